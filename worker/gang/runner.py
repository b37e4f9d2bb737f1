"""One engine over several ranks: rank 0 plans, every rank computes its share.

Rank 0 broadcasts each step before it runs it and gathers one result of every rank after. Messages
have one order on all ranks: answers that the others are about to send are received before the next
broadcast. An error before the exchanges of a step is reported, and the engine retries as usual; an
error inside them, a rank with different tables, and one that is gone end the gang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from context_parallel.exchange import Exchange, ExchangeFailed
from context_parallel.group import Channel
from kvpaging.host_pool import Moves
from kvpaging.host_store import Copying
from kvpaging.table import Copy
from worker.execution.batch import Batch
from worker.execution.model import PagedModel
from worker.execution.runner import EngineDead, InFlight, Runner, StepResult
from worker.gang import protocol
from worker.gang.batch import GangBuilder
from worker.gang.pages import Copied
from worker.scheduling.step import Row, StepPlan

NOTHING = StepResult([], [])

CAUSE_S = 1.0
"""How long rank 0 waits for another rank to report why an exchange failed."""


class GangBroken(RuntimeError):
    """The ranks cannot go on together: names the rank at fault, the step, the reason."""


class StepRefused(RuntimeError):
    """A rank could not do its part of a step, which can be repeated on all ranks."""


FATAL = (GangBroken, ExchangeFailed, protocol.WrongMessage, torch.AcceleratorError)


@dataclass(frozen=True, slots=True)
class GangComm:
    """One rank's connections to the others, in one epoch."""

    exchange: Exchange
    channel: Channel
    epoch: int
    copied: Copied = field(default_factory=Copied)

    @property
    def rank(self) -> int:
        return self.exchange.rank

    @property
    def ranks(self) -> int:
        return self.exchange.ranks

    def abort(self, reason: str) -> None:
        self.exchange.abort(reason)
        self.channel.abort(reason)


class RankRunner(Runner):
    """A rank's share of plans: own rows, tokens of sharded ones, copies; it samples at home."""

    builder: GangBuilder

    def __init__(self, gang: GangComm, model: PagedModel, *parts: Any, **clocks: Any) -> None:
        """`parts` and `clocks` are for `Runner`."""
        super().__init__(model, *parts, **clocks)
        self.gang = gang
        model.pages.exchange = gang.exchange

    def exchanged(self) -> dict[str, int]:
        exchange = self.gang.exchange
        sent = exchange.bytes_sent * exchange.ranks  # all send equally much
        return {"exchange_calls": exchange.calls, "exchange_bytes": sent}

    def move(self, moves: Moves) -> Copying:
        assert self.host is not None
        return self.gang.copied.move(self.host, moves, self.gang.rank)

    def launch(self, plan: StepPlan) -> InFlight:
        self.gang.exchange.step = plan.step
        return super().launch(plan)

    def collect(self, flight: InFlight) -> StepResult:
        if any(row.sharded for row in flight.plan.rows):
            self.gang.exchange.synchronize(flight.plan.step)
        return super().collect(flight)

    def _prepare(self, plan: StepPlan) -> Batch:
        sharded = [row for row in plan.rows if row.sharded]
        try:
            batch = super()._prepare(plan)
        except Exception as error:
            if sharded:
                self._begin(plan.step, sharded, error)
            raise
        if sharded:
            self._begin(plan.step, sharded, None)
        return batch

    def _begin(self, step: int, rows: Sequence[Row], error: Exception | None) -> None:
        """The first exchange of a step with sharded rows: their last tokens, which only their homes
        have, and whether all ranks are ready.

        Raises StepRefused where another rank is not. On a GPU no rank synchronizes to check this,
        so a rank that is not ready ends the gang there: it raises GangBroken.
        """
        if error is not None and self.last_token.is_cuda:
            raise GangBroken(f"step {step}: rank {self.gang.rank}: {error}") from error
        unknown = [row for row in rows if len(row.tokens) < row.known]
        if self.last_token.is_cuda and not unknown:
            return
        slots, homes = (
            torch.tensor(numbers, dtype=torch.int64).to(self.last_token.device)
            for numbers in ([row.slot for row in unknown], [row.home for row in unknown])
        )
        failed = self.last_token.new_tensor([error is not None])
        gathered = self.gang.exchange.all_gather(torch.cat((self.last_token[slots], failed)))
        self.last_token[slots] = gathered[homes, torch.arange(len(unknown), device=gathered.device)]
        if error is None and not gathered.is_cuda and bool(gathered[:, -1].any()):
            late = int(gathered[:, -1].argmax())
            raise StepRefused(f"step {step}: rank {late} could not begin it")

    def _copy(self, copies: Iterable[Copy]) -> None:
        super()._copy(
            [
                Copy(copy.group, copy.src % own, copy.dst % own)
                for copy in copies
                if copy.src // (own := self.builder.per_rank[copy.group]) == self.gang.rank
            ]
        )

    def _forward(self, batch: Batch) -> Tensor:
        if not len(batch.ids):  # a rank without rows in a step without exchanges
            return self.last_token.new_zeros(0, 1)
        try:
            return super()._forward(batch)
        except FATAL:
            raise
        except Exception as error:
            if not batch.sharded:
                raise
            step, rank = self.gang.exchange.step, self.gang.rank
            raise GangBroken(f"step {step}: rank {rank} left the others: {error}") from error

    def _sample(self, plan: StepPlan, batch: Batch, logits: Tensor) -> InFlight:
        mine = tuple(row for row in plan.rows if row.home == self.gang.rank)
        flight = super()._sample(replace(plan, rows=mine), batch, logits)
        return replace(flight, plan=plan)


class GangRunner(RankRunner):
    """Rank 0's runner: has all ranks run the engine's steps."""

    def __init__(self, gang: GangComm, *parts: Any, depth: int, **clocks: Any) -> None:
        """`depth` steps may be in flight, as in the engine; the rest is for `RankRunner`."""
        super().__init__(gang, *parts, **clocks)
        self.depth = depth
        self._open: deque[int] = deque()  # steps that the others have not answered
        self._due = 0  # of those, how many they answer before they receive again
        self._answers: dict[int, list[protocol.Result]] = {}

    def move(self, moves: Moves) -> Copying:
        self._broadcast(protocol.encode(protocol.MOVE, moves))
        return super().move(moves)

    def launch(self, plan: StepPlan) -> InFlight:
        digest = self.builder.apply(plan)
        self._broadcast(protocol.pack_step(self.gang.epoch, digest, plan))
        self._open.append(plan.step)
        self._due = max(self._due, len(self._open) - (self.depth - 1))
        return super().launch(plan)

    def collect(self, flight: InFlight) -> StepResult:
        plan = flight.plan
        try:
            own = super().collect(flight)
        finally:
            for step in [step for step in self._answers if step < plan.step]:
                del self._answers[step]
        started = self.clock()
        while plan.step not in self._answers:
            self._request_one()
        answers = self._answers.pop(plan.step)
        self.execute_s += self.clock() - started
        for answer in answers:
            if answer.error:
                raise StepRefused(f"step {plan.step}: rank {answer.rank}: {answer.error}")
        return _joined(plan, [own, *(answer.done for answer in answers)])

    def heartbeat(self) -> None:
        """Show that rank 0 is alive: the others wait for its next message, but not for ever. Raises
        EngineDead where one of them is gone."""
        try:
            self._broadcast(protocol.encode(protocol.HEARTBEAT))
        except FATAL as error:
            self.raise_if_dead(error)

    def stop(self) -> None:
        self._broadcast(protocol.encode(protocol.STOP))

    def raise_if_dead(self, error: Exception) -> None:
        """Where it raises nothing, no rank is in a step any more: blocks may be allocated again."""
        try:
            while self._open and not isinstance(error, FATAL):
                self._request_one()
        except FATAL as failure:
            error = failure
        if isinstance(error, FATAL):
            reason = str(self._cause(error))
            self.gang.abort(reason)
            raise EngineDead(f"the gang stopped: {reason}") from error

    def _broadcast(self, message: bytes) -> None:
        while self._due:
            self._receive()
        self.gang.channel.broadcast(message)

    def _request_one(self) -> None:
        """Receive the answers of one more step, which the others send on request."""
        if not self._due:
            self._broadcast(protocol.encode(protocol.COLLECT))
            self._due += 1
        self._receive()

    def _receive(self, timeout_s: float | None = None) -> None:
        """Receive one answer of each rank, `timeout_s` in place of the channel's deadline. Raises
        GangBroken where a rank has failed."""
        gathered = self.gang.channel.all_gather(b"", timeout_s)
        assert gathered is not None
        decoded = [protocol.decode(message) for message in gathered[1:]]
        if others := {kind for kind, _ in decoded} - {protocol.RESULT}:
            raise protocol.WrongMessage(f"messages of kinds {others} came in place of results")
        answers: list[protocol.Result] = [result for _, result in decoded]
        worst = max(answers, key=lambda answer: answer.fatal)
        if worst.fatal:
            raise GangBroken(worst.error)
        step = self._open.popleft()
        self._due -= 1
        for answer in answers:
            if (answer.epoch, answer.step) != (self.gang.epoch, step):
                raise GangBroken(
                    f"rank {answer.rank} answers step {answer.step} of epoch {answer.epoch}, "
                    f"not step {step} of epoch {self.gang.epoch}"
                )
            self.saved_reads += answer.saved_reads
        self._answers[step] = answers

    def _cause(self, error: Exception) -> Exception:
        """The error that another rank reports for an exchange that failed here, if it still can:
        its deadline was the same."""
        if not isinstance(error, ExchangeFailed):
            return error
        try:
            while self._open:
                self._due = max(1, self._due)
                self._receive(CAUSE_S)
        except GangBroken as cause:
            return cause
        except ExchangeFailed as silence:
            return silence if error.rank is None else error
        except protocol.WrongMessage:
            return error
        return error


class Follower:
    """Runs rank 0's steps on another rank, until rank 0 sends a stop."""

    def __init__(self, runner: RankRunner, *, depth: int) -> None:
        self.runner, self.depth = runner, depth
        self.gang = runner.gang
        self._params = protocol.SlotParams()
        self._in_flight: deque[tuple[int, InFlight | Exception]] = deque()
        self._last: int | None = None

    def serve(self) -> None:
        """Raises EngineDead where the gang ends without a stop from rank 0."""
        step = -1
        try:
            while True:
                kind, record = protocol.decode(self.gang.channel.broadcast(None))
                if kind == protocol.STEP:
                    decoded = self._params.filled(record)
                    step = decoded.plan.step
                    self._launch(decoded)
                    while len(self._in_flight) >= self.depth:
                        self._collect()
                elif kind == protocol.COLLECT:
                    self._collect()
                elif kind == protocol.MOVE:
                    self.runner.move(record)
                elif kind == protocol.STOP:
                    return
        except Exception as error:
            self._end(step, error)
            raise EngineDead(f"the gang stopped: {error}") from error

    def _launch(self, decoded: protocol.StepMessage) -> None:
        self._check(decoded)
        flight: InFlight | Exception
        try:
            flight = self.runner.launch(decoded.plan)
        except FATAL:
            raise
        except Exception as error:
            flight = error
        self._in_flight.append((decoded.plan.step, flight))

    def _check(self, decoded: protocol.StepMessage) -> None:
        """Raises GangBroken unless this rank has the state that rank 0 expects."""
        rank, step = self.gang.rank, decoded.plan.step
        if decoded.epoch != self.gang.epoch:
            raise GangBroken(
                f"rank {rank} is in epoch {self.gang.epoch}, rank 0 in {decoded.epoch}"
            )
        if self._last is not None and step != self._last + 1:
            raise GangBroken(f"rank {rank} was sent step {step} after step {self._last}")
        self._last = step
        try:
            digest = self.runner.builder.apply(decoded.plan)
        except ValueError as error:
            raise GangBroken(f"rank {rank} diverged at step {step}: {error}") from error
        if digest != decoded.digest:
            raise GangBroken(
                f"rank {rank} diverged at step {step}: its block tables are not those that the "
                "step was planned for"
            )

    def _collect(self) -> None:
        step, flight = self._in_flight.popleft()
        done, error = NOTHING, ""
        if isinstance(flight, Exception):
            error = f"{type(flight).__name__}: {flight}"
        else:
            try:
                done = self.runner.collect(flight)
            except FATAL:
                raise
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        self._answer(step, done, error)

    def _answer(self, step: int, done: StepResult, error: str, fatal: int = 0) -> None:
        saved, self.runner.saved_reads = self.runner.saved_reads, 0
        result = protocol.Result(self.gang.rank, self.gang.epoch, step, done, error, fatal, saved)
        self.gang.channel.all_gather(protocol.encode(protocol.RESULT, result))

    def _end(self, step: int, error: Exception) -> None:
        """Report the reason, where rank 0 still receives, and end the others' exchanges."""
        reason = str(error)
        self.gang.exchange.abort(reason)
        try:
            self._answer(step, NOTHING, reason, 1 if isinstance(error, ExchangeFailed) else 2)
        except ExchangeFailed:
            return  # the channel has failed too: rank 0 knows


def _joined(plan: StepPlan, results: Sequence[StepResult]) -> StepResult:
    """The ranks' results in the order of the plan's rows; a row's is at its home."""
    samples = [iter(r.samples) for r in results]
    scores = [iter(r.scores) for r in results]
    beam_candidates = [iter(r.beam_candidates) for r in results]
    joined = StepResult([], [], [])
    for row in plan.rows:
        if row.scored_from is not None:
            joined.scores.append(next(scores[row.home]))
        joined.samples.extend(islice(samples[row.home], row.samples))
        if row.candidates:
            joined.beam_candidates.append(next(beam_candidates[row.home]))
    return joined
