"""Messages inside a gang: rank 0 sends each step to the others, each answers with its results.

msgpack arrays that begin with a version. A step carries only what is new: table entries, the tokens
it computes, and parameters with the first row of a sequence in its slot. Every rank applies the
same changes to the same tables, which the digest in a step verifies.
"""

from __future__ import annotations

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


_PLANS = {STEP: codec.plan(StepMessage), RESULT: codec.plan(Result), MOVE: codec.plan(Moves)}


def encode(kind: int, record: Any = None) -> bytes:
    """A message with the record of its kind: a StepMessage, a Result, Moves (the copies that every
    rank does before the next step), None for other kinds."""
    body = _PLANS[kind].written(record) if kind in _PLANS else ()
    return codec.pack((VERSION, kind, *body))


def decode(message: bytes) -> tuple[int, Any]:
    """The kind of a message and its record. Raises WrongMessage."""
    try:
        parts = codec.unpack(message)
        if type(parts) is not list or len(parts) < 2:
            raise WrongField(codec.shown(parts))
        version, kind, *body = parts
        if version != VERSION:
            raise WrongField(f"version {codec.shown(version)}, this rank speaks {VERSION}")
        if type(kind) is not int or kind not in KINDS:
            raise WrongField(f"unknown kind {codec.shown(kind)}")
        return kind, _PLANS[kind].read(body) if kind in _PLANS else None
    except WrongField as error:
        raise WrongMessage(f"a message that cannot be read: {error}") from error


def pack_step(epoch: int, digest: int, plan: StepPlan) -> bytes:
    params = [row.params for row in plan.rows if row.changed_from == 0]
    return encode(STEP, StepMessage(epoch, digest, params, plan))


class SlotParams:
    """A follower's side of steps: knows the parameters of the sequence in each slot."""

    def __init__(self) -> None:
        self._known: dict[int, SamplingParams] = {}

    def filled(self, message: StepMessage) -> StepMessage:
        """The step with the parameters of all its rows. Raises WrongMessage."""
        plan, known = message.plan, self._known
        new = [row.slot for row in plan.rows if row.changed_from == 0]
        try:
            known.update(zip(new, message.params, strict=True))
            rows = tuple([row._replace(params=known[row.slot]) for row in plan.rows])
        except (KeyError, ValueError) as error:
            raise WrongMessage(f"a step that cannot be read: {error}") from error
        return message._replace(plan=replace(plan, rows=rows))
