"""The engine cases of the equality tests: the committed lists and how they are made.

`python -m tests.worker.cases` writes the lists anew after a change of parameters.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.covering import all_pairs, cover, pairs
from tests.families import FAMILIES

if TYPE_CHECKING:
    from tests.covering import Case

EQUALITY = Path(__file__).with_name("equality_cases.json")
SHARING = Path(__file__).with_name("sharing_cases.json")
GANGS = Path(__file__).with_name("gang_cases.json")
SPECULATION = Path(__file__).with_name("speculation_cases.json")
UNBOUNDED = 4096
"""A token budget that no step of these tests fills."""

PARAMETERS = {
    EQUALITY: {
        "family": list(FAMILIES),
        "block_size": [8, 16, 64],
        "chunk": [1, 7, 64, UNBOUNDED],
        "batch": ["alone", "mixed"],
        "preemption": ["none", "random"],
        "depth": [1, 2],
    },
    SHARING: {
        "family": list(FAMILIES),
        "block_size": [8, 16, 64],
        "history": ["warm", "turns", "evicted", "forked"],
        "sampling": ["greedy", "seeded"],
        "chunk": [7, UNBOUNDED],
        "preemption": ["none", "random"],
        "depth": [1, 2],
    },
    GANGS: {
        "family": list(FAMILIES),
        "ranks": [2, 4, 8],
        "block_size": [8, 16, 64],
        "chunk": [1, 7, 64, 1000],
        "batch": ["alone", "mixed", "forked", "beams"],
        "change": ["none", "preempted", "grown", "hit"],
        "depth": [1, 2],
    },
    SPECULATION: {
        "family": ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"],
        "ranks": [1, 2, 4],
        "guesses": ["lookup", "most", "nonsense"],
        "k": [1, 3, 8],
        "block_size": [8, 16],
        "chunk": [7, 64, UNBOUNDED],
        "batch": ["mixed", "forked", "lasting"],
        "change": ["none", "preempted", "hit"],
        "depth": [1, 2],
    },
}


def committed(path: Path) -> list[Case]:
    return json.loads(path.read_text())


ALIKE = (
    ("llama", "qwen2", "qwen3", "olmo2", "smollm3", "granite", "glm4", "mixtral", "qwen3_moe"),
    ("llama_dynamic", "phi3_longrope"),
    ("gpt2", "opt", "gpt_neox"),
    ("mistral", "phi3"),
    ("gemma3", "cohere2"),
    ("gemma2",),
    ("gemma4",),
    ("gemma4_shared",),
    ("gpt_oss",),
    ("deepseek_v3",),
)
"""Families that differ in nothing but what lies between their calls of attention: full attention
with fewer heads of keys, the same with frequencies that looked at lengths, with as many heads,
windows in all layers and in some, with a soft cap, groups of two shapes, layers that share keys,
sinks, keys wider than values."""
_KIND = {family: families[0] for families in ALIKE for family in families}


def kind_of(case: Case) -> Case:
    """The case with the first of the families like its own."""
    return case | {"family": _KIND[str(case["family"])]}


def in_every_run(path: Path) -> list[Case]:
    """Some of the committed cases: each family, and all pairs that no like family can stand for."""
    left: set[Any] = all_pairs(PARAMETERS[path] | {"family": [some[0] for some in ALIKE]})
    left |= set(FAMILIES)
    chosen: list[Case] = []

    def covers(case: Case) -> set[Any]:
        return left & (pairs(kind_of(case)) | {case["family"]})

    # Of those that cover as much, the one of fewest steps.
    rest = sorted(committed(path), key=lambda case: (case.get("ranks", 1), -case["chunk"]))
    while left:
        best = max(rest, key=lambda case: len(covers(case)))
        left -= covers(best)
        chosen.append(best)
    return [case for case in committed(path) if case in chosen]


def parameters(path: Path) -> list[Any]:
    """The committed cases as parameters of a test, those that not every run holds under `full`."""
    some = in_every_run(path)
    marks = {True: (), False: pytest.mark.full}
    return [pytest.param(case, marks=marks[case in some]) for case in committed(path)]


def product_of(path: Path, family: str) -> list[Case]:
    """All cases of one family."""
    others = {name: values for name, values in PARAMETERS[path].items() if name != "family"}
    return [
        {"family": family, **dict(zip(others, values, strict=True))}
        for values in product(*others.values())
    ]


def name_of(case: Case) -> str:
    return "-".join(map(str, case.values()))


if __name__ == "__main__":
    for path, parameters in PARAMETERS.items():
        lines = ",\n".join(json.dumps(case) for case in cover(parameters))
        path.write_text(f"[\n{lines}\n]\n")
