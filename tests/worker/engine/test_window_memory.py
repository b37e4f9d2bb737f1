"""What a sequence of 8,192 tokens owns in models with sliding windows, in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpaging.table import BlockTable
from scripts.bench_windows import BLOCK, CHUNK, KINDS, Kind, full_bytes, measure, prepare
from tests.worker.served import fill
from worker.startup.build import build_engine

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 8192


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_with_a_window_keep_only_their_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    spec, model = prepare(tmp_path, kind, TOKENS)
    pages = spec.layout
    full = full_bytes(pages, kind.windowed + 1, TOKENS)
    assert full == TOKENS // BLOCK * (kind.windowed + 1) * pages.groups[0].block_bytes
    two_blocks = sum(2 * group.block_bytes for group in pages.groups)

    fill(model.store)
    taken = measure(build_engine(spec, model, lambda: 0.0), TOKENS)
    assert taken.decoding_bytes <= kind.share_max * full
    assert taken.decoding_bytes <= pages.sequence_bytes(TOKENS, 1) + two_blocks
    assert taken.decoding_bytes < taken.prefill_bytes
    assert taken.prefill_bytes <= pages.sequence_bytes(TOKENS, CHUNK) + two_blocks

    monkeypatch.setattr(BlockTable, "free_out_of_window", lambda *_: 0)
    fill(model.store)
    kept = measure(build_engine(spec, model, lambda: 0.0), TOKENS)
    assert kept.decoding_bytes == full
    assert kept.tokens == taken.tokens
    assert len(set(taken.tokens)) > 3
