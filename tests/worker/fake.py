"""An engine whose device is a dictionary: every key it reads must be where a table says it is.

With several ranks, each knows only the tokens it has sampled or been told, and touches only blocks
of its own; no step may cost a rank more than its budget.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from threading import Event
from zlib import crc32

from context_parallel.policy import ShardPolicy
from kvpaging import audit
from kvpaging.host_pool import HostPool, Moves
from kvpaging.pool import BlockPool
from kvpaging.windows import NULL_BLOCK
from tests.kvpaging.helpers import host_problems, locate
from worker import messages
from worker.blocks.host_cache import HostCache
from worker.blocks.swap import Swaps
from worker.blocks.transfer import Transfers
from worker.decoding.speculation import Speculation
from worker.engine.engine import Engine
from worker.engine.stats import StepTimes
from worker.execution.runner import InFlight, StepResult
from worker.params import SamplingParams
from worker.request import Request, Sequence
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import Limits, SchedulerState
from worker.scheduling.step import BeamCandidates, Row, SampledToken, StepPlan

VOCAB = 97
UNLIKELY = messages.PromptLogprob(-9.0, 9, [])
Fault = Callable[[str, StepPlan], None]


def next_token(tokens: Seq[int]) -> int:
    """What the fake model says after `tokens`: any lost, doubled or foreign key changes it."""
    return crc32(bytes(tokens)) % VOCAB


@lru_cache(maxsize=100_000)
def log_probabilities(tokens: bytes) -> tuple[float, ...]:
    """Of each token after `tokens`, as sensitive to them."""
    draw = random.Random(crc32(tokens))
    logits = [draw.gauss(0.0, 2.0) for _ in range(VOCAB)]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(logit - total for logit in logits)


def expected(prompt: Seq[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SmallTiles(ShardPolicy):
    """Long rows begin after 4 tokens."""

    __slots__ = ()
    tile = 4


class FakeCopying:
    """Copies that were begun; whose blocks come back have rubbish until they have ended."""

    def __init__(self, runner: FakeRunner, moves: Moves) -> None:
        self.runner, self.moves, self.done = runner, moves, False
        self._each(lambda page, slot: runner.pages.update({page: (-1, -1)}))

    def _each(self, work: Callable[[tuple[int, int, int], tuple[int, int, int]], None]) -> None:
        for arena, block, slot in self.moves.loads:
            for group in self.runner._groups(arena):
                for offset in range(self.runner.block_size):
                    work((group, block, offset), (group, slot, offset))

    def finish(self) -> None:
        runner = self.runner
        self._each(lambda page, slot: runner.pages.update({page: runner.host.get(slot, (-1, -1))}))
        self.done = True

    def took_s(self) -> tuple[float, float]:
        """Those of rank 0."""
        out, back = (sum(m.block < self.runner.per_rank for m in some) for some in self.moves)
        return out * 0.25, back * 0.5


class FakeRunner:
    """Stands in for `Runner`: pages are `{(group, block, offset): (position, token)}`, with blocks
    numbered over all ranks; `last_token` is of each rank, by slot."""

    def __init__(
        self,
        block_size: int,
        groups: int,
        fault: Fault | None = None,
        policy: ShardPolicy | None = None,
        limits: Limits | None = None,
        windows: Seq[int | None] = (),
    ) -> None:
        self.block_size, self.groups = block_size, groups
        self.windows = tuple(windows) or (None,) * groups
        self.policy, self.limits = policy or ShardPolicy(), limits
        self.pages: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.last_token: list[dict[int, int]] = [{} for _ in range(self.policy.ranks)]
        self.seen: Counter[str] = Counter()
        self.fault = fault or (lambda point, plan: None)
        self.running: list[Sequence] = []
        self.rows_of: dict[int, Sequence] = {}  # by slot, in the step that is launched
        self.tables: dict[int, list[list[int]]] = {}  # by slot and group, as far as rows said
        self.build_s = self.execute_s = 0.0
        self.saved_reads = 0
        self.shared = False  # groups draw from one pool
        self.per_rank = 0  # blocks of each pool
        self.host: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.slow = False  # copies back end when a test says so
        self.pending: list[FakeCopying] = []
        self._results: dict[int, StepResult] = {}
        self.words: list[str] = []

    def heartbeat(self) -> None:
        self.words.append("heartbeat")

    def stop(self) -> None:
        self.words.append("stop")

    def move(self, moves: Moves) -> FakeCopying:
        """Blocks to the host at once; back at once too, or when the copy is `finish`ed."""
        self.fault("move", moves)  # type: ignore[arg-type]
        for arena, block, slot in moves.offloads:
            for group in self._groups(arena):
                for offset in range(self.block_size):
                    if (found := self.pages.get((group, block, offset))) is not None:
                        self.host[group, slot, offset] = found
        copying = FakeCopying(self, moves)
        if self.slow and moves.loads:
            self.pending.append(copying)
        else:
            copying.finish()
        return copying

    def _groups(self, arena: int) -> range:
        return range(self.groups) if self.shared else range(arena, arena + 1)

    def launch(self, plan: StepPlan) -> InFlight:
        self.fault("build", plan)
        filled = {(copy.group, copy.dst) for copy in plan.copies}
        assert len(filled) == len(plan.copies), "a block is filled twice"
        assert not any((copy.group, copy.src) in filled for copy in plan.copies), (
            "a chain of copies"
        )
        self._afford(plan)
        self._hear(plan)
        moved = {}  # all at once, as on a device: a source is read before any copy is made
        for copy in plan.copies:
            for offset in range(self.block_size):
                found = self.pages.get((copy.group, copy.src, offset))
                moved[copy.group, copy.dst, offset] = found or (-1, -1)
        self.pages.update(moved)
        tokens, beam_candidates = [], []
        for row in plan.rows:
            written = self._write(row)
            self.fault("forward", plan)
            for last in range(written - row.samples, written):
                token = next_token(self._read(row, last + 1))
                for rank in range(self.policy.ranks):
                    if row.sharded or rank == row.home:
                        self.last_token[rank][row.slot] = token
                    else:
                        self.last_token[rank].pop(row.slot, None)
                tokens.append(token)
            if row.candidates:
                values = log_probabilities(bytes(self._read(row, written)))
                ids = sorted(range(VOCAB), key=lambda t: -values[t])[: row.candidates]
                beam_candidates.append(BeamCandidates(ids, [values[t] for t in ids]))
        self.fault("sample", plan)
        samples = [SampledToken(token, False, None) for token in tokens]
        scores = [[UNLIKELY] * len(r.targets) for r in plan.rows if r.scored_from is not None]
        self._results[plan.step] = StepResult(samples, scores, beam_candidates)
        return InFlight(plan, None, None)

    def _hear(self, plan: StepPlan) -> None:
        """What rows say of the tables is what the tables are; tokens are those of the sequences."""
        self.rows_of = {sequence.slot: sequence for sequence in self.running}
        for row in plan.rows:
            sequence = self.rows_of[row.slot]
            tables = self.tables.setdefault(row.slot, [[] for _ in range(self.groups)])
            for column, new in zip(tables, row.blocks or [[]] * self.groups, strict=True):
                assert len(column) >= row.changed_from
                column[row.changed_from :] = new
            table = sequence.table
            assert table is not None
            for column, blocks, first in zip(tables, table.blocks, table.first, strict=True):
                assert column[first:] == blocks[first:], "the device does not know the table"
            assert [*row.tokens] == sequence.tokens[row.start : row.start + row.known]
            assert row.prompt_tokens == sequence.prompt_tokens
            assert row.params is sequence.params
            if row.scored_from is not None:
                first = row.scored_from + 1
                scored = sequence.tokens[first : sequence.prompt_tokens]
                assert [*row.targets] == scored[: row.start + row.count - row.scored_from]

    def _afford(self, plan: StepPlan) -> None:
        """The plan costs no rank more than it may: rows on one rank, short rows on all, and of long
        ones the tiles that are dealt to it."""
        tokens, logits = Counter[int](), Counter[int]()
        for row in plan.rows:
            logits[row.home] += row.logit_rows
            long = row.sharded and row.count > self.policy.tile
            assert not (long and (row.sampled or row.candidates or row.logit_rows))
            self.seen["long" if long else "short" if row.sharded else "narrow"] += 1
            for at in range(row.count):
                tile = at // self.policy.tile
                ranks = range(self.policy.ranks) if row.sharded else [row.home]
                for rank in [tile % self.policy.ranks] if long else ranks:
                    tokens[rank] += 1
        if self.limits is not None:
            assert max(tokens.values()) <= self.limits.max_batch_tokens
            assert max(logits.values()) <= self.limits.max_logit_rows

    def _known(self, row: Row) -> list[int]:
        """The tokens of a row, as every rank that computes it knows them."""
        known = [*row.tokens]
        if len(known) < row.known:
            ranks = range(self.policy.ranks) if row.sharded else [row.home]
            last = {self.last_token[rank].get(row.slot) for rank in ranks}
            assert len(last) == 1, "a rank does not know the last token"
            known = [*known, last.pop()]
        assert len(known) == row.known
        return [*known, *row.drafts]

    def _locate(self, row: Row, position: int, group: int) -> tuple[int, int]:
        """Where a token is; a row of one rank finds it there."""
        table = self.rows_of[row.slot].table
        assert table is not None
        block, offset = locate(table, position, group)
        owners = {
            pool.rank_of(blocks[position // self.block_size])
            for pool, blocks in zip(table.pools, table.blocks, strict=True)
            if blocks[position // self.block_size] != NULL_BLOCK
        }
        assert len(owners) == 1, "the groups of a block are on several ranks"
        assert row.sharded or owners == {row.home}, "a rank touches another's block"
        return block, offset

    def _write(self, row: Row) -> int:
        sequence = self.rows_of[row.slot]
        table = sequence.table
        assert table is not None
        for position, token in enumerate(self._known(row), row.start):
            for group in range(self.groups):
                block, offset = self._locate(row, position, group)
                if position < row.stored:
                    assert self.pages[group, block, offset] == (position, token), "a false hit"
                    continue
                if table.pools[group].references(block) > 1:
                    self._prove_unused(sequence, group, position)
                self.pages[group, block, offset] = (position, token)
        return row.start + row.count

    def _prove_unused(self, writer: Sequence, group: int, position: int) -> None:
        """A block that others have too is written only behind what they have stored there."""
        index = position // self.block_size
        for other in self.running:
            blocks = other.table.blocks[group] if other.table is not None else []
            if other is not writer and blocks[index : index + 1] == [
                writer.table.blocks[group][index]
            ]:
                assert max(other.stored, other.computed) <= position, "another's key is written"

    def _read(self, row: Row, length: int) -> list[int]:
        """The tokens, as each group finds them that sees them from the row's first query on; those
        that none sees, as they are known."""
        known = [*self.rows_of[row.slot].tokens[: row.start], *self._known(row)][:length]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, row.start - window + 1)
            for position in range(first, length):
                block, offset = self._locate(row, position, group)
                stored, token = self.pages[group, block, offset]
                assert stored == position, "another position's key is there"
                if window is None:
                    known[position] = token
                assert token == known[position], "another token's key is there"
        return known

    def collect(self, flight: InFlight) -> StepResult:
        self.fault("collect", flight.plan)
        return self._results.pop(flight.plan.step)

    def raise_if_dead(self, error: Exception) -> None:
        pass


def make_engine(
    *,
    blocks: int = 64,
    block_size: int = 4,
    groups: int = 1,
    shared: bool = False,
    seqs: int = 4,
    batch_tokens: int = 8,
    max_waiting: int = 100,
    depth: int = 1,
    max_model_len: int = 100,
    end_tokens: frozenset[int] = frozenset(),
    fault: Fault | None = None,
    prefix_cache: bool = True,
    policy: ShardPolicy | None = None,
    speculation: Speculation | None = None,
    windows: Seq[int | None] = (),
    host_blocks: int = 0,
    host_step_blocks: int = 1000,
    preemption: str = "auto",
) -> Engine:
    """`windows` are of the groups, none where there are none given."""
    policy = policy or ShardPolicy()
    arenas = [
        BlockPool(blocks * (groups if shared else 1), policy.ranks)
        for _ in range(1 if shared else groups)
    ]
    pools = arenas * groups if shared else arenas
    block_hash = HashInputs(b"fake", "int")
    ticks = itertools.count()

    def clock() -> float:
        return float(next(ticks))

    prefix = PrefixCache(
        pools, block_size, block_hash, enabled=prefix_cache, cpu_clock=clock, windows=windows
    )
    limits = Limits(seqs, batch_tokens, 2 * seqs, max_waiting)
    state = SchedulerState(prefix, limits, policy)
    runner = FakeRunner(block_size, groups, fault, policy, limits, windows)
    runner.shared, runner.per_rank = shared, arenas[0].per_rank
    runner.running = state.running
    step_times, swaps = StepTimes(), None
    if host_blocks:
        hosts = {a: HostPool(a, host_blocks * (groups if shared else 1)) for a in arenas}
        host_cache = HostCache(
            state,
            [hosts[pool] for pool in pools],
            runner,
            arena_bytes=[10] * len(arenas),
            step_bytes=10 * host_step_blocks,
        )
        swaps = Swaps(host_cache, step_times, preemption)
    scheduler = Scheduler(state, speculation, swaps)
    engine = Engine(
        scheduler,
        runner,  # type: ignore[arg-type]
        end_tokens=end_tokens,
        max_model_len=max_model_len,
        cpu_clock=clock,
        depth=depth,
        step_times=step_times,
    )
    engine.on_step_error = _tell_wrong_from_failed
    return engine


def _tell_wrong_from_failed(error: BaseException, retried: bool) -> None:
    """A step that failed is tried again; one that did wrong must not be."""
    if isinstance(error, AssertionError):
        raise error


def make_request(name: str, prompt: Seq[int], count: int, **fields) -> Request:  # type: ignore[no-untyped-def]
    options = fields.pop("options", {})
    if fields.pop("pulling", False):
        fields["arrival"] = Event()
    params = SamplingParams(max_tokens=count, temperature=0.0, **options)
    return Request(name, list(prompt), params, **fields)


def transfers_of(scheduler: Scheduler) -> Transfers:
    return Transfers(scheduler.state, scheduler.host_cache)


def random_prompt(rng: random.Random, most: int = 20) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(1, most))]


def check(engine: Engine) -> None:
    """Conservation, after every step."""
    tables = engine.scheduler.tables()
    for pool in engine.scheduler.pools:
        problems = audit.check(pool, tables)
        assert not problems, problems
    host_cache = engine.scheduler.host_cache
    for host in host_cache.arenas if host_cache is not None else ():
        problems = host_problems(host)
        assert not problems, problems


def tokens_of(outputs, name: str) -> list[int]:  # type: ignore[no-untyped-def]
    return [t for r, e in outputs if r.id == name for t in getattr(e, "tokens", ())]
