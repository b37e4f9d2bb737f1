"""The engine's spec: shapes, sizes and limits, decided before a model's weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from configs.schema import Config
from kvpaging import quant
from kvpaging.store import Layout
from worker.execution.model import ModelShape
from worker.params import ParamLimits
from worker.scheduling.state import Limits
from worker.startup.memory import MemoryPlan

INT8 = "int8"
UNPLANNED = MemoryPlan(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Weights:
    """How the weights are stored. `format` is part of the model's fingerprint; `loading_bytes` is
    the most they take while they are loaded; `packed`: they stay as in the checkpoint."""

    format: str
    size_bytes: int
    loading_bytes: int
    packed: bool = False

    @property
    def int8(self) -> bool:
        return self.format.startswith(INT8) and not self.packed


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything decided before the weights are loaded: `memory` and `weights` last, by the other
    fields. A `draft` model has the memory that `drafting` gives it."""

    config: Config
    directory: Path
    hf_config: PretrainedConfig
    shape: ModelShape
    layout: Layout
    limits: Limits
    params: ParamLimits
    dtype: torch.dtype
    device: torch.device
    weights: Weights = Weights("", 0, 0)
    memory: MemoryPlan = UNPLANNED
    draft: EngineSpec | None = None
    host_slices: int = 0  # slices of the host cache

    @property
    def text(self) -> PretrainedConfig:
        """The config of the language model proper."""
        found: PretrainedConfig = self.hf_config.get_text_config(decoder=True)
        return found

    @property
    def positions(self) -> int:
        """How many positions the model is made for; dynamic rotary multiplies them."""
        limit = int(getattr(self.text, "max_position_embeddings", 0) or 1 << 20)
        rope = getattr(self.text, "rope_parameters", None) or {}
        return int(limit * rope["factor"]) if rope.get("rope_type") == "dynamic" else limit

    @property
    def page_dtype(self) -> torch.dtype:
        return quant.FORMATS.get(self.config.kv.dtype, self.dtype)

    @property
    def kv_dtype(self) -> str:
        """The name of `page_dtype`, part of block hashes."""
        return quant.NAMES.get(self.page_dtype) or str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return self.config.model.name or Path(self.config.model.path).name

    def table(self) -> dict[str, int | str]:
        memory, extra = self.memory, dict[str, int | str]()
        if self.host_slices:
            extra["host_bytes"] = self.host_slices * self.layout.slice_bytes
            extra["host_tokens"] = self.host_slices * self.layout.block_size
        if self.draft is not None:
            extra["draft_model"] = self.draft.directory.name
            extra["draft_kv_bytes"] = self.draft_kv_bytes
        return {
            "model": self.name,
            "family": self.shape.family,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv_dtype": self.kv_dtype,
            "weights": self.weights.format,
            "weights_bytes": memory.weight_bytes,
            "workspace_bytes": memory.workspace_bytes,
            "kv_bytes": memory.kv_bytes,
            **extra,
            "kv_bytes_per_token": self.layout.bytes_per_token,
            "layer_groups": len(self.layout.groups),
            "block_size": self.layout.block_size,
            "blocks": memory.slices,
            "tokens": memory.tokens,
            "max_model_len": memory.max_model_len,
            "max_num_seqs": self.limits.max_num_seqs,
        }

    @property
    def draft_kv_bytes(self) -> int:
        if self.draft is None:
            return 0
        return self.drafting().memory.slices * self.draft.layout.slice_bytes

    def drafting(self) -> EngineSpec:
        """The spec of the draft model. Its pages store as many tokens; on rank 0 of a gang, those
        of all ranks."""
        draft, memory = self.draft, self.memory
        assert draft is not None
        own = replace(
            memory,
            slices=memory.slices * memory.ranks,
            max_model_len=min(memory.max_model_len, draft.positions),
            ranks=1,
        )
        return replace(draft, memory=own)
