"""The rates, and the books under random use; `test_pull.py` has them in pulls."""

from __future__ import annotations

import random
from typing import Any

import pytest

from context_parallel.policy import ShardPolicy
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from tests.worker.fake import (
    VOCAB,
    SmallTiles,
    check,
    expected,
    make_engine,
    make_request,
    transfers_of,
)
from worker import messages
from worker.blocks.incoming import Chunk
from worker.blocks.transfer import LINKS_MAX, IncomingPull, PullFailed, TransferStats
from worker.engine.stats import PrefillRate, Rate
from worker.scheduling.prefix import UNWANTED


def test_a_rate_follows_what_is_measured() -> None:
    rate = Rate()
    rate.add(100, 0.0)
    assert rate.per_s == 0.0
    rate.add(100, 2.0)
    assert rate.per_s == 50.0
    rate.add(100, 1.0)
    assert rate.per_s == pytest.approx(60.0)
    for _ in range(60):
        rate.add(10, 1.0)
    assert rate.per_s == pytest.approx(10.0, rel=1e-3)


def test_only_steps_of_chunks_say_how_fast_prompts_are_computed() -> None:
    rate = PrefillRate()
    for rows, tokens, seconds, wanted in (
        (64, 64, 1.0, 0.0),  # single tokens
        (1, 20, 1.0, 0.0),  # hardly any
        (2, 100, 0.5, 200.0),
        (0, 0, 0.0, 200.0),  # a turn without a step
    ):
        rate.note(tokens, rows, seconds)
        assert rate.per_s == wanted


def test_links_are_bounded_and_those_in_use_stay() -> None:
    stats = TransferStats()
    stats.link("busy").add(1, 1)
    for i in range(3 * LINKS_MAX):
        stats.link(f"gang-{i}")
        assert stats.link("busy").per_s == 1
    assert len(stats.links) == LINKS_MAX


SIZE = 4


class Books:
    """Random use of the books of one engine: pulls, loans, requests, at any stage of each."""

    def __init__(self, seed: int, ranks: int = 1) -> None:
        self.draw = random.Random(seed)
        self.groups = self.draw.choice([1, 2])
        self.engine = make_engine(
            block_size=SIZE,
            groups=self.groups,
            blocks=-(-self.draw.choice([9, 20, 50]) // ranks),
            depth=self.draw.choice([1, 2]),
            policy=SmallTiles(ranks, shard_from_tokens=16, hit_tokens=8),
        )
        self.transfers = transfers_of(self.engine.scheduler)
        self.stems = [[0] * 24]
        self.pulls: list[IncomingPull] = []
        self.late: list[Chunk] = []  # of pulls that have ended
        self.writers: dict[Chunk, list[list[int]]] = {}
        self.export_pins: list[list[list[int]]] = []
        self.made = self.landed = self.finished = self.refused = self.quarantines = 0

    def submit(self) -> None:
        self.made += 1
        self.begin()
        pulling = self.draw.random() < 0.7
        if self.draw.random() < 0.5:
            self.stems.append([self.draw.randrange(VOCAB) for _ in range(24)])
        request = make_request(f"r{self.made}", self.prompt(), 3, pulling=pulling)
        self.engine.submit(request)
        if pulling:
            self.pulls.append(IncomingPull(request, "owner"))
            self.begin()

    def prompt(self) -> list[int]:
        return [*self.draw.choice(self.stems[-3:])[: self.draw.randint(4, 24)], 1]

    def begin(self) -> None:
        for pull in self.pulls:
            if not pull.wanted:
                other = self.transfers.begin(pull, self.draw.randrange(8))
                assert other is None or other in self.pulls

    def reserve(self) -> None:
        pull = self.draw.choice(self.pulls)
        start = pull.chunks[-1].stop if pull.chunks else 0
        if start >= pull.count:
            return
        chunk = Chunk(start, self.draw.randint(start + 1, pull.count))
        before = [pool.counts() for pool in self.transfers.pools]
        try:
            self.transfers.reserve(pull, chunk)
        except PullFailed:
            self.refused += 1
            assert before == [pool.counts() for pool in self.transfers.pools]

    def land(self) -> None:
        pull = self.draw.choice(self.pulls)
        for chunk in pull.chunks:
            if chunk.blocks and chunk.blocks[0] and not chunk.writing:
                count = self.draw.randint(0, len(chunk.blocks[0]))
                self.fill(pull, chunk, count)
                self.transfers.land(pull, chunk, count)
                self.landed += count
                return

    def fill(self, pull: IncomingPull, chunk: Chunk, count: int) -> None:
        """What a copy does: the keys of the prompt, where they belong."""
        runner: Any = self.engine.runner
        hashes = self.engine.scheduler.prefix.block_hashes(pull.request.sequences[0])[0]
        for at in range(count):
            first = hashes.index(pull.wanted[0][chunk.start + at]) * SIZE
            for group, column in enumerate(chunk.blocks):
                for offset in range(SIZE):
                    token = pull.request.sequences[0].tokens[first + offset]
                    runner.pages[group, column[at], offset] = (first + offset, token)

    def write(self) -> None:
        for chunk in self.draw.choice(self.pulls).chunks:
            if chunk.blocks and not chunk.writing:
                chunk.writing = True
                self.writers[chunk] = [[*column] for column in chunk.blocks]

    def end(self) -> None:
        pull = self.pulls.pop(self.draw.randrange(len(self.pulls)))
        self.late += [chunk for chunk in pull.chunks if chunk.writing]
        self.transfers.end(pull)

    def confirm(self) -> None:
        """Until then the writer may write."""
        chunk = self.late.pop(self.draw.randrange(len(self.late)))
        runner: Any = self.engine.runner
        for group, column in enumerate(self.writers.pop(chunk)):
            for block in column:
                runner.pages.update({(group, block, offset): (-1, -1) for offset in range(SIZE)})
        self.transfers.confirmed(chunk)

    def quarantine(self) -> None:
        chunk = self.draw.choice(self.late)
        if not chunk.overdue:
            self.transfers.quarantine(chunk)
            self.quarantines += 1

    def lend(self) -> None:
        request = make_request("asks", self.prompt(), 1)
        group_hashes = self.engine.scheduler.prefix.block_hashes(request.sequences[0])
        self.export_pins.append([])
        self.transfers.begin_export(self.export_pins[-1], group_hashes)

    def give_back(self) -> None:
        self.transfers.end_export(self.export_pins.pop(self.draw.randrange(len(self.export_pins))))

    def turn(self, *, more: bool) -> None:
        choices = [self.submit, self.lend] if more else []
        if self.pulls:
            choices += [self.reserve, self.reserve, self.land, self.write, self.end]
        if self.late:
            choices += [self.confirm, self.quarantine]
        if self.export_pins:
            choices += [self.give_back]
        if self.engine.requests and self.draw.random() < 0.05:
            self.engine.abort(self.draw.choice(sorted(self.engine.requests)))
        if choices:
            self.draw.choice(choices)()
            check(self.engine)
        for request, event in self.engine.step(0.0):
            if isinstance(event, messages.Finish) and event.reason != "abort":
                assert request.sequences[0].tokens == [
                    *request.prompt,
                    *expected(request.prompt, 3),
                ]
                self.finished += 1
        check(self.engine)
        assert sum(pool.counts().quarantined for pool in self.engine.scheduler.pools) == (
            self.transfers.stats.unconfirmed_blocks
        )

    def run(self) -> None:
        for _ in range(300):
            self.turn(more=True)
        while self.pulls or self.late or self.export_pins or not self.engine.idle:
            self.turn(more=False)
        for pool in self.engine.scheduler.pools:
            counts = pool.counts()
            assert counts.cached + counts.free == pool.blocks
            assert not any(pool._pins[block] for block in range(pool.blocks))
        assert not self.transfers.incoming.coming


@pytest.mark.parametrize(
    ("first", "ranks"), [*((first, 1) for first in range(0, 40, 10)), (40, 2), (50, 4)]
)
def test_the_books_conserve_blocks_whatever_is_done_in_whatever_order(
    first: int, ranks: int
) -> None:
    """And what landed is what requests read, on a device that finds any misplaced key."""
    books = [Books(seed, ranks) for seed in range(first, first + 10)]
    for each in books:
        each.run()
    for name in ("landed", "finished", "refused", "quarantines"):
        assert sum(getattr(each, name) for each in books) > 10, name


@pytest.mark.parametrize(("prompt", "loads"), [(15, [0, 3]), (20, [3, 2])])
def test_what_is_pulled_lies_where_its_request_will_run(prompt: int, loads: list[int]) -> None:
    """A short one's blocks where there is most room, a long one's on all ranks."""
    engine = make_engine(blocks=20, policy=SmallTiles(2, shard_from_tokens=16))
    pool = engine.scheduler.pools[0]
    pool.allocate(2, 0)
    transfers = transfers_of(engine.scheduler)
    pull = IncomingPull(make_request("r", range(prompt), 3, pulling=True), "owner")
    engine.submit(pull.request)
    assert transfers.begin(pull, 8) is None
    chunks = [Chunk(0, 2), Chunk(2, pull.count)]
    for chunk in chunks:
        transfers.reserve(pull, chunk)
    owners = [pool.rank_of(block) for chunk in chunks for block in chunk.blocks[0]]
    assert [owners.count(rank) for rank in range(2)] == loads


def scattered(engine, count: int) -> tuple[list[list[bytes]], list[BlockTable]]:
    """Block hashes of blocks of two groups, and the tables on two ranks that have them: each group
    finds its last block on its own rank, and those before on rank 0."""
    pools, prefix = engine.scheduler.pools, engine.scheduler.prefix
    group_hashes = prefix.block_hashes(make_request("r", range(SIZE * count), 1).sequences[0])
    tables = [BlockTable(pools, SIZE, (rank,)) for rank in range(2)]
    for group, (pool, table) in enumerate(zip(pools, tables, strict=True)):
        table.append(SIZE * count)
        for at, block_hash in enumerate(group_hashes[group]):
            there = table if at == count - 1 else tables[0]
            pool.register(
                there.blocks[group][at], block_hash, group_hashes[group][at - 1] if at else None
            )
    return group_hashes, tables


def test_what_is_lent_of_each_block_lies_on_one_rank() -> None:
    engine = make_engine(blocks=20, groups=2, policy=ShardPolicy(2))
    transfers, export_pin = transfers_of(engine.scheduler), []
    group_hashes, tables = scattered(engine, 3)
    transfers.begin_export(export_pin, group_hashes)
    assert export_pin == [column[:2] for column in tables[0].blocks]
    transfers.end_export(export_pin)
    for table in tables:
        table.release()
    check(engine)


def test_what_lands_is_found_though_one_group_has_it_elsewhere() -> None:
    engine = make_engine(blocks=20, groups=2, policy=ShardPolicy(2))
    scheduler, prefix = engine.scheduler, engine.scheduler.prefix
    request = make_request("r", range(9), 3, pulling=True)
    hashes = prefix.block_hashes(request.sequences[0])[0]
    table = BlockTable(scheduler.pools, SIZE, (1,))
    table.append(2 * SIZE)
    for at, block in enumerate(table.blocks[0]):
        scheduler.pools[0].register(block, hashes[at], hashes[at - 1] if at else None)
    transfers = transfers_of(scheduler)
    pull, chunk = IncomingPull(request, "owner", ranks=(0,)), Chunk(0, 2)
    engine.submit(request)
    assert transfers.begin(pull, 8) is None
    transfers.reserve(pull, chunk)
    blocks = chunk.blocks
    transfers.land(pull, chunk, 2)
    assert prefix.match(request.sequences[0]) == pull.kept == blocks
    transfers.confirmed(chunk)
    transfers.end(pull)
    table.release()
    check(engine)


def test_what_lands_without_its_window_leaves_an_earlier_twin_elsewhere() -> None:
    """The group that came without a block has none that could lie on another rank."""
    engine = make_engine(blocks=20, groups=2, windows=(5, None), policy=ShardPolicy(2))
    (_, full), prefix = engine.scheduler.pools, engine.scheduler.prefix
    hashes = prefix.block_hashes(make_request("r", range(9), 1).sequences[0])[1]
    table = BlockTable([full], SIZE, (1,))
    table.append(2 * SIZE)
    twins = table.blocks[0]
    full.register(twins[0], hashes[0], None)
    full.register(twins[1], hashes[1], hashes[0])
    (came,) = full.allocate(1, 0)
    assert prefix.register_blocks([NULL_BLOCK, came], [UNWANTED, hashes[0]], [None, None]) == [
        NULL_BLOCK,
        twins[0],
    ]
    assert [full.lookup(block_hash) for block_hash in hashes] == twins
    full.unref(came)
    table.release()
    check(engine)


@pytest.mark.parametrize("cuts", [[(0, 1), (1, 2), (2, 3), (3, 8)], [(0, 3), (3, 6), (6, 8)]])
def test_the_pieces_of_a_pull_no_rank_can_hold_alone_are_even_over_ranks(
    cuts: list[tuple[int, int]],
) -> None:
    """Also where nothing is long for its length alone."""
    engine = make_engine(blocks=6, policy=ShardPolicy(2, shard_from_tokens=1000))
    pool, transfers = engine.scheduler.pools[0], transfers_of(engine.scheduler)
    pull = IncomingPull(make_request("r", range(8 * SIZE), 3, pulling=True), "owner")
    engine.submit(pull.request)
    assert transfers.begin(pull, 8) is None
    chunks = [Chunk(*cut) for cut in cuts]
    for chunk in chunks:
        transfers.reserve(pull, chunk)
    owners = [pool.rank_of(block) for chunk in chunks for block in chunk.blocks[0]]
    assert owners == [0, 1] * 4
