"""Writes the tables of all settings into docs/configuration.md: `python -m configs.table`."""

from __future__ import annotations

import sys
from pathlib import Path

from configs import pools
from configs.rules import shown
from configs.schema import SECTIONS, settings

BEGIN = "<!-- settings: written by `python -m configs.table` -->"
END = "<!-- end of settings -->"
HEAD, RULE = "| setting | default | possible | meaning |", "| --- | --- | --- | --- |"


def tables() -> str:
    """One Markdown table for each section, in the order of the schema."""
    lines: list[str] = []
    for section, kind in SECTIONS.items():
        lines += [f"### `{section}`", "", f"{kind.__doc__}", ""]
        lines += [HEAD, RULE]
        for key, field in settings():
            if key.startswith(section + "."):
                possible, doc = field.metadata["rule"].possible, field.metadata["doc"]
                doc += " *Live.*" if field.metadata["live"] else ""
                lines.append(f"| `{key}` | `{shown(field.default)}` | {possible} | {doc} |")
        lines.append("")
    lines += ["### An entry of `cluster.pools`", "", f"{pools.PoolConfig.__doc__}", "", HEAD, RULE]
    for name, field in pools.FIELDS.items():
        rule, doc = field.metadata["rule"], field.metadata["doc"]
        lines.append(f"| `{name}` | `{shown(field.default)}` | {rule.possible} | {doc} |")
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
