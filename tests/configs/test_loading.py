from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs import schema
from configs.loading import ConfigError, adjusted, load
from configs.schema import Config


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(*overrides: str, path: str | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert all("\n" not in problem for problem in caught.value.problems)
    return caught.value.problems


def value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_without_file_and_overrides_everything_has_its_default() -> None:
    assert load(None, []) == Config()
    assert load() == Config()


def test_file_and_overrides_meet_and_the_later_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path, "kv: {block_size: 32, memory: 1GiB}\nserver: {port: 9000}\n")
    config = load(path, ["kv.block_size=8", "server.port=9001", "server.port=9002"])
    assert (config.kv.block_size, config.kv.memory, config.server.port) == (8, 2**30, 9002)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "kv:\nmodel:\n", "kv: {}\n", "null\n"])
def test_an_empty_file_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, text)) == Config()


def test_null_is_the_default_in_a_file_and_in_an_override(tmp_path: Path) -> None:
    everything = {name: {} for name in schema.SECTIONS}
    for key in schema.FIELDS:
        section, _, name = key.partition(".")
        everything[section][name] = None
    assert load(write(tmp_path, yaml.safe_dump(everything))) == Config()
    path = write(tmp_path, "server: {port: 9000}\n")
    assert load(path, ["server.port=null"]) == Config()
    assert load(path, ["server.port="]) == Config()


def test_every_default_follows_its_own_rule_and_type() -> None:
    for section, kind in schema.SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.default is None:
                assert type(None) in typing.get_args(hints[field.name]), (section, field.name)
            else:
                assert field.metadata["rule"].parse(field.default) == field.default
                kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
                literals = [a for k in kinds for a in typing.get_args(k)] + list(kinds)
                assert field.default in literals or type(field.default) in kinds


def test_every_setting_has_a_one_line_meaning() -> None:
    for key, field in schema.FIELDS.items():
        assert re.fullmatch(r"[^\n|]{10,110}\.", field.metadata["doc"]), key


def test_records_are_frozen_and_slotted() -> None:
    config = Config()
    for part in (config, *(getattr(config, name) for name in schema.SECTIONS)):
        assert not hasattr(part, "__dict__")
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, None)


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("kv.memory=2GiB", 2**31),
        ("kv.memory=512 MiB", 2**29),
        ("kv.memory=1.5gib", 3 * 2**29),
        ("kv.memory=10KB", 10_000),
        ("kv.memory=123456", 123456),
        ("kv.memory=auto", "auto"),
        ("limits.max_body_bytes=1MiB", 2**20),
        ("kv.memory_fraction=1", 1.0),
        ("limits.request_timeout_s=3", 3.0),
        ("kv.block_size=256", 256),
        ("model.path=123", "123"),
        ("model.path=org/model", "org/model"),
        ("model.name=true", "true"),
        ("model.revision=1.10", "1.10"),
        ("model.dtype=float64", "float64"),
        ("model.compile=true", True),
        ("server.host=0.0.0.0", "0.0.0.0"),
        ("limits.max_logprobs=0", 0),
    ],
)
def test_possible_values(override: str, result: object) -> None:
    found = value(load(None, [override]), override.partition("=")[0])
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    "override",
    [
        "kv.block_size=24",
        "kv.block_size=4",
        "kv.block_size=512",
        "kv.block_size=16.0",
        "kv.block_size=true",
        "kv.blocks=0",
        "kv.blocks=-1",
        "kv.blocks='8'",
        "kv.memory=2G",
        "kv.memory=2gigabytes",
        "kv.memory=0",
        "kv.memory=-1GiB",
        "kv.memory=1.5",
        "kv.memory=99999999TiB",
        "kv.memory=123456GiBB",
        "limits.max_body_bytes=auto",
        "kv.memory_fraction=0",
        "kv.memory_fraction=1.01",
        "kv.memory_fraction=.nan",
        "limits.request_timeout_s=.inf",
        "limits.request_timeout_s=0",
        "limits.request_timeout_s=true",
        "model.compile=1",
        "model.compile='true'",
        "model.dtype=float8",
        "model.dtype=[float32]",
        "model.path=' '",
        "server.port=0",
        "server.port=65536",
        "server.port=8000.0",
        "server.log_level=verbose",
        "cluster.workers=513",
        "scheduler.max_waiting=x",
        "scheduler.max_waiting=[1",
    ],
)
def test_impossible_values_name_key_value_and_what_is_possible(override: str) -> None:
    key, _, text = override.partition("=")
    (problem,) = problems(override)
    assert problem.startswith(f"{key} (--set): ")
    assert text.strip("'.[]").lower() in problem.lower()
    assert "possible is" in problem


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "kv: {block_size: 24, blok: 3}\nport: 1\nserver: {port: true}\nlimits: 4\nmodel.path: x\n",
    )
    found = problems("kv.memory=2G", "server", "server=1", "nonsense.key=1", path=path)
    for start in ("kv.block_size", "kv.blok", "port", "server.port", "limits", "model.path"):
        assert any(problem.startswith(f"{start} ({path})") for problem in found), start
    assert sum("--set" in problem for problem in found) == 4
    assert len(found) == 10
    with pytest.raises(ConfigError, match="10 problems"):
        load(path, ["kv.memory=2G", "server", "server=1", "nonsense.key=1"])


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.dtyp", "did you mean model.dtype?"),
        ("server.block_size", "did you mean kv.block_size?"),
        ("port", "did you mean server.port?"),
        ("schedular.max_waiting", "did you mean scheduler.max_waiting?"),
        ("limits.logprobs", "did you mean limits.max_logprobs?"),
        ("schedular", "did you mean section scheduler?"),
        ("server.colour", "section server has host, port"),
        ("qqq.zzz", "the sections are model, kv"),
    ],
)
def test_an_unknown_key_gets_a_hint(key: str, hint: str) -> None:
    (problem,) = problems(f"{key}=1")
    assert f"{key} (--set): there is no such setting" in problem
    assert hint in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kv: {", "is not valid YAML"),
        ("kv: {blocks: 1}\nkv: {blocks: 2}\n", "key kv is given twice"),
        ("kv:\n  blocks: 1\n  blocks: 2\n", "line 3, column 3: is not valid YAML"),
        ("- kv\n", "must hold sections (model, kv"),
        ("just text", "must hold sections"),
        ("? [a]\n: 1\n", "is not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("kv: [1]\n", "kv ("),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    (problem,) = problems(path=write(tmp_path, text))
    assert words in problem


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in problems(path=str(tmp_path / "none.yaml"))[0]
    assert "cannot be read" in problems(path=str(tmp_path))[0]
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: \xff}")
    assert "is not UTF-8" in problems(path=str(tmp_path / "latin.yaml"))[0]


def test_a_missing_file_hides_no_problem_of_the_overrides() -> None:
    assert len(problems("kv.blocks=0", path="/nowhere.yaml")) == 2


def test_the_shipped_files_load() -> None:
    """Those of settings; `test_files_of_ray.py` has the others."""
    folder = Path(schema.__file__).parent
    assert load(str(folder / "local.yaml")) == Config()
    assert load(str(folder / "two-workers.yaml")).cluster.workers == 2


def test_what_a_file_would_hold_is_as_good_as_a_file() -> None:
    made = load({"kv": {"block_size": 8}, "cluster": None}, ["kv.blocks=9"])
    assert made == load(None, ["kv.block_size=8", "kv.blocks=9"])
    with pytest.raises(ConfigError, match=r"kv.block_size \(config\): 9 is not possible"):
        load({"kv": {"block_size": 9}})


def test_settings_that_are_possible_alone_may_contradict_each_other() -> None:
    assert load(None, ["cluster.workers=3"]).most_ranks == 3
    assert load(None, ["scaling.max_workers=3"]).most_ranks == 3
    with pytest.raises(ConfigError) as error:
        load(None, ["cluster.workers=4", "scaling.max_workers=3"])
    (problem,) = error.value.problems
    assert problem.startswith("scaling.max_workers=3 is less than cluster.workers=4: raise")
    assert load(None, ["kv.host_gib=2", "scheduler.preemption=swap"]).kv.host_gib == 2.0
    with pytest.raises(ConfigError) as error:
        load(None, ["kv.host_gib=0.5", "kv.prefix_cache=false"])
    assert "kv.host_gib=0.5 keeps blocks" in str(error.value)
    with pytest.raises(ConfigError, match=r"scheduler\.preemption=swap needs memory"):
        load(None, ["scheduler.preemption=swap"])


def test_live_settings_change_and_others_do_not() -> None:
    config = load(None, ["kv.blocks=9", "limits.max_body_bytes=1000"])
    changed = adjusted(config, {"limits": {"request_timeout_s": 7, "max_body_bytes": None}})
    assert changed.limits.request_timeout_s == 7
    assert changed.limits.max_body_bytes == 1000
    assert changed.kv == config.kv
    with pytest.raises(ConfigError) as error:
        adjusted(config, {"kv": {"blocks": 8}, "server": {"log_level": 1}, "limits": {"no": 1}})
    first, *rest = error.value.problems
    assert first.startswith("kv.blocks (user_config): needs a restart; what does not is limits.")
    assert len(rest) == 2


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(key=st.sampled_from([*schema.FIELDS]), given_value=_json)
def test_any_value_is_either_taken_with_the_right_type_or_refused(
    key: str, given_value: object
) -> None:
    field = schema.FIELDS[key]
    try:
        parsed = field.metadata["rule"].parse(given_value)
    except ValueError:
        return
    assert field.default is None or isinstance(parsed, type(field.default) | int)
    assert isinstance(parsed, bool) == isinstance(field.default, bool)


@given(st.text(max_size=40))
def test_any_override_text_is_reported_and_hides_no_other(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [f"no-{text}", f"kv.blocks=x{text}", f"model.path={text}"])
    assert len(caught.value.problems) >= 2
