"""A transformers model with paged attention: all its keys and values are stored in pages.

A model gets one flat ragged batch `[1, T]`; attention finds rows, tables and slots of the step in
`Pages`. A model is served if it passes two checks: `probe`, without weights, that every layer calls
the attention hook once, with which shapes; `worker.startup.selfcheck`, with weights, that the
logits are those of the model's own attention.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from context_parallel import attention as sharded_attention
from context_parallel.exchange import Exchange
from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions
from kvpaging.store import BlockStore, LayerShape
from worker.execution.batch import Batch
from worker.execution.int8 import Linears, linears

HOOK = "kvatlas"
NO_HOOK = (
    "never calls the attention hook, so its keys and values cannot be paged and requests in one "
    "batch would read each other"
)
SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(Exception):
    """The model's family cannot be served; the message names the family and the reason."""


@dataclass(slots=True)
class Pages:
    """The inputs of attention: the store, and the batch while a step runs. The partials of its
    sharded tokens go through the `exchange` of a gang."""

    store: BlockStore
    batch: Batch | None = None
    group_of: tuple[int, ...] = ()
    exchange: Exchange | None = None
    handle: int = field(default_factory=itertools.count(1).__next__)

    def __post_init__(self) -> None:
        layers = range(self.store.layout.num_layers)
        self.group_of = tuple(self.store.layout.group_of(layer) for layer in layers)
        _PAGES[self.handle] = self

    def close(self) -> None:
        _PAGES.pop(self.handle, None)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, options: AttentionOptions
    ) -> Tensor:
        """Write k, v [T, Hkv, D*] to their slots, then attend q [T, Hq, Dk] over all pages of its
        row. Returns [T, Hq, Dv] in q's dtype. The window is the layer's, not that of `options`."""
        group, batch = self.group_of[layer], self.batch
        assert batch is not None
        pages = self.store.pages[layer]
        options = replace(options, window=self.store.layout.groups[group].shape.window)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = batch.rows[group]
            ops.write(k, v, pages, rows.slots)
            return ops.attend_finish(q, pages, rows, options)

        if not batch.sharded:
            return local(q, k, v)
        assert self.exchange is not None
        n = batch.local
        rest = sharded_attention.attend(
            q[n:],
            k[n:],
            v[n:],
            pages,
            batch=batch.sharded[group],
            exchange=self.exchange,
            options=options,
        )
        return torch.cat((local(q[:n], k[:n], v[:n]), rest)) if n else rest


# The one way into a compiled graph: the op carries a number, never the step's own tensors, so that
# the graph neither specialises on a batch nor holds one alive.
_PAGES: dict[int, Pages] = {}
_LIBRARY = torch.library.Library("kvatlas", "DEF")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, int pages, int layer, float scale, "
    "float? softcap, Tensor? sink) -> Tensor"
)


def _attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    pages: int,
    layer: int,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    options = AttentionOptions(scale, softcap=softcap, sink=sink)
    return _PAGES[pages].attend(q, k, v, layer=layer, options=options).contiguous()


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_LIBRARY.impl("attend", _attend_op, "CompositeExplicitAutograd")
torch.library.register_fake("kvatlas::attend", _attend_shape, lib=_LIBRARY)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pages: Pages | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The hook: query [1, Hq, T, Dk], key and value [1, Hkv, T, D*] -> [1, T, Hq, Dv]."""
    assert pages is not None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if torch.compiler.is_compiling():
        arena = pages.store.arenas[pages.store.layout.groups[pages.group_of[layer]].arena]
        out = torch.ops.kvatlas.attend(q, k, v, arena, pages.handle, layer, scale, softcap, s_aux)
    else:
        options = AttentionOptions(scale, softcap=softcap, sink=s_aux)
        out = pages.attend(q, k, v, layer=layer, options=options)
    return out.unsqueeze(0), None


AttentionInterface.register(HOOK, _paged_attention)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How a layer calls attention, beside the shapes it stores."""

    heads: int
    softcap: float | None
    sink: bool


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shapes, known before its weights are loaded."""

    family: str
    layers: tuple[LayerShape, ...]
    calls: tuple[AttentionCall, ...]
    vocab_size: int
    weight_count: int
    linears: Linears


def probe(config: PretrainedConfig) -> ModelShape:
    """Run the model without weights and record how it calls attention.

    Raises `UnsupportedModel` where a layer's attention cannot be replaced: it would take the flat
    batch for one sequence, and requests would read each other.
    """
    family = str(config.model_type)
    config = copy.deepcopy(config.get_text_config(decoder=True))
    unknown = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if unknown:
        raise UnsupportedModel(
            f"{family}: layers of type {', '.join(sorted(unknown))} keep state or masks that pages "
            f"cannot hold; served are {' and '.join(sorted(SERVED_LAYER_TYPES))}"
        )
    calls: dict[int, list[tuple[LayerShape, AttentionCall]]] = {}

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        window, sink = kwargs.get("sliding_window"), kwargs.get("s_aux") is not None
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
        call = AttentionCall(query.shape[1], kwargs.get("softcap"), sink)
        calls.setdefault(int(module.layer_idx), []).append((shape, call))  # type: ignore[arg-type]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("kvatlas_probe", record)
    with torch.device("meta"), torch.no_grad():
        try:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="kvatlas_probe", dtype=torch.bfloat16
            ).eval()
            fix_rotary(model, 4)  # an update that looks at positions cannot run without values
            ids = torch.zeros(1, 4, dtype=torch.long)
            model(
                input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False, logits_to_keep=1
            )
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            what = "its attention fails on a flat batch" if calls else NO_HOOK
            raise UnsupportedModel(f"{family}: {what} ({reason})") from error
    layers = int(config.num_hidden_layers)
    if not calls:
        raise UnsupportedModel(f"{family}: {NO_HOOK}")
    odd = [i for i in range(layers) if len(calls.get(i, ())) != 1]
    if odd or len(calls) != layers:
        times = sorted({len(calls.get(i, ())) for i in odd})
        raise UnsupportedModel(
            f"{family}: calls the attention hook {' or '.join(map(str, times))} times in layers "
            f"{odd[:4]} of {layers}; once a layer is needed"
        )
    return ModelShape(
        family=family,
        layers=tuple(calls[i][0][0] for i in range(layers)),
        calls=tuple(calls[i][0][1] for i in range(layers)),
        vocab_size=int(config.vocab_size),
        weight_count=sum(p.numel() for p in model.parameters()),
        linears=linears(model),
    )


def fix_rotary(model: nn.Module, max_model_len: int) -> str:
    """Fix rotary frequencies that would depend on the batch (`longrope`, `dynamic`).

    They become those of a sequence of `max_model_len` tokens: else the keys of a cached block would
    depend on the longest row beside it. Returns the choice, part of the model fingerprint.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fixed = []
    for name, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        by_layer = types if isinstance(types, dict) else {None: types}
        for layer_type, kind in by_layer.items():
            if kind not in ("longrope", "dynamic"):
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            buffer: Tensor = getattr(module, f"{prefix}inv_freq")
            kwargs = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
                module.config, buffer.device, seq_len=max_model_len, **kwargs
            )
            buffer.copy_(frequencies)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if isinstance(types, dict):
                types[layer_type] = "default"
            else:
                module.rope_type = "default"
            fixed.append(f"{name}:{kind}@{max_model_len}")
    return ",".join(fixed)


class PagedModel:
    """A loaded model with paged attention; `forward` runs one flat batch."""

    def __init__(self, hf: PreTrainedModel, store: BlockStore):
        self.hf, self.store = hf.eval(), store
        self.pages = Pages(store)
        hf.set_attn_implementation(HOOK)
        self.call: Callable[..., Any] = hf

    def compile(self, **options: Any) -> None:
        self.call = torch.compile(self.hf, **options)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Returns the logits [n, vocab] that a batch of known ids needs. Stores the keys and values
        of all its tokens in their pages."""
        self.pages.batch = batch
        try:
            out = self.call(
                input_ids=batch.ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_at,
                pages=self.pages,
            )
        finally:
            self.pages.batch = None
        logits: Tensor = out.logits[0]
        return logits
