"""The forward compiles to one graph that serves batches of any size, for every family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo

from tests.families import FAMILIES, reference
from tests.worker.gangs import gang_engine
from tests.worker.served import Models, generate, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker.engine.engine import Engine

BUDGET = 60


class CountingBackend:
    """Runs graphs as they are and counts how often the compiler made one."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(engine: Engine, outputs: dict[int, list[int]]) -> tuple[int, int]:
    """Run one step; its size in tokens and rows."""
    tokens, rows = engine.stats.batch_tokens, engine.stats.rows
    for request, event in engine.step(0.0):
        outputs[int(request.id)] += event.tokens  # type: ignore[union-attr]
    return engine.stats.batch_tokens - tokens, engine.stats.rows - rows


@pytest.mark.parametrize("name", FAMILIES)
def test_one_graph_serves_three_batch_sizes(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine, backend = models.engine(name, 8, chunk=BUDGET), CountingBackend()
    model = engine.runner.model
    monkeypatch.setattr(model, "call", model.call)  # undone after: others share the model
    model.compile(fullgraph=True, dynamic=True, backend=backend)
    outputs: dict[int, list[int]] = {1: [], 2: [], 3: []}
    submit(engine, 1)
    submit(engine, 2)
    assert step(engine, outputs) == (40, 2)
    assert step(engine, outputs) == (2, 2)
    submit(engine, 3)
    assert step(engine, outputs) == (BUDGET, 3)
    assert step(engine, outputs) == (14, 3)
    assert step(engine, outputs) == (3, 3)
    assert backend.graphs == 1
    for index, tokens in outputs.items():
        assert tokens == list(reference(name, index)[: len(tokens)])
    assert list(map(len, outputs.values())) == [5, 5, 2]


def test_the_graph_serves_rows_that_span_ranks_too(models: Models) -> None:
    """A rank makes no more graphs than for rows of its own: one for many tokens, and those of one
    token and of no logits at all, which torch makes whatever it is told of shapes."""
    name = "gemma2"
    spec, model = models.load(name, 8)
    limits = replace(spec.limits, max_batch_tokens=256)
    with gang_engine(replace(spec, limits=limits), model, 2, sharded_from=60) as (
        engine,
        members,
    ):
        backends = []
        for runner in (engine.runner, members.followers[0].runner):
            backends.append(CountingBackend())
            runner.model.compile(fullgraph=True, dynamic=True, backend=backends[-1])
        for _ in range(2):
            outputs = generate(engine, range(4))
            assert outputs == {index: reference(name, index) for index in range(4)}
        assert members.gangs[0].exchange.calls > 0
    assert max(backend.graphs for backend in backends) <= 4
