"""The variants of the kernels that are compiled ahead of time, and how each is compiled.

The attention rows hold each pair of values of any two parameters at least once; a test counts. The
last four are what ranks of a gang run over their shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpaging.kernels.attend import attend_kernel
from kvpaging.kernels.launch import COPY_QUADS, constants, heads_together
from kvpaging.kernels.merge import merge_kernel
from kvpaging.kernels.pages import copy_kernel, write_kernel
from kvpaging.kernels.tiles import CHIPS, Shape, pad, shapes

TARGETS = CHIPS
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PAGES = {"int8": "*i8", "fp8": "*fp8e4nv"}

PARAMETERS = {
    "tile": ("decode", "prefill"),
    "dtype": ("bf16", "fp16", "fp32"),
    "block": ("8", "16", "64", "256"),
    "head": ("64", "80", "96", "128", "256", "512", "192/128"),
    "group": ("1", "3", "4", "8"),
    "window": ("-", "window"),
    "softcap": ("-", "softcap"),
    "sink": ("-", "sink"),
    "keys": ("-", "logical"),
    "result": ("output", "partial"),
    "pages": ("-", *PAGES),
}

ATTEND = """
prefill bf16  16   64       1  -       softcap  -     -        partial  fp8
prefill bf16  64   80       3  window  -        -     -        partial  fp8
decode  bf16  256  96       8  -       softcap  -     logical  partial  -
prefill bf16  8    128      3  window  -        sink  -        output   fp8
prefill bf16  256  192/128  4  window  -        sink  logical  output   -
decode  bf16  64   256      3  -       softcap  sink  logical  output   -
decode  bf16  256  256      4  window  softcap  sink  -        output   fp8
decode  bf16  16   512      3  window  softcap  sink  -        output   int8
decode  fp16  256  64       3  window  softcap  -     -        output   -
decode  fp16  256  80       1  -       softcap  sink  -        output   int8
prefill fp16  16   96       4  window  -        sink  -        output   fp8
decode  fp16  64   128      8  window  -        -     logical  partial  int8
decode  fp16  8    192/128  8  -       softcap  -     -        partial  fp8
prefill fp16  8    256      1  window  softcap  sink  logical  output   int8
decode  fp16  64   512      4  -       -        -     logical  partial  fp8
decode  fp32  8    64       8  window  -        sink  logical  output   -
decode  fp32  64   64       4  -       softcap  -     logical  partial  int8
decode  fp32  16   80       8  -       softcap  -     logical  output   -
prefill fp32  8    80       4  window  softcap  -     logical  output   -
decode  fp32  8    96       1  -       -        -     -        partial  int8
prefill fp32  64   96       3  window  -        sink  logical  output   -
decode  fp32  16   128      4  -       softcap  -     logical  partial  -
prefill fp32  256  128      1  window  -        sink  logical  output   fp8
decode  fp32  16   192/128  3  -       -        -     logical  partial  -
prefill fp32  64   192/128  1  window  softcap  sink  logical  output   int8
prefill fp32  16   256      8  window  -        -     -        partial  int8
decode  fp32  8    512      8  window  -        -     logical  partial  -
prefill fp32  256  512      1  window  -        -     logical  output   -
decode  bf16  64   128      4  -       -        -     logical  partial  -
decode  bf16  16   64       1  window  -        -     logical  partial  -
prefill bf16  64   128      4  -       -        -     logical  partial  -
prefill bf16  16   128      8  window  softcap  -     logical  partial  -
"""
OTHERS = """
write   bf16  128
write   fp32  80/64
write   bf16  128     int8
write   fp16  80/64   fp8
merge   128
merge   80    listed
finish  bf16  96
copy
"""


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel specialised: what `triton.compile` takes beside the target."""

    name: str
    kernel: Any
    types: dict[str, str]  # of the run-time arguments, in Triton's notation
    fixed: dict[str, Any]  # compile-time arguments, None for absent tensors and numbers
    shape: Shape
    quads: int  # accesses of 16 bytes that each thread needs for a tile's keys and values, at least

    @property
    def aligned(self) -> list[int]:
        """Positions of the pointers known to be multiples of 16 bytes."""
        return [
            p.num
            for p in self.kernel.params
            if self.types.get(p.name, "")[:1] == "*" and not p.do_not_specialize_on_alignment
        ]


def names() -> list[str]:
    """Every variant."""
    lines = [f"attend {line}" for line in ATTEND.strip().splitlines()] + OTHERS.strip().splitlines()
    return [" ".join(line.split()) for line in lines]


def targets(name: str) -> list[str]:
    """Chips that the variant is compiled for: sm_80 has no fp8."""
    return [target for target in TARGETS if target != "sm_80" or name.split()[-1] != "fp8"]


def build(name: str, target: str) -> Build:
    """The variant `name` for a chip of TARGETS."""
    kind, *rest = name.split()
    return {"attend": _attend, "write": _write, "copy": _copy}.get(kind, _merge)(name, target, rest)


def _attend(name: str, target: str, words: list[str]) -> Build:
    case = dict(zip(PARAMETERS, words, strict=True))
    dtype, item = case["dtype"], BYTES[case["dtype"]]
    k_dim, v_dim = _dims(case["head"])
    quantised = case["pages"] in PAGES
    shape = shapes(target, item, max(k_dim, v_dim), quantised)[case["tile"] == "prefill"]
    fixed = constants(shape, int(case["group"]), int(case["block"]), k_dim, v_dim=v_dim)
    pointer = f"*{dtype}"
    types = dict.fromkeys(("q", "out", "sink"), pointer) | _pages(case["pages"], dtype)
    types |= dict.fromkeys(("table", "logical", "used", "items", "stacked"), "*i32")
    types |= dict.fromkeys(("acc_out", "m_out", "l_out"), "*fp32")
    types |= {"scale": "fp32", "softcap": "fp32"}
    absent = [name for name in ("window", "softcap", "sink") if case[name] == "-"]
    absent += ["logical"] * (case["keys"] == "-") + ["out"] * (case["result"] == "partial")
    absent += [] if quantised else ["k_scales", "v_scales"]
    threads = shape.warps * (64 if target.startswith("gfx") else 32)
    quads = shape.keys * (fixed["DK_PAD"] + fixed["DV_PAD"]) * (1 if quantised else item)
    quads = quads // 16 // threads
    return _build(name, attend_kernel, types, fixed, absent=absent, shape=shape, quads=quads)


def _write(name: str, target: str, words: list[str]) -> Build:
    dtype, (k_dim, v_dim), pages = words[0], _dims(words[1]), "".join(words[2:])
    types = dict.fromkeys(("k", "v"), f"*{dtype}") | _pages(pages, dtype) | {"slots": "*i64"}
    fixed = {
        "B": 16,
        "DK": k_dim,
        "DV": v_dim,
        "DK_PAD": pad(k_dim),
        "DV_PAD": pad(v_dim),
        "HEADS": heads_together(8, max(k_dim, v_dim)),
    }
    absent = [] if pages in PAGES else ["k_scales", "v_scales"]
    return _build(name, write_kernel, types, fixed, absent=absent)


def _pages(pages: str, dtype: str) -> dict[str, str]:
    types = dict.fromkeys(("k_pages", "v_pages"), PAGES.get(pages, f"*{dtype}"))
    return types | dict.fromkeys(("k_scales", "v_scales"), "*i16")


def _merge(name: str, target: str, words: list[str]) -> Build:
    finishes = name.startswith("finish")
    dtype, dim = (words[0], int(words[1])) if finishes else ("fp32", int(words[0]))
    floats = ("acc_in", "m_in", "l_in", "acc_out", "m_out", "l_out", "sink")
    types = dict.fromkeys(floats, "*fp32") | {"out": f"*{dtype}"}
    types |= dict.fromkeys(("items", "sources"), "*i32")
    fixed = {"D": dim, "D_PAD": pad(dim), "HEADS": heads_together(32, dim)}
    absent = ["acc_out", "m_out", "l_out"] if finishes else ["sink", "out"]
    if "listed" not in words:
        absent += ["items", "sources"]
    return _build(name, merge_kernel, types, fixed, absent=absent)


def _copy(name: str, target: str, words: list[str]) -> Build:
    types = {"arena": "*i32", "src": "*i64", "dst": "*i64"}
    return _build(name, copy_kernel, types, {"CHUNK": COPY_QUADS}, absent=[])


def _build(
    name: str,
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    absent: list[str],
    shape: Shape | None = None,
    quads: int = 0,
) -> Build:
    given = [p for p in kernel.arg_names if p not in fixed and p not in absent]
    types = {p: types.get(p, "i32") for p in given}
    fixed = fixed | dict.fromkeys(absent)
    return Build(
        name=name,
        kernel=kernel,
        types=types,
        fixed=fixed,
        shape=shape or Shape(0, 0, warps=4, stages=1),
        quads=quads,
    )


def _dims(head: str) -> tuple[int, int]:
    k_dim, _, v_dim = head.partition("/")
    return int(k_dim), int(v_dim or k_dim)
