"""How long requests are: built-in distributions, and trace files in two public formats.

A distribution is written `NAME` or `NAME:key=value,...`. Prompt and answer are independent draws:

- `chat`: means of 161 and 338 tokens, those the PagedAttention paper gives for ShareGPT;
- `instruction`: means of 19 and 58 tokens, those it gives for Alpaca;
- `uniform`: every length from 1 to twice the mean, less one;
- `fixed`: every request the same.

`chat` and `instruction` are log-normal. The paper prints their shape only as a picture; `spread`
(the standard deviation of the logarithm) is our reading of it. `input` and `output` (means in
tokens) are parameters of all four.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import UserError

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LONGEST = 1 << 32  # tokens; more is a mistake in the file, not a request
_PARAMETERS: dict[str, dict[str, float]] = {
    "chat": {"input": 161.31, "output": 337.99, "spread": 1.0},
    "instruction": {"input": 19.31, "output": 58.45, "spread": 0.7},
    "uniform": {"input": 512, "output": 256},
    "fixed": {"input": 512, "output": 256},
}


def _tokens() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests as two columns of tokens: `inputs[i]` of the prompt, `outputs[i]` of the answer."""

    source: str
    inputs: array[int] = field(default_factory=_tokens)
    outputs: array[int] = field(default_factory=_tokens)

    def add(self, prompt: int, answer: int) -> None:
        self.inputs.append(prompt)
        self.outputs.append(answer)


def load(
    text: str, count: int, seed: int, *, progress: Callable[[int], None] = lambda lines: None
) -> Lengths:
    """What a user names: a trace file (see `read`), or else a distribution (see `draw`)."""
    if text.partition(":")[0] not in _PARAMETERS and text and Path(text).exists():
        return read(Path(text), progress=progress)
    return draw(text, count, seed)


def draw(text: str, count: int, seed: int) -> Lengths:
    """`count` requests of the distribution that `text` describes, the same for the same seed.

    Raises UserError for an unknown name, an unknown parameter or a value out of range.
    """
    name, parameters = _parsed(text)
    generator = random.Random(f"{name}:{seed}")
    shown = ",".join(f"{key}={value:g}" for key, value in parameters.items())
    lengths = Lengths(f"{name}:{shown}, {count} requests, seed {seed}")
    for _ in range(count):
        lengths.add(
            _one(name, parameters["input"], parameters, generator),
            _one(name, parameters["output"], parameters, generator),
        )
    return lengths


def _one(name: str, mean: float, parameters: Mapping[str, float], source: random.Random) -> int:
    """One length, 1 or more."""
    if name == "fixed":
        return max(1, round(mean))
    if name == "uniform":
        return source.randint(1, max(1, round(2 * mean - 1)))
    spread = parameters["spread"]
    # The mean of a log-normal is e^(mu + spread^2 / 2).
    drawn = source.lognormvariate(math.log(mean) - spread * spread / 2, spread)
    return min(LONGEST, max(1, round(drawn)))


def _parsed(text: str) -> tuple[str, dict[str, float]]:
    name, _, rest = text.partition(":")
    if name not in _PARAMETERS:
        raise UserError(
            f"--lengths {text}: neither a distribution ({', '.join(_PARAMETERS)}) nor a file here"
        )
    parameters = dict(_PARAMETERS[name])
    for parameter in rest.split(",") if rest else ():
        key, _, value = parameter.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        high = 3.0 if key == "spread" else 1e7
        low = 0.0 if key == "spread" else 1.0
        if key not in parameters or not low <= number <= high:
            raise UserError(
                f"--lengths {text}: {parameter!r} is not possible; {name} takes input and output "
                "(mean tokens, 1 to 10,000,000)"
                + (" and spread (0 to 3)" if "spread" in parameters else "")
            )
        parameters[key] = number
    return name, parameters


def read(path: Path, *, progress: Callable[[int], None] = lambda lines: None) -> Lengths:
    """The requests of a trace file, in its order; the format is seen from the first line.

    `progress` gets the number of lines read, now and then. Raises UserError where the file cannot
    be read, is neither format, or has a line that does not fit (the first such line is named).
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            return _trace(path, file, progress)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file; {_FORMATS}") from error


_FORMATS = (
    "a trace is JSON lines with input_length and output_length (Mooncake), or CSV with the header "
    f"{','.join(AZURE_HEADER)} (Azure)"
)


def _trace(path: Path, lines: Iterable[str], progress: Callable[[int], None]) -> Lengths:
    lengths = Lengths(path.name)
    parse: Callable[[str], tuple[object, object]] | None = None
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line:
            continue
        if parse is None:
            parse = _azure if tuple(line.split(",")) == AZURE_HEADER else _mooncake
            if parse is _azure:
                continue
            if not line.startswith("{"):
                raise UserError(f"{path} line {number}: {line[:60]!r} fits no format; {_FORMATS}")
        try:
            lengths.add(*map(_count, parse(line)))
        except ValueError as error:
            raise UserError(f"{path} line {number}: {error}") from None
        if number % 100_000 == 0:
            progress(number)
    if not lengths.inputs:
        raise UserError(f"{path} holds no request; {_FORMATS}")
    return lengths


def _mooncake(line: str) -> tuple[object, object]:
    try:
        match json.loads(line):
            case {"input_length": prompt, "output_length": answer}:
                return prompt, answer
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(f"{line[:60]!r} is no JSON") from None
    raise ValueError("wanted an object with input_length and output_length")


def _azure(line: str) -> tuple[object, object]:
    cells = line.split(",")
    if len(cells) != len(AZURE_HEADER):
        raise ValueError(f"{len(cells)} columns, wanted {','.join(AZURE_HEADER)}")
    return tuple(int(cell) if cell.isdecimal() else cell for cell in cells[1:])  # type: ignore[return-value]


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= LONGEST:
        raise ValueError(f"{value!r} is no number of tokens (a whole number, 0 to {LONGEST})")
    return value
