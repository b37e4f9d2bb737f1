"""Engines around the tiny models of `tests.families`, started as a server starts them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from configs.loading import load
from kvpaging import audit
from kvpaging.native.library import library
from kvpaging.store import BlockStore
from tests.families import MAX_MODEL_LEN, NEW_TOKENS, build, prompts
from worker.execution.model import PagedModel
from worker.messages import Delta, Finish
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.build import build_engine
from worker.startup.spec import EngineSpec
from worker.startup.start import resolve, start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from random import Random

    from transformers import PreTrainedModel

    from worker.engine.engine import Engine

MAX_NUM_SEQS = 4
FREE_BYTES = 1 << 32
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
PREEMPTIONS = 2
"""How often one request is preempted at random: more, and one token a step gets nowhere."""


def twin(hf: PreTrainedModel) -> PreTrainedModel:
    """The same weights in modules of their own: fused layers keep what they computed in theirs."""
    return deepcopy(hf, {id(x): x for x in chain(hf.parameters(), hf.buffers())})


class Models:
    """Saved models and, for each block size, pool size and dtype, the loaded one.

    Weights are loaded, and checked as a server does, for the first block size and for each kind of
    quantised pages; other pages lie below twins.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._weights: dict[tuple[str, str, int, bool], PreTrainedModel] = {}
        self._loaded: dict[tuple[str, int, int, str, str, bool], tuple[EngineSpec, PagedModel]] = {}

    def directory(self, name: str) -> Path:
        path = self.home / name
        if not path.exists():
            build(name, fixed=False).float().save_pretrained(path)
        return path

    def load(
        self,
        name: str,
        block_size: int,
        *,
        tokens: int = 512,
        dtype: str = "float64",
        kv_dtype: str = "auto",
    ) -> tuple[EngineSpec, PagedModel]:
        """What a server decides and loads; pages hold `tokens` tokens."""
        native = library() is not None
        key = (name, block_size, tokens, dtype, kv_dtype, native)
        if key not in self._loaded:
            settings = {
                "model.path": self.directory(name),
                "model.dtype": dtype,
                "model.device": "cpu",
                "model.max_model_len": MAX_MODEL_LEN if tokens > MAX_MODEL_LEN else tokens,
                "kv.block_size": block_size,
                "kv.dtype": kv_dtype,
                "kv.blocks": -(-tokens // block_size),
                "scheduler.max_num_seqs": MAX_NUM_SEQS,
            }
            config = load(None, [f"{name}={value}" for name, value in settings.items()])
            spec = resolve(config, self.directory(name), free_bytes=FREE_BYTES)
            same = (name, dtype, spec.memory.max_model_len, native)
            if same in self._weights and kv_dtype == "auto":
                store = BlockStore(spec.layout, spec.memory.slices, spec.page_dtype, spec.device)
                model = PagedModel(twin(self._weights[same]), store)
            else:
                model = start(spec, clock=lambda: 0.0).runner.model
                self._weights.setdefault(same, model.hf)
            self._loaded[key] = spec, model
        return self._loaded[key]

    def engine(
        self,
        name: str,
        block_size: int,
        *,
        chunk: int,
        depth: int = 1,
        cache: bool = True,
        **options: object,
    ) -> Engine:
        """A new engine whose steps compute at most `chunk` tokens. Its pages are full of what a
        finished request might have left there, loud enough to be heard if it is ever read."""
        spec, model = self.load(name, block_size, **options)  # type: ignore[arg-type]
        fill(model.store)
        limits = replace(spec.limits, max_batch_tokens=chunk)
        config = replace(spec.config, kv=replace(spec.config.kv, prefix_cache=cache))
        spec = replace(spec, limits=limits, config=config)
        engine = build_engine(spec, model, lambda: 0.0)
        engine.depth = depth
        return engine


def fill(store: BlockStore) -> None:
    """Loud numbers everywhere; in quantised pages at least 3.5 times a scale of 12,672."""
    for arena in store.arenas:
        if store.layout.quantised:
            arena.fill_(0x46)
        else:
            arena.view(store.dtype).fill_(1e4)


def generate(
    engine: Engine, indexes: Sequence[int], *, together: bool = True, random: Random | None = None
) -> dict[int, tuple[int, ...]]:
    """Greedy outputs of some of the families' prompts; see `answer`."""
    requests = [request_of(index) for index in indexes]
    outputs = answer(engine, requests, together=together, random=random)
    return {index: output for index, (output,) in zip(indexes, outputs, strict=True)}


def answer(
    engine: Engine,
    requests: Sequence[Request],
    *,
    together: bool = True,
    random: Random | None = None,
    each_turn: Callable[[int], None] = lambda turn: None,
) -> list[list[tuple[int, ...]]]:
    """The outputs of each request's choices; the pools are proved sound at each step.

    `together` submits one every second step, so that prompts and single tokens share steps, else
    each is alone. With `random`, running sequences are preempted.
    """
    outputs: dict[str, list[list[int]]] = {r.id: [[] for _ in range(r.choices)] for r in requests}
    left = list(requests)
    turn = 0
    while left or not engine.idle:
        if left and (engine.idle or (together and turn % 2 == 0)):
            engine.submit(left.pop(0))
        turn += 1
        each_turn(turn)
        for request, event in engine.step(0.0):
            assert isinstance(event, Delta | Finish), event
            outputs[request.id][event.choice] += event.tokens
        prove_sound(engine)
        running = [s for s in engine.scheduler.running if s.request.preemptions < PREEMPTIONS]
        if random is not None and running and (turn == 3 or random.random() < 0.15):
            engine.scheduler.preempt(random.choice(running))
            prove_sound(engine)
    for pool in engine.scheduler.pools:
        counts = pool.counts()
        assert (counts.quarantined, counts.active, counts.pinned) == (0, 0, 0)
    return [[tuple(tokens) for tokens in outputs[r.id]] for r in requests]


def request_of(index: int) -> Request:
    return Request(str(index), prompts()[index], GREEDY)


def submit(engine: Engine, index: int) -> None:
    engine.submit(request_of(index))


def prove_sound(engine: Engine) -> None:
    tables = engine.scheduler.tables()
    for pool in set(engine.scheduler.pools):
        assert audit.check(pool, tables) == []
