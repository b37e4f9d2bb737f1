"""The start-up check: a model over pages must give the logits of its own attention."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpaging import quant
from kvpaging.attention.inputs import Rows
from kvpaging.store import BlockStore, Layout, layout
from worker.execution.batch import Batch
from worker.execution.fused import fuse
from worker.execution.int8 import Int8Linear
from worker.execution.layers import replace_layers
from worker.execution.model import ModelShape, PagedModel, UnsupportedModel
from worker.execution.packed import pack_linears

# Root mean square of the logits' difference, in units of their own spread. Models take softmax,
# norms and rotary tables in float32 whatever their dtype, hence no less for float64.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
TOLERANCE_16_BIT = 0.15
# Unrelated logits differ by 1.41. Tiny random models, the most sensitive ones, differ by up to 0.34
# in int8 and 0.39 in fp8; trained ones by far less. So this detects wrong scales and models that
# 8 bits ruin, and nothing finer.
TOLERANCE_QUANTISED = 0.7
CHECK_TOKENS_MAX = 1024


def checked_model(hf: PreTrainedModel, store: BlockStore, shape: ModelShape) -> PagedModel:
    """The model over pages, if two prompts in one flat batch, one of them in two chunks, give the
    logits of each alone through the model's own attention. Raises UnsupportedModel.

    Rounding in quantised pages would hide a fault of attention. So the model is first checked over
    a few unquantised pages, as strictly as any, and then over the quantised ones.
    """
    room = store.slices * store.layout.block_size // 2 - store.layout.block_size
    prompts = _prompts(shape, room, store.device)
    expected = _alone(hf, prompts)
    limit = _tolerance(hf)
    if not getattr(hf, "is_quantized", False):  # packed weights cannot be joined
        fuse(hf)
        pack_linears(hf)
        replace_layers(hf)
    if store.layout.quantised:
        _check_plain(hf, store.layout, shape, prompts, expected=expected, limit=limit)
    model = PagedModel(hf, store)
    if store.layout.quantised:
        limit = TOLERANCE_QUANTISED
    _compare(_paged_logits(model, prompts), expected, shape, store.dtype, limit=limit)
    return model


def check_plain(hf: PreTrainedModel, pages: Layout, shape: ModelShape) -> None:
    """The same check over a few unquantised pages before the weights are quantised, whose rounding
    would hide a fault of attention. Raises UnsupportedModel."""
    prompts = _prompts(shape, CHECK_TOKENS_MAX, hf.device)
    _check_plain(hf, pages, shape, prompts, expected=_alone(hf, prompts), limit=_tolerance(hf))


def _prompts(shape: ModelShape, room: int, device: torch.device) -> list[Tensor]:
    """Two prompts, the first longer than every window where `room` tokens of pages allow it."""
    windows = [s.window for s in shape.layers if s.window is not None]
    long = min([max([33, *(w + 9 for w in windows)]), CHECK_TOKENS_MAX, max(room, 2)])
    return [
        (torch.arange(n, device=device) * (7919 + 2 * i) + 13) % shape.vocab_size
        for i, n in enumerate((long, min(17, long)))
    ]


def _alone(hf: PreTrainedModel, prompts: list[Tensor]) -> Tensor:
    """Last logits of each prompt through the model's own attention."""
    hf.set_attn_implementation("eager")
    with torch.inference_mode():
        alone = [
            hf(input_ids=p[None], use_cache=False, logits_to_keep=1).logits[0, -1] for p in prompts
        ]
    return torch.stack(alone)


def _check_plain(
    hf: PreTrainedModel,
    pages: Layout,
    shape: ModelShape,
    prompts: list[Tensor],
    expected: Tensor,
    limit: float,
) -> None:
    place = layout(shape.layers, pages.block_size, hf.dtype.itemsize)
    slices = sum(-(-len(p) // pages.block_size) for p in prompts)
    model = PagedModel(hf, BlockStore(place, slices, hf.dtype, hf.device))
    try:
        _compare(_paged_logits(model, prompts), expected, shape, hf.dtype, limit=limit)
    finally:
        model.pages.close()


def _tolerance(hf: PreTrainedModel) -> float:
    """The largest difference allowed over unquantised pages. Where layer inputs are rounded to 8
    bits, a float32 rounding difference may grow to a full step, and accumulate."""
    rounded = any(isinstance(module, Int8Linear) for module in hf.modules())
    if rounded or getattr(hf, "is_quantized", False):
        return TOLERANCE_QUANTISED
    return TOLERANCE.get(hf.dtype, TOLERANCE_16_BIT)


def _compare(
    got: Tensor, expected: Tensor, shape: ModelShape, pages: torch.dtype, limit: float
) -> None:
    spread = expected.double().std()
    error = float((got.double() - expected.double()).square().mean().sqrt() / spread)
    if error <= limit:
        return
    if pages in quant.LARGEST:
        raise UnsupportedModel(
            f"{shape.family}: with kv.dtype={quant.NAMES[pages]} its logits differ by {error:.2g} "
            f"of their spread from those without, at most {limit:g} is allowed: its keys or values "
            "do not fit in 8 bits; use kv.dtype=auto"
        )
    raise UnsupportedModel(
        f"{shape.family}: two prompts in one batch over pages give other logits than each alone "
        f"through the model's own attention (difference {error:.2g} of their spread, at most "
        f"{limit:g} is allowed): some of its attention does not go through the hook"
    )


def _paged_logits(model: PagedModel, prompts: list[Tensor]) -> Tensor:
    """Last logits of two prompts: half of the first runs alone, then the rest of both."""
    layout, size = model.store.layout, model.store.layout.block_size
    device, half = model.store.device, len(prompts[0]) // 2
    need = [-(-len(p) // size) for p in prompts]
    tables = torch.zeros(len(layout.groups), 2, max(need), dtype=torch.int32, device=device)
    at = [len(arena) for arena in model.store.arenas]
    for g, group in enumerate(layout.groups):
        for row, n in enumerate(need):
            # Backwards, so that ignoring the table gives wrong logits.
            at[group.arena] -= n
            blocks = torch.arange(at[group.arena], at[group.arena] + n, device=device)
            tables[g, row, :n] = blocks.flip(0).int()

    def run(spans: list[tuple[int, int, int]]) -> Tensor:
        rows = tuple(rows_of(table, spans, size) for table in tables)
        ids = torch.cat([prompts[r][a:b] for r, a, b in spans])
        positions = torch.cat([torch.arange(a, b, device=device) for _, a, b in spans])
        last = torch.tensor([b - a for _, a, b in spans], device=device).cumsum(0) - 1
        return model.forward(Batch(ids, positions, rows, last))

    if half:
        run([(0, 0, half)])
    return run([(0, half, len(prompts[0])), (1, 0, len(prompts[1]))])


def rows_of(table: Tensor, spans: list[tuple[int, int, int]], size: int) -> Rows:
    """Rows for `spans` (row of the table, first position, end), with blocks of `size` tokens."""
    device = table.device
    lens = tuple(b - a for _, a, b in spans)
    firsts = tuple(a for _, a, _ in spans)
    slots = []
    for r, a, b in spans:
        position = torch.arange(a, b, device=device)
        slots.append(table[r, position // size].long() * size + position % size)
    return Rows(
        table=table[[r for r, _, _ in spans]],
        blocks=torch.tensor([-(-b // size) for _, _, b in spans], dtype=torch.int32, device=device),
        logical=None,
        slots=torch.cat(slots),
        lens=lens,
        firsts=firsts,
    )
