"""GuideLLM as it comes from the package index, against `kvatlas serve` with a real model.

The program has dependencies of its own, so it lives in an environment of its own:
`make test-guidellm` makes it and runs this, `GUIDELLM` names the program elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.quickstart import QUICK, ModelError, resolve
from scripts.served import ROOT, Client, metrics, started_server

pytestmark = pytest.mark.guidellm
LIMIT_S = 200  # of a run that takes half a minute on two cores
PROGRAM = Path(os.environ.get("GUIDELLM") or ROOT / ".venv-guidellm" / "bin" / "guidellm")
PROMPT, OUTPUT, REQUESTS = 32, 8, 16  # tokens of one request, and requests of one benchmark


@dataclass(frozen=True)
class Setup:
    model: Path
    url: str

    def run(self, out: Path, *options: str) -> list[dict[str, Any]]:
        """What GuideLLM reports of each benchmark of one run."""
        command = [str(PROGRAM), "run", "--disable-console-interactive", *options]
        command += ["--tokenizer", f"kind=huggingface_auto,model={self.model}"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += [
            *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"),
            *("--output", f"kind=json,path={out}"),
        ]
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
        return found

    def generated(self) -> float:
        """Output tokens that the server has counted since it started."""
        return metrics(Client(self.url))["vllm:generation_tokens_total"]


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    if not PROGRAM.is_file():
        pytest.skip(f"there is no {PROGRAM}: make test-guidellm installs it, or set GUIDELLM")
    try:
        model = resolve(QUICK)
    except ModelError as error:
        pytest.skip(str(error))
    with started_server("configs/local.yaml", ()) as url:
        yield Setup(model, url)


def check(report: dict[str, Any]) -> None:
    """Every request finished, none failed, and each has the tokens that were asked for."""
    counted = report["metrics"]
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert counted["request_totals"] == totals
    tokens = counted["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"], tokens["count"]) == (OUTPUT, OUTPUT, REQUESTS)
    for one in report["requests"]["successful"]:
        assert one["output"]
        times = one["info"]["timings"]
        assert times["request_start"] < times["first_token_iteration"]
        assert times["first_token_iteration"] < times["last_token_iteration"]


def test_chat_at_a_fixed_concurrency(setup: Setup, tmp_path: Path) -> None:
    before = setup.generated()
    backend = ("--backend", f"kind=openai_http,target={setup.url}")
    (report,) = setup.run(
        tmp_path / "report.json", *backend, "--profile", "kind=concurrent,streams=4"
    )
    check(report)
    # The template of the model comes around each text.
    assert report["metrics"]["prompt_token_count"]["successful"]["min"] > PROMPT
    assert setup.generated() - before == REQUESTS * OUTPUT


def test_completions_from_one_at_a_time_to_all_at_once(setup: Setup, tmp_path: Path) -> None:
    before = setup.generated()
    target = f"target={setup.url},request_format=/v1/completions"
    reports = setup.run(
        tmp_path / "report.json",
        *("--backend", f"kind=openai_http,{target}", "--profile", "kind=sweep,sweep_size=3"),
    )
    assert len(reports) == 3
    for report in reports:
        check(report)
        prompts = report["metrics"]["prompt_token_count"]["successful"]
        assert (prompts["min"], prompts["max"]) == (PROMPT, PROMPT)
    assert setup.generated() - before == 3 * REQUESTS * OUTPUT
