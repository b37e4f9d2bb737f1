from __future__ import annotations

from pathlib import Path

import pytest

from configs import schema, table

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_shows_the_settings_of_today() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table.replaced(page) == page, "run: python -m configs.table"


def test_every_setting_is_a_row_of_its_own() -> None:
    tables, _, _ = table.tables().partition("### An entry of")
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*schema.FIELDS]
    assert all(row.count(" | ") == 3 for row in rows)


def test_only_the_part_between_the_marks_changes() -> None:
    page = f"before {table.BEGIN} old {table.END} after"
    found = table.replaced(page)
    assert found.startswith("before ")
    assert found.endswith(" after")
    assert " old " not in found
    with pytest.raises(ValueError, match="lacks"):
        table.replaced("no marks")
