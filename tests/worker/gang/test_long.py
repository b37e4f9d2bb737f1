"""Long prompts over several ranks: the same logits, no blind stripe, and the needle is found.

8,192 tokens in every run, 32,768 and 131,072 with `-m full`: only their number differs, since what
ranks move is cut by bytes and by the tokens of a step. Looking at the logits of such a prompt costs
what computing it costs; where only its last blocks differ from a prompt before, those are computed.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
import transformers as tf

from configs.loading import load as load_config
from tests.worker import copying
from tests.worker.gangs import gang_engine
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.build import build_engine
from worker.startup.spec import EngineSpec
from worker.startup.start import load, resolve

if TYPE_CHECKING:
    from torch import Tensor

    from worker.engine.engine import Engine
    from worker.execution.model import PagedModel

VOCAB = 64
BLOCK = 64
CHUNK = 512
ONE = SamplingParams(max_tokens=1, temperature=0.0)
LENGTHS = [8192, *(pytest.param(length, marks=pytest.mark.full) for length in (32768, 131072))]
NEEDLES = [8192, pytest.param(131072, marks=pytest.mark.full)]


def started(
    directory: Path, model: tf.PreTrainedModel, tokens: int
) -> tuple[EngineSpec, PagedModel]:
    """A model with room for the whole prompt on each rank, so that one rank can be asked too."""
    model.save_pretrained(directory)
    settings = {
        "model.path": directory,
        "model.dtype": "float64",
        "model.device": "cpu",
        "model.max_model_len": tokens + BLOCK,
        "kv.block_size": BLOCK,
        "kv.blocks": 2 * tokens // BLOCK,
        "scheduler.max_num_seqs": 2,
        "scheduler.max_batch_tokens": CHUNK,
    }
    config = load_config(None, [f"{name}={value}" for name, value in settings.items()])
    spec = resolve(config, directory, free_bytes=1 << 34)
    return spec, load(spec, lambda: 0.0)[0]


def small_llama(tokens: int) -> tf.PreTrainedModel:
    """Two layers of one narrow head, whose scores differ little, so that every key counts."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=tokens + BLOCK,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            gain = 0.2 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data.copy_(gain * torch.randn(parameter.shape, generator=generator))
    return model.eval()


class Seen:
    """The last logits that any rank of an engine sampled from, and who owns a prompt's blocks."""

    def __init__(self, engine: Engine, runners: list) -> None:
        self.engine = engine
        self.logits: Tensor | None = None
        self.owners: list[int] = []
        for runner in runners:
            runner.sampler.sample = self._watch(runner.sampler.sample)

    def _watch(self, true):
        def sample(logits, plan):
            if len(logits):
                (sequence,) = self.engine.scheduler.running  # rank 0 waits or samples itself
                pool = sequence.table.pools[0]
                self.owners = [pool.rank_of(block) for block in sequence.table.blocks[0]]
                self.logits = logits[-1].clone()
            return true(logits, plan)

        return sample

    def ask(self, tokens: list[int]) -> tuple[Tensor, int]:
        """The logits after a prompt, and the token that is said."""
        self.engine.submit(Request("r", tokens, ONE))
        said = []
        while not self.engine.idle:
            for _, event in self.engine.step(0.0):
                said += event.tokens
        assert self.logits is not None
        return self.logits, said[0]


def opened(stack: ExitStack, spec: EngineSpec, model: PagedModel, ranks: int) -> Seen:
    if ranks == 1:
        engine = build_engine(spec, model, lambda: 0.0)
        return Seen(engine, [engine.runner])
    opened = gang_engine(spec, model, ranks, sharded_from=1, timeout_s=600.0)
    engine, members = stack.enter_context(opened)
    return Seen(engine, [engine.runner, *(f.runner for f in members.followers)])


def changed(tokens: list[int], position: int) -> list[int]:
    return [*tokens[:position], (tokens[position] + 1) % VOCAB, *tokens[position + 1 :]]


@pytest.mark.parametrize("length", LENGTHS)
def test_long_prompts_have_the_same_logits_and_every_stripe_counts(tmp_path: Path, length: int):
    spec, model = started(tmp_path, small_llama(length), length)
    tokens = Random(1).choices(range(VOCAB), k=length)
    with ExitStack() as stack:
        wanted, _ = opened(stack, spec, model, 1).ask(tokens)
    spread = float(wanted.std())
    for ranks in (2, 4):
        with ExitStack() as stack:
            seen = opened(stack, spec, model, ranks)
            got, _ = seen.ask(tokens)
            assert float((got - wanted).abs().max()) <= 1e-7 * spread
            assert seen.engine.runner.gang.exchange.calls > 0
            assert [seen.owners.count(rank) for rank in range(ranks)] == pytest.approx(
                [len(seen.owners) / ranks] * ranks, abs=1
            )
            if ranks == 4:
                every_stripe_counts(seen, tokens, wanted, spread)


def every_stripe_counts(seen: Seen, tokens: list[int], wanted: Tensor, spread: float) -> None:
    """Of blocks near the end there is one on each rank; what is before them is not computed."""
    length = len(tokens)
    for block in range(length // BLOCK - 20, length // BLOCK - 16):
        other, _ = seen.ask(changed(tokens, block * BLOCK + 5))
        assert float((other - wanted).abs().max()) >= 1e-5 * spread
    assert set(seen.owners[block - 3 : block + 1]) == set(range(4))
    early, _ = seen.ask(changed(tokens, 3 * BLOCK + 5))
    assert float((early - wanted).abs().max()) >= 1e-5 * spread


@cache
def _codes() -> None:
    """Codes of all tokens differ enough that none is taken for another."""
    codes = copying.codes()
    overlap = codes @ codes.T - copying.CODE * torch.eye(copying.VOCAB)
    assert float(overlap.max()) < 0.8 * copying.CODE


@pytest.mark.parametrize("length", NEEDLES)
def test_the_token_after_the_needle_is_found_in_every_stripe(tmp_path: Path, length: int):
    """One haystack with needles in every stripe, early and late; each is asked for by one token."""
    _codes()
    spec, model = started(tmp_path, copying.build(length + BLOCK), length)
    draw = Random(2)
    tokens = draw.choices(range(40), k=length - 1)
    needles = list(range(40, copying.VOCAB))
    # Two in every stripe, in the first and last quarter, at odd places; blocks follow in turn.
    places = {}
    for i, needle in enumerate(needles[:8]):
        block = (i % 4) + (0 if i < 4 else length // BLOCK // 4 * 4 - 8)
        places[needle] = block * BLOCK + draw.randrange(BLOCK - 1)
    answers = {needle: draw.randrange(40) for needle in places}
    for needle, position in places.items():
        tokens[position : position + 2] = needle, answers[needle]
    for ranks in (1, 2, 4):
        with ExitStack() as stack:
            seen = opened(stack, spec, model, ranks)
            owners = set()
            for needle, position in places.items():
                _, said = seen.ask([*tokens, needle])
                assert said == answers[needle], f"needle at {position} of {ranks} ranks"
                owners.add(seen.owners[position // BLOCK])
        assert owners == set(range(ranks))


def test_a_rank_that_is_not_looked_at_loses_its_needles(tmp_path: Path, monkeypatch):
    """So the test above can fail: without one rank's sums its needles are not found."""
    from context_parallel.attention import _Layer

    spec, model = started(tmp_path, copying.build(1024 + BLOCK), 1024)
    tokens = Random(2).choices(range(40), k=1023)
    tokens[5 * BLOCK + 3 : 5 * BLOCK + 5] = 50, 7
    true = _Layer.finished
    lost: list[int] = []

    def finished(self, parts, dtype):
        parts = parts.clone()
        for rank in lost:
            parts[rank, ..., :-2], parts[rank, ..., -2], parts[rank, ..., -1] = 0.0, -torch.inf, 0.0
        return true(self, parts, dtype)

    monkeypatch.setattr(_Layer, "finished", finished)
    with ExitStack() as stack:
        seen = opened(stack, spec, model, 4)
        assert seen.ask([*tokens, 50])[1] == 7
        lost.append(seen.owners[5])
        assert seen.ask([*tokens, 50])[1] != 7
