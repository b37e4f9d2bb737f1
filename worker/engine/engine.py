"""The engine: plans a step, runs it, commits it and emits its events. One thread, no own clock.

Requests go in (`submit`, `abort`); `step` gives the events (`worker.messages`) for their streams.
Up to `depth` steps are in flight: with 2, step k commits while step k + 1 runs, and tokens computed
past the end of a sequence are dropped. A step that raises commits nothing; its rows are retried, in
the end each alone, so that only a request that itself fails is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

from worker import messages
from worker.decoding import beam
from worker.decoding.speculation import verify
from worker.engine.load import blocks_in_use
from worker.engine.stats import EngineStats, PrefillRate, StepTimes
from worker.execution.philox import derive
from worker.execution.runner import InFlight, Runner, StepResult
from worker.params import ParamError
from worker.request import Request, Sequence
from worker.scheduling.scheduler import QueueFull, Scheduler
from worker.scheduling.step import SampledToken, StepPlan

Output = tuple[Request, messages.Event]


class Engine:
    """Requests in, wire events out.

    `cpu_clock` gives CPU seconds of this thread, for `stats`; `now` arguments are in the clock of
    `Request.arrival_s` and `deadline_s`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        end_tokens: frozenset[int],
        max_model_len: int,
        cpu_clock: Callable[[], float],
        depth: int = 1,
        step_times: StepTimes | None = None,
    ) -> None:
        assert depth in (1, 2)
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self.end_tokens, self.max_model_len = end_tokens, max_model_len
        self.cpu_clock = cpu_clock
        self.requests: dict[str, Request] = {}
        self.stats = EngineStats()
        self.step_times, self.prefill = step_times or StepTimes(), PrefillRate()
        self.searches: dict[str, beam.BeamSearch] = {}  # by request
        self.on_step_error: Callable[[BaseException, bool], None] = lambda error, retried: None
        self._in_flight: deque[InFlight] = deque()

    @property
    def idle(self) -> bool:
        scheduler, host_cache = self.scheduler, self.scheduler.host_cache
        loading = host_cache is not None and host_cache.busy
        return not (scheduler.running or scheduler.waiting or loading or self._in_flight)

    def submit(self, request: Request) -> list[messages.Event]:
        """Queue a checked request. The first event is accepted or rejected; a request that needs
        no step is finished at once."""
        if request.id in self.requests:
            message = f"a request with id {request.id} is being served"
            return [messages.Rejected("duplicate_id", 0.0, message)]
        search = None
        try:
            if request.params.beam_width:
                search = beam.begin(
                    request, self.scheduler.state, self.end_tokens, self.max_model_len
                )
                request.candidates = search.candidates
            if any(s.target > 0 for s in request.sequences):
                self.scheduler.submit(request)
        except ParamError as error:
            return [messages.Rejected("invalid", 0.0, str(error))]
        except QueueFull as full:
            return [messages.Rejected("queue_full", self._retry_after_s(), str(full))]
        for sequence in request.sequences[1:]:  # not before: a refused request costs no time
            seed = derive(request.params.seed, sequence.choice)
            sequence.params = replace(request.params, seed=seed)
        events: list[messages.Event] = [messages.Accepted(request.id, len(request.prompt))]
        if request.params.prompt_logprobs is not None:
            events.append(messages.PromptLogprobs(0, [None]))
        self.requests[request.id] = request
        if search is not None:
            self.searches[request.id] = search
        for sequence in request.sequences:
            if sequence.target <= 0:
                sequence.finish_reason = "length"
                events.append(ending(sequence, [], None))
                self._forget_if_finished(request)
        return events

    def abort(self, request_id: str, choice: int | None = None) -> list[Output]:
        """End a request or one of its choices, waiting or running; other choices go on.

        Returns a finish event per choice ended, none where the request is not (or no longer) here.
        """
        request = self.requests.get(request_id)
        if request is None:
            return []
        if request.id in self.searches:
            return self._finish_search(request, "abort")
        chosen = [s for s in request.sequences if choice in (None, s.choice)]
        return self._close(chosen, "abort")

    def _close(self, sequences: Iterable[Sequence], reason: str) -> list[Output]:
        """Finish the unfinished ones of these sequences, without another token."""
        out: list[Output] = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                self.scheduler.finish(sequence, reason)
                out.append((sequence.request, ending(sequence, [], None)))
                self._forget_if_finished(sequence.request)
        return out

    def step(self, now: float) -> list[Output]:
        """Plan and launch one step, collect the oldest one in flight. Empty when idle."""
        out = self._expire(now)
        plan = self._plan()
        if plan.rows:
            self._mark_admitted(plan, now)
            try:
                self._in_flight.append(self.runner.launch(plan))
            except Exception as error:
                self._note(error)
                lost = self._roll_back([plan])
                while self._in_flight:
                    out += self._collect(now)
                return out + self._recover(lost, now)
        if self._in_flight and (len(self._in_flight) >= self.depth or not plan.rows):
            out += self._collect(now)
        return out

    def _plan(self, only: Iterable[Sequence] | None = None) -> StepPlan:
        """The next step. Copies from and to the host that it needs have begun."""
        host_cache, again = self.scheduler.host_cache, True
        if host_cache is not None:
            host_cache.land()
        while again:
            started = self.cpu_clock()
            plan = self.scheduler.plan(only)
            self.stats.schedule_s += self.cpu_clock() - started
            again = False
            if host_cache is not None:
                host_cache.issue()
                again = only is None and not plan.rows and host_cache.land()
        return plan

    def _collect(self, now: float) -> list[Output]:
        flight = self._in_flight.popleft()
        try:
            result = self.runner.collect(flight)
        except Exception as error:
            self._note(error)
            plans = [*(later.plan for later in reversed(self._in_flight)), flight.plan]
            self._in_flight.clear()
            return self._recover(self._roll_back(plans), now)
        return self._commit(flight.plan, result, now)

    def _note(self, error: Exception) -> None:
        self.stats.failed_steps += 1
        self.on_step_error(error, False)
        self.runner.raise_if_dead(error)

    def _roll_back(self, plans: Iterable[StepPlan]) -> dict[Sequence, bool]:
        """Undo failed steps, newest first. Returns the sequences to retry, and whether one of these
        steps admitted them."""
        lost: dict[Sequence, bool] = {}
        for plan in plans:
            for row, sequence in zip(plan.rows, self.scheduler.rollback(plan), strict=True):
                if sequence is not None:
                    lost[sequence] = row.admitted or lost.get(sequence, False)
        return lost

    def _recover(self, lost: dict[Sequence, bool], now: float) -> list[Output]:
        """Retry the rows of failed steps without the sequences just admitted; those, and all if
        that fails too, run alone. A request that fails alone ends with error 500."""
        out: list[Output] = []
        old = [sequence for sequence, fresh in lost.items() if not fresh]
        alone = [sequence for sequence, fresh in lost.items() if fresh]
        if old:
            done, failure = self._try(old, now)
            out += done
            if failure is not None:
                alone = [*old, *alone]
        for sequence in alone:
            done, failure = self._try([sequence], now)
            out += done
            if failure is not None:
                out += self._fail(sequence.request, failure)
        return out

    def _try(
        self, sequences: Iterable[Sequence], now: float
    ) -> tuple[list[Output], Exception | None]:
        plan = self._plan(sequences)
        if not plan.rows:
            return [], None
        self._mark_admitted(plan, now)
        try:
            result = self.runner.collect(self.runner.launch(plan))
        except Exception as error:
            self.on_step_error(error, True)
            self.runner.raise_if_dead(error)
            self.scheduler.rollback(plan)
            return [], error
        return self._commit(plan, result, now), None

    def _commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        stats = self.stats
        stats.steps += 1
        stats.rows += len(plan.rows)
        stats.batch_tokens += plan.tokens
        took_s = self.runner.execute_s - stats.execute_s
        stats.note_ranks(plan, took_s)
        self.prefill.note(plan.tokens, len(plan.rows), took_s)
        self.step_times.note(plan, took_s, blocks_in_use(self.scheduler))
        stats.build_s, stats.execute_s = self.runner.build_s, self.runner.execute_s
        stats.saved_reads = self.runner.saved_reads
        out: list[Output] = []
        ends = self.end_tokens
        samples = iter(result.samples)
        verified = {
            row.slot: verify(row.drafts, [*islice(samples, row.samples)], row.params.ends(ends))
            for row in plan.rows
            if row.sampled
        }
        drafted = {
            row.slot: [sample.token for sample in verified[row.slot] if not sample.bad]
            for row in plan.rows
            if row.drafts
        }
        scores, beam_candidates = iter(result.scores), iter(result.beam_candidates)
        for row, sequence in zip(plan.rows, self.scheduler.commit(plan, drafted), strict=True):
            scored = next(scores) if row.scored_from is not None else None
            candidates = next(beam_candidates) if row.candidates else None
            if sequence is None or sequence.finish_reason is not None:
                continue
            request = sequence.request
            if row.scored_from is not None and scored is not None:
                sequence.scored = row.scored_from + len(scored)
                if not sequence.choice:
                    parts = prompt_scores(request, row.scored_from + 1, scored)
                    out += [(request, part) for part in parts]
            new = verified.get(row.slot, [])
            if any(sample.bad for sample in new) or (row.candidates and candidates is None):
                out += self._fail(request, ArithmeticError(BAD_LOGITS))
            elif new:
                event = self._append(sequence, new)
                if self._mark_first_token(request, now):
                    event = replace(event, started=started(sequence))
                out.append((request, event))
            elif candidates is not None:
                self._mark_first_token(request, now)
                sequence.candidates = candidates
                out += self._search(request)
            elif request.params.max_tokens == 0 and sequence.computed >= sequence.target:
                out += self._close(request.sequences, "length")  # one scores the prompt for all
        return out

    def _mark_first_token(self, request: Request, now: float) -> bool:
        """Note a request's first token; False where it had one already."""
        if request.first_token_s is not None:
            return False
        request.first_token_s = now
        self.stats.prompt_tokens += len(request.prompt)
        return True

    def _search(self, request: Request) -> list[Output]:
        """Take a step of a beam search once all its beams have candidates."""
        search, beams = self.searches[request.id], request.sequences
        beam_candidates = [beam.candidates for beam in beams if beam.candidates is not None]
        if len(beam_candidates) < len(beams):
            return []
        children = search.select(
            beam_candidates, lambda place: beams[place].tokens[len(request.prompt) :]
        )
        if children:
            request.sequences = beam.branch(self.scheduler, beams, children)
            return []
        return self._finish_search(request)

    def _finish_search(self, request: Request, reason: str | None = None) -> list[Output]:
        """End a beam search with its `n` best, in order of score; with a `reason`, without any."""
        search, first = self.searches[request.id], request.sequences[0]
        best = search.ended[: request.choices]
        if reason is not None:
            best = [NOT_ENDED] * request.choices
        assert len(best) == request.choices
        events = [
            messages.Finish(
                choice=choice,
                reason=reason or ("length" if ended.stop_token is None else "stop"),
                prompt_tokens=first.prompt_tokens,
                cached_tokens=first.cached_tokens,
                generated_tokens=len(ended.tokens),
                stop_token=ended.stop_token,
                tokens=ended.tokens,
                score=ended.score if reason is None else None,
            )
            for choice, ended in enumerate(best)
        ]
        if reason is None:
            events[0] = replace(events[0], started=started(first))
        self.stats.generated_tokens += sum(event.generated_tokens for event in events)
        self._end(request, events[0].reason)
        return [(request, event) for event in events]

    def _append(
        self, sequence: Sequence, samples: list[SampledToken]
    ) -> messages.Delta | messages.Finish:
        """Append the last of `samples`; those before it are accepted drafts, appended already."""
        request, params = sequence.request, sequence.request.params
        tokens = [sample.token for sample in samples]
        token = tokens[-1]
        sequence.tokens.append(token)
        self.stats.generated_tokens += len(tokens)
        known = [sample.logprob for sample in samples if sample.logprob is not None]
        logprobs = None if params.logprobs is None else known
        if token in params.ends(self.end_tokens):
            reason, sequence.stop_token = "stop", token
        elif (
            sequence.generated_tokens >= params.max_tokens
            or len(sequence.tokens) >= self.max_model_len
        ):
            reason = "length"
        else:
            return messages.Delta(sequence.choice, tokens, logprobs)
        self.scheduler.finish(sequence, reason)
        event = ending(sequence, tokens, logprobs)
        self._forget_if_finished(request)
        return event

    def _mark_admitted(self, plan: StepPlan, now: float) -> None:
        for sequence in self.scheduler.sequences(plan):
            if sequence is not None and sequence.request.admitted_s is None:
                sequence.request.admitted_s = now

    def _expire(self, now: float) -> list[Output]:
        late = [r for r in self.requests.values() if now > r.deadline_s]
        out: list[Output] = []
        for request in late:
            self._end(request, "timeout")
            message = "the request ran past its deadline (limits.request_timeout_s changes it)"
            out.append((request, messages.Error("timeout", message, 408)))
        return out

    def _fail(self, request: Request, error: Exception) -> list[Output]:
        self._end(request, "error")
        message = f"the model failed on this request: {error}"
        return [(request, messages.Error("engine_error", message, 500))]

    def end_quarantined(self) -> list[Output]:
        """Fail the requests that have quarantined blocks: these may hold another request's keys."""
        out: list[Output] = []
        for request in list(self.requests.values()):
            tables = [s.table for s in request.sequences if s.table is not None]
            if any(
                block in pool.quarantined
                for table in tables
                for pool, blocks in zip(table.pools, table.blocks, strict=True)
                for block in blocks
            ):
                out += self._fail(request, RuntimeError("its KV blocks failed the pool's audit"))
        return out

    def _end(self, request: Request, reason: str) -> None:
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason)
        self._forget_if_finished(request)

    def _forget_if_finished(self, request: Request) -> None:
        if request.finished:
            self.requests.pop(request.id, None)
            self.searches.pop(request.id, None)
            reason = request.sequences[0].finish_reason or ""
            self.stats.finished[reason] = self.stats.finished.get(reason, 0) + 1

    def _retry_after_s(self) -> float:
        """Estimated seconds until a place in the queue is free: until a running sequence ends."""
        stats = self.stats
        if not stats.steps or not stats.rows:
            return 1.0
        step_s = stats.execute_s / stats.steps
        left = [
            s.request.params.max_tokens - s.generated_tokens
            for s in islice(self.scheduler.running, 64)
        ]
        return max(1.0, step_s * min(left, default=0))


BAD_LOGITS = "its logits are not finite numbers; model.dtype=float32 has the widest range"
NOT_ENDED = beam.Ended([], 0.0, None)


def ending(
    sequence: Sequence, tokens: list[int], logprobs: list[messages.TokenLogprob] | None
) -> messages.Finish:
    assert sequence.finish_reason is not None
    return messages.Finish(
        choice=sequence.choice,
        reason=sequence.finish_reason,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        generated_tokens=sequence.generated_tokens,
        stop_token=sequence.stop_token,
        tokens=tokens,
        logprobs=logprobs,
    )


def prompt_scores(
    request: Request, first: int, scored: list[messages.PromptLogprob]
) -> list[messages.PromptLogprobs]:
    """The log-probabilities of prompt tokens from `first` on, in messages that are not large."""
    alternatives = request.params.prompt_logprobs or 0
    most = max(1, messages.VALUES_MAX // (messages.SCORED_COST + alternatives))
    starts = range(0, len(scored), most)
    return [messages.PromptLogprobs(first + at, [*scored[at : at + most]]) for at in starts]


def started(sequence: Sequence) -> messages.Started:
    request = sequence.request
    assert request.admitted_s is not None
    return messages.Started(
        queue_s=request.admitted_s - request.arrival_s, cached_tokens=sequence.cached_tokens
    )
