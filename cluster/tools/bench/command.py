"""`kvatlas bench`: sends load to a live server and prints the latencies that clients see."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.tools import traces
from cluster.tools.bench import load

API_KEY = "KVATLAS_API_KEY"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.set_defaults(run=command)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help=f"the server; its key is in {API_KEY}")
    add("--requests", type=_count, default=64, help="how many; of a trace the first ones")
    add("--rate", type=_positive, help="requests a second, at random; all at once without it")
    add("--concurrency", type=_count, default=256, help="most at one time")
    add("--prompt-tokens", type=_count, default=128, help="of each request")
    add("--output-tokens", type=_count, default=64, help="of each request")
    add("--trace", type=Path, help="Mooncake-format file instead of requests of one size")
    add("--speed", type=_positive, default=1.0, help="pace of the trace")
    add("--scale", type=_count, default=1, help="divide the lengths of the trace by this")
    add("--ttft-ms", type=_positive, help="limit that goodput keeps")
    add("--tpot-ms", type=_positive, help="limit that goodput keeps")
    add("--seed", type=int, default=1, help="of prompts and times")
    add("--json", action="store_true", help="only the JSON line")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def command(options: argparse.Namespace) -> int:
    """Runs the load; exit code 1 where a request failed."""
    found = asyncio.run(_bench(options))
    if not options.json:
        print(table(found))
    print(json.dumps(found))
    return 1 if found["errors"] else 0


async def _bench(options: argparse.Namespace) -> dict[str, Any]:
    import aiohttp

    headers = {}
    if key := os.environ.get(API_KEY):
        headers["Authorization"] = f"Bearer {key}"
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        options.url, headers=headers, connector=limits, timeout=timeout
    ) as session:
        card = await _model(session, options.url)
        plan = _plan(options, card)
        outcomes, wall_s = await load.run(
            HttpServer(session),
            card["id"],
            plan,
            concurrency=options.concurrency,
            progress=lambda done: _say(done, len(plan)),
        )
    found = load.summary(outcomes, wall_s, ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms)
    setup = {"url": options.url, "model": card["id"], "trace": options.trace and options.trace.name}
    names = ("rate", "concurrency", "prompt_tokens", "output_tokens", "speed", "scale", "seed")
    return {"setup": setup | {name: getattr(options, name) for name in names}, **found}


async def _model(session: Any, url: str) -> dict[str, Any]:
    import aiohttp

    try:
        async with session.get("/v1/models") as answer:
            body = await answer.json()
            if answer.status != 200:
                raise UserError(f"{url} answers {answer.status}: {body['error']['message']}")
            card: dict[str, Any] = body["data"][0]
            return card
    except (OSError, aiohttp.ClientError, TimeoutError) as error:
        raise UserError(f"{url} does not answer: {error}; --url names the server") from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"{url} is no OpenAI-style server: /v1/models lists no model") from None


def _plan(options: argparse.Namespace, card: dict[str, Any]) -> list[load.Planned]:
    if options.trace is None:
        return load.alike(
            options.requests,
            rate=options.rate or 0.0,
            prompt=options.prompt_tokens,
            output=options.output_tokens,
            seed=options.seed,
        )
    arrivals = traces.read(options.trace)[: options.requests]
    longest = card.get("max_model_len") or sys.maxsize
    plan = load.of_trace(arrivals, speed=options.speed, scale=options.scale, longest=longest)
    if not plan:
        raise UserError(
            f"all {len(arrivals)} requests are longer than the {longest} tokens that the server "
            "takes: --scale divides their lengths"
        )
    if len(plan) < len(arrivals):
        left_out = len(arrivals) - len(plan)
        print(f"{left_out} requests are too long for the server and left out", file=sys.stderr)
    return plan


class HttpServer:
    """A `load.Server` behind HTTP."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The messages of a completion. Raises OSError where the connection breaks."""
        import aiohttp

        try:
            async with self._session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    yield {"error": {"code": (await answer.json())["error"]["code"]}}
                    return
                async for line in answer.content:
                    if (message := load.parse(line)) is not None:
                        yield message
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from None


def _say(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} requests", end="" if done < of else "\n", file=sys.stderr)


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    setup = ", ".join(f"{k} {v}" for k, v in found["setup"].items() if v is not None)
    lines = [setup, f"{found['requests']} requests in {found['wall_s']:.1f} s"]
    if found["errors"]:
        lines.append("failed: " + ", ".join(f"{n} {name}" for name, n in found["errors"].items()))
    lines += [
        f"requests/s {found['requests_per_s']:.2f}, within the limits {found['goodput_per_s']:.2f}",
        f"output tokens/s {found['output_tokens_per_s']:.1f}",
        f"prompt tokens {found['prompt_tokens']}, cached {found['cached_share']:.1%}",
        f"{'ms':<6}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("ttft", "tpot", "itl", "e2el"):
        cells = (found[f"{name}_ms_{kind}"] for kind in ("mean", "p50", "p90", "p99"))
        shown = "".join(f"{'-' if cell is None else format(cell, '.1f'):>10}" for cell in cells)
        lines.append(f"{name.upper():<6}{shown}")
    return "\n".join(lines)
