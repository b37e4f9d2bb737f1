"""Messages inside a gang: rank 0 sends each step to the others, each answers with its results.

msgpack arrays that begin with a version. A step carries only what is new: table entries, the tokens
it computes, and parameters with the first row of a sequence in its slot. Every rank applies the
same changes to the same tables, which the digest in a step verifies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from kvpaging import codec
from kvpaging.codec import ROW, Int32s, WrongField
from kvpaging.host_pool import Moves
from kvpaging.table import Copy
from worker.execution.runner import StepResult
from worker.params import SamplingParams
from worker.scheduling.step import Row, StepPlan

VERSION = 4
STEP, COLLECT, HEARTBEAT, STOP, RESULT, MOVE = KINDS = range(6)


class WrongMessage(RuntimeError):
    """A message of a rank that does not fit this version: that rank cannot take part."""


class Change(NamedTuple):
    """From logical block `first` on, the sequence in `slot` has the gang-wide blocks `ids[g]`."""

    slot: int
    first: int
    ids: tuple[Int32s, ...]


class Start(NamedTuple):
    """Sent with the first row of a sequence in its slot."""

    prompt_tokens: int
    params: SamplingParams


class RowMessage(NamedTuple):
    """A row of a plan as it is sent; its table entries are among the changes of the step."""

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
    targets: Int32s
    history: tuple[Int32s, Int32s] | None
    first: Start | None


class StepMessage(NamedTuple):
    """A plan as it is sent, and the changes of the block tables before it."""

    epoch: int
    step: int
    digest: int
    changes: list[Change]
    copies: tuple[Annotated[Copy, ROW], ...]
    rows: list[RowMessage]


class DecodedStep(NamedTuple):
    """The step that every rank does next. `digest` is of the tables after the changes."""

    epoch: int
    step: int
    digest: int
    plan: StepPlan
    changes: list[Change]


class Result(NamedTuple):
    """The results of a step on one rank. With an `error` nothing is `done`; a `fatal` one ends the
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
    """The new table entries of a plan's rows."""
    return [
        Change(row.slot, row.changed_from, tuple(map(list, row.blocks)))
        for row in plan.rows
        if row.blocks and row.blocks[0]
    ]


class PlanEncoder:
    """Rank 0's side of steps."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def step(self, plan: StepPlan, changes: Iterable[Change], digest: int) -> bytes:
        """The message for a plan; `digest` is of the tables after the changes."""
        rows = [_row(row) for row in plan.rows]
        message = StepMessage(self.epoch, plan.step, digest, [*changes], plan.copies, rows)
        return _packed(STEP, _STEP.written(message))


def _row(row: Row) -> RowMessage:
    first = row.changed_from == 0
    return RowMessage(
        slot=row.slot,
        start=row.start,
        length=row.count,
        sampled=row.sampled,
        stored=row.stored,
        scored_from=row.scored_from,
        candidates=row.candidates,
        home=row.home,
        sharded=row.sharded,
        drafts=[*row.drafts],
        tokens=[*row.tokens],
        targets=[*row.targets],
        history=None if row.history is None else ([*row.history[0]], [*row.history[1]]),
        first=Start(row.prompt_tokens, row.params) if first else None,
    )


class PlanDecoder:
    """A follower's side of steps: knows the parameters of the sequence in each slot. Their tables
    are in `LocalTables`."""

    def __init__(self) -> None:
        self._known: dict[int, Start] = {}

    def step(self, body: list[Any]) -> DecodedStep:
        """Decode the body of a step message (see `read`). Raises WrongMessage."""
        message = _decoded(_STEP, body, "a step")
        try:
            rows = tuple([self._row(row) for row in message.rows])
        except KeyError as error:
            raise WrongMessage(f"a step that cannot be read: {error}") from error
        plan = StepPlan(message.step, rows, message.copies)
        return DecodedStep(message.epoch, message.step, message.digest, plan, message.changes)

    def _row(self, message: RowMessage) -> Row:
        """Raises KeyError where a slot has no sequence yet."""
        if message.first is not None:
            self._known[message.slot] = message.first
        prompt_tokens, params = self._known[message.slot]
        return Row(
            slot=message.slot,
            start=message.start,
            count=message.length,
            tokens=message.tokens,
            params=params,
            prompt_tokens=prompt_tokens,
            sampled=message.sampled,
            stored=message.stored,
            scored_from=message.scored_from,
            targets=message.targets,
            history=message.history,
            candidates=message.candidates,
            home=message.home,
            sharded=message.sharded,
            drafts=tuple(message.drafts),
        )


def pack_result(result: Result) -> bytes:
    """A follower's answer."""
    return _packed(RESULT, _RESULT.written(result))


def unpack_result(message: bytes) -> Result:
    """Raises WrongMessage."""
    kind, body = read(message)
    if kind != RESULT:
        raise WrongMessage(f"a message of kind {kind} came in place of a result")
    result: Result = _decoded(_RESULT, body, "a result")
    return result


def moving(moves: Moves) -> bytes:
    """The message for the copies that every rank does before the next step."""
    return _packed(MOVE, _MOVES.written(moves))


def moved(body: list[Any]) -> Moves:
    """Decode the body of such a message. Raises WrongMessage."""
    moves: Moves = _decoded(_MOVES, body, "copies")
    return moves


def note(kind: int) -> bytes:
    """A message that is only a kind."""
    return _packed(kind)


def read(message: bytes) -> tuple[int, list[Any]]:
    """The kind and the body of a message. Raises WrongMessage."""
    try:
        parts = codec.unpack(message)
    except WrongField as error:
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


def _decoded(plan: codec.Plan, body: list[Any], name: str) -> Any:
    try:
        return plan.read(body)
    except WrongField as error:
        raise WrongMessage(f"{name} that cannot be read: {error}") from error


def _packed(kind: int, body: Iterable[Any] = ()) -> bytes:
    return codec.pack((VERSION, kind, *body))
