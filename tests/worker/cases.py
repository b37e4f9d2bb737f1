"""The engine cases of the equality test: the committed list and how it is made.

`python -m tests.worker.cases` writes the list anew after a change of `PARAMETERS`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.covering import cover
from tests.families import FAMILIES

if TYPE_CHECKING:
    from tests.covering import Case

LIST = Path(__file__).with_name("equality_cases.json")
UNBOUNDED = 4096
"""A token budget that no step of these tests fills."""

PARAMETERS = {
    "family": list(FAMILIES),
    "block_size": [8, 16, 64],
    "chunk": [1, 7, 64, UNBOUNDED],
    "batch": ["alone", "mixed"],
    "preemption": ["none", "random"],
    "depth": [1, 2],
}


def committed() -> list[Case]:
    return json.loads(LIST.read_text())


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in cover(PARAMETERS))
    LIST.write_text(f"[\n{lines}\n]\n")
