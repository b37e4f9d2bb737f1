"""Streams over an engine thread, on the fake device."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import pytest

from tests.worker.fake import expected, make_engine, make_request
from worker import messages
from worker.engine import loop as loops
from worker.engine.loop import EngineLoop, Outbox
from worker.execution.runner import EngineDead


@asynccontextmanager
async def running(**options):
    rate, heartbeat_s = options.pop("messages_per_s", 1e9), options.pop("heartbeat_s", None)
    loop = EngineLoop(
        lambda: make_engine(**options),
        now=time.monotonic,
        messages_per_s=rate,
        heartbeat_s=heartbeat_s,
    )
    loop.start(asyncio.get_running_loop())
    try:
        yield loop
    finally:
        loop.stop()


async def collect(loop, request):
    return [event async for event in loop.stream(request)]


def tokens(events):
    return [t for e in events for t in getattr(e, "tokens", ())]


def test_streams_are_complete_and_in_order():
    async def main():
        async with running() as loop:
            names = [f"r{i}" for i in range(8)]
            streams = [collect(loop, make_request(n, [i], 20)) for i, n in enumerate(names)]
            for i, events in enumerate(await asyncio.gather(*streams)):
                assert isinstance(events[0], messages.Accepted)
                assert isinstance(events[-1], messages.Finish)
                assert tokens(events) == expected([i], 20)
            assert not loop._boxes

    asyncio.run(main())


def test_a_request_without_streaming_gets_its_tokens_in_one_message():
    async def main():
        async with running() as loop:
            events = await collect(loop, make_request("r", [1], 30, stream=False))
            assert [type(e) for e in events if not isinstance(e, messages.KeepAlive)] == [
                messages.Accepted,
                messages.Finish,
            ]
            assert tokens(events) == expected([1], 30)

    asyncio.run(main())


def test_a_slow_pace_folds_deltas_but_sends_first_token_and_end_at_once():
    async def main():
        async with running(messages_per_s=1e-3) as loop:
            started = time.monotonic()
            events = await collect(loop, make_request("r", [1], 40))
            assert time.monotonic() - started < 60
            assert len(events) <= 4
            assert tokens(events) == expected([1], 40)

    asyncio.run(main())


def test_other_ranks_hear_from_an_idle_engine_and_of_its_end():
    async def main():
        async with running(heartbeat_s=0.01) as loop:
            await collect(loop, make_request("r", [1], 5))
            words = loop.engine.runner.words
            while len(words) < 3:
                await asyncio.sleep(0)
        assert set(words[:-1]) == {"heartbeat"}
        assert words[-1] == "stop"
        async with running() as loop:
            await collect(loop, make_request("r", [1], 5))
            assert loop.engine.runner.words == []

    asyncio.run(main())


def test_other_ranks_hear_from_an_engine_that_nobody_listens_to_yet():
    engine = make_engine()
    loop = EngineLoop(lambda: engine, now=time.monotonic, messages_per_s=1e6, heartbeat_s=0.01)
    while not engine.runner.words:
        pass
    loop.stop()
    assert engine.runner.words[-1] == "stop"


def test_closing_a_stream_aborts_its_request():
    async def main():
        gate = threading.Event()

        def fault(point, plan):
            if point == "build" and plan.step > 2:
                assert gate.wait(30)

        async with running(fault=fault, max_model_len=10_000, blocks=3000) as loop:
            stream = loop.stream(make_request("r", [1], 9000))
            assert isinstance(await anext(stream), messages.Accepted)
            await stream.aclose()
            gate.set()
            await loop.call(lambda: None)
            counts = loop.engine.scheduler.pools[0].counts()
            assert counts.active == counts.pinned == 0
            assert not loop.engine.requests

    asyncio.run(main())


@pytest.mark.parametrize(("error", "ends"), [(ValueError, False), (EngineDead, True)])
def test_work_that_finds_the_device_dead_ends_the_engine(error, ends):
    async def main():
        async with running() as loop:

            def work():
                raise error("found between steps")

            with pytest.raises(error, match="found between steps"):
                await loop.call(work)
            loop.stop()
            assert isinstance(loop.failure, EngineDead) == ends

    asyncio.run(main())


def test_a_choice_may_be_aborted_while_others_go_on():
    async def main():
        gate = threading.Event()

        def fault(point, plan):
            if point == "build" and plan.step > 3:
                assert gate.wait(30)

        async with running(fault=fault) as loop:
            request = make_request("r", [1, 2], 30, generated=((),) * 3)
            stream = loop.stream(request)
            events = [await anext(stream)]
            aborts = asyncio.gather(loop.abort("r", 1), loop.abort("r", 7), loop.abort("x", 0))
            await asyncio.sleep(0)
            gate.set()
            assert await aborts == [True, False, False]
            events += [event async for event in stream]
            finishes = {e.choice: e for e in events if isinstance(e, messages.Finish)}
            reasons = {choice: e.reason for choice, e in finishes.items()}
            assert reasons == {0: "length", 1: "abort", 2: "length"}
            assert finishes[1].generated_tokens < 30
            for choice in (0, 2):
                assert tokens(e for e in events if getattr(e, "choice", -1) == choice) == (
                    expected([1, 2], 30)
                )
            assert not loop._boxes
            assert loop._choices == 0

    asyncio.run(main())


def test_an_abort_from_elsewhere_ends_the_stream():
    async def main():
        gate = threading.Event()
        async with running(fault=lambda point, plan: gate.wait(30) and None) as loop:
            stream = loop.stream(make_request("r", [1], 30, generated=((),) * 2))
            assert isinstance(await anext(stream), messages.Accepted)
            abort = asyncio.ensure_future(loop.abort("r"))
            await asyncio.sleep(0)
            gate.set()
            assert await abort
            assert [e.reason async for e in stream if isinstance(e, messages.Finish)] == [
                "abort"
            ] * 2

    asyncio.run(main())


def test_silence_is_marked(monkeypatch):
    monkeypatch.setattr(loops, "KEEP_ALIVE_S", 0.001)

    async def main():
        gate = threading.Event()
        async with running(fault=lambda point, plan: gate.wait(30) and None) as loop:
            stream = loop.stream(make_request("r", [1], 3))
            while isinstance(event := await anext(stream), messages.KeepAlive):
                pass
            assert isinstance(event, messages.Accepted)
            assert isinstance(await anext(stream), messages.KeepAlive)
            gate.set()
            assert tokens([e async for e in stream]) == expected([1], 3)

    asyncio.run(main())


def test_a_call_runs_between_steps_and_brings_errors_back():
    async def main():
        async with running() as loop:
            assert await loop.call(lambda: threading.current_thread().name) == "engine"
            with pytest.raises(ZeroDivisionError):
                await loop.call(lambda: 1 / 0)

    asyncio.run(main())


def test_a_dead_engine_ends_every_stream_and_says_so():
    async def main():
        def fault(point, plan):
            raise KeyboardInterrupt("the device is gone")

        async with running(fault=fault) as loop:
            events = await collect(loop, make_request("r", [1], 3))
            assert isinstance(events[-1], messages.Error)
            assert (events[-1].code, events[-1].status) == ("worker_lost", 503)
            assert isinstance(loop.failure, KeyboardInterrupt)
            late = await collect(loop, make_request("late", [1], 3))
            assert isinstance(late[-1], messages.Error)

    asyncio.run(main())


def test_an_id_in_use_is_rejected_and_its_owner_undisturbed():
    async def main():
        async with running() as loop:
            first = loop.stream(make_request("same", [1], 20))
            assert isinstance(await anext(first), messages.Accepted)
            (event,) = await collect(loop, make_request("same", [2], 20))
            assert isinstance(event, messages.Rejected)
            assert tokens([e async for e in first]) == expected([1], 20)

    asyncio.run(main())


def test_an_outbox_joins_deltas_of_one_choice_only():
    async def main():
        box = Outbox()
        box.put(messages.Delta(0, [1], [messages.TokenLogprob(-1.0, [])]))
        box.put(messages.Delta(0, [2], [messages.TokenLogprob(-2.0, [])]))
        box.put(messages.Delta(1, [3]))
        box.put(messages.Delta(0, [5], [messages.TokenLogprob(-3.0, [])]))
        assert not box.urgent.is_set()
        box.put(messages.Finish(1, "stop", 1, 0, 2, tokens=[4]))
        assert box.urgent.is_set()
        first, second = box.take()
        assert (first.tokens, len(first.logprobs)) == ([1, 2, 5], 3)
        assert (second.tokens, second.reason) == ([3, 4], "stop")
        assert box.take() == []
        box.put(messages.Delta(0, [6], [messages.TokenLogprob(-4.0, [])]))
        box.put(messages.Accepted("r", 1))
        assert [type(e) for e in box.take(fine=False)] == [messages.Accepted]
        box.put(messages.Error("engine_error", "", 500))
        assert [type(e) for e in box.take()] == [messages.Delta, messages.Error]

    asyncio.run(main())


def test_an_outbox_copies_a_token_once_however_long_nobody_takes_it(monkeypatch):
    async def main():
        box, steps = Outbox(), 1000
        for token in range(steps):
            box.put(messages.Delta(0, [token]))
        box.put(messages.Finish(0, "length", 1, 0, steps + 1, tokens=[steps]))
        (event,) = box.take(fine=False)
        assert event.tokens == list(range(steps + 1))
        assert joins == [steps + 1]

    joins = []
    replace = loops.replace
    monkeypatch.setattr(
        loops, "replace", lambda e, **new: joins.append(len(new["tokens"])) or replace(e, **new)
    )
    asyncio.run(main())


def test_no_message_grows_without_bound():
    """14,000 tokens with 20 log-probabilities each were one message of more than 4 MiB."""

    async def main():
        box, steps = Outbox(), 2000
        entry = messages.TokenLogprob(-1.0, [(i, -1.0) for i in range(20)])
        sent = []
        for token in range(steps):
            assert not box.urgent.is_set()
            box.put(messages.Delta(0, [token], [entry]))
            if box.urgent.is_set():  # also for one who takes no deltas
                sent += box.take(fine=False)
        box.put(messages.Finish(0, "length", 1, 0, steps, logprobs=[]))
        sent += box.take(fine=False)
        assert [type(e) for e in sent] == [messages.Delta] * 9 + [messages.Finish]
        assert tokens(sent) == list(range(steps))
        assert sum(len(e.logprobs) for e in sent) == steps
        assert max(map(messages.values, sent)) <= messages.VALUES_MAX + 37
        for token in range(steps):  # and for one who is slow
            box.put(messages.Delta(0, [token], [entry]))
        sent = box.take()
        assert tokens(sent) == list(range(steps))
        assert max(map(messages.values, sent)) <= messages.VALUES_MAX + 37

    asyncio.run(main())
