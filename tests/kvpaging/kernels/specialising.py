"""Which kernels would be compiled for a launch; called in the compiling process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvpaging.attention.inputs import AttentionOptions, Partial
from kvpaging.attention.page_view import PageView
from kvpaging.kernels import launch
from tests.kvpaging.ragged import Batch, quantised, ragged


class Hopper:
    """As much of a device as Triton asks for before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """The kernels asked for, by name and everything they are specialised on; none is compiled."""
    asked: set[tuple[str, str]] = set()

    def compile_(kernel: Any, key: str, *_: object) -> None:
        asked.add((kernel.__name__, str(key)))

    driver.set_active(Hopper())
    with mock.patch.object(JITFunction, "_do_compile", compile_):
        yield asked


@lru_cache
def stored_batch(
    lens: tuple[int, ...], firsts: tuple[int, ...], ranks: int, kind: str | None
) -> tuple[Batch, PageView]:
    batch = ragged(
        lens, firsts, heads=3, group=3, k_dim=64, v_dim=64, dtype=torch.float16, ranks=ranks
    )
    return batch, quantised(batch.pages, kind)


def steps(
    partials: bool, kind: str | None, lens: tuple[int, ...], firsts: tuple[int, ...], shift: int
) -> None:
    """One step of a layer, its inputs `shift` elements off any alignment."""
    batch, pages = stored_batch(lens, firsts, 2 if partials else 1, kind)
    rows = replace(batch.rows, cache={})
    tokens = len(batch.q)
    buffer = torch.zeros(tokens * (9 + 2 * 3) * 64 + shift, dtype=torch.float16)[shift:]
    qkv = buffer.view(tokens, 15, 64)
    q, k, v = qkv[:, :9], qkv[:, 9:12], qkv[:, 12:]
    launch.write(k, v, pages, rows.slots)
    options = AttentionOptions(scale=1, softcap=30)
    if partials:
        partial = launch.attend(q, pages, rows, options)
        merged = launch.merge(Partial(*(x[None] for x in partial)))
        launch.finish(merged, None, torch.float16)
    else:
        launch.attend_finish(q, pages, rows, options)


def asked_for(
    partials: bool, kind: str | None
) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """What warming up compiles, and what steps of many sizes then ask for."""
    with recorded() as warm:
        batch = ragged((1,), (0,), heads=3, k_dim=64, v_dim=64, dtype=torch.float16)
        launch.warm_up(
            quantised(batch.pages, kind), 9, torch.float16,
            options=AttentionOptions(1.0, softcap=30.0), partials=partials,
        )  # fmt: skip
    with recorded() as later:
        for lens, firsts in (
            ((1,), (0,)),
            ((1, 1), (16, 300)),
            ((17, 1, 3), (0, 1000, 255)),
            ((70,), (31,)),
            ((1,) * 16, tuple(range(0, 4096, 256))),
        ):
            for shift in (0, 1, 8):
                steps(partials, kind, lens, firsts, shift)
    return warm, later
