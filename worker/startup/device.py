"""What this machine has: devices, free memory, number formats. No other module looks."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch


def choose_device(asked: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises ValueError for `cuda` without a GPU."""
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ValueError(
            "model.device=cuda was asked for, but torch sees no GPU on this machine; "
            "use model.device=cpu or auto, or install a torch with CUDA or ROCm and its driver"
        )
    return torch.device("cuda" if has_gpu and asked != "cpu" else "cpu")


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can be allocated now; on a CPU also within the limit of this control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return max(0, min(_available_bytes(), *_cgroup_bytes()))


def _available_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup_bytes() -> list[int]:
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        (root / "memory.max", root / "memory.current"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes"),
    ):
        if limit.is_file() and used.is_file():
            most = limit.read_text().strip()
            return [] if most == "max" else [int(most) - int(used.read_text())]
    return []


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts fp8 (e4m3); NVIDIA GPUs do from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; elsewhere float32 is faster."""
    return bool({"avx512_bf16", "amx_bf16"} & _cpu_flags())


def has_vnni() -> bool:
    """Whether the CPU adds products of 8-bit numbers in 32 bits; others use 16, which overflow."""
    return "avx512_vnni" in _cpu_flags()


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return set()
    flags = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
    return set(flags.split())


def keep_freed_memory() -> bool:
    """Tell glibc to keep large temporaries instead of returning them to the kernel.

    On a CPU every step frees and allocates the same few megabytes per layer; by default each of
    them is mapped anew and faulted in page by page, which costs more than the arithmetic. Returns
    whether this libc took it (others, musl among them, have no such switch).
    """
    try:
        libc = ctypes.CDLL(None)
        mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
        kept = [libc.mallopt(mmap_threshold, 1 << 30), libc.mallopt(trim_threshold, 2**31 - 1)]
    except (OSError, AttributeError):
        return False
    return all(kept)


def release_freed_memory() -> None:
    """Give back to the kernel what is freed now, once, where this libc can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
