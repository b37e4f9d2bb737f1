"""`kvatlas capacity`: how many sequences fit, what paging wastes, what its tables cost."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import quickstart
from cluster.errors import UserError
from configs import rules

if TYPE_CHECKING:
    from cluster.tools.capacity.indirection import Cost, Step
    from cluster.tools.capacity.simulation import Fit, Geometry, Requests

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TOKENS_MAX = 1 << 33  # in the memory: more takes minutes and gives the same shares
NAMES = {"maximum": "the maximum", "power_of_two": "power of two", "exact": "exact final length"}


@dataclass(frozen=True, slots=True)
class Model:
    """The model whose KV cache is planned."""

    name: str
    geometry: Geometry
    heads: int  # query heads of the layer that is measured
    dtype: str
    limit: int | None  # positions the model was made for


class Progress:
    """A progress line that is overwritten on a terminal; elsewhere it prints nothing."""

    def __init__(self) -> None:
        self._on, self._last_s, self._width = sys.stderr.isatty(), 0.0, 0

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if self._on and (now - self._last_s > 0.1 or not text):
            print(f"\r{text:<{self._width}}", end="" if text else "\r", file=sys.stderr, flush=True)
            self._last_s, self._width = now, max(self._width, len(text))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(run=run)
    parser.usage = "kvatlas capacity [options]"
    add = parser.add_argument
    add("--model", help="smollm2 (the default), a model directory or a hub id")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--layers", type=integer, help="a geometry instead of a model: its layers,")
    add("--kv-heads", type=integer, help="KV heads of a layer,")
    add("--head-dim", type=integer, help="and numbers in a head")
    add("--heads", type=integer, help="query heads, for the measurement (as many as KV heads)")
    add("--dtype", choices=ITEM_BYTES, help="of keys and values (the model's own, or bfloat16)")
    add("--memory", type=memory, default="16GiB", help="for keys and values (16GiB)")
    add("--max-len", type=integer, help="longest sequence in tokens (what model and memory allow)")
    add(
        "--lengths", default="chat", metavar="NAME|FILE",
        help="chat, instruction, uniform or fixed, with parameters as in chat:input=200,output=99, "
        "or a trace (Mooncake JSON lines, Azure CSV)",
    )  # fmt: skip
    add("--requests", type=integer, default=16384, help="drawn from a distribution (16384)")
    add("--seed", type=_seed, default=0, help="of all random draws (0)")
    add("--plot", type=Path, metavar="FILE.png", help="the tradeoff as a picture")
    add("--no-measure", action="store_true", help="do not time attention on this device")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def integer(text: str) -> int:
    """An option's integer of 1 or more. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _seed(text: str) -> int:
    return integer(text) if text != "0" else 0


def memory(text: str) -> int:
    """An option's memory size in bytes. Raises ArgumentTypeError."""
    rule = rules.size()
    try:
        size = rule.parse(int(text) if text.isdecimal() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: possible are {rule.possible}") from None
    assert isinstance(size, int)
    return size


def run(options: argparse.Namespace) -> int:
    """Plan, measure, print. Raises UserError."""
    from cluster.tools import picture
    from cluster.tools.capacity import lengths, plot, simulation

    if options.plot is not None:
        picture.check(options.plot)
    progress = Progress()
    drawn = lengths.load(
        options.lengths, options.requests, options.seed,
        progress=lambda lines: progress(f"reading: {lines:,} lines"),
    )  # fmt: skip
    model = _model(options, progress)
    everything = simulation.Requests.of(drawn.inputs, drawn.outputs)
    longest = _longest(options, model, everything)
    requests = everything.up_to(longest)
    left_out = len(everything.prompts) - len(requests.prompts)
    if not len(requests.prompts):
        raise UserError(
            f"nothing fits: the shortest of {left_out} sequences is {everything.finals.min():,} "
            f"tokens long, at most {longest:,} are possible; raise --memory or --max-len"
        )
    fits = simulation.fill(
        model.geometry, options.memory, requests, longest, seed=options.seed,
        progress=lambda met: progress(f"filling the memory: {met:,} sequences"),
    )  # fmt: skip
    measured = None if options.no_measure else _measure(options, model, requests, progress)
    progress("")
    facts = {
        "model": model.name,
        "dtype": model.dtype,
        "layers": len(model.geometry.layers),
        "layer_groups": model.geometry.groups,
        "bytes_per_token": model.geometry.bytes_per_token,
        "memory_bytes": options.memory,
        "memory_tokens": options.memory // model.geometry.bytes_per_token,
        "lengths": drawn.source,
        "requests": len(requests.prompts),
        "left_out": left_out,
        "input_tokens_mean": round(float(requests.prompts.mean()), 1),
        "output_tokens_mean": round(float(requests.steps.mean()), 1),
        "max_len": longest,
        "seed": options.seed,
        "fits": simulation.rows(fits),
        "attention": measured and _attention(*measured),
    }
    if options.plot is not None:
        title = f"{model.name}, {size(options.memory)}, {drawn.source}"
        plot.save(options.plot, fits, title)
    if not options.json:
        print("\n".join([*_setup(facts), "", *_table(fits, measured and measured[1]), ""]))
    print(json.dumps(facts))
    return 0


def _model(options: argparse.Namespace, progress: Callable[[str], None]) -> Model:
    explicit = {"--layers": options.layers, "--kv-heads": options.kv_heads}
    explicit["--head-dim"] = options.head_dim
    given = [name for name, value in explicit.items() if value is not None]
    if not given:
        if options.heads is not None:
            raise UserError("--heads belongs to a geometry (--layers, --kv-heads, --head-dim)")
        return _probed(options, progress)
    if options.model or options.revision or len(given) < len(explicit):
        raise UserError(
            "give either --model or all of --layers, --kv-heads and --head-dim; there is "
            + ", ".join([f"--model {options.model}"] * bool(options.model) + given)
        )
    heads = options.heads or options.kv_heads
    if heads % options.kv_heads:
        raise UserError(f"--heads {heads} is no multiple of --kv-heads {options.kv_heads}")
    from cluster.tools.capacity.simulation import Geometry, Layer

    dtype = options.dtype or "bfloat16"
    layer = Layer(options.kv_heads, options.head_dim, options.head_dim)
    name = f"{options.kv_heads} KV heads of {options.head_dim}"
    return Model(
        name=name,
        geometry=Geometry((layer,) * options.layers, ITEM_BYTES[dtype]),
        heads=heads,
        dtype=dtype,
        limit=None,
    )


def _probed(options: argparse.Namespace, progress: Callable[[str], None]) -> Model:
    """Geometry of a model from its config, without its weights."""
    path = options.model or quickstart.QUICK
    directory = quickstart.resolve(path, options.revision, say=_say)
    progress("reading the model's geometry")
    import torch
    from transformers import AutoConfig

    from cluster.tools.capacity.simulation import Geometry, Layer
    from worker.execution.model import UnsupportedModel, probe

    try:
        config = AutoConfig.from_pretrained(directory)
        shape = probe(config)
    except UnsupportedModel as error:
        raise UserError(str(error)) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{directory}/config.json cannot be used: {reason}") from None
    text = config.get_text_config(decoder=True)
    own = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    dtype = options.dtype or str(own).removeprefix("torch.")
    layers = tuple(Layer(x.kv_heads, x.k_dim, x.v_dim, x.window) for x in shape.layers)
    at = _measured_layer(layers)
    return Model(
        name=path,
        geometry=Geometry(layers, ITEM_BYTES[dtype]),
        heads=shape.calls[at].heads,
        dtype=dtype,
        limit=getattr(text, "max_position_embeddings", None),
    )


def _measured_layer(layers: tuple[Any, ...]) -> int:
    """The first layer without a window, else the first."""
    return next((i for i, layer in enumerate(layers) if layer.window is None), 0)


def _longest(options: argparse.Namespace, model: Model, requests: Requests) -> int:
    """Tokens of the longest sequence accepted, decided as `kvatlas serve` does."""
    tokens: int = options.memory // model.geometry.bytes_per_token
    room = model.geometry.longest(options.memory)
    if tokens > TOKENS_MAX:
        raise UserError(
            f"--memory {size(options.memory)} holds {tokens:,} tokens; at most {TOKENS_MAX:,} "
            "are simulated, give the share of one device"
        )
    if room < 1:
        raise UserError(
            f"nothing fits: --memory {size(options.memory)} is less than one token of "
            f"{size(model.geometry.bytes_per_token)}"
        )
    limit = model.limit or int(requests.finals.max())
    if options.max_len is None:
        return min(limit, room)
    asked: int = options.max_len
    if model.limit is not None and asked > model.limit:
        raise UserError(f"--max-len {asked} is more than the model's {model.limit} positions")
    if asked > room:
        raise UserError(
            f"nothing fits: --max-len {asked} takes more than --memory {size(options.memory)}, "
            f"which holds {room:,} tokens"
        )
    return asked


def _measure(
    options: argparse.Namespace, model: Model, requests: Requests, progress: Callable[[str], None]
) -> tuple[Step, list[Cost], float]:
    """The batch, its times, and the load average before, with which to judge a CPU's times."""
    progress("preparing the measurement")
    import torch

    from cluster.tools.capacity import indirection
    from cluster.tools.capacity.simulation import Moments
    from kvpaging.store import LayerShape
    from worker.startup.device import choose_device, has_fast_bfloat16

    device = choose_device("auto")
    dtype: torch.dtype = getattr(torch, model.dtype)
    if device.type == "cpu" and dtype.itemsize == 2 and not has_fast_bfloat16():
        dtype = torch.float32  # as a server on this device would compute
    layer = model.geometry.layers[_measured_layer(model.geometry.layers)]
    shape = LayerShape(layer.kv_heads, layer.k_dim, layer.v_dim)
    per_token = layer.kv_heads * (layer.k_dim + layer.v_dim) * dtype.itemsize
    now, _ = Moments(requests, options.seed).draw(indirection.SEQUENCES_MAX)
    lengths = indirection.batch(now.tolist(), per_token, device)
    step = indirection.Step(
        shape=shape, heads=model.heads, dtype=dtype, device=device, lengths=lengths
    )
    load = round(os.getloadavg()[0], 1)
    costs = indirection.measure(
        step, progress=lambda turn: progress(f"timing attention: turn {turn}")
    )
    return step, costs, load


def _attention(step: Step, costs: list[Cost], load: float) -> dict[str, Any]:
    import torch

    on_gpu = step.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(step.device) if on_gpu else "cpu",
        "threads": None if on_gpu else torch.get_num_threads(),
        "load": None if on_gpu else load,
        "dtype": str(step.dtype).removeprefix("torch."),
        "heads": step.heads,
        "kv_heads": step.shape.kv_heads,
        "head_dim": step.shape.k_dim,
        "sequences": len(step.lengths),
        "tokens": sum(step.lengths),
        "longest": max(step.lengths),
        "paged_over_contiguous": [
            {
                "block_size": cost.block_size,
                "paged_s": float(f"{cost.paged_s:.4g}"),
                "contiguous_s": float(f"{cost.contiguous_s:.4g}"),
                "ratio": round(cost.ratio, 3),
            }
            for cost in costs
        ],
    }


def _setup(facts: dict[str, Any]) -> list[str]:
    lines = {
        "model": f"{facts['model']}, {facts['layers']} layers, {facts['dtype']}, "
        f"{size(facts['bytes_per_token'])} a token",
        "memory": f"{size(facts['memory_bytes'])}, {facts['memory_tokens']:,} tokens",
        "lengths": facts["lengths"],
        "requests": f"{facts['requests']:,}, mean prompt {facts['input_tokens_mean']:,} and answer "
        f"{facts['output_tokens_mean']:,} tokens; {facts['left_out']:,} longer ones left out",
        "maximum": f"{facts['max_len']:,} tokens",
    }
    if at := facts["attention"]:
        where = at["device"]
        if at["threads"]:
            where += f" ({at['threads']} of {os.cpu_count()} cores, load {at['load']})"
        lines["measured"] = (
            f"{where}, {at['dtype']}: one decode step of one layer, "
            f"{at['heads']} query and {at['kv_heads']} KV heads of {at['head_dim']}, "
            f"batch of {at['sequences']} with {at['tokens']:,} tokens in all"
        )
    return [f"  {name:<9}  {text}" for name, text in lines.items()]


def _table(fits: list[Fit], costs: list[Cost] | None) -> list[str]:
    ratios = {cost.block_size: f"{cost.ratio:.2f}" for cost in costs or ()}
    lines = [("scheme", "sequences", "vs max", "no token", "table entries", "paged/contiguous")]
    for fit in fits:
        paged = fit.block_size is not None
        gain = f"{fit.sequences / fits[0].sequences:.2f}x" if fits[0].sequences else "-"
        lines.append(
            (
                f"blocks of {fit.block_size}" if paged else NAMES[fit.scheme],
                f"{fit.sequences:,.1f}",
                gain,
                f"{100 * fit.empty:.1f} %",
                f"{fit.entries:,.1f}" if paged else "-",
                ratios.get(fit.block_size or 0, "-"),
            )
        )
    if costs is None:
        lines = [line[:-1] for line in lines]  # type: ignore[misc]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        f"  {line[0]:<{widths[0]}}"
        + "".join(f"  {x:>{w}}" for x, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]


def size(count: int) -> str:
    """Bytes in the unit that fits."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.4g} {units[0]}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
