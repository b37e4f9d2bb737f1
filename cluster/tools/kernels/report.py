"""Compile the kernels ahead of time for every target and write their resources to docs/kernels.md.

Run it as `python -m cluster.tools.kernels.report`.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cluster.tools.kernels import variants

ROOT = Path(__file__).parents[3]
PAGE, KERNELS = ROOT / "docs" / "kernels.md", ROOT / "kvpaging" / "kernels"
SHARED_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
_GPU = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
HEAD = """\
# Kernels

Written by `python -m cluster.tools.kernels.report` with Triton {version} from sources {digest}.
A test fails where the kernels or their variants have changed since; others compile variants again
(all of them with `-m full`) and fail where a figure got worse: more registers or shared memory than
here, any spill, more shared memory than the chip has, or fewer accesses of 16 bytes than a tile
needs.

Attention variants name the tile (decode for single tokens, prefill for chunks), dtype, block size,
head size (`K/V` where they differ), query heads of a KV head, then window, soft cap, sink, logical
block indices, whether they finish the output or return partials, and the 8-bit pages they read if
any; sm_80 has no fp8.  A tile is rows x keys, rows being queries times the heads of a group.
Registers are per thread (on gfx942 VGPRs and AGPRs), shared memory is in bytes of a program, spills
in bytes of a thread (on gfx942 in registers).

| Variant | Target | Tile | Warps | Stages | Registers | Spills | Shared | 16-byte accesses |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The resources of a chip that one compiled variant uses."""

    registers: int
    spills: int
    shared: int
    quads: int  # 16-byte accesses to global memory in the code

    def worse(self, limit: Cost) -> list[str]:
        """Figures that exceed those of an earlier compile."""
        return [
            f"{name} {mine} > {theirs}"
            for name in ("registers", "spills", "shared")
            if (mine := getattr(self, name)) > (theirs := getattr(limit, name))
        ]


def compiled(name: str, target: str) -> Cost:
    """Compile the variant `name` of `cluster.tools.kernels.variants` for one of its targets."""
    build = variants.build(name, target)
    signature = {p: build.types.get(p, "constexpr") for p in build.kernel.arg_names}
    attributes: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in build.aligned}
    source = ASTSource(build.kernel, signature, build.fixed, attributes)
    options = {
        "num_warps": build.shape.warps,
        "num_stages": build.shape.stages,
        "enable_fp_fusion": True,
    }
    kernel = triton.compile(source, target=_GPU[target], options=options)
    shared = int(kernel.metadata.shared)
    if target == "gfx942":
        return _amd(kernel.asm["amdgcn"], shared)
    return _nvidia(kernel.asm["ptx"], kernel.asm["cubin"], shared)


def digest() -> str:
    """A digest of what decides the figures: the kernels' code, without comments and imports, and
    how each variant is built. If it equals the page's, the page's figures are current."""
    found = hashlib.blake2b(digest_size=8)
    for name in ("attend", "merge", "pages", "partials"):
        tree = ast.parse((KERNELS / f"{name}.py").read_text(encoding="utf-8"))
        found.update(ast.unparse(_Code().visit(tree)).encode())
    for name in variants.names():
        for target in variants.targets(name):
            build = variants.build(name, target)
            found.update(repr((build.types, build.fixed, build.shape, build.aligned)).encode())
    return found.hexdigest()


class _Code(ast.NodeTransformer):
    """Leaves out what is not compiled: imports and docstrings."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def problems(name: str, target: str, cost: Cost) -> list[str]:
    """Violations of the limits that hold for every compile, besides those of earlier figures."""
    build = variants.build(name, target)
    found = []
    if cost.spills:
        found.append(f"spills {cost.spills}")
    if cost.shared > SHARED_LIMIT[target]:
        found.append(f"shared memory {cost.shared} > {SHARED_LIMIT[target]}")
    if cost.quads < build.quads:
        found.append(f"16-byte accesses {cost.quads} < {build.quads}")
    return found


def _nvidia(ptx: str, cubin: bytes, shared: int) -> Cost:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    accesses = r"(?:ld|st)\.global\S*\.(?:v4\.\w32|v2\.\w64)|cp\.async\.\S+ [^;]*\], 0x10"
    return Cost(
        registers=_number(r"REG:(\d+)", usage),
        spills=_number(r"STACK:(\d+)", usage),
        shared=shared,
        quads=len(re.findall(accesses, ptx)),
    )


def _amd(assembly: str, shared: int) -> Cost:
    accesses = r"(?:global|buffer)_(?:load|store)_dwordx4"
    return Cost(
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        spills=_number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
        shared=shared,
        quads=len(re.findall(accesses, assembly)),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, pattern
    return int(match[1])


def row(name: str, target: str, cost: Cost) -> str:
    """One line of the table."""
    shape = variants.build(name, target).shape
    tile = f"{shape.rows} x {shape.keys}" if shape.rows else "-"
    figures = (shape.warps, shape.stages, cost.registers, cost.spills, cost.shared, cost.quads)
    return "| " + " | ".join([name, target, tile, *map(str, figures)]) + " |"


def committed(page: str) -> tuple[str, str, dict[tuple[str, str], Cost]]:
    """The Triton version and the digest of the sources a page was written with, and its table."""
    table = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[1] in variants.TARGETS:
            table[cells[0], cells[1]] = Cost(*map(int, cells[5:]))
    match = re.search(r"with Triton ([\d.]+\d) from sources (\w+)", page)
    assert match
    return match[1], match[2], table


def main() -> int:
    """Write docs/kernels.md; the exit code is 1 if a limit does not hold."""
    lines, failed = [], False
    for name in variants.names():
        for target in variants.targets(name):
            cost = compiled(name, target)
            lines.append(row(name, target, cost))
            for problem in problems(name, target, cost):
                failed = True
                print(f"{name} on {target}: {problem}", file=sys.stderr)
    head = HEAD.format(version=triton.__version__, digest=digest())
    PAGE.write_text(head + "\n".join(lines) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
