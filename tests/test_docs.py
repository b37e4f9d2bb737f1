"""Whatever the pages name exists: files, links, make targets, modules, settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from configs.schema import SECTIONS, settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = "cluster|worker|kvpaging|context_parallel|configs|tests|scripts|docs"


def code(page: str) -> Iterator[str]:
    """Every piece of code on a page: the lines of its blocks, then what stands in backticks."""
    blocks = re.findall(r"```.*?\n(.*?)```", page, re.S)
    for block in blocks:
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))


def is_module(name: str) -> bool:
    """Whether `python -m name` finds something; asked without importing anything."""
    top = name.partition(".")[0]
    if (ROOT / top).is_dir():
        place = ROOT / name.replace(".", "/")
        return place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
    return top in sys.stdlib_module_names or top in packages_distributions()


def problems(page: Path, text: str) -> list[str]:
    """What a page names that does not exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    known = {key for key, _ in settings()}
    cli = (ROOT / "cluster" / "cli.py").read_text(encoding="utf-8")
    commands = set(re.findall(r'add_parser\("(\w+)"', cli))
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    options = {option for source in sources for option in re.findall(r'"(--[\w-]+)"', source)}
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" not in link and path and not (page.parent / path).exists():
            found.append(f"link {link}")
        if anchor and "://" not in link:
            target = text if not path else (page.parent / path).read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", target, re.M)
            if anchor not in {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}:
                found.append(f"anchor {link}")
    for piece in code(text):
        found += [f"make {t}" for t in re.findall(r"\bmake ([a-z]+)", piece) if t not in targets]
        for command, rest in re.findall(r"\bkvatlas ([a-z]+)(.*)", piece):
            used = {command} | set(re.findall(r"--[a-z][a-z-]*", rest))
            found += [f"kvatlas {word}" for word in sorted(used - commands - options)]
        for module in re.findall(r"python -m ([\w.]+)", piece):
            if not is_module(module):
                found.append(f"module {module}")
        for file in re.findall(rf"(?<![\w/.])(?:{ROOMS})/[\w./*-]*", piece):
            if not list(ROOT.glob(file.rstrip("/."))):
                found.append(f"file {file}")
        for key in re.findall(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?![\w(])", piece):
            if key not in known and not (ROOT / key.replace(".", "/")).is_dir():
                found.append(f"setting {key}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert problems(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "text",
    [
        "[x](nowhere.md)",
        "[x](README.md#no-such-title)",
        "`make coffee`",
        "```\nmake coffee PORT=1\n```",
        "`kvatlas coffee`",
        "```\nkvatlas serve --coffee 1\n```",
        "`python -m configs.coffee`",
        "`kvpaging/coffee.py`",
        "```\nvi configs/coffee.yaml\n```",
        "`kv.coffee`",
        "`--set model.coffee=1`",
    ],
)
def test_what_does_not_exist_is_seen(text: str) -> None:
    assert len(problems(ROOT / "README.md", text)) == 1


def test_what_exists_is_not_complained_about() -> None:
    text = (
        "[a](docs/configuration.md) [b](README.md#two-commands) [c](https://x.y/z) `make test` "
        "`kvatlas serve --set kv.blocks=1` "
        "`python -m configs.table` `kvpaging/pool.py` `tests/` `configs/*.yaml` `kv.block_size=8`"
    )
    assert problems(ROOT / "README.md", text) == []


def test_every_page_of_the_docs_can_be_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme


def test_the_api_page_names_every_parameter_and_every_refused_one() -> None:
    from cluster.http import openai

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    fields = openai.ChatRequest.model_fields | openai.CompletionRequest.model_fields
    refused = openai._COMMON | openai._CHAT | openai._COMPLETION
    names = {*fields, *refused, *openai.HARMLESS, *openai.StreamOptions.model_fields}
    assert {name for name in names if f"`{name}`" not in page and f'"{name}"' not in page} == set()


def test_the_api_page_names_every_route_and_error_code() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    routes = re.findall(r'app\.(?:get|post)\(\s*"([^"]+)"', source)
    codes = re.findall(r'ApiError\(\s*\d{3},\s*"(\w+)"|code="(\w+)"', source)
    assert len(routes) >= 12
    assert len(codes) >= 10
    assert [route for route in routes if f" {route.replace(':path', '')}`" not in page] == []
    assert {a or b for a, b in codes if f"`{a or b}`" not in page} == set()
