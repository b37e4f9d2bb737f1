from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.errors import ApiError
from cluster.http import text as text_module
from cluster.http.text import (
    INLINE_CHARACTERS,
    MAX_PENDING,
    THREADS,
    Decoder,
    Detokenizer,
    StopMatcher,
    TextService,
    load_tokenizer,
)
from cluster.http.threads import LoopTurns
from tests.cluster import tokens
from tests.cluster.fakes import MAX_MODEL_LEN
from tests.cluster.http.test_openai import served

KINDS = ("byte_level", "byte_parts", "byte_fallback")
HALF = "\N{REPLACEMENT CHARACTER}"
emoji = st.sampled_from("aé漢😀👩‍👩‍👧🇩🇪 \n")
texts = st.lists(st.one_of(emoji, st.characters(exclude_categories=["Cs"])), max_size=40).map(
    "".join
)


def decode(kind: str, ids: Sequence[int], skip: bool = True) -> str:
    backend = tokens.wrapped(kind).backend_tokenizer
    text: str = backend.decode(list(ids), skip_special_tokens=skip)
    return text


@cache
def decoder(kind: str, skip: bool = True) -> Decoder:
    service = TextService(tokens.wrapped(kind), LoopTurns())
    service.close()
    return service.decoder(skip_special=skip)


def encode(kind: str, text: str) -> list[int]:
    ids: list[int] = tokens.wrapped(kind).backend_tokenizer.encode(text).ids
    return ids


def cut(draw: st.DrawFn, length: int) -> list[slice]:
    points = draw(st.lists(st.integers(0, length), max_size=length + 2) | st.just(range(length)))
    edges = sorted({0, length, *points})
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@st.composite
def in_pieces(draw: st.DrawFn, whole: st.SearchStrategy[Any]) -> tuple[Any, list[slice]]:
    value = draw(whole)
    return value, cut(draw, len(value))


def streamed(
    kind: str, ids: list[int], cuts: list[slice], context: Sequence[int] = (), skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(decoder(kind, skip), context)
    pieces = [detokenizer.push(ids[part]) for part in cuts]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=texts, data=st.data())
def test_pieces_of_text_join_to_the_text_and_hold_no_half_character(
    kind: str, text: str, data: st.DataObject
) -> None:
    ids = encode(kind, text.replace(HALF, "?"))
    pieces = streamed(kind, ids, data.draw(st.composite(cut)(len(ids))))
    assert "".join(pieces) == decode(kind, ids)
    assert HALF not in "".join(pieces)
    assert pieces[-1] == ""  # a whole text leaves nothing behind


SPECIAL, BEYOND = range(tokens.EOS, tokens.VOCAB), tokens.VOCAB + 5
ONE, ANOTHER = encode("byte_level", "é")
HALVES = [ONE, *range(tokens.EOS, tokens.EOS + 2), tokens.VOCAB + 9, ANOTHER]
CHAIN = [ONE, *[259] * 9, ANOTHER]  # the end of a character and the beginning of the next


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "byte_parts"])
@settings(max_examples=100)
@given(case=in_pieces(st.lists(st.integers(0, 255) | st.integers(256, 270), max_size=80)))
@example(case=(HALVES, [slice(i, i + 1) for i in range(5)]))
@example(case=(CHAIN, [slice(i, i + 1) for i in range(11)]))
def test_any_bytes_come_out_as_the_decoder_shows_them_however_they_were_cut(
    kind: str, skip: bool, case: tuple[list[int], list[slice]]
) -> None:
    ids, cuts = case
    assert "".join(streamed(kind, ids, cuts, skip=skip)) == decode(kind, ids, skip)


@settings(max_examples=200)
@given(case=in_pieces(st.lists(st.integers(0, 275), max_size=80)))
def test_bytes_that_are_no_text_are_the_same_marks_however_they_were_cut(
    case: tuple[list[int], list[slice]],
) -> None:
    """The decoder shows a whole run of them as marks, what was sent before it is seen is not."""
    ids, cuts = case
    one_by_one = [slice(i, i + 1) for i in range(len(ids))]
    pieces = streamed("byte_fallback", ids, cuts)
    assert "".join(pieces) == "".join(streamed("byte_fallback", ids, one_by_one))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_keeps_the_space_that_joins_it_to_the_prompt(kind: str) -> None:
    prompt, rest = encode(kind, "hello"), encode(kind, "hello world")
    answer = rest[len(prompt) :]
    assert "".join(streamed(kind, answer, [slice(0, len(answer))], prompt)) == " world"


def test_half_a_character_at_the_end_of_the_prompt_is_completed_by_the_answer() -> None:
    ids = encode("byte_level", "x😀y")
    assert "".join(streamed("byte_level", ids[3:], [slice(0, 99)], ids[:3])) == "😀y"


def test_detokenising_looks_at_a_bounded_window() -> None:
    longest = 0

    def watching(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode("byte_level", ids)

    broken = encode("byte_level", "😀")[1:2] * 5000  # never a character, always perhaps one
    detokenizer = Detokenizer(Decoder(watching))
    out = "".join(detokenizer.push([token]) for token in broken) + detokenizer.flush()
    assert out == HALF * 5000
    assert longest < 20


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Looks at every beginning of the text, the way a reader would."""
    for end in range(1, len(text) + 1):
        ends = [s for s in stops if text[:end].endswith(s)]
        if ends:
            longest = max(ends, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


few = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=500)
@given(
    case=in_pieces(st.text(alphabet="abc", max_size=30)),
    stops=st.lists(few, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_cut_where_a_reader_would_whatever_the_pieces(
    case: tuple[str, list[slice]], stops: list[str], include: bool
) -> None:
    text, cuts = case
    expected, stop = reference(text, stops, include)
    matcher = StopMatcher(stops, include=include)
    out = ""
    for part in cuts:
        out += matcher.push(text[part])
        assert expected.startswith(out)  # what was sent is never taken back
        if matcher.matched:
            break
        # Nothing more than needed stays back: it is the longest possible beginning of a stop.
        seen = text[: part.stop]
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert matcher.held == held
    out += matcher.flush()
    assert (out, matcher.matched) == (expected, stop)


def test_a_stop_string_in_a_long_text_is_found_quickly() -> None:
    matcher = StopMatcher(["x" * 256], include=False)
    assert len(matcher.push("y" * 2_000_000)) == 2_000_000
    assert matcher.push("x" * 300) == ""
    assert matcher.matched == "x" * 256


@pytest.fixture
def service() -> Iterator[TextService]:
    made = TextService(tokens.wrapped(), LoopTurns())
    yield made
    made.close()


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_short_and_long_texts_have_the_same_tokens(service: TextService) -> None:
    long = "".join(random.Random(1).choices("aé漢😀 ", k=INLINE_CHARACTERS + 1))
    assert run(service.encode([long])) == [encode("byte_level", long)]
    assert run(service.encode(["hé", ""])) == [encode("byte_level", "hé"), []]


def test_a_conversation_becomes_tokens_of_the_template(service: TextService) -> None:
    ids = run(service.encode_chat([{"role": "user", "content": "hi"}]))
    assert tokens.wrapped().decode(ids) == "<|user|>hi<|end|><|assistant|>"
    ids = run(
        service.encode_chat(
            [{"role": "user", "content": "hi"}],
            add_generation_prompt=False,
            variables={"shout": "!"},
        )
    )
    assert tokens.wrapped().decode(ids) == "<|user|>hi<|end|>!"


def test_special_tokens_written_in_a_text_are_special(service: TextService) -> None:
    assert run(service.encode(["<|end|>"])) == [[tokens.EOS]]


@pytest.mark.parametrize(
    "error", ["none.x.y", "1 / 0", "{}['a']['b']", "1 + 'a'", "raise_exception('no')"]
)
def test_what_a_template_stumbles_over_is_a_400(error: str) -> None:
    tokenizer = tokens.wrapped()
    service = TextService(tokenizer, LoopTurns())
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ " + error + " }}"
    try:
        with pytest.raises(ApiError, match="the model's chat template refuses this") as refused:
            run(service.encode_chat([{"role": "user", "content": "hi"}]))
    finally:
        tokenizer.chat_template = before
        service.close()
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_client_sets_nothing_that_the_server_tells_the_template(service: TextService) -> None:
    for name in ("add_generation_prompt", "tokenize", "conversation", "chat_template", "messages"):
        with pytest.raises(ApiError, match=f"may not set {name}") as refused:
            run(service.encode_chat([{"role": "user", "content": "hi"}], variables={name: 1}))
        assert refused.value.param == "chat_template_kwargs"


def test_what_the_template_refuses_is_a_400(service: TextService) -> None:
    with pytest.raises(ApiError, match="a conversation starts with the user") as error:
        run(service.encode_chat([{"role": "assistant", "content": "hi"}]))
    assert (error.value.status, error.value.param) == (400, "messages")


def test_lone_surrogates_are_a_400(service: TextService) -> None:
    with pytest.raises(ApiError, match="lone surrogate at character 1") as error:
        run(service.encode(["a\ud800"]))
    assert error.value.status == 400


def test_more_long_texts_than_the_queue_holds_are_a_429(service: TextService) -> None:
    long = "x" * (INLINE_CHARACTERS + 1)

    async def burst() -> list[Any]:
        calls = (service.encode([long]) for _ in range(MAX_PENDING + 3))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = run(burst())
    refused = [a for a in answers if isinstance(a, ApiError)]
    assert [r.status for r in refused] == [429] * 3
    assert refused[0].headers() == {"retry-after": "1"}
    assert len([a for a in answers if isinstance(a, list)]) == MAX_PENDING


def test_a_text_that_no_sequence_holds_is_not_tokenised(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MiB of digits took 131 times their size in memory before they were counted."""
    most = MAX_MODEL_LEN * max(map(len, tokens.wrapped().get_vocab()))
    assert run(service.encode(["x" * most], served=served()))
    monkeypatch.setattr(service, "_backend", object())  # tokenises nothing
    message = {"role": "user", "content": "x" * (most + 1)}
    for work in (
        lambda: service.encode(["x" * (most + 1)], served=served()),
        lambda: service.encode_chat([message], served=served()),
    ):
        with pytest.raises(ApiError, match=r"has \d+ characters, .*model.max_model_len") as error:
            run(work())
        assert error.value.code == "context_length_exceeded"
        assert error.value.param in ("prompt", "messages")


def test_many_texts_are_tokenised_a_few_at_a_time(
    service: TextService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BATCH_CHARACTERS", 10)
    texts = ["aaaa", "bbbb", "cc", "", "d" * 25, "e"]
    assert list(text_module._batches(texts)) == [["aaaa", "bbbb", "cc", ""], ["d" * 25], ["e"]]
    assert run(service.encode(texts)) == [encode("byte_level", text) for text in texts]


HALF_MEGABYTE = ("The pages of this book, 37 of them, are scattered. " * 10_000)[:500_000]
LONG_WORK = {
    "one text": lambda s: s.encode([HALF_MEGABYTE]),
    "one message": lambda s: s.encode_chat([{"role": "user", "content": HALF_MEGABYTE}]),
    "many messages": lambda s: s.encode_chat(
        [{"role": "user", "content": HALF_MEGABYTE[i : i + 125]} for i in range(0, 500_000, 125)]
    ),
    "messages of nothing": lambda s: s.encode_chat([{"role": "user", "content": ""}] * 4000),
    "a long name": lambda s: s.encode_chat(
        [{"role": "user", "content": "", "name": HALF_MEGABYTE}]
    ),
    "a variable": lambda s: s.encode_chat(
        [{"role": "user", "content": ""}], variables={"shout": HALF_MEGABYTE}
    ),
    "tokens": lambda s: s.decode(list(range(256)) * 400),
}


@pytest.mark.parametrize("work", LONG_WORK)
def test_long_work_is_done_off_the_event_loop(work: str, service: TextService) -> None:
    """While all threads hang in such work, short texts pass."""
    entered, go_on = threading.Semaphore(0), threading.Event()
    submit = service.threads._pool.submit

    def hanging(function: Any) -> Any:
        def hang() -> Any:
            entered.release()
            assert go_on.wait(60)
            return function()

        return submit(hang)

    service.threads._pool.submit = hanging  # type: ignore[method-assign, assignment]

    async def others_pass() -> Any:
        tasks = [asyncio.create_task(LONG_WORK[work](service)) for _ in range(THREADS + 1)]
        for _ in range(THREADS):
            await asyncio.to_thread(entered.acquire)
        try:
            assert await service.encode(["short"]) == [encode("byte_level", "short")]
            assert await service.encode_chat([{"role": "user", "content": "hi"}])
            assert not any(task.done() for task in tasks)
        finally:
            go_on.set()
        first, *others = await asyncio.gather(*tasks)
        assert others == [first] * THREADS
        return first

    assert run(others_pass())


@pytest.mark.parametrize("work", LONG_WORK)
def test_a_long_text_is_rendered_and_tokenised_in_no_thread_that_turns_a_loop(
    work: str, service: TextService
) -> None:
    """Each step of it, wherever it is called from; a short one needs no thread."""
    seen: dict[str, set[str]] = {}

    def watched(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.setdefault(name, set()).add(threading.current_thread().name.rstrip("0123456789"))
            return genuine(*arguments, **options)

        return call

    class Backend:
        genuine = service._backend

        def __getattr__(self, method: str) -> Any:
            return watched(method, getattr(self.genuine, method))

    service._backend = Backend()
    for name in ("_render", "_encode"):
        setattr(service, name, watched(name, getattr(service, name)))
    assert run(LONG_WORK[work](service))
    steps = {"tokens": {"decode_batch"}}.get(work, {"_encode", "encode_batch_fast"})
    assert seen.keys() >= steps
    assert set().union(*seen.values()) == {"long_"}
    seen.clear()
    assert run(service.encode_chat([{"role": "user", "content": "hi"}]))
    assert seen.keys() >= {"_render", "_encode"}
    assert set().union(*seen.values()) == {threading.current_thread().name.rstrip("0123456789")}


@pytest.mark.parametrize("work", ["one message", "many messages", "tokens"])
def test_the_event_loop_turns_while_long_texts_are_tokenised(
    work: str, service: TextService, record_property: Callable[[str, object], None]
) -> None:
    """The tokenizer releases the interpreter lock: the loop turns between its begin and its end.
    The longest time between two turns is shown (-rA), and held by nothing: it is the machine's too.
    """
    turns, during = 0, 0
    name = "decode_batch" if work == "tokens" else "encode_batch_fast"
    genuine = getattr(service._backend, name)

    class Watched:
        def __getattr__(self, method: str) -> Any:
            return watched if method == name else getattr(genuine.__self__, method)

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal during
        before = turns
        out = genuine(*arguments, **options)
        during += turns - before
        return out

    async def gap_s() -> float:
        nonlocal turns
        service._backend = Watched()
        task = asyncio.create_task(LONG_WORK[work](service))
        longest_s, last_s = 0.0, time.perf_counter()
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert await task
        return longest_s

    gap_ms = run(gap_s()) * 1e3
    record_property("gap_ms_max", gap_ms)
    print(f"{work}: longest gap of the event loop {gap_ms:.1f} ms, {during} turns meanwhile")
    assert during > 20


@pytest.mark.parametrize(
    ("kind", "token", "shown", "raw"),
    [
        ("byte_level", "a", "a", b"a"),
        ("byte_level", "Ġ", " ", b" "),
        ("byte_level", "ð", "bytes:\\xf0", b"\xf0"),
        ("byte_level", "<|end|>", "<|end|>", b"<|end|>"),
        ("byte_fallback", "▁w", " w", b" w"),
        ("byte_fallback", "w", "w", b"w"),
        ("byte_fallback", "<0xE2>", "bytes:\\xe2", b"\xe2"),
        ("byte_fallback", "<0x0A>", "\n", b"\n"),
    ],
)
def test_a_token_by_itself_shows_its_text_and_bytes(
    kind: str, token: str, shown: str, raw: bytes
) -> None:
    tokenizer = tokens.wrapped(kind)
    service = TextService(tokenizer, LoopTurns())
    assert service.token(tokenizer.convert_tokens_to_ids(token)) == (shown, raw)
    service.close()


def test_ids_beyond_the_tokenizer_are_no_text(service: TextService) -> None:
    assert service.token(10_000) == ("", b"")
    assert service.decoder(skip_special=True)([10_000]) == ""


def test_special_tokens_are_skipped_where_asked(service: TextService) -> None:
    ids = [*encode("byte_level", "a"), tokens.EOS]
    assert service.decoder(skip_special=True)(ids) == "a"
    assert service.decoder(skip_special=False)(ids) == "a<|end|>"


def test_a_tokenizer_that_would_cut_texts_is_told_not_to(tmp_path: Path) -> None:
    file = tokens.save(tmp_path) / "tokenizer.json"
    body = json.loads(file.read_text())
    body["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    file.write_text(json.dumps(body))
    service = TextService(load_tokenizer(tmp_path), LoopTurns())
    assert len(run(service.encode(["abcdef"]))[0]) == 6
    service.close()


def test_a_plain_tokenizer_is_loaded_as_transformers_would(tmp_path: Path) -> None:
    loaded = load_tokenizer(tokens.save(tmp_path))
    assert loaded.chat_template == tokens.TEMPLATE
    assert loaded.encode("hé<|end|>") == tokens.wrapped().encode("hé<|end|>")
