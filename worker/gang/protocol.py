"""Messages inside a gang: rank 0 tells each step to the others, each answers with its results.

msgpack arrays that begin with a version. A step says only what is new: table entries and tokens
since the last message, parameters with the first row of a sequence in its slot. Every rank applies
the same changes to the same tables, and the digest in a step says whether it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from kvpaging import codec
from kvpaging.codec import ROW, Int32s, Refused
from kvpaging.host_pool import Moves
from kvpaging.table import Copy
from worker.execution.runner import StepResult
from worker.params import SamplingParams
from worker.request import Request, Sequence
from worker.scheduling.scheduler import Row, StepPlan

VERSION = 3
STEP, SETTLE, BEAT, STOP, RESULT, MOVE = KINDS = range(6)


class WrongMessage(RuntimeError):
    """A rank of the gang says something else than this version: it cannot take part."""


class Change(NamedTuple):
    """From logical block `first` on, the sequence in `slot` has the gang-wide blocks `ids[g]`."""

    slot: int
    first: int
    ids: tuple[Int32s, ...]


class Start(NamedTuple):
    """With the first row of a sequence in its slot: how many of its tokens are the prompt."""

    prompt_tokens: int
    params: SamplingParams


class RowMessage(NamedTuple):
    """A row of a plan, with the `tokens` of its sequence that are new to the others."""

    slot: int
    start: int
    length: int
    sampled: bool
    stored: int
    scored_from: int | None
    candidates: int
    home: int
    sharded: bool
    drafts: Int32s
    tokens: Int32s
    first: Start | None


class StepMessage(NamedTuple):
    """A plan as it travels, and what changes in the block tables before it."""

    epoch: int
    step: int
    digest: int
    changes: list[Change]
    copies: tuple[Annotated[Copy, ROW], ...]
    rows: list[RowMessage]


class Told(NamedTuple):
    """What every rank is to do next. `digest` is of the tables after the changes."""

    epoch: int
    step: int
    digest: int
    plan: StepPlan
    changes: list[Change]


class Result(NamedTuple):
    """What came of a step on one rank. With an `error` nothing is `done`; a `fatal` one ends the
    gang, 1 where the rank only noticed that another one failed, 2 where it is the cause.
    `saved_reads` are those since its last answer."""

    rank: int
    epoch: int
    step: int
    done: Annotated[StepResult, ROW]
    error: str = ""
    fatal: int = 0
    saved_reads: int = 0


_STEP, _RESULT, _MOVES = map(codec.plan, (StepMessage, Result, Moves))


def changes_of(plan: StepPlan) -> list[Change]:
    """The table entries of a plan's rows that are new to the devices."""
    found = []
    for row in plan.rows:
        table = row.sequence.table
        assert table is not None
        if row.changed_from < len(table.blocks[0]):
            ids = tuple(blocks[row.changed_from :] for blocks in table.blocks)
            found.append(Change(row.slot, row.changed_from, ids))
    return found


class Teller:
    """Rank 0's side of steps: knows what the others were told of the sequence in each slot."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._told: dict[int, tuple[Sequence, int, int]] = {}  # sequence, its epoch, tokens

    def step(self, plan: StepPlan, changes: Iterable[Change], digest: int) -> bytes:
        """The message for a plan, `digest` being that of the tables after the changes."""
        rows = [self._row(row) for row in plan.rows]
        message = StepMessage(self.epoch, plan.step, digest, [*changes], plan.copies, rows)
        return _packed(STEP, _STEP.written(message))

    def _row(self, row: Row) -> RowMessage:
        sequence = row.sequence
        known, epoch, told = self._told.get(row.slot, (None, 0, 0))
        first = known is not sequence or epoch != sequence.epoch
        told = 0 if first else told
        self._told[row.slot] = (sequence, sequence.epoch, len(sequence.tokens))
        return RowMessage(
            row.slot,
            row.start,
            row.count,
            row.sampled,
            row.stored,
            row.scored_from,
            row.candidates,
            row.home,
            row.sharded,
            [*row.drafts],
            sequence.tokens[told:],
            Start(sequence.prompt_tokens, sequence.params) if first else None,
        )


class Listener:
    """A follower's side of steps: mirrors of the sequences by slot, as far as a runner and a batch
    builder look at them. Their tables are elsewhere, in `LocalTables`."""

    def __init__(self) -> None:
        self._seated: dict[int, Sequence] = {}

    def step(self, body: list[Any]) -> Told:
        """What `read` gave for a message of rank 0. Raises WrongMessage."""
        try:
            told = _STEP.read(body)
            rows = tuple([self._row(row) for row in told.rows])
        except (Refused, KeyError) as error:
            raise WrongMessage(f"a step that cannot be read: {error}") from error
        plan = StepPlan(told.step, rows, told.copies)
        return Told(told.epoch, told.step, told.digest, plan, told.changes)

    def _row(self, told: RowMessage) -> Row:
        """Raises KeyError where a slot has no sequence yet."""
        slot, known = told.slot, told.tokens
        if told.first is not None:
            prompt_tokens, params = told.first
            request = Request(str(slot), known[:prompt_tokens], params)
            self._seated[slot] = Sequence(request, 0, known[prompt_tokens:])
        else:
            self._seated[slot].tokens += known
        return Row(
            self._seated[slot],
            slot,
            epoch=0,
            start=told.start,
            count=told.length,
            sampled=told.sampled,
            admitted=False,
            changed_from=0,
            stored=told.stored,
            scored_from=told.scored_from,
            candidates=told.candidates,
            home=told.home,
            sharded=told.sharded,
            drafts=tuple(told.drafts),
        )


def pack_result(result: Result) -> bytes:
    """A follower's answer."""
    return _packed(RESULT, _RESULT.written(result))


def unpack_result(message: bytes) -> Result:
    """Raises WrongMessage."""
    kind, body = read(message)
    if kind != RESULT:
        raise WrongMessage(f"a message of kind {kind} came in place of a result")
    try:
        result: Result = _RESULT.read(body)
    except Refused as error:
        raise WrongMessage(f"a result that cannot be read: {error}") from error
    return result


def moving(moves: Moves) -> bytes:
    """What every rank is to copy of its blocks and slots, before the next step."""
    return _packed(MOVE, _MOVES.written(moves))


def moved(body: list[Any]) -> Moves:
    """What `read` gave for such a message. Raises WrongMessage."""
    try:
        moves: Moves = _MOVES.read(body)
    except Refused as error:
        raise WrongMessage(f"copies that cannot be read: {error}") from error
    return moves


def note(kind: int) -> bytes:
    """A message without more to it."""
    return _packed(kind)


def read(message: bytes) -> tuple[int, list[Any]]:
    """The kind of a message and what it says. Raises WrongMessage."""
    try:
        parts = codec.unpack(message)
    except Refused as error:
        raise WrongMessage(f"a message that cannot be read: {error}") from error
    if type(parts) is not list or len(parts) < 2:
        raise WrongMessage(f"a message that cannot be read: {codec.shown(parts)}")
    version, kind, *body = parts
    if version != VERSION:
        shown = codec.shown(version)
        raise WrongMessage(f"a message of version {shown}, this rank speaks {VERSION}")
    if type(kind) is not int or kind not in KINDS:
        raise WrongMessage(f"a message of unknown kind {codec.shown(kind)}")
    return kind, body


def _packed(kind: int, body: Iterable[Any] = ()) -> bytes:
    return codec.pack((VERSION, kind, *body))
