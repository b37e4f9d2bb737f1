"""Writes the tables of all settings into docs/configuration.md: `python -m configs.table`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from configs.pools import PoolConfig
from configs.rules import shown
from configs.schema import SECTIONS

BEGIN = "<!-- settings: written by `python -m configs.table` -->"
END = "<!-- end of settings -->"
HEAD, RULE = "| setting | default | possible | meaning |", "| --- | --- | --- | --- |"


def tables() -> str:
    """One Markdown table for each section, in the order of the schema, and one for a pool."""
    kinds: dict[str, Any] = {f"`{section}`": kind for section, kind in SECTIONS.items()}
    lines: list[str] = []
    for title, kind in (kinds | {"An entry of `cluster.pools`": PoolConfig}).items():
        lines += [f"### {title}", "", f"{kind.__doc__}", "", HEAD, RULE]
        for field in dataclasses.fields(kind):
            key = field.name if kind is PoolConfig else f"{title.strip('`')}.{field.name}"
            possible, doc = field.metadata["rule"].possible, field.metadata["doc"]
            doc += " *Live.*" if field.metadata["live"] else ""
            lines.append(f"| `{key}` | `{shown(field.default)}` | {possible} | {doc} |")
        lines.append("")
    return "\n".join(lines)


def replaced(document: str) -> str:
    """The document with all between its two marks replaced by the current tables."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks {BEGIN!r} or {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    page.write_text(replaced(page.read_text(encoding="utf-8")), encoding="utf-8")
