"""The speculation benchmark on a model so small that its figures mean nothing but its way does."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import bench_speculation
from tests.worker.fake import VOCAB, expected, make_engine, next_token
from tests.worker.guessing import Told, guessing
from worker.params import NO_SPECULATION, PROMPT_LOOKUP


def made(options: Any) -> Any:
    scheme = guessing(lambda: Told(next_token, VOCAB, 0.2))
    engine = make_engine(batch_tokens=64, seqs=4, max_model_len=60, speculation=scheme)
    tokenizer = SimpleNamespace(apply_chat_template=lambda chat, **_: [len(str(chat)) % VOCAB] * 5)
    return engine, tokenizer, {"model": "fake", "tokens": options.tokens}


def test_both_ways_answer_alike_and_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_speculation, "make", made)
    arguments = "--concurrency 1 3 --requests 2 --tokens 20 --rounds 2"
    assert bench_speculation.main(arguments.split()) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["concurrency"], r["requests"]) for r in figures["results"]] == [(1, 2), (3, 3)]
    for result in figures["results"]:
        assert result["same_answers"] == 1.0
        assert 0.3 < result["right"] < 1.0
        quotient = result["guessed_tokens_per_s"] / result["plain_tokens_per_s"]
        assert result["ratio"] == pytest.approx(quotient, rel=1e-2)


@pytest.mark.parametrize("method", [NO_SPECULATION, PROMPT_LOOKUP])
def test_a_turn_answers_every_request(method: str) -> None:
    engine, _, _ = made(SimpleNamespace(tokens=12))
    asked = [[i] * 6 for i in range(5)]
    turn = bench_speculation.run(engine, asked, 2, 12, method)
    assert turn.answers == tuple(tuple(expected(prompt, 12)) for prompt in asked)
    assert (engine.scheduler.speculation.stats.drafts > 0) == (method == PROMPT_LOOKUP)


def test_paragraphs_are_plain_text_of_the_pages() -> None:
    texts = bench_speculation.paragraphs()
    assert len(texts) >= 32
    assert len(set(texts)) == len(texts)
    assert all("\n" not in text and not text.startswith("|") for text in texts)


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench_speculation.main(["--rounds", "0"])
    assert end.value.code == 2
    assert "start at 1" in capsys.readouterr().err
