"""Pulling a prefix from another worker beside computing it again, two workers on this machine.

In each round one worker computes a new prompt, then the other one answers the same prompt with the
first one's blocks. Both times are to the first token, so the second includes the request, the
export, Ray's object store, the import, and one step. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.serve.local import RAY_ENVIRONMENT, SERVE_ENVIRONMENT, THREADS_ENVIRONMENT, local_ray
from configs.loading import load
from configs.schema import Config
from scripts.served import machine
from worker import messages
from worker.params import SamplingParams

ANSWER_TOKENS = 8
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Time to the first token, cached tokens of the prompt, and the tokens of the answer."""

    first_s: float
    cached: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Size:
    """The medians for one length of prompt."""

    prompt_tokens: int
    pulled_tokens: int
    pulled_bytes: int
    compute_ms: float
    pull_ms: float
    equal: float

    @property
    def ratio(self) -> float:
        return self.compute_ms / self.pull_ms


class Workers:
    """The workers of a running application, called as an ingress calls them."""

    def __init__(self, handle: Any, model: str, gangs: Sequence[str]) -> None:
        self.handle, self.model, self.gangs = handle, model, gangs
        self._sent = 0

    async def ask(self, gang: str, method: str, *arguments: Any) -> Any:
        from cluster.routing import calls

        return await calls.ask(self.handle.to(gang), method, *arguments, deadline_s=DEADLINE_S)

    async def pulled_bytes(self) -> int:
        return sum([(await self.ask(g, "stats"))["transfers"]["pulled_bytes"] for g in self.gangs])

    async def answer(
        self, gang: str, prompt: list[int], pull: messages.Pull | None = None
    ) -> Answer:
        """One request, sent from this process."""
        from cluster.routing.calls import Stream

        self._sent += 1
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        submit = messages.GenerateRequest(
            f"bench-{self._sent}", self.model, prompt, params, DEADLINE_S, pull=pull
        )
        tokens: list[int] = []
        first_s = 0.0
        began_s = time.perf_counter()
        with Stream(self.handle.to(gang), "generate", messages.encode(submit)) as stream:
            while not stream.finished:
                event = messages.decode(await stream.next())
                if isinstance(event, messages.Rejected | messages.Error):
                    raise SystemExit(f"the worker answered: {event.message}")
                if isinstance(event, messages.Delta | messages.Finish):
                    tokens += event.tokens
                    first_s = first_s or time.perf_counter() - began_s
                if isinstance(event, messages.Finish):
                    stream.finished, cached = True, event.cached_tokens
        return Answer(first_s, cached, tuple(tokens))


async def find_workers(deployment: Any) -> Workers:
    """All workers of an application, once this process knows them."""
    from cluster.routing.calls import ServeHandle, ask
    from cluster.serve.delivery import ANYONE
    from cluster.serve.pools import DIRECTORY, WORKER

    handle = ServeHandle(deployment, ANYONE)
    info = await ask(handle, "info", deadline_s=DEADLINE_S)
    return Workers(handle, info["model"], sorted(DIRECTORY[WORKER]))


async def measure(workers: Workers, length: int, rounds: int, draw: random.Random) -> Size:
    """Prompts of `length` tokens; the workers take turns at computing."""
    info = await workers.ask(workers.gangs[0], "info")
    size, vocab = info["block_size"], info["vocab_size"]
    colds, warms = [], []
    before = await workers.pulled_bytes()
    for number in range(rounds):
        owner, puller = workers.gangs[number % 2], workers.gangs[1 - number % 2]
        prompt = [draw.randrange(vocab) for _ in range(length)]
        colds.append(await workers.answer(owner, prompt))
        warms.append(await workers.answer(puller, prompt, messages.Pull(owner, length // size)))
    after = await workers.pulled_bytes()
    return Size(
        prompt_tokens=length,
        pulled_tokens=int(statistics.median(warm.cached for warm in warms)),
        pulled_bytes=(after - before) // rounds,
        compute_ms=1e3 * statistics.median(cold.first_s for cold in colds),
        pull_ms=1e3 * statistics.median(warm.first_s for warm in warms),
        equal=sum(c.tokens == w.tokens for c, w in zip(colds, warms, strict=True)) / rounds,
    )


async def compare(deployment: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all lengths, and the rates that the workers measured themselves."""
    workers = await find_workers(deployment)
    draw = random.Random(options.seed)
    await measure(workers, min(options.prompt_tokens), 2, draw)  # nothing of the first calls counts
    print(
        f"{'prompt':>7} {'pulled':>7} {'MB':>7} {'compute ms':>11} {'pull ms':>9} "
        f"{'ratio':>6} {'equal':>6}"
    )
    sizes = []
    for length in options.prompt_tokens:
        one = await measure(workers, length, options.rounds, draw)
        sizes.append(one)
        print(
            f"{one.prompt_tokens:>7} {one.pulled_tokens:>7} {one.pulled_bytes / 1e6:>7.2f} "
            f"{one.compute_ms:>11.1f} {one.pull_ms:>9.1f} {one.ratio:>6.2f} {one.equal:>6.2f}",
            flush=True,
        )
    rates = [(await workers.ask(gang, "stats"))["transfers"] for gang in workers.gangs]
    links = [link for each in rates for link in each["links"].values()]
    if not links:
        raise SystemExit(f"no block came: {[each['failures'] for each in rates]}")
    found = {
        "link_bytes_per_s": statistics.mean(link["bytes_per_s"] for link in links),
        "link_tokens_per_s": statistics.mean(link["tokens_per_s"] for link in links),
        "prefill_tokens_per_s": statistics.mean(each["prefill_tokens_per_s"] for each in rates),
        "failures": sum(sum(each["failures"].values()) for each in rates),
    }
    print(
        f"measured by the workers: link {found['link_bytes_per_s'] / 1e6:.0f} MB/s, which is "
        f"{found['link_tokens_per_s']:.0f} tokens/s; computing "
        f"{found['prefill_tokens_per_s']:.0f} tokens/s; {found['failures']} pulls failed"
    )
    results = [{name: getattr(one, name) for name in (*Size.__slots__, "ratio")} for one in sizes]
    return {"sizes": results, **found}


def run(config: Config, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same inside an application of its own, which ends with it."""
    for name, value in (SERVE_ENVIRONMENT | THREADS_ENVIRONMENT | RAY_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    with local_ray(config, say):
        import ray
        from ray import serve

        from cluster.serve.application import APP, build
        from cluster.serve.pools import WORKER

        serve.start(http_options={"location": "NoServer"}, logging_config={"log_level": "ERROR"})
        gpus = ray.cluster_resources().get("GPU", 0.0) > 0  # type: ignore[no-untyped-call]
        say(f"loading {directory} twice")
        serve.run(build(config, str(directory), secrets.token_bytes(32), gpus=gpus), name=APP)
        return asyncio.run(compare(serve.get_deployment_handle(WORKER, APP), options))


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main() -> None:
    from cluster.quickstart import resolve

    options = arguments()
    config = load(None, ["cluster.workers=2", "server.log_level=warning", *options.set])
    directory = resolve(config.model.path, config.model.revision, say=say)
    setup: dict[str, Any] = {"model": config.model.path, "dtype": config.model.dtype}
    setup |= {"rounds": options.rounds, **machine()}
    print(", ".join(f"{name} {value}" for name, value in setup.items()), flush=True)
    print(json.dumps({"setup": setup, **run(config, directory, options)}))


if __name__ == "__main__":
    main()
