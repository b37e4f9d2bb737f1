"""Whatever pages name exists: files, functions, links, make targets, metrics, modules, settings.

And they can be read: sentences are short, and the way of a request and of a block is on one page.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from configs.schema import FIELDS, SECTIONS

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
WRITTEN = [page for page in PAGES if page.name != "kernels.md"]  # that one is a compiler's table
WORDS_MAX = 20.0
ROOMS = "cluster|worker|kvpaging|context_parallel|configs|tests|scripts|docs"
PLACE = rf"(?:{ROOMS})/[\w/]+\.py:[A-Za-z_][\w.]*"


def code(page: str) -> Iterator[str]:
    """Every piece of code on a page: the lines of its blocks, then what stands in backticks."""
    blocks = re.findall(r"```.*?\n(.*?)```", page, re.S)
    for block in blocks:
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.S))


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page: of its paragraphs and list items, not of its code and tables."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    text = re.sub(r"^\s*(#|\|).*$", "", text, flags=re.M)
    for part in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s", text, flags=re.M):
        found = re.split(r"(?<=[.!?])[\"')*]*\s+", part.strip())
        yield from (sentence for sentence in found if sentence)


def defines(file: Path, name: str) -> bool:
    """Whether a Python file has this function or class, or `Class.method`."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


def stops(title: str) -> list[list[str]]:
    """For each item of the numbered list under a title of the architecture, the places it names."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    items = re.split(r"^\d+\. ", section, flags=re.M)[1:]
    return [re.findall(rf"`({PLACE})`", item) for item in items]


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
    known = set(FIELDS)
    cli = (ROOT / "cluster" / "cli.py").read_text(encoding="utf-8")
    commands = set(re.findall(r'add_parser\("(\w+)"', cli))
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    options = set(re.findall(r'"(--[\w-]+)"', sources))
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
        for metric in re.findall(r"\b(?:kvatlas|vllm):[a-z_]+", piece):
            if f'"{re.sub("_(total|sum)$", "", metric)}"' not in sources:
                found.append(f"metric {metric}")
        for place in re.findall(PLACE, piece):
            path, _, name = place.partition(":")
            if (ROOT / path).is_file() and not defines(ROOT / path, name):
                found.append(f"function {place}")
        for key in re.findall(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?![\w(])", piece):
            if key not in known and not (ROOT / key.replace(".", "/")).is_dir():
                found.append(f"setting {key}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
        "`kvpaging/pool.py:coffee`",
        "`kvpaging/pool.py:BlockPool.coffee`",
        "```\nvi configs/coffee.yaml\n```",
        "`kv.coffee`",
        "`kvatlas:coffee_total`",
        "`--set model.coffee=1`",
    ],
)
def test_what_does_not_exist_is_seen(text: str) -> None:
    assert len(problems(ROOT / "README.md", text)) == 1


def test_what_exists_is_not_complained_about() -> None:
    text = (
        "[a](docs/configuration.md) [b](README.md#two-commands) [c](https://x.y/z) `make test` "
        "`kvatlas serve --set kv.blocks=1` "
        "`python -m configs.table` `kvpaging/pool.py` "
        "`kvpaging/pool.py:BlockPool.allocate` `tests/` `configs/*.yaml` `kv.block_size=8`"
    )
    assert problems(ROOT / "README.md", text) == []


def test_every_page_of_the_docs_can_be_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in DOCS:
        if page.parent.name != "measurements":  # docs/long_context.md leads there
            assert f"]({page.relative_to(ROOT).as_posix()})" in readme


@pytest.mark.parametrize(
    ("title", "most"),
    [
        ("A chat request, from the socket to the kernel", 15),
        ("A block, from allocation to free", 12),
    ],
)
def test_the_architecture_page_leads_through_the_code(title: str, most: int) -> None:
    found = stops(title)
    assert 8 <= len(found) <= most
    assert all(found)


def test_the_architecture_is_one_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1500


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(page.read_text(encoding="utf-8"))]
    assert sum(words) / len(words) < WORDS_MAX


def test_sentences_are_those_of_people() -> None:
    page = (
        "# Not this one\n\nOne two. Three `a.b c` four!\nFive [six seven](x.md)\neight.\n\n"
        "| not | this |\n\n```\nnor. this.\n```\n\n- nine\n- ten: eleven.\n1. twelve\n"
    )
    lengths = [len(sentence.split()) for sentence in sentences(page)]
    assert lengths == [2, 3, 4, 1, 2, 1]


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
