"""The engine cases of the equality tests: the committed lists and how they are made.

`python -m tests.worker.cases` writes the lists anew after a change of parameters.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from tests.covering import cover
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
