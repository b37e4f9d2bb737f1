"""The compiled kernels of this process, and their arguments."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Formats of weights and pages that the kernels read; they compute in float32."""


class Attention(Structure):
    """`Attention` of attention.c."""

    _fields_ = [
        ("q", c_void_p), ("q_token", c_int64), ("q_head", c_int64),
        ("k", c_void_p), ("v", c_void_p),
        ("k_block", c_int64), ("k_head", c_int64), ("v_block", c_int64), ("v_head", c_int64),
        ("out", c_void_p), ("lse", c_void_p), ("sink", c_void_p),
        ("table", c_void_p), ("logical", c_void_p),
        ("table_row", c_int64), ("logical_row", c_int64),
        ("blocks", c_void_p), ("positions", c_void_p), ("tokens", c_void_p),
        ("pieces", c_void_p), ("phases", c_void_p), ("phase_count", c_int64), ("kept", c_void_p),
        ("heads", c_int64), ("kv_heads", c_int64),
        ("k_dim", c_int64), ("v_dim", c_int64), ("block_shift", c_int64), ("window", c_int64),
        ("scale", c_float), ("softcap", c_float), ("dtype", c_int32), ("threads", c_int32),
    ]  # fmt: skip


class Library:
    """The functions of a library that `compiler.compiled` made, and the threads that each call
    computes with."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        self.threads = threads
        functions = ctypes.CDLL(str(path))
        pointer, number = c_void_p, c_int64

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(functions, f"kvatlas_{name}")
            found.restype, found.argtypes = result, arguments
            return found

        self.linear = function(
            "linear", None, *(pointer,) * 4, number, number, number, c_int, c_int
        )
        self.attend = function("attend", None, POINTER(Attention), pointer)
        self.scratch = function("scratch", number, POINTER(Attention))
        self.kept = function("kept", number, POINTER(Attention))
        self.write = function(
            "write", None, pointer, number, number, pointer, number, number, pointer,
            number, number, number, number, c_int,
        )  # fmt: skip
        self.rms_norm = function(
            "rms_norm", None, pointer, pointer, pointer, number, number, c_float, c_float, c_int
        )
        self.silu_mul = function("silu_mul", None, pointer, pointer, number, number, c_int)
        self.panel_width = int(function("panel_width", number)())


_library: Library | None = None


def use(library: Library | None) -> None:
    """From now on this process computes with `library`; with torch where None."""
    global _library
    _library = library


def library() -> Library | None:
    return _library
