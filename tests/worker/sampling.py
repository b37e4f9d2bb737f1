"""What the sampler's tests share: random options, the documented order in plain Python, a meter."""

import math
import random
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.execution.philox import Purpose, uniform
from worker.execution.sample_plan import FEW, SampleRow
from worker.execution.sampler import Sampled, Sampler
from worker.params import SamplingParams

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]
END = 2
GREEDY = SamplingParams(temperature=0.0)


def make(vocab: int, seats: int = 64, device: torch.device = CPU, **options: Any) -> Sampler:
    return Sampler(vocab, seats, [END], device=device, **options)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3


def run(sampler: Sampler, logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    return sampler.sample(logits, sampler.plan(rows))


def one(logits: Sequence[float], params: SamplingParams, position: int = 0) -> int:
    x = torch.tensor([logits], dtype=torch.float64)
    return int(run(make(x.shape[1]), x, [SampleRow(0, params, position)]).tokens)


def random_params(pick: random.Random, vocab: int) -> SamplingParams:
    """Options drawn so that each is off about half of the time."""

    def maybe(value: Any, off: Any) -> Any:
        return value if pick.random() < 0.5 else off

    ids = range(vocab)
    return SamplingParams(
        temperature=pick.choice([0.0, 0.3, 1.0, 1.0, 2.0]),
        top_k=maybe(pick.choice([-1, 2, 7, 50, FEW, FEW + 1, 400, 10**6]), 0),
        top_p=maybe(pick.choice([1e-6, 0.3, 0.9, 0.999]), 1.0),
        min_p=maybe(pick.choice([0.001, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(pick.choice([0.5, 1.3]), 1.0),
        presence_penalty=maybe(pick.choice([-1.5, 0.7]), 0.0),
        frequency_penalty=maybe(pick.choice([-0.4, 1.1]), 0.0),
        logit_bias=maybe({i: pick.uniform(-9, 9) for i in pick.sample(ids, vocab // 5)}, {}),
        min_tokens=maybe(pick.randrange(8), 0),
        max_tokens=100,
        seed=pick.randrange(-(2**63), 2**63),
        ignore_eos=pick.random() < 0.5,
        stop_token_ids=tuple(maybe(pick.sample(ids, 3), [])),
        logprobs=maybe(pick.randrange(6), None),
    )


def expected_token(
    logits: list[float], row: SampleRow, prompt: list[int], output: list[int]
) -> int:
    """The documented order for one row, in plain Python."""
    p = row.params
    x = list(logits)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else (
            x[token] * p.repetition_penalty
        )  # fmt: skip
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if row.position < p.min_tokens:
        for token in {*p.stop_token_ids, *([] if p.ignore_eos else [END])}:
            x[token] = -math.inf
    greatest = max(x)
    if p.greedy:
        return x.index(greatest)
    weights = [math.exp((value - greatest) / p.temperature) for value in x]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    kept = order[: p.top_k] if p.top_k > 0 else order
    mass, aim = 0.0, p.top_p * math.fsum(weights[i] for i in kept)
    nucleus = []
    for i in kept:
        if mass >= aim and p.top_p < 1.0:
            break
        nucleus.append(i)
        mass += weights[i]
    final = sorted(i for i in nucleus if weights[i] >= p.min_p)
    u = uniform([p.seed], [row.choice], [row.position], Purpose.TOKEN).item()
    aim, mass = u * math.fsum(weights[i] for i in final), 0.0
    for i in final:
        mass += weights[i]
        if mass > aim:
            return i
    return final[-1]


def batch(vocab: int, dtype: torch.dtype) -> tuple[Tensor, list[SampleRow]]:
    pick = random.Random(5)
    logits = random_logits(64, vocab).to(dtype)
    logits[::3] = logits[::3].bfloat16().to(dtype)  # rows with many equal logits
    params = [random_params(pick, vocab) for _ in range(64)]
    return logits, [SampleRow(i, p, pick.randrange(5), i % 3) for i, p in enumerate(params)]


def slot_filled(sampler: Sampler) -> Sampler:
    for slot in range(64):
        sampler.state.fill_slot(slot, [slot, 7, 8], [9] * (slot % 5))
        sampler.state.counted[slot] = 99  # tokens counted already, whatever the position
    return sampler


def same(part: Sampled, whole: Sampled, order: Sequence[int], rows: Sequence[SampleRow]) -> None:
    for at, i in enumerate(order):
        assert part.tokens[at] == whole.tokens[i]
        top = rows[i].params.logprobs
        if top is None:
            continue
        assert part.logprobs is not None
        assert whole.logprobs is not None
        assert part.logprobs[at] == whole.logprobs[i]
        assert part.top_ids is not None
        assert whole.top_ids is not None
        assert part.top_ids[at, :top].tolist() == whole.top_ids[i, :top].tolist()
        assert part.top_logprobs is not None
        assert whole.top_logprobs is not None
        assert part.top_logprobs[at, :top].tolist() == whole.top_logprobs[i, :top].tolist()


class Peak(TorchDispatchMode):
    """Counts the bytes of live storages that operations under it have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.most = max(self.most, sum(self.live.values()))
        return out
