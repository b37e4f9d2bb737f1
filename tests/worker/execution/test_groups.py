"""Sequences that share a long prompt read its pages once, and say what they would say alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from configs.loading import load
from kvpaging.attention.shared_prefix import SAVED_KEYS_MIN
from tests.families import build, prompts
from tests.worker.served import FREE_BYTES, prove_sound
from worker.execution import batch
from worker.messages import Event
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.build import build_engine
from worker.startup.spec import EngineSpec
from worker.startup.start import resolve, start

if TYPE_CHECKING:
    from worker.execution.model import PagedModel

LENGTH = 1700
SHARED = 1536  # of it, in whole splits


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp(request.param)
    model = build(request.param, fixed=False).float()
    model.config.max_position_embeddings = 2048
    model.save_pretrained(path)
    settings = {
        "model.path": path, "model.dtype": "float64", "model.device": "cpu",
        "kv.block_size": 16, "kv.blocks": 160, "scheduler.max_num_seqs": 4,
    }  # fmt: skip
    spec = resolve(
        load(None, [f"{k}={v}" for k, v in settings.items()]), path, free_bytes=FREE_BYTES
    )
    return spec, start(spec, clock=lambda: 0.0).runner.model


def sample(
    loaded: tuple[EngineSpec, PagedModel], **params: object
) -> tuple[list[list[int]], int, int]:
    """The tokens of each choice, reads saved, and reads that sharing rows should have saved."""
    engine = build_engine(*loaded, lambda: 0.0)
    prompt = (prompts()[-1] * 30)[:LENGTH]
    asked = SamplingParams(max_tokens=12, n=4, **params)
    events: list[Event] = engine.submit(Request("r", prompt, asked, generated=((),) * 4))
    expected = 0
    while not engine.idle:
        before = engine.stats.rows
        events += [event for _, event in engine.step(0.0)]
        more = engine.stats.rows - before - 1
        expected += more * SHARED if more * SHARED >= SAVED_KEYS_MIN else 0
        prove_sound(engine)
    said = [
        [t for e in events if getattr(e, "choice", -1) == choice for t in e.tokens]
        for choice in range(4)
    ]
    return said, engine.stats.saved_reads, expected


@pytest.mark.parametrize(
    "params",
    [{"seed": 3, "ignore_eos": True}, {"beam_width": 4}],
    ids=["samples", "beams"],
)
def test_samples_and_beams_of_a_long_prompt_are_the_same_grouped_or_not(
    loaded: tuple[EngineSpec, PagedModel], params: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, saved, expected = sample(loaded, **params)
    assert len({tuple(each) for each in grouped}) == 4
    assert saved == expected >= 11 * 3 * SHARED  # layers with a window see none of it whole
    monkeypatch.setattr(batch, "find", lambda *_, **__: ())
    assert sample(loaded, **params)[:2] == (grouped, 0)
