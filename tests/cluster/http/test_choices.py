from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.http.choices import Choice, Echo, Piece
from cluster.http.openai import CompletionRequest
from tests.cluster import tokens
from tests.cluster.fakes import ids_of
from tests.cluster.http.test_text import decoder
from worker import messages

PROMPT = ids_of("hi")
MARK = "\N{REPLACEMENT CHARACTER}"


decode = decoder("byte_level")


def choice(
    *, stops: Sequence[str] = (), include_stop: bool = False, scored: bool = False, **options: Any
) -> Choice:
    request = CompletionRequest(
        prompt="hi",
        stop=list(stops),
        include_stop_str_in_output=include_stop,
        logprobs=0 if scored else None,
        **{"return_token_ids": True, **options},
    )
    return Choice(0, PROMPT, decode, request)


def scores(ids: Sequence[int]) -> list[messages.TokenLogprob]:
    return [messages.TokenLogprob(-float(token), []) for token in ids]


def finish(ids: Sequence[int], *, reason: str = "stop", stop: int | None = None) -> messages.Finish:
    return messages.Finish(0, reason, len(PROMPT), 0, len(ids), stop, list(ids), scores(ids))


def take(made: Choice) -> Piece:
    piece = made.take()
    assert piece is not None
    return piece


def test_there_is_nothing_to_take_until_something_came() -> None:
    made = choice()
    assert made.take() is None
    made.add([], None)
    assert made.take() is None


def test_deltas_that_nobody_took_are_one_piece() -> None:
    made = choice()
    made.add(ids_of("ab"), None)
    made.add(ids_of("c"), None)
    assert take(made) == Piece("abc", ids_of("abc"), [])
    assert made.take() is None


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_tokens_that_no_answer_shows_are_not_kept(stops: list[str]) -> None:
    """100 bytes each: an answer of 16 choices of 131,072 tokens would be 200 MiB."""
    made = choice(stops=stops, return_token_ids=False)
    made.add(ids_of("ab"), None)
    made.finish(finish(ids_of("c")))
    assert made.held == 0
    assert take(made) == Piece("abc", [], [], "stop")


def test_the_finish_is_reported_once_with_the_last_text() -> None:
    made = choice()
    made.finish(finish([*ids_of("ab"), tokens.EOS], stop=tokens.EOS))
    piece = take(made)
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("ab", "stop", None)
    assert piece.tokens == [*ids_of("ab"), tokens.EOS]
    assert made.generated_tokens == 3
    assert made.take() is None


def test_half_a_character_at_the_end_is_a_mark() -> None:
    made = choice()
    made.add(ids_of("é")[:1], None)
    assert take(made).text == ""
    made.finish(messages.Finish(0, "length", 2, 0, 1))
    assert take(made).text == MARK


def test_tokens_and_scores_wait_for_their_text_to_be_decided() -> None:
    made = choice(stops=["bcX"], scored=True)
    ids = ids_of("abc")
    made.add(ids, scores(ids))
    piece = take(made)
    assert (piece.text, piece.tokens) == ("a", ids_of("a"))
    assert [(s.token, s.offset) for s in piece.scored] == [(ids[0], 0)]
    assert made.take() is None
    more = ids_of("d")
    made.add(more, scores(more))
    piece = take(made)
    assert (piece.text, piece.tokens) == ("bcd", ids_of("bcd"))
    assert [s.offset for s in piece.scored] == [1, 2, 3]


def test_what_a_stop_string_cuts_off_is_in_no_list() -> None:
    made = choice(stops=["bc"], scored=True)
    ids = ids_of("abcd")
    made.add(ids, scores(ids))
    piece = take(made)
    assert (piece.text, piece.tokens, len(piece.scored)) == ("a", ids_of("a"), 1)
    assert (piece.finish_reason, piece.stop_reason) == ("stop", "bc")
    assert made.generated_tokens == 3  # b and c were made, d came after the end
    kept = choice(stops=["bc"], include_stop=True, scored=True)
    kept.add(ids, scores(ids))
    assert take(kept).tokens == ids_of("abc")


def test_the_first_tokens_cannot_stop_an_answer() -> None:
    made = choice(stops=["b"], min_tokens=3)
    made.add(ids_of("abbb"), None)
    assert take(made).text == "abb"
    assert made.finish_reason == "stop"


def test_the_token_that_stopped_is_text_only_where_asked() -> None:
    stop = ids_of("c")[0]
    for include, text in ((False, "ab"), (True, "abc")):
        made = choice(include_stop=include, stop_token_ids=[stop])
        made.finish(finish(ids_of("abc"), stop=stop))
        piece = take(made)
        assert (piece.text, piece.stop_reason) == (text, stop)
        assert piece.tokens == ids_of("abc")


def test_an_echo_comes_first_and_shifts_the_offsets() -> None:
    made = choice(scored=True)
    entries = [None, messages.PromptLogprob(-1.0, 1, [])]
    echo = Echo(PROMPT, decode)
    made.echo_scored(*echo.push(messages.PromptLogprobs(0, entries[:1])))
    made.echo_scored(*echo.push(messages.PromptLogprobs(1, entries[1:])))
    ids = ids_of("aé")[:2] + ids_of("é")[1:]
    made.add(ids[:2], scores(ids[:2]))
    # Another worker scores the prompt again, of which nothing is news.
    made.echo_scored(*echo.push(messages.PromptLogprobs(2, [])))
    made.add(ids[2:], scores(ids[2:]))
    piece = take(made)
    assert piece.text == "hiaé"
    assert [(s.offset, s.entry) for s in piece.scored[:2]] == [(0, None), (1, entries[1])]
    assert [s.offset for s in piece.scored[2:]] == [2, 3, 3]


def spelled(kind: str, text: str) -> list[int]:
    ids: list[int] = tokens.wrapped(kind).encode(text, add_special_tokens=False)
    return ids


@dataclass(frozen=True)
class Case:
    """An answer as a worker gives it, and how the ingress may see it."""

    kind: str
    prompt: list[int]
    ids: list[int]
    stops: list[str] = field(default_factory=list)
    skip: bool = True
    include: bool = False
    echo: bool = False
    scored: bool = True
    min_tokens: int = 0
    ended_by: int | None = None  # a stop token behind `ids`
    cuts: list[int] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)


PIECES = {
    kind: [*spelled(kind, "aé→😀b "), *tokens.wrapped(kind).added_tokens_decoder, 9999,
           *(range(256, 262) if kind == "byte_parts" else ())]
    for kind in ("byte_level", "byte_parts", "byte_fallback")
}  # fmt: skip
STOPS = ["→", "é", "b→", "a", "ab", "😀b", " →", "<|end|>", MARK, "xa"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from([*PIECES]))
    some = st.lists(st.sampled_from(PIECES[kind]), max_size=12)
    whole = st.lists(st.sampled_from([[one] for one in PIECES[kind]] + [
        spelled(kind, text) for text in ("→", "é", "😀b", "b→a")
    ]), max_size=8).map(lambda parts: [*itertools.chain(*parts)])  # fmt: skip
    return Case(
        kind,
        prompt=draw(whole | some) or spelled(kind, "a"),
        ids=draw(whole | some),
        stops=draw(st.lists(st.sampled_from(STOPS), max_size=2)),
        skip=draw(st.booleans()),
        include=draw(st.booleans()),
        echo=draw(st.booleans()),
        scored=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        ended_by=draw(st.none() | st.sampled_from(PIECES[kind])),
        cuts=draw(st.lists(st.integers(1, 4), max_size=30)),
        taken=draw(st.lists(st.booleans(), max_size=30)),
    )


def told(case: Case) -> tuple[Choice, list[Piece]]:
    """What a client is told in the end, and what it was told on the way."""
    decode = decoder(case.kind, case.skip)
    request = CompletionRequest(
        prompt="",
        stop=case.stops,
        include_stop_str_in_output=case.include,
        logprobs=0 if case.scored else None,
        min_tokens=case.min_tokens,
        return_token_ids=True,
    )
    made, pieces = Choice(0, case.prompt, decode, request), list[Piece | None]()
    takes = iter(case.taken)
    if case.echo and case.scored:
        entries = [None, *(messages.PromptLogprob(-float(t), 1, []) for t in case.prompt[1:])]
        echo = Echo(case.prompt, decode)
        for message in (
            messages.PromptLogprobs(0, entries[:1]),
            messages.PromptLogprobs(1, entries[1:]),
        ):
            made.echo_scored(*echo.push(message))
            pieces += [made.take()] if next(takes, False) else []
    elif case.echo:
        made.echo(decode.whole(case.prompt))
    at = 0
    for cut in case.cuts:
        part = case.ids[at : at + cut]
        made.add(part, scores(part) if case.scored else None)
        at += cut
        pieces += [made.take()] if next(takes, False) else []
        if made.finish_reason:
            break
    else:
        last = [*case.ids[at:], *([] if case.ended_by is None else [case.ended_by])]
        count = len(case.ids) + (case.ended_by is not None)
        why = "length" if case.ended_by is None else "stop"
        logprobs = scores(last) if case.scored else None
        prompt = len(case.prompt)
        made.finish(messages.Finish(0, why, prompt, 0, count, case.ended_by, last, logprobs))
    pieces.append(made.take())
    return made, [piece for piece in pieces if piece is not None]


def joined(case: Case) -> tuple[Any, ...]:
    made, pieces = told(case)
    return (
        "".join(p.text for p in pieces),
        [t for p in pieces for t in p.tokens],
        [s for p in pieces for s in p.scored],
        [p.finish_reason for p in pieces if p.finish_reason],
        made.stop_reason,
        made.generated_tokens,
    )


def case(kind: str, text: str, *stops: str, **options: Any) -> Case:
    return Case(kind, spelled(kind, "b"), spelled(kind, text), list(stops), **options)


CHAIN = [*spelled("byte_level", "é")[:1], *[259] * 5, *spelled("byte_level", "éa")[1:]]
FOUND = [
    case("byte_level", "aé", "é", cuts=[2], taken=[True], scored=False),
    case("byte_level", "a<|user|>→", "→", cuts=[1] * 5, taken=[True] * 9),
    case("byte_level", "ab<|user|>→", "→x", cuts=[1] * 6, taken=[True] * 9, echo=True),
    Case("byte_level", spelled("byte_level", "a→")[:-1], spelled("byte_level", "→b")[-2:],
         echo=True, cuts=[1], taken=[True] * 4),
    Case("byte_fallback", [3], [*spelled("byte_fallback", "é")[1:], 268, 3], cuts=[1, 1],
         taken=[True] * 4),
    Case("byte_level", [64], [*spelled("byte_level", "é")[:1], 64], ended_by=tokens.EOS),
    Case("byte_level", [64], spelled("byte_level", "é")[:1], ended_by=tokens.EOS),
    Case("byte_parts", [64], CHAIN, ["éa"], cuts=[1] * 9, taken=[True] * 9),
    Case("byte_parts", CHAIN[:-2], [*CHAIN[-2:], 64], echo=True, cuts=[1] * 9, taken=[True] * 9),
]  # fmt: skip
"""What differed, or pointed at the wrong character."""


def examples(test: Any) -> Any:
    for found in FOUND:
        test = example(case=found)(test)
    return test


@settings(max_examples=150)
@given(case=cases())
@examples
def test_pieces_join_to_the_same_answer_however_they_were_cut_and_taken(case: Case) -> None:
    assert joined(case) == joined(replace(case, cuts=[], taken=[]))


@settings(max_examples=150)
@given(case=cases())
@examples
def test_text_tokens_offsets_and_ids_agree(case: Case) -> None:
    case = replace(case, scored=True)
    text, ids, scored, _, reason, _ = joined(case)
    decode, cut = decoder(case.kind, case.skip), reason in case.stops
    assert [s.token for s in scored] == ids
    before = case.prompt if case.echo else []
    every = [*before, *case.ids, *([] if case.ended_by is None else [case.ended_by])]
    assert ids == every[: len(ids)]
    assert cut or ids == every
    offsets = [s.offset for s in scored]
    assert offsets == sorted(offsets)
    if not case.echo and decode(case.prompt).endswith(MARK):
        return  # what the prompt's half character becomes may be no text of the answer
    shown = scored[:-1] if case.ended_by is not None and not cut and not case.include else scored
    for one in shown:
        own = decode([one.token])
        if case.kind == "byte_fallback" and decode([3, one.token]) == "a " + own:
            own = f" {own}" if one.offset else own  # only a text's first token loses its space
        if not decode.audible([one.token]) or one.empty:
            assert one.offset <= len(text)
        else:
            assert one.offset < len(text), one  # no token behind the cut
            if MARK not in own:
                assert own.startswith(text[one.offset :][: len(own)])
    if case.kind != "byte_fallback" and case.echo:
        whole = decode([s.token for s in shown])
        assert whole.startswith(text) if cut else whole == text
    plain = joined(replace(case, scored=False))
    assert (plain[0], plain[1]) == (text, ids)
