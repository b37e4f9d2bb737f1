"""Which features work together: every pair of them runs, or is refused.

`python -m tests.worker.compatibility` runs all pairs and writes `docs/compatibility.md`. A pair
that runs must have both features at work, and say what is said without those that change no output.
The word on that is transformers', whose keys and values are rounded as those of the pages are, and
on samples that of separate requests for which nothing else is at work.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import DynamicCache

from configs.loading import ConfigError, load
from context_parallel.policy import ShardPolicy
from kvpaging import quant
from kvpaging.windows import NULL_BLOCK
from tests.families import build, reference_model
from tests.kvpaging.helpers import host_problems
from tests.worker.gangs import gang_engine
from tests.worker.searching import transformers_beams, wide_softmax
from tests.worker.served import FREE_BYTES, Models, answer, fill
from worker.blocks.swap import RECOMPUTE, SWAP
from worker.execution.model import UnsupportedModel
from worker.execution.philox import derive
from worker.params import DRAFT_MODEL, PROMPT_LOOKUP, ParamError, SamplingParams, check
from worker.request import Request
from worker.startup import start
from worker.startup.build import build_draft, build_engine
from worker.startup.memory import DoesNotFit

if TYPE_CHECKING:
    from worker.decoding.draft_model import DraftModel
    from worker.decoding.speculation import Speculation
    from worker.engine.engine import Engine
    from worker.execution.model import PagedModel
    from worker.request import Sequence
    from worker.startup.spec import EngineSpec

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
REFUSALS = (ConfigError, UnsupportedModel, DoesNotFit, ParamError)
"""What a user is told, at start or before his request is taken."""

BLOCK, CHUNK, TOKENS, HOST_SLICES = 8, 16, 512, 200
FEW = (13, 22, 27, 68, 104)
"""All tokens of the prompts: so few that what was said before is said again, and such that none of
them alone is what the models say after them."""
BIAS = dict.fromkeys(FEW, 100.0)
"""Lets nothing else be said."""
PROMPTS = [Random(length).choices(FEW, k=length) for length in (45, 38)]
SPREADS_AT, NEVER = 48, 1 << 20
PLAIN = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of; request i asks for `options[i]`, or for the only ones there are."""

    family: str = "llama"
    kv_dtype: str = "auto"
    ranks: int = 1
    spreads_at: int = 1
    warm: bool = False
    host: bool = False
    preemption: str = ""
    options: tuple[Mapping[str, Any], ...] = ({},)


@dataclass(slots=True)
class Ran:
    """What a run said, each choice of each request, and what was seen to be at work."""

    said: list[list[tuple[int, ...]]]
    spec: EngineSpec = field(repr=False)
    hit_tokens: int
    host_tokens: int
    recomputes: int
    swaps: int
    reshards: int
    guesses: Counter[tuple[str, bool]]
    seen: set[str]

    def guessed_by(self, proposer: str) -> bool:
        """Rightly and wrongly."""
        return self.guesses[proposer, True] > 0 < self.guesses[proposer, False]


@dataclass(frozen=True, slots=True)
class Feature:
    """`ways` are the fields of a setup that switch it on, one after another where there are
    several; `works` asks a run whether it was at work."""

    name: str
    ways: tuple[dict[str, Any], ...]
    works: Callable[[Ran], bool]
    how: str
    sign: str


def _pages(kind: str) -> Feature:
    return Feature(
        f"{kind} pages",
        ({"kv_dtype": kind},),
        lambda ran: ran.spec.layout.quantised and ran.spec.kv_dtype == kind,
        f"`kv.dtype={kind}`",
        "what the pages hold",
    )


FEATURES = (
    Feature(
        "samples",
        ({"options": ({"n": 3, "temperature": 0.5, "seed": 5},)},),
        lambda ran: "shared by choices" in ran.seen and all(len(set(s)) > 1 for s in ran.said),
        "`n=3`",
        "choices that share blocks and differ",
    ),
    Feature(
        "prompt lookup",
        ({"options": ({"speculation": PROMPT_LOOKUP, "max_tokens": 18, "logit_bias": BIAS},)},),
        lambda ran: ran.guessed_by("PromptLookup"),
        "`speculation.method=prompt_lookup`",
        "draft tokens that were right, and others that were wrong",
    ),
    Feature(
        "draft model",
        ({"options": ({"speculation": DRAFT_MODEL},)},),
        lambda ran: ran.guessed_by("Drafter"),
        "`speculation.method=draft_model`",
        "draft tokens that were right, and others that were wrong",
    ),
    Feature(
        "beams",
        ({"options": ({"beam_width": 3, "temperature": 0.0, "logit_bias": {}},)},),
        lambda ran: {"three beams", "shared by choices"} <= ran.seen,
        "`beam_width=3`",
        "three beams at once that share blocks",
    ),
    Feature(
        "prefix cache",
        ({"warm": True},),
        lambda ran: ran.hit_tokens > 0,
        "`kv.prefix_cache=true`",
        "tokens found, of the same requests before",
    ),
    _pages("int8"),
    _pages("fp8"),
    Feature(
        "host cache",
        ({"warm": True, "host": True},),
        lambda ran: ran.host_tokens > 0,
        "`kv.host_gib`",
        "tokens that came back from the host, of the same requests before",
    ),
    Feature(
        "recompute",
        ({"preemption": RECOMPUTE},),
        lambda ran: ran.recomputes > 0,
        "`scheduler.preemption=recompute`",
        "preempted sequences that were computed again",
    ),
    Feature(
        "swap",
        ({"preemption": SWAP},),
        lambda ran: ran.swaps > 0 and "back from the host" in ran.seen,
        "`scheduler.preemption=swap`",
        "preempted sequences whose blocks came back from the host",
    ),
    Feature(
        "window",
        ({"family": "mistral"}, {"family": "gemma2"}),
        lambda ran: "gave back" in ran.seen,
        "a model with a window in all layers, and one with a window in every other",
        "running sequences that gave blocks back",
    ),
    Feature(
        "growth",
        ({"ranks": 2, "spreads_at": SPREADS_AT},),
        lambda ran: ran.reshards > 0,
        "`shard_from_tokens` of a pool",
        "sequences that went on, on all ranks",
    ),
    Feature(
        "degree",
        ({"ranks": 2}, {"ranks": 4}),
        lambda ran: "spread from the start" in ran.seen,
        "`gang_size` of a pool, 2 and 4",
        "sequences with blocks on all ranks from their first token on",
    ),
)
PAIRS = tuple(combinations(FEATURES, 2))


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Setup:
    """Both at once. Two ways to guess are for a request each, and two of preemption for the rates
    to choose from; where a setting would have to have two values, it says what it thinks of that.
    """
    fields = {**first, **second}
    if "options" in first and "options" in second:
        (one,), (two,) = first["options"], second["options"]
        both = "speculation" in one and "speculation" in two
        fields["options"] = (two, one) if both else ({**one, **two},)
    if "preemption" in first and "preemption" in second:
        fields["preemption"] = "auto"
    if "kv_dtype" in first and "kv_dtype" in second:
        fields["kv_dtype"] = f"{first['kv_dtype']} and {second['kv_dtype']}"
    if "spreads_at" in fields and "ranks" in first and "ranks" in second:
        fields["spreads_at"] = 40  # the longer prompt starts on all ranks, the shorter gets there
    return Setup(**fields)


class Rounded(DynamicCache):
    """transformers' cache, whose keys and values are those that quantised pages give back."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__(**options)
        self.kind = quant.FORMATS[kind]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *place: Any, **more: Any) -> Any:
        keys, values = (
            quant.dequantise(*quant.quantise(x, self.kind), x.dtype) for x in (keys, values)
        )
        return super().update(keys, values, *place, **more)


class Lab:
    """Runs setups over tiny models in float64, each loaded once."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._drafts: dict[tuple[str, str], tuple[EngineSpec, PagedModel]] = {}
        self._words: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}
        self._outcomes: dict[tuple[str, str], str] = {}

    def outcome(self, first: Feature, second: Feature) -> str:
        """Nothing where the pair runs, else what a user is told. Raises AssertionError where it
        runs and should not be served."""
        pair = (first.name, second.name)
        if pair not in self._outcomes:
            self._outcomes[pair] = self.tried(first, second)
        return self._outcomes[pair]

    def tried(self, first: Feature, second: Feature) -> str:
        """The same, whether it was found before or not."""
        told = set()
        for one, two in product(first.ways, second.ways):
            setup = merged(one, two)
            try:
                ran = self.run(setup)
            except REFUSALS as refusal:
                told.add(str(refusal).splitlines()[-1].strip())
                continue
            told.add("")
            for feature in (first, second):
                assert feature.works(ran), f"{feature.name} was not at work: {ran}"
            words = [self.word(setup, index) for index in range(len(PROMPTS))]
            assert ran.said == words, f"it says {ran.said}, and the word is {words}"
        (message,) = told
        return message

    def run(self, setup: Setup) -> Ran:
        """Raises one of REFUSALS."""
        spec, model = self._launch(setup)
        asked = [_request(setup, index, "") for index in range(len(PROMPTS))]
        for request in asked:
            check(request.params, spec.params)
        with self._engine(setup, spec, model) as engine:
            if setup.warm:
                answer(engine, [_request(setup, index, "first") for index in range(len(PROMPTS))])
            guesses = _counted(engine.scheduler.speculation)
            scheduler, seen = engine.scheduler, set[str]()
            before = scheduler.prefix.stats.hit_tokens
            if setup.host:
                _evict(engine)

            def each_turn(turn: int) -> None:
                _look(engine, seen)
                _shake(engine, setup)

            random = Random(2) if setup.preemption else None
            said = answer(engine, asked, random=random, each_turn=each_turn)
            host_cache = scheduler.host_cache
            swaps = None if scheduler.swaps is None else scheduler.swaps.stats
            if host_cache is not None:
                assert not any(
                    host_problems(host) or host.counts().pinned for host in host_cache.arenas
                )
                if host_cache.stats.loaded_blocks:
                    seen.add("back from the host")
            return Ran(
                said,
                spec,
                hit_tokens=scheduler.prefix.stats.hit_tokens - before,
                host_tokens=0 if host_cache is None else host_cache.stats.hit_tokens,
                recomputes=scheduler.preemptions if swaps is None else swaps.recomputes,
                swaps=0 if swaps is None else swaps.swaps,
                reshards=scheduler.reshards,
                guesses=guesses,
                seen=seen,
            )

    @contextmanager
    def _engine(self, setup: Setup, spec: EngineSpec, model: PagedModel) -> Iterator[Engine]:
        if setup.ranks == 1:
            fill(model.store)
            engine = build_engine(spec, model, lambda: 0.0)
            engine.depth = 2
            self._equip(setup, engine)
            yield engine
            return
        gang = gang_engine(spec, model, setup.ranks, depth=2, sharded_from=setup.spreads_at)
        with gang as (engine, _):
            engine.scheduler.state.policy = ShardPolicy(setup.ranks, setup.spreads_at, NEVER)
            self._equip(setup, engine)
            yield engine

    def _launch(self, setup: Setup) -> tuple[EngineSpec, PagedModel]:
        spec, model = self.models.load(setup.family, BLOCK, tokens=TOKENS, kv_dtype=setup.kv_dtype)
        host_cache = setup.host or setup.preemption in ("auto", SWAP)
        config = replace(
            spec.config,
            kv=replace(spec.config.kv, prefix_cache=setup.warm or host_cache),
            scheduler=replace(spec.config.scheduler, preemption=setup.preemption or RECOMPUTE),
        )
        limits = replace(spec.limits, max_batch_tokens=CHUNK)
        slices = HOST_SLICES if host_cache else 0
        return replace(spec, limits=limits, config=config, host_slices=slices), model

    def _equip(self, setup: Setup, engine: Engine) -> None:
        """With a draft model, where one is asked for."""
        if any(options.get("speculation") == DRAFT_MODEL for options in setup.options):
            makers = engine.scheduler.speculation.makers
            makers[DRAFT_MODEL] = self._draft(setup.family, setup.kv_dtype).proposer

    def _draft(self, family: str, kv_dtype: str) -> DraftModel:
        """A model that is much like the large one, started beside it."""
        key = (family, kv_dtype)
        if key not in self._drafts:
            settings = {
                "model.path": self.models.directory(family),
                "model.dtype": "float64",
                "model.device": "cpu",
                "kv.block_size": BLOCK,
                "kv.dtype": kv_dtype,
                "kv.blocks": TOKENS // BLOCK,
                "speculation.draft_model": self._near(family),
            }
            config = load(None, [f"{name}={value}" for name, value in settings.items()])
            directory = self.models.directory(family)
            small = start.resolve(config, directory, free_bytes=FREE_BYTES).drafting()
            self._drafts[key] = small, start.load(small, lambda: 0.0)[0]
        small, model = self._drafts[key]
        fill(model.store)
        return build_draft(small, model)

    def _near(self, family: str) -> Path:
        """The directory of a model that often says what that family's says."""
        path = self.models.home / f"near {family}"
        if not path.exists():
            hf, generator = build(family, fixed=False), torch.Generator().manual_seed(4)
            for parameter in hf.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.mul_(1 + 0.05 * noise)
            hf.float().save_pretrained(path)
        return path

    def word(self, setup: Setup, index: int) -> list[tuple[int, ...]]:
        """What request `index` must say, without anything that is to change nothing."""
        params = _params(setup, index)
        key = (setup.family, setup.kv_dtype, index, repr(replace(params, speculation="")))
        if key not in self._words:
            if params.beam_width:
                self._words[key] = _searched(setup, index, params)
            elif params.n > 1:
                self._words[key] = self._separately(setup, index, params)
            else:
                self._words[key] = [_said(setup, index, params)]
        return self._words[key]

    def _separately(
        self, setup: Setup, index: int, params: SamplingParams
    ) -> list[tuple[int, ...]]:
        """Each sample as a request of its own, one after another."""
        seeds = [params.seed, *(derive(params.seed, i) for i in range(1, params.n))]
        plain = Setup(setup.family, setup.kv_dtype)
        single = [
            Request(str(i), PROMPTS[index], replace(params, n=1, seed=seed, speculation=""))
            for i, seed in enumerate(seeds)
        ]
        with self._engine(plain, *self._launch(plain)) as engine:
            return [tokens for (tokens,) in answer(engine, single, together=False)]


def _params(setup: Setup, index: int) -> SamplingParams:
    return SamplingParams(**{**PLAIN, **setup.options[index % len(setup.options)]})


def _request(setup: Setup, index: int, name: str) -> Request:
    params = _params(setup, index)
    choices = 1 if params.beam_width else params.n
    return Request(f"{name}{index}", PROMPTS[index], params, generated=((),) * choices)


def _counted(speculation: Speculation) -> Counter[tuple[str, bool]]:
    """Draft tokens from now on, by who made them and whether they were right."""
    guesses: Counter[tuple[str, bool]] = Counter()
    true = speculation.note

    def note(sequence: Sequence, guessed: int, right: int) -> None:
        proposer = type(speculation.speculators[sequence].proposer).__name__
        guesses[proposer, True] += right
        guesses[proposer, False] += guessed - right
        true(sequence, guessed, right)

    speculation.note = note  # type: ignore[method-assign]
    return guesses


def _evict(engine: Engine) -> None:
    """Nothing stays in the pages that nobody uses."""
    for pool in dict.fromkeys(engine.scheduler.pools):
        for rank in range(pool.ranks):
            for block in pool.allocate(pool.available_on(rank), rank):
                pool.unref(block)


def _shake(engine: Engine, setup: Setup) -> None:
    """What was preempted finds nothing in the pages; the rates favour both kinds in turn."""
    host_cache = engine.scheduler.host_cache
    if host_cache is None or not setup.preemption:
        return
    if engine.scheduler.waiting:
        _evict(engine)
    host_cache.offload_rate.per_s = host_cache.load_rate.per_s = 1e6
    engine.step_times.token_s = 1e-9 if engine.scheduler.preemptions % 2 else 1.0


def _look(engine: Engine, seen: set[str]) -> None:
    """Note what can be seen at work between two steps."""
    scheduler = engine.scheduler
    pool, ranks = scheduler.pools[0], scheduler.state.policy.ranks
    together = Counter(id(s.request) for s in scheduler.running if s.request.candidates)
    if 3 in together.values():
        seen.add("three beams")
    for sequence in scheduler.running:
        table = sequence.table
        assert table is not None
        blocks = [block for block in table.blocks[0] if block != NULL_BLOCK]
        if any(pool.references(block) > 1 for block in blocks):
            seen.add("shared by choices")
        owners = {pool.rank_of(block) for block in blocks}
        if len(owners) == ranks > 1 and not sequence.generated_tokens:
            seen.add("spread from the start")
        if any(table.first):
            seen.add("gave back")


def _kept(setup: Setup) -> DynamicCache:
    """What transformers keeps keys and values in."""
    config = reference_model(setup.family).config
    if setup.kv_dtype == "auto":
        return DynamicCache(config=config)
    return Rounded(setup.kv_dtype, config=config)


def _searched(setup: Setup, index: int, params: SamplingParams) -> list[tuple[int, ...]]:
    found = transformers_beams(
        setup.family,
        PROMPTS[index],
        width=params.beam_width,
        max_tokens=params.max_tokens,
        cache=_kept(setup),
    )
    return [tuple(tokens) for tokens, _ in found[: params.n]]


def _said(setup: Setup, index: int, params: SamplingParams) -> tuple[int, ...]:
    """What transformers says greedily."""
    model = reference_model(setup.family)
    ids = torch.tensor([PROMPTS[index]])
    others = [t for t in range(model.config.vocab_size) if t not in params.logit_bias]
    with mock.patch.object(torch.nn.functional, "softmax", wide_softmax):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
            suppress_tokens=others if params.logit_bias else None,
            cache=_kept(setup),
        )
    return tuple(out[0, ids.shape[1] :].tolist())


def page(outcomes: Mapping[tuple[str, str], str]) -> str:
    """The page that says so."""
    numbers: dict[str, int] = {}
    for message in filter(None, outcomes.values()):
        numbers.setdefault(message, len(numbers) + 1)

    def cell(row: Feature, column: Feature) -> str:
        if row is column:
            return "–"
        message = outcomes.get((row.name, column.name), outcomes.get((column.name, row.name)))
        assert message is not None
        return f"refused {numbers[message]}" if message else "same"

    names = [feature.name for feature in FEATURES]
    features = [f"| {f.name} | {f.how} | {f.sign} |" for f in FEATURES]
    cells = [
        f"| **{row.name}** | {' | '.join(cell(row, column) for column in FEATURES)} |"
        for row in FEATURES
    ]
    refusals = [f"{number}. `{message}`" for message, number in numbers.items()]
    parts = [HEAD, _table(["feature", "switched on by", "at work, as seen by"], features)]
    parts += [BETWEEN, _table(["", *names], cells), AFTER, "\n".join(refusals) + "\n"]
    return "\n".join(parts)


def _table(columns: list[str], rows: list[str]) -> str:
    head, rule = " | ".join(columns), " | ".join(["---"] * len(columns))
    return "\n".join([f"| {head} |", f"| {rule} |", *rows, ""])


HEAD = """# What works together

Each pair of these features is run by the test suite in one engine, over tiny models in float64,
with both at work at the same time. `.venv/bin/python -m tests.worker.compatibility` runs all pairs
and writes this page, and a test fails where the page says something else.
"""
BETWEEN = """**same**: the pair runs, and says what is said without those of the two that change no
output. Samples, beams, the model and what pages hold do change it. There the word is transformers'
own greedy or beam search, with keys and values rounded as 8-bit pages round them; a sample must
equal a request of its own with the sample's seed, over the same pages and alone.

**refused**: a message, listed below, says so at start or before the request is taken.

Features with several ways to switch them on are run in each. Prompt lookup and draft model are run
side by side, a request each.
"""
AFTER = """The messages:
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        lab, outcomes = Lab(Models(Path(home))), {}
        for number, (first, second) in enumerate(PAIRS, 1):
            print(f"{number}/{len(PAIRS)} {first.name} and {second.name}", file=sys.stderr)
            outcomes[first.name, second.name] = lab.outcome(first, second)
    PAGE.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
