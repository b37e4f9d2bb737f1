from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.http.choices import Choice, Echo, Piece
from cluster.http.openai import CompletionRequest
from tests.cluster import tokens
from tests.cluster.fakes import ids_of
from worker import messages

PROMPT = ids_of("hi")


def decode(ids: Sequence[int]) -> str:
    text: str = tokens.wrapped().backend_tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


def choice(
    *, stops: Sequence[str] = (), include_stop: bool = False, scored: bool = False, **options: Any
) -> Choice:
    request = CompletionRequest(
        prompt="hi",
        stop=list(stops),
        include_stop_str_in_output=include_stop,
        logprobs=0 if scored else None,
        **options,
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
    assert take(made).text == "\N{REPLACEMENT CHARACTER}"


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
    ids = ids_of("ab")
    made.add(ids, scores(ids))
    piece = take(made)
    assert piece.text == "hiab"
    assert [(s.offset, s.entry) for s in piece.scored[:2]] == [(0, None), (1, entries[1])]
    assert [s.offset for s in piece.scored[2:]] == [2, 3]


@settings(max_examples=200)
@given(
    text=st.text(alphabet="abé", max_size=20),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=30),
    taken=st.lists(st.booleans(), max_size=30),
    scored=st.booleans(),
    include=st.booleans(),
)
@example(text="aé", stops=["é"], cuts=[2], taken=[True], scored=False, include=False)
def test_pieces_join_to_the_same_answer_however_they_were_cut_and_taken(
    text: str, stops: list[str], cuts: list[int], taken: list[bool], scored: bool, include: bool
) -> None:
    def answer(parts: list[list[int]], takes: list[bool]) -> tuple[Any, ...]:
        made = choice(stops=stops, include_stop=include, scored=scored)
        pieces = []
        for i, part in enumerate(parts):
            made.add(part, scores(part) if scored else None)
            if i < len(takes) and takes[i]:
                pieces.append(made.take())
            if made.finish_reason:
                break
        else:
            made.finish(messages.Finish(0, "length", 2, 0, len(ids)))
        pieces.append(made.take())
        told = [piece for piece in pieces if piece is not None]
        return (
            "".join(p.text for p in told),
            [t for p in told for t in p.tokens],
            [s for p in told for s in p.scored],
            [p.finish_reason for p in told if p.finish_reason],
            made.stop_reason,
            made.generated_tokens,
        )

    ids = ids_of(text)
    parts, at = [], 0
    for cut in cuts:
        parts.append(ids[at : at + cut])
        at += cut
    parts.append(ids[at:])
    assert answer(parts, taken) == answer([ids], [])
