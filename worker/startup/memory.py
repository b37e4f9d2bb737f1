"""The memory plan: bytes of weights and workspaces, and the rest for pages. Pure arithmetic.

A *slice* is one block of each layer group: the keys and values of `block_size` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpaging.store import Layout

GIB = 1 << 30
CPU_AUTO_BYTES_MAX = 2 * GIB


class DoesNotFit(Exception):
    """The model or its longest sequence does not fit this device; three numbers, three remedies."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All sizes in bytes; `slices` fit on each of `ranks`, `tokens` on all of them together. Where
    layers keep only a window a sequence may be longer; it is computed `chunk` tokens at a time."""

    free_bytes: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    slices: int
    tokens: int
    max_model_len: int
    chunk: int
    ranks: int = 1


def plan_memory(
    layout: Layout,
    *,
    free_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    model_limit: int,
    max_model_len: int | None,
    chunk: int,
    memory: int | None,
    memory_fraction: float,
    blocks: int | None,
    on_cpu: bool,
    ranks: int = 1,
    draft_bytes: int = 0,
    loading_bytes: int = 0,
) -> MemoryPlan:
    """Size the KV budget of one rank. Raises DoesNotFit before anything is loaded.

    An explicit `blocks` or `memory` wins over the automatic size: on a GPU `memory_fraction` of the
    free memory, less weights and workspaces; on a CPU a quarter of the rest, at most 2 GiB. A draft
    model takes `draft_bytes` of it for each slice, on rank 0 for those of all ranks; the others
    leave as much free. Weights that are packed on loading take `loading_bytes` until then, before
    there are pages. Without an explicit `max_model_len` model and pages bound the longest sequence.
    """
    usable = free_bytes if on_cpu else int(free_bytes * memory_fraction)
    left = usable - weight_bytes - workspace_bytes
    slice_bytes = layout.slice_bytes + draft_bytes
    if loading_bytes > usable:
        raise DoesNotFit(
            f"the model does not fit while it is loaded: its weights are {gib(loading_bytes)} "
            f"before they are packed into {gib(weight_bytes)}, but {gib(usable)} are free. Use a "
            "smaller model, a checkpoint that is quantised already, or free memory"
        )
    if left < slice_bytes:
        raise DoesNotFit(
            f"the model does not fit: its weights need {gib(weight_bytes)} and its workspaces "
            f"{gib(workspace_bytes)}, but {gib(usable)} are free. Use a smaller model or "
            "model.dtype=bfloat16, lower scheduler.max_batch_tokens, or free memory"
            + ("" if on_cpu else " (kv.memory_fraction is the share of it that is used)")
        )
    if blocks is not None:
        budget = blocks * slice_bytes
    elif memory is not None:
        budget = memory
    else:
        budget = min(left // 4, CPU_AUTO_BYTES_MAX) if on_cpu else left
    if budget > left:
        raise DoesNotFit(
            f"the pages do not fit: {gib(budget)} were asked for, weights and workspaces take "
            f"{gib(weight_bytes + workspace_bytes)} of the {gib(usable)} that are free. Lower "
            "kv.memory or kv.blocks, use model.dtype=bfloat16, or free memory"
        )
    most = MemoryPlan(
        free_bytes=free_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        kv_bytes=budget,
        slices=budget // slice_bytes,
        tokens=0,
        max_model_len=max_model_len or model_limit,
        chunk=chunk,
        ranks=ranks,
    )
    return with_slices(most, layout, most.slices, asked=max_model_len)


def plan_host(
    layout: Layout, host_gib: float, *, free_bytes: int, taken_bytes: int, on_cpu: bool
) -> int:
    """How many slices fit in `host_gib` of host memory, of which `free_bytes` less `taken_bytes`
    are free. Raises DoesNotFit."""
    asked = int(host_gib * GIB)
    if asked > free_bytes - taken_bytes:
        left = f"{gib(max(0, free_bytes - taken_bytes))} are left beside weights and pages"
        raise DoesNotFit(
            f"kv.host_gib={host_gib:g} does not fit: "
            + (left if on_cpu else f"the host has {gib(free_bytes)} free")
            + ". Lower it, or free memory"
        )
    if 0 < asked < layout.slice_bytes:
        raise DoesNotFit(
            f"kv.host_gib={host_gib:g} is less than a block of {gib(layout.slice_bytes)}: raise "
            "it, or set it to 0, which is off"
        )
    return asked // layout.slice_bytes


def with_slices(plan: MemoryPlan, layout: Layout, slices: int, asked: int | None) -> MemoryPlan:
    """The plan with room for `slices` on each rank. The longest sequence is `asked`, or what fits,
    at most that of `plan`. Raises DoesNotFit where `asked` is too long."""
    chunk = plan.chunk * plan.ranks
    most = layout.longest(slices, chunk, plan.ranks) if slices else 0
    kv_bytes = slices * layout.slice_bytes
    longest = asked or min(plan.max_model_len, most)
    if longest > most or slices == 0:
        each = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
        raise DoesNotFit(
            f"a sequence of {longest} tokens does not fit: it needs "
            f"{gib(layout.sequence_bytes(longest, chunk))} of pages, {gib(kv_bytes)} are there"
            f"{each}, which is {most} tokens. Lower model.max_model_len to {most} or less, raise "
            "kv.memory or kv.blocks, or free memory"
        )
    return replace(
        plan,
        slices=slices,
        kv_bytes=kv_bytes,
        tokens=slices * layout.block_size * plan.ranks,
        max_model_len=longest,
    )


def gib(size: int) -> str:
    """A size in text: GiB, below one GiB in MiB, below one MiB in KiB."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / 1024:.1f} KiB"
