"""Loads the configuration: `load` reads a file and overrides, `adjusted` changes live settings.

Both raise ConfigError with all problems at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.rules import Rule, shown
from configs.schema import FIELDS, SECTIONS, Config


class ConfigError(Exception):
    """The configuration cannot be used; `problems` has one line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{head} in the configuration:\n  " + "\n  ".join(problems))


def load(source: str | Mapping[str, object] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `source` with `section.key=value` overrides on top.

    `source` is the path of a YAML file or what such a file holds. Without it all settings have
    their defaults, and null anywhere means the default.
    Raises ConfigError with all problems of the source and the overrides together.
    """
    problems: list[str] = []
    where, tree = "config", source
    if isinstance(source, str):
        where, tree = source, _read(source, problems)
    given = {key: (where, value) for key, value in _flatten(tree, where, problems)}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            problems.append(f"--set {override}: is not of the form section.key=value")
        elif key in SECTIONS:
            problems.append(f"--set {override}: {key} is a section, set one of its keys")
        else:
            given[key] = ("--set", _scalar(key, text))
    return _with(Config(), given, problems)


def adjusted(config: Config, changes: Mapping[str, object]) -> Config:
    """`config` with other values of live settings; `changes` has sections, as a file has.

    Raises ConfigError with all problems, other settings among them.
    """
    problems: list[str] = []
    given: dict[str, tuple[str, object]] = {}
    for key, value in _flatten(changes, "user_config", problems):
        if key in FIELDS and not FIELDS[key].metadata["live"]:
            live = ", ".join(name for name, field in FIELDS.items() if field.metadata["live"])
            problems.append(f"{key} (user_config): needs a restart; what does not is {live}")
        else:
            given[key] = ("user_config", value)
    return _with(config, given, problems)


def _with(config: Config, given: Mapping[str, tuple[str, object]], problems: list[str]) -> Config:
    """`config` with the given values. Raises ConfigError with these and earlier problems."""
    values: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    for key, (where, value) in given.items():
        field = FIELDS.get(key)
        if field is None:
            problems.append(f"{key} ({where}): there is no such setting{_meant(key)}")
        elif value is not None:
            rule: Rule = field.metadata["rule"]
            section, _, name = key.partition(".")
            try:
                values[section][name] = rule.parse(value)
            except ValueError as error:
                if error.args:
                    problems.append(f"{key} ({where}): {error}")
                    continue
                default = shown(field.default)
                problems.append(
                    f"{key} ({where}): {rule.refusal(value)} (null is the default, {default})"
                )
    if problems:
        raise ConfigError(problems)
    changed = {
        section: dataclasses.replace(getattr(config, section), **found)
        for section, found in values.items()
    }
    made = dataclasses.replace(config, **changed)
    if problems := list(made.conflicts()):
        raise ConfigError(problems)
    return made


def _read(path: str, problems: list[str]) -> Any:
    """What a YAML file holds; what is wrong with it goes to `problems`."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        problems.append(f"{path}: is not UTF-8 text")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problems.append(f"{path}{line}: is not valid YAML: {error.problem}")
    except (yaml.YAMLError, TypeError) as error:
        problems.append(f"{path}: is not valid YAML: {error}")
    return None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, where YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                mark = node.value[at][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"key {key} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def _flatten(tree: object, path: str, problems: list[str]) -> Iterator[tuple[str, object]]:
    """("section.key", value) of a parsed file; an unknown section is yielded under its own key."""
    if tree is None:
        return
    if not isinstance(tree, dict):
        problems.append(f"{path}: must hold sections ({', '.join(SECTIONS)}), not {shown(tree)}")
        return
    for section, body in tree.items():
        if str(section) in FIELDS:
            name, _, key = str(section).partition(".")
            problems.append(f"{section} ({path}): belongs into its section, {name}: {{{key}: ...}}")
        elif section not in SECTIONS:
            yield str(section), body
        elif isinstance(body, dict):
            yield from ((f"{section}.{key}", value) for key, value in body.items())
        elif body is not None:
            problems.append(f"{section} ({path}): {shown(body)} is not a mapping of settings")


def _scalar(key: str, text: str) -> object:
    """The value of an override's text: YAML, but a text setting may look like a number."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    field = FIELDS.get(key)
    wants_text = field is not None and "str" in str(field.type).split(" | ")
    return text if wants_text and value is not None and not isinstance(value, str) else value


def _meant(key: str) -> str:
    """A hint for an unknown key: its own name in another section, else similar spelling."""
    section, _, name = key.rpartition(".")
    names = {full.partition(".")[2]: full for full in FIELDS}
    own = [f.name for f in dataclasses.fields(SECTIONS[section])] if section in SECTIONS else []
    if name in names:
        return f"; did you mean {names[name]}?"
    if similar := difflib.get_close_matches(name, own, n=1):
        return f"; did you mean {section}.{similar[0]}?"
    if similar := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
        return f"; did you mean {names[similar[0]]}?"
    if own:
        return f"; section {section} has {', '.join(own)}"
    if similar := difflib.get_close_matches(key, SECTIONS, n=1):
        return f"; did you mean section {similar[0]}?"
    return f"; the sections are {', '.join(SECTIONS)}"
