"""Messages inside a gang: rank 0 tells each step to the others, each answers with its results.

msgpack arrays that begin with a version. A step says only what is new: table entries and tokens
since the last message, parameters with the first row of a sequence in its slot. Every rank applies
the same changes to the same tables, and the digest in a step says whether it has.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped]

from kvpaging.host_pool import Move, Moves
from kvpaging.table import Copy
from worker import messages
from worker.decoding.beam import Offer
from worker.execution.runner import StepResult
from worker.params import SamplingParams
from worker.request import Request, Sequence
from worker.scheduling.scheduler import Row, StepPlan

VERSION = 3
STEP, SETTLE, BEAT, STOP, RESULT, MOVE = range(6)
_PARAMETERS = tuple(field.name for field in fields(SamplingParams))


class WrongMessage(RuntimeError):
    """A rank of the gang says something else than this version: it cannot take part."""


class Change(NamedTuple):
    """From logical block `first` on, the sequence in `slot` has the gang-wide blocks `ids[g]`."""

    slot: int
    first: int
    ids: tuple[list[int], ...]


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
    done: StepResult
    error: str = ""
    fatal: int = 0
    saved_reads: int = 0


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
        packed = [(c.slot, c.first, [_pack_ints(ids) for ids in c.ids]) for c in changes]
        copies = [(copy.group, copy.src, copy.dst) for copy in plan.copies]
        rows = [self._row(row) for row in plan.rows]
        return _packed(STEP, self.epoch, plan.step, digest, packed, copies, rows)

    def _row(self, row: Row) -> tuple[Any, ...]:
        sequence = row.sequence
        known, epoch, told = self._told.get(row.slot, (None, 0, 0))
        first = known is not sequence or epoch != sequence.epoch
        told = 0 if first else told
        self._told[row.slot] = (sequence, sequence.epoch, len(sequence.tokens))
        return (
            row.slot,
            row.start,
            row.count,
            row.sampled,
            row.stored,
            row.scored_from,
            row.candidates,
            row.home,
            row.sharded,
            _pack_ints(row.drafts),
            _pack_ints(sequence.tokens[told:]),
            (sequence.prompt_tokens, _parameters(sequence.params)) if first else None,
        )


class Listener:
    """A follower's side of steps: mirrors of the sequences by slot, as far as a runner and a batch
    builder look at them. Their tables are elsewhere, in `LocalTables`."""

    def __init__(self) -> None:
        self._seated: dict[int, Sequence] = {}

    def step(self, body: list[Any]) -> Told:
        """What `read` gave for a message of rank 0. Raises WrongMessage."""
        try:
            epoch, step, digest, packed, copies, rows = body
            changes = [Change(slot, at, tuple(map(_ints, ids))) for slot, at, ids in packed]
            made = tuple(Copy(*copy) for copy in copies)
            plan = StepPlan(step, tuple(self._row(*row) for row in rows), made)
        except (TypeError, ValueError, KeyError) as error:
            raise WrongMessage(f"a step that cannot be read: {error}") from error
        return Told(epoch, step, digest, plan, changes)

    def _row(
        self,
        slot: int,
        start: int,
        count: int,
        sampled: bool,
        stored: int,
        scored_from: int | None,
        candidates: int,
        home: int,
        sharded: bool,
        drafts: bytes,
        tokens: bytes,
        first: tuple[int, Mapping[str, Any]] | None,
    ) -> Row:
        known = _ints(tokens)
        if first is not None:
            prompt_tokens, parameters = first
            stops = tuple(parameters["stop_token_ids"])
            params = SamplingParams(**{**parameters, "stop_token_ids": stops})
            request = Request(str(slot), known[:prompt_tokens], params)
            self._seated[slot] = Sequence(request, 0, known[prompt_tokens:])
        else:
            self._seated[slot].tokens += known
        return Row(
            self._seated[slot],
            slot,
            epoch=0,
            start=start,
            count=count,
            sampled=sampled,
            admitted=False,
            changed_from=0,
            stored=stored,
            scored_from=scored_from,
            candidates=candidates,
            home=home,
            sharded=sharded,
            drafts=tuple(_ints(drafts)),
        )


def pack_result(result: Result) -> bytes:
    """A follower's answer."""
    return _packed(RESULT, *result._replace(done=_fields(result.done)))  # type: ignore[arg-type]


def unpack_result(message: bytes) -> Result:
    """Raises WrongMessage."""
    kind, body = read(message)
    if kind != RESULT or len(body) != len(Result._fields):
        raise WrongMessage(f"a message of kind {kind} came in place of a result")
    result = Result(*body)
    tokens, bad, logprobs, scores, offers = body[Result._fields.index("done")]
    done = StepResult(
        tokens,
        bad,
        [None if one is None else messages.TokenLogprob(one[0], _top(one[1])) for one in logprobs],
        [
            [messages.PromptLogprob(lp, rank, _top(top)) for lp, rank, top in some]
            for some in scores
        ],
        [None if one is None else Offer(*one) for one in offers],
    )
    return result._replace(done=done)


def moving(moves: Moves) -> bytes:
    """What every rank is to copy of its blocks and slots, before the next step."""
    return _packed(MOVE, *moves)


def moved(body: list[Any]) -> Moves:
    """What `read` gave for such a message. Raises WrongMessage."""
    try:
        out, back = (tuple(Move(*move) for move in some) for some in body)
    except (TypeError, ValueError) as error:
        raise WrongMessage(f"copies that cannot be read: {error}") from error
    return Moves(out, back)


def note(kind: int) -> bytes:
    """A message without more to it."""
    return _packed(kind)


def read(message: bytes) -> tuple[int, list[Any]]:
    """The kind of a message and what it says. Raises WrongMessage."""
    try:
        version, kind, *body = msgpack.unpackb(message, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WrongMessage(f"a message that cannot be read: {error}") from error
    if version != VERSION:
        raise WrongMessage(f"a message of version {version}, this rank speaks {VERSION}")
    return kind, body


def _packed(kind: int, *body: Any) -> bytes:
    data: bytes = msgpack.packb((VERSION, kind, *body))
    return data


def _fields(result: StepResult) -> tuple[Any, ...]:
    return (result.tokens, result.bad, result.logprobs, result.scores, result.offers)


def _parameters(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in _PARAMETERS}


def _top(pairs: list[list[Any]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in pairs]


def _pack_ints(numbers: Iterable[int]) -> bytes:
    return array("i", numbers).tobytes()


def _ints(data: bytes) -> list[int]:
    return array("i", data).tolist()
