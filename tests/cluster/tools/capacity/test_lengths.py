from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import UserError
from cluster.tools.capacity.lengths import LONGEST, draw, load, read

MOONCAKE = '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACE = Path(__file__).parents[4].parent / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "prompt", "answer"),
    [
        ("chat", 161.31, 337.99),
        ("instruction", 19.31, 58.45),
        ("chat:input=40,spread=0.5", 40, 337.99),
        ("uniform:input=100,output=10", 100, 10),
        ("fixed:input=7,output=3", 7, 3),
    ],
)
def test_a_distribution_has_the_means_it_promises(text: str, prompt: float, answer: float) -> None:
    lengths = draw(text, 40_000, seed=3)
    assert statistics.mean(lengths.inputs) == pytest.approx(prompt, rel=0.03)
    assert statistics.mean(lengths.outputs) == pytest.approx(answer, rel=0.03)
    assert min(*lengths.inputs, *lengths.outputs) >= 1


def test_a_seed_decides_and_the_kinds_spread() -> None:
    assert draw("chat", 50, 1) == draw("chat", 50, 1)
    assert draw("chat", 50, 1).inputs != draw("chat", 50, 2).inputs
    assert draw("chat", 50, 1).inputs[:20] == draw("chat", 20, 1).inputs
    assert max(draw("chat", 5000, 0).inputs) > 2000
    assert set(draw("uniform:input=3", 200, 0).inputs) == {1, 2, 3, 4, 5}
    assert len(set(draw("chat:spread=0", 50, 0).inputs)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "nothing", "", "no/such/file.jsonl", "chat:input", "chat:input=0", "chat:input=nan",
        "chat:input=1e9", "chat:spread=4", "chat:spread=-1", "fixed:spread=1", "chat:cake=1",
        "chat:input=1,,output=2", "chat:input=x",
    ],
)  # fmt: skip
def test_what_is_no_distribution_is_one_message(text: str) -> None:
    with pytest.raises(UserError, match=r"^--lengths "):
        load(text, 1, 0)


def test_mooncake_lines_are_read_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, MOONCAKE + "\n" + MOONCAKE.replace("6758", "12"))
    lengths = load(str(path), 1, 0)
    assert lengths.source == "trace.txt"
    assert lengths.inputs.tolist() == [6758, 12]
    assert lengths.outputs.tolist() == [500, 500]


def test_azure_lines_are_read_in_order(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.97,4808,10\r\n2023-11-16 18:17:04.03,3180,8\r\n"
    lengths = read(write(tmp_path, "\ufeff" + AZURE + rows))
    assert lengths.inputs.tolist() == [4808, 3180]
    assert lengths.outputs.tolist() == [10, 8]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("hello\n", "line 1"),
        ("\n\nhello\n", "line 3"),
        (MOONCAKE + "{\n", "line 2"),
        (MOONCAKE + "[" * 100_000 + "\n", "line 2"),
        (MOONCAKE + "[1]\n", "line 2"),
        (MOONCAKE + '{"input_length": 1}\n', "line 2"),
        (MOONCAKE + MOONCAKE.replace("500", "-1"), "line 2"),
        (MOONCAKE + MOONCAKE.replace("500", "true"), "line 2"),
        (MOONCAKE + MOONCAKE.replace("500", "1.5"), "line 2"),
        (MOONCAKE + MOONCAKE.replace("500", str(LONGEST + 1)), "line 2"),
        (AZURE + "t,1,2\nt,1\n", "line 3"),
        (AZURE + "t,1,x\n", "line 2"),
        (AZURE + "t,-1,1\n", "line 2"),
        (AZURE + "t,²,1\n", "line 2"),
        (AZURE, "no request"),
        ("", "no request"),
    ],
)
def test_the_first_wrong_line_is_named(tmp_path: Path, text: str, where: str) -> None:
    with pytest.raises(UserError, match=where):
        read(write(tmp_path, text))


def test_what_is_no_text_or_no_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="not a text file"):
        read(tmp_path / "binary")
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


@given(st.text(max_size=60))
def test_any_line_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    for start in ("", MOONCAKE, AZURE):
        path.write_text(start + text, encoding="utf-8")
        try:
            lengths = read(path)
        except UserError:
            continue
        assert len(lengths.inputs) == len(lengths.outputs) > 0


def test_progress_counts_lines(tmp_path: Path) -> None:
    seen: list[int] = []
    read(write(tmp_path, AZURE + "t,1,1\n" * 250_000), progress=seen.append)
    assert seen == [100_000, 200_000]


def test_the_public_trace_is_read_whole() -> None:
    if not TRACE.is_file():
        pytest.skip("the Mooncake conversation trace is not beside the repository")
    lengths = read(TRACE)
    assert len(lengths.inputs) == 12_031
    assert max(lengths.inputs) == 126_195
    assert statistics.mean(lengths.inputs) == pytest.approx(12_035, abs=1)
    assert statistics.mean(lengths.outputs) == pytest.approx(343, abs=1)
