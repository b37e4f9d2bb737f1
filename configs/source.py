"""Reads a YAML file of settings, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, where YAML would silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                mark = node.value[at][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"key {key} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def read(path: str | None, problems: list[str]) -> object:
    """What a YAML file holds, None where there is no path; what is wrong goes to `problems`."""
    if path is None:
        return None
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
