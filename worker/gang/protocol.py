"""Messages inside a gang: rank 0 sends each step to the others, each answers with its results.

msgpack arrays that begin with a version. A step carries only what is new: table entries, the tokens
it computes, and parameters with the first row of a sequence in its slot. Every rank applies the
same changes to the same tables, which the digest in a step verifies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from kvpaging import codec
from kvpaging.codec import ROW, WrongField
from kvpaging.host_pool import Moves
from worker.execution.runner import StepResult
from worker.params import SamplingParams
from worker.scheduling.step import StepPlan

VERSION = 5
STEP, COLLECT, HEARTBEAT, STOP, RESULT, MOVE = KINDS = range(6)


class WrongMessage(RuntimeError):
    """A message of a rank that does not fit this version: that rank cannot take part."""


class StepMessage(NamedTuple):
    """The step that every rank does next. `digest` is of the tables with its entries, `params` are
    those of its rows that are new to their slots."""

    epoch: int
    digest: int
    params: list[SamplingParams]
    plan: Annotated[StepPlan, ROW]


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


def pack_step(epoch: int, digest: int, plan: StepPlan) -> bytes:
    params = [row.params for row in plan.rows if row.changed_from == 0]
    return packed(STEP, _STEP.written(StepMessage(epoch, digest, params, plan)))


class PlanDecoder:
    """A follower's side of steps: knows the parameters of the sequence in each slot."""

    def __init__(self) -> None:
        self._known: dict[int, SamplingParams] = {}

    def step(self, body: list[Any]) -> StepMessage:
        """Decode the body of a step message (see `read`). Raises WrongMessage."""
        message: StepMessage = _decoded(_STEP, body, "a step")
        plan, known = message.plan, self._known
        new = [row.slot for row in plan.rows if row.changed_from == 0]
        try:
            known.update(zip(new, message.params, strict=True))
            rows = tuple([row._replace(params=known[row.slot]) for row in plan.rows])
        except (KeyError, ValueError) as error:
            raise WrongMessage(f"a step that cannot be read: {error}") from error
        return message._replace(plan=replace(plan, rows=rows))


def pack_result(result: Result) -> bytes:
    return packed(RESULT, _RESULT.written(result))


def unpack_result(message: bytes) -> Result:
    """Raises WrongMessage."""
    kind, body = read(message)
    if kind != RESULT:
        raise WrongMessage(f"a message of kind {kind} came in place of a result")
    result: Result = _decoded(_RESULT, body, "a result")
    return result


def moving(moves: Moves) -> bytes:
    """The message for the copies that every rank does before the next step."""
    return packed(MOVE, _MOVES.written(moves))


def moved(body: list[Any]) -> Moves:
    """Decode the body of such a message. Raises WrongMessage."""
    moves: Moves = _decoded(_MOVES, body, "copies")
    return moves


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


def packed(kind: int, body: Iterable[Any] = ()) -> bytes:
    """A message; a body is what its plan has written."""
    return codec.pack((VERSION, kind, *body))
