"""The list of variants that are compiled ahead of time."""

from __future__ import annotations

import pytest

from cluster.tools.kernels import variants
from tests.covering import all_pairs, uncovered

MOST = 40


def cases() -> list[dict[str, str]]:
    lines = [name.split() for name in variants.names() if name.startswith("attend ")]
    return [dict(zip(variants.PARAMETERS, line[1:], strict=True)) for line in lines]


def test_the_attention_variants_cover_all_pairs() -> None:
    impossible = frozenset({("sink", "sink"), ("result", "partial")})  # a sink joins output only
    assert uncovered(variants.PARAMETERS, cases()) == {impossible}
    assert impossible in all_pairs(variants.PARAMETERS)


def test_the_list_is_short_and_has_no_duplicates() -> None:
    names = variants.names()
    assert len(set(names)) == len(names) <= MOST
    assert {name.split()[0] for name in names} == {"attend", "write", "merge", "finish", "copy"}


@pytest.mark.parametrize("name", variants.names())
@pytest.mark.parametrize("target", variants.TARGETS)
def test_every_argument_of_a_kernel_has_a_type_or_a_value(name: str, target: str) -> None:
    build = variants.build(name, target)
    assert sorted([*build.types, *build.fixed]) == sorted(build.kernel.arg_names)
    assert set(build.aligned) <= {build.kernel.arg_names.index(p) for p in build.types}
