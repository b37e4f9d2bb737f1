"""The router of one ingress: which gang should serve a prompt.

It gathers what the ingress knows of the gangs that can hold the request (their last reports, their
blocks, what was sent to them since) in a `RoutingQuery` and asks the policy of `routing.policy`.
The `Route` names the gang, perhaps blocks to pull first, and a predicted time to the first token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from cluster.routing.block_hashes import BlockHasher
from cluster.routing.health import HealthMonitor
from cluster.routing.index import Mirror
from cluster.routing.policies import Policy, make
from cluster.routing.registry import GangRegistry
from cluster.routing.table import GangTable
from configs.schema import Config, RoutingConfig
from kvpaging.events import LoadStats
from worker import messages

UNREPORTED_S = 5.0
"""How long a prompt that was sent counts as load if no report has counted it."""

OUTPUT_TOKENS = 128.0
"""Expected tokens of an answer before any has ended."""

UNMEASURED_TOKEN_S = 1e-3
"""Time of a prompt token on a gang that has computed none yet: its queue needs a price."""

STEP_TOKENS = 512
"""Tokens of a step before a worker has reported any, if `scheduler.max_batch_tokens` is null."""

OPEN_ENDED = 4.0
"""A request without a token limit needs room for this many times the usual answer."""

NEW = 0.05
"""Weight of the latest answer in the moving average of answer lengths."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a prompt goes. `ttft_s` is the policy's prediction, None if it makes none."""

    gang: str
    pull: messages.Pull | None = None
    ttft_s: float | None = None
    explained: str = ""


class Length(NamedTuple):
    """Tokens of a job's longest sequence: `known` ones and the next, and the most it may reach;
    `asked` is None where the request sets no limit."""

    known: int
    asked: int | None


class Router:
    """Chooses gangs for the ingress `name`. `share` gives its number and the number of ingresses,
    `config` the current settings, `clock` seconds."""

    def __init__(
        self,
        gangs: GangRegistry,
        mirror: Mirror,
        block_hashes: BlockHasher,
        *,
        name: str,
        share: Callable[[], tuple[int, int]],
        config: Callable[[], Config],
        clock: Callable[[], float],
    ) -> None:
        self._gangs, self._mirror, self._hasher = gangs, mirror, block_hashes
        self._name, self._share, self._config, self._clock = name, share, config, clock
        self._numbers = itertools.count()
        self._output_tokens = OUTPUT_TOKENS
        self._reported: dict[str, tuple[int, int]] = {}
        self._table: GangTable | None = None
        self._policy: tuple[RoutingConfig, Policy] | None = None

    def choose(
        self, submit: messages.GenerateRequest, length: Length, avoid: Collection[str]
    ) -> Route | None:
        """The route of a prompt; None if no gang outside `avoid` is ready and can hold it."""
        info = self._gangs.info
        ready = self._gangs.ready()  # once: all below decides about the same gangs
        holding = self._holding(ready, length) - set(avoid)
        if not info or not holding:
            return None
        now = self._clock()
        config = self._config()
        table = self._synced(ready, info["block_size"], config, now)
        hashes = self._hasher.block_hashes(info, submit.prompt, submit.salt.encode())
        output = min(submit.params.max_tokens, self._output_tokens) * max(1, submit.params.n)
        number = next(self._numbers)
        rows = [row for row in table.rows if row.name in holding]
        query = table.query(
            number,
            rows,
            hashes,
            prompt_tokens=len(submit.prompt),
            expected_output=output,
            now_s=now,
        )
        if not hashes:  # nothing to reuse later: equal gangs take turns
            query = replace(query, next_block=b"%s %d" % (self._name.encode(), number))
        decision = self._decide(config.routing)(query, rows)
        table.sent(rows[decision.row], query, decision, hashes, now)
        pull = None
        if decision.pull_from is not None:
            pull = messages.Pull(rows[decision.pull_from].name, query.cached(decision))
        return Route(rows[decision.row].name, pull, decision.ttft_s, decision.explained(rows))

    def _holding(self, ready: Mapping[str, HealthMonitor], length: Length) -> set[str]:
        """Those of the ready gangs that can hold a sequence of this length."""
        tokens = length.asked
        if tokens is None:
            longest = max(self._gangs.limits().values(), default=0)
            tokens = min(longest, length.known + int(OPEN_ENDED * self._output_tokens))
        least = max(tokens, length.known)
        return {g for g, m in ready.items() if m.info["max_model_len"] >= least}

    def ended(self, tokens: int) -> None:
        """An answer of that many tokens has ended."""
        self._output_tokens += NEW * (tokens - self._output_tokens)

    def _decide(self, routing: RoutingConfig) -> Policy:
        if self._policy is None or self._policy[0] != routing:
            self._policy = (routing, make(routing, start=_number(self._name)))
        return self._policy[1]

    def _synced(
        self, ready: Mapping[str, HealthMonitor], block_size: int, config: Config, now: float
    ) -> GangTable:
        """The table, updated with the ready gangs and their last reports."""
        table = self._table
        if table is None or table.block_size != block_size:
            alike = config.routing.rates_alike
            table = self._table = GangTable(self._mirror, block_size, rates_alike=alike)
            self._reported.clear()
        table.rates_alike = config.routing.rates_alike
        table.at, table.ingresses = self._share()
        for name in {row.name for row in table.rows} - ready.keys():
            table.leave(name)
            self._reported.pop(name, None)
        for name in ready.keys() - {row.name for row in table.rows}:
            table.join(name, self._load(ready[name], name, config), ready[name].info["ranks"])
        for row in table.rows:
            known = self._mirror.gangs.get(row.name)
            if known is not None and self._reported.get(row.name) != (known.epoch, known.number):
                self._reported[row.name] = (known.epoch, known.number)
                row.report(
                    self._load(ready[row.name], row.name, config), known.heard_s - known.age_s
                )
            row.report(row.load, now - UNREPORTED_S)
        return table

    def _load(self, monitor: HealthMonitor, name: str, config: Config) -> LoadStats:
        """A gang's last report, completed where it lacks values or has not measured them yet."""
        info = monitor.info
        known = self._mirror.gangs.get(name)
        load = LoadStats() if known is None else known.load
        if not load.blocks:
            step_tokens = config.scheduler.max_batch_tokens or STEP_TOKENS
            load = replace(load, blocks=info["table"]["blocks"], step_tokens_max=step_tokens)
        if not load.token_s:
            load = replace(load, token_s=UNMEASURED_TOKEN_S)
        if not load.link_tokens_per_s:
            rate = config.routing.link_bytes_per_s / info["table"]["kv_bytes_per_token"]
            load = replace(load, link_tokens_per_s=rate)
        return load


def _number(name: str) -> int:
    """A hash of a name, the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "big")
