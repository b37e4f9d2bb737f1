"""A gang computes what one rank would, and ends as a whole where it cannot."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from context_parallel.exchange import ExchangeFailed
from tests.covering import cover
from tests.families import NEW_TOKENS, PROMPT_LENGTHS, prompts, reference
from tests.worker.cases import name_of
from tests.worker.gangs import gang_engine
from tests.worker.served import GREEDY, answer, generate, submit
from worker import messages
from worker.execution.runner import EngineDead
from worker.gang.runner import CAUSE_S
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine

ALL = range(len(PROMPT_LENGTHS))
EVERYTHING, LONGER, NOTHING = 1, 40, 1000
"""From how many tokens sequences lie on all ranks: all do, the longest does, none does."""


def launched(models: Models, family: str, chunk: int = 64):
    launch, model = models.load(family, 8)
    return replace(launch, limits=replace(launch.limits, max_batch_tokens=chunk)), model


def run_out(engine: Engine) -> None:
    while not engine.idle:
        engine.step(0.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_short_requests_send_nothing(models, depth):
    with gang_engine(*launched(models, "llama"), 3, depth=depth, sharded_from=NOTHING) as (
        engine,
        members,
    ):
        outputs = generate(engine, ALL)
        assert [g.exchange.calls for g in members.gangs] == [0, 0, 0]
        assert engine.stats.sharded_steps == engine.stats.mixed_steps == 0
    assert outputs == {i: reference("llama", i) for i in ALL}


def test_steps_in_which_short_rows_wait_for_long_ones_are_counted(models):
    """Every step takes a second."""
    kinds = Counter()
    with gang_engine(*launched(models, "llama"), 2, sharded_from=LONGER) as (engine, _):
        launch = engine.runner.launch

        def noted(plan):
            kinds[frozenset(row.sharded for row in plan.rows)] += 1
            engine.runner.execute_s += 1.0
            return launch(plan)

        engine.runner.launch, engine.runner.clock = noted, lambda: 0.0
        generate(engine, ALL)
        stats = engine.stats
    both, all_long = kinds[frozenset((False, True))], kinds[frozenset((True,))]
    assert (stats.mixed_steps, stats.mixed_s) == (both, both)
    assert (stats.sharded_steps, stats.sharded_s) == (all_long, all_long)
    assert both
    assert stats.execute_s == stats.steps == kinds.total()


@pytest.mark.parametrize("depth", [1, 2])
def test_decode_makes_one_exchange_a_layer_of_a_size_that_the_context_does_not_change(
    models, depth
):
    launch, model = launched(models, "llama")
    layers = launch.layout.num_layers
    with gang_engine(launch, model, 4, depth=depth, sharded_from=EVERYTHING) as (engine, members):
        exchange = members.gangs[0].exchange
        sizes = {}
        for index in (1, 3):
            submit(engine, index)
            while engine.requests[str(index)].sequences[0].generated_tokens < 3:
                engine.step(0.0)
            for _ in range(8):
                calls, sent = exchange.calls, exchange.bytes_sent
                engine.step(0.0)
                sizes.setdefault(index, set()).add(
                    (exchange.calls - calls, exchange.bytes_sent - sent)
                )
            run_out(engine)
    assert sizes[1] == sizes[3]
    ((calls, sent),) = sizes[1]
    assert calls == layers + 1
    call = launch.shape.calls[0]
    partial = call.heads * (launch.shape.layers[0].v_dim + 2) * 8
    begin = 8 * (1 + (depth == 2))  # whether all are ready, and the token that the host lacks
    assert sent == (layers * partial + begin) * 3


def test_log_probabilities_and_penalties_are_those_of_one_rank(models):
    """What a request may ask for is said by the rank that is its home."""
    launch, model = launched(models, "qwen2", chunk=23)
    params = SamplingParams(
        max_tokens=9,
        temperature=0.9,
        seed=5,
        logprobs=3,
        prompt_logprobs=2,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={7: 2.0},
    )

    def events(engine: Engine) -> list[tuple[str, object]]:
        for index in ALL:
            engine.submit(Request(str(index), prompts()[index], params))
        found = []
        while not engine.idle:
            found += [(request.id, event) for request, event in engine.step(0.0)]
        return sorted(found, key=lambda pair: pair[0])

    alone = events(models.engine("qwen2", 8, chunk=23))
    for depth in (1, 2):
        with gang_engine(launch, model, 3, depth=depth, sharded_from=LONGER) as (engine, _):
            together = events(engine)
        assert _tokens(together) == _tokens(alone)
        assert _numbers(together) == pytest.approx(_numbers(alone), abs=1e-9)


def _tokens(events) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for request, event in events:
        if isinstance(event, messages.Delta | messages.Finish):
            said.setdefault(request, []).extend(event.tokens)
    return said


def _numbers(events) -> list[float]:
    """Every log-probability, of prompts and outputs, with the alternatives."""
    found: dict[tuple[str, int], list[float]] = {}
    for request, event in events:
        of_prompt = isinstance(event, messages.PromptLogprobs)
        entries = event.entries if of_prompt else getattr(event, "logprobs", None)
        for entry in entries or ():
            if entry is not None:
                numbers = [entry.logprob, *(x for pair in entry.top for x in pair)]
                found.setdefault((request, of_prompt), []).extend(numbers)
    return [number for _, numbers in sorted(found.items()) for number in numbers]


class Once:
    """Raises the first time it is called after `armed`, then does what it stands for."""

    def __init__(self, true, error: Exception) -> None:
        self.true, self.error, self.armed = true, error, False

    def __call__(self, *arguments):
        if self.armed:
            self.armed = False
            raise self.error
        return self.true(*arguments)


FAULTS = cover(
    {
        "place": ["builder.build", "sampler.plan", "sampler.sample"],
        "rank": [0, 1, 2],
        "sharded_from": [EVERYTHING, NOTHING],
        "depth": [1, 2],
    }
)


@pytest.mark.parametrize("case", FAULTS, ids=name_of)
def test_an_error_of_one_rank_before_or_after_the_exchanges_costs_a_retry(models, case):
    rank = case["rank"]
    with gang_engine(
        *launched(models, "llama"), 3, depth=case["depth"], sharded_from=case["sharded_from"]
    ) as (engine, members):
        runner = engine.runner if rank == 0 else members.followers[rank - 1].runner
        part, method = case["place"].split(".")
        fault = Once(getattr(getattr(runner, part), method), ValueError("no luck"))
        setattr(getattr(runner, part), method, fault)
        for index in ALL:
            submit(engine, index)
        said = {index: [] for index in ALL}
        for turn in range(1000):
            fault.armed |= turn == 4
            for request, event in engine.step(0.0):
                said[int(request.id)] += event.tokens
            if engine.idle:
                break
        assert engine.stats.failed_steps >= 1
        assert not fault.armed
    assert {i: tuple(tokens) for i, tokens in said.items()} == {
        i: reference("llama", i) for i in ALL
    }


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("depth", [1, 2])
def test_no_rank_is_in_a_step_whose_blocks_are_given_back(models, depth, when):
    """A transfer may write to them as soon as they are."""
    sharded_from = NOTHING if when == "before" else EVERYTHING
    with gang_engine(*launched(models, "llama"), 2, depth=depth, sharded_from=sharded_from) as (
        engine,
        members,
    ):
        for index in ALL:
            submit(engine, index)
        for _ in range(4):
            engine.step(0.0)
        ended, out_of_window_blocks = set(), []
        answer_one, roll_back = members.followers[0]._answer, engine.scheduler.rollback

        def answered(step, *rest):
            ended.add(step)
            answer_one(step, *rest)

        def rollback(plan):
            out_of_window_blocks.append(plan.step in ended)
            return roll_back(plan)

        members.followers[0]._answer, engine.scheduler.rollback = answered, rollback
        if when == "before":
            part, method = engine.runner.builder, "build"
        else:
            part, method = members.gangs[0].exchange, "synchronize"
        fault = Once(getattr(part, method), ValueError("no luck"))
        setattr(part, method, fault)
        fault.armed = True
        run_out(engine)
        assert len(out_of_window_blocks) == (depth if when == "after" else 1)
        assert all(out_of_window_blocks)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_of_one_rank_inside_the_exchanges_ends_the_gang(models, depth, rank):
    with gang_engine(
        *launched(models, "llama"), 3, depth=depth, fails=True, sharded_from=EVERYTHING
    ) as (engine, members):
        runner = engine.runner if rank == 0 else members.followers[rank - 1].runner
        layers = runner.model.pages
        submit(engine, 3)
        engine.step(0.0)

        class Broken(list):
            def __getitem__(self, layer):
                if layer == 1:
                    raise ValueError("a layer is gone")
                return super().__getitem__(layer)

        layers.store.pages = Broken(layers.store.pages)
        with pytest.raises(EngineDead, match=f"rank {rank} left the others: a layer is gone"):
            run_out(engine)
    assert all(isinstance(end, EngineDead) for end in members.ends.values())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sharded_from", [EVERYTHING, NOTHING])
def test_a_rank_with_other_tables_is_named_in_the_step_in_which_it_is_seen(
    models, depth, sharded_from
):
    with gang_engine(
        *launched(models, "llama"), 3, depth=depth, fails=True, sharded_from=sharded_from
    ) as (engine, members):
        for index in ALL:
            submit(engine, index)
        for _ in range(5):
            engine.step(0.0)
        next_step = engine.scheduler.state.step
        tables = members.followers[1].runner.builder.local
        slot = int(tables.length.argmax())
        tables.change(slot, 0, [tables.blocks[0, slot, : tables.length[slot]][::-1]])
        with pytest.raises(EngineDead, match=f"rank 2 diverged at step {next_step}:"):
            run_out(engine)
        assert engine.scheduler.state.step <= next_step + depth
    assert all(isinstance(end, EngineDead) for end in members.ends.values())
    assert "rank 2 diverged" in str(members.ends[2])


def test_a_rank_of_another_epoch_is_refused(models):
    with gang_engine(*launched(models, "llama"), 2, fails=True, sharded_from=NOTHING) as (
        engine,
        members,
    ):
        engine.runner.gang = replace(engine.runner.gang, epoch=7)
        submit(engine, 1)
        with pytest.raises(EngineDead, match="rank 1 is in epoch 1, rank 0 in 7"):
            run_out(engine)
    assert isinstance(members.ends[1], EngineDead)


def test_a_lost_message_is_seen(models):
    with gang_engine(*launched(models, "llama"), 2, fails=True, sharded_from=NOTHING) as (
        engine,
        members,
    ):
        submit(engine, 1)
        engine.step(0.0)
        members.followers[0]._last += 1
        with pytest.raises(EngineDead, match="rank 1 was sent step 1 after step 1"):
            run_out(engine)
    assert isinstance(members.ends[1], EngineDead)


def test_a_rank_that_is_gone_is_named_after_the_deadline(models):
    launch, model = launched(models, "llama")
    with gang_engine(launch, model, 3, fails=True, sharded_from=EVERYTHING) as (engine, members):
        submit(engine, 3)
        engine.step(0.0)
        members.gangs[0].exchange._meeting.timeout_s = 2.0  # of all ranks
        awake = threading.Event()
        members.followers[1].runner.launch = lambda plan: awake.wait(30)
        with pytest.raises(EngineDead, match=r"rank 2: did not answer within 2 s"):
            run_out(engine)
        awake.set()
    assert all(isinstance(end, EngineDead) for end in members.ends.values())


def test_reads_that_any_rank_saved_are_counted_once(models):
    with gang_engine(*launched(models, "llama"), 3, sharded_from=NOTHING) as (engine, members):
        for follower, saved in zip(members.followers, (5, 7), strict=True):
            follower.runner.saved_reads = saved
        generate(engine, ALL)
        assert engine.stats.saved_reads == 12


def test_to_collect_a_step_is_to_wait_for_its_own_exchanges(models):
    with gang_engine(*launched(models, "llama"), 2, depth=2, sharded_from=EVERYTHING) as (
        engine,
        members,
    ):
        synchronized = []
        members.gangs[0].exchange.synchronize = synchronized.append
        submit(engine, 1)
        run_out(engine)
        assert synchronized == list(range(engine.stats.steps))
        assert len(synchronized) > NEW_TOKENS // 2


class OnGPU:
    """A tensor of which a test looks only where it is."""

    is_cuda = True


def test_a_rank_that_is_not_ready_on_a_gpu_ends_the_gang_and_says_why(models):
    with gang_engine(*launched(models, "llama"), 3, fails=True, sharded_from=EVERYTHING) as (
        engine,
        members,
    ):
        submit(engine, 3)
        engine.step(0.0)
        runner = members.followers[1].runner
        runner.last_token = OnGPU()

        def build(plan):
            raise ValueError("no luck")

        runner.builder.build = build
        with pytest.raises(EngineDead, match="the gang stopped: step 1: rank 2: no luck"):
            run_out(engine)
    assert "rank 2: no luck" in str(members.ends[2])


class Waits:
    """A channel of which a test looks only how long rank 0 means to wait."""

    def __init__(self, timeouts_s: list[float | None]) -> None:
        self.timeouts_s = timeouts_s

    def all_gather(self, message: bytes, timeout_s: float | None = None) -> list[bytes]:
        self.timeouts_s.append(timeout_s)
        raise ExchangeFailed(2, None, "nothing came")

    def abort(self, reason: str) -> None:
        """Nobody listens."""


@pytest.mark.parametrize(("rank", "named"), [(1, "rank 1: late"), (None, "rank 2: nothing came")])
def test_after_a_deadline_rank_0_does_not_wait_for_another_one(models, rank, named):
    """What failed may not know which rank is at fault; then the silent one is."""
    with gang_engine(*launched(models, "llama"), 3, fails=True, sharded_from=NOTHING) as (
        engine,
        members,
    ):
        runner, timeouts_s = engine.runner, []
        members.gangs[0].abort("over")
        runner.gang = replace(runner.gang, channel=Waits(timeouts_s))
        runner._open.append(0)
        with pytest.raises(EngineDead, match=named):
            runner.raise_if_dead(ExchangeFailed(rank, 0, "late"))
    assert timeouts_s == [CAUSE_S]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_gang_hears_that_rank_0_is_alive_and_goes_on(models, depth):
    with gang_engine(*launched(models, "llama"), 2, depth=depth, sharded_from=LONGER) as (
        engine,
        members,
    ):
        engine.runner.heartbeat()
        first = generate(engine, ALL)
        engine.runner.heartbeat()
        second = generate(engine, ALL)
        assert members.gangs[1].exchange.calls == members.gangs[0].exchange.calls > 0
    assert first == second == {i: reference("llama", i) for i in ALL}


def test_a_word_to_a_gang_that_is_gone_ends_the_engine(models):
    launch, model = launched(models, "llama")
    with gang_engine(launch, model, 2, fails=True, sharded_from=EVERYTHING) as (engine, members):
        members.gangs[1].abort("the host is going down")
        with pytest.raises(EngineDead, match="the host is going down"):
            engine.runner.heartbeat()
    assert isinstance(members.ends[1], EngineDead)


def test_beams_and_samples_are_those_of_one_rank(models):
    launch, model = launched(models, "gemma2", chunk=40)
    search = SamplingParams(max_tokens=8, temperature=0.0, beam_width=3, n=2)
    several = SamplingParams(max_tokens=8, temperature=0.9, n=3, seed=4)

    def said(engine: Engine):
        found = []
        for params in (search, several):
            for index in (1, 3):
                request = Request(f"{index}", prompts()[index], params, generated=((),) * params.n)
                engine.submit(request)
                tokens: dict[int, list[int]] = {}
                while not engine.idle:
                    for _, event in engine.step(0.0):
                        tokens.setdefault(event.choice, []).extend(event.tokens)
                found.append(tokens)
        return found

    alone = said(models.engine("gemma2", 8, chunk=40))
    with gang_engine(launch, model, 3, sharded_from=LONGER) as (engine, _):
        assert said(engine) == alone
        assert engine.scheduler.copies > 0


def test_answers_take_the_place_of_their_rows(models):
    """Sampled rows of all homes are mixed in one plan: nobody gets another's token."""
    launch, model = launched(models, "mistral")
    with gang_engine(launch, model, 3, sharded_from=LONGER) as (engine, _):
        requests = [Request(str(i), prompts()[i], GREEDY) for i in ALL]
        outputs = answer(engine, requests, together=True)
        assert {len(output[0]) for output in outputs} == {NEW_TOKENS}
    assert [output[0] for output in outputs] == [reference("mistral", i) for i in ALL]
