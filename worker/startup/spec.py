"""The engine's spec: shapes, sizes and limits, decided before a model's weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from configs.schema import Config, SpeculationConfig
from kvpaging import quant
from kvpaging.store import Layout
from worker.execution.model import ModelShape
from worker.params import ParamLimits
from worker.scheduling.state import Limits
from worker.startup.memory import MemoryPlan
from worker.startup.weights import Weights


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model before its weights are loaded."""

    directory: Path
    hf_config: PretrainedConfig
    shape: ModelShape
    layout: Layout
    weights: Weights
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything decided before the weights are loaded."""

    config: Config
    directory: Path
    hf_config: PretrainedConfig
    shape: ModelShape
    layout: Layout
    memory: MemoryPlan
    limits: Limits
    params: ParamLimits
    dtype: torch.dtype
    device: torch.device
    weights: Weights
    draft: Draft | None = None
    host_slices: int = 0  # slices of the host cache

    @property
    def page_dtype(self) -> torch.dtype:
        """The dtype of the numbers in pages."""
        return quant.FORMATS.get(self.config.kv.dtype, self.dtype)

    @property
    def kv_dtype(self) -> str:
        """The name of `page_dtype`, part of block hashes."""
        return quant.NAMES.get(self.page_dtype) or str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        return self.config.model.name or Path(self.config.model.path).name

    def table(self) -> dict[str, int | str]:
        """The rows of the start-up table, in order."""
        memory = self.memory
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
            **self._host_rows(),
            **self._draft_rows(),
            "kv_bytes_per_token": self.layout.bytes_per_token,
            "layer_groups": len(self.layout.groups),
            "block_size": self.layout.block_size,
            "blocks": memory.slices,
            "tokens": memory.tokens,
            "max_model_len": memory.max_model_len,
            "max_num_seqs": self.limits.max_num_seqs,
        }

    def _host_rows(self) -> dict[str, int | str]:
        """Rows of the start-up table for the host cache."""
        if not self.host_slices:
            return {}
        return {
            "host_bytes": self.host_slices * self.layout.slice_bytes,
            "host_tokens": self.host_slices * self.layout.block_size,
        }

    def _draft_rows(self) -> dict[str, int | str]:
        """Rows of the start-up table for a draft model."""
        if self.draft is None:
            return {}
        return {"draft_model": self.draft.directory.name, "draft_kv_bytes": self.draft_kv_bytes}

    @property
    def draft_kv_bytes(self) -> int:
        """Bytes of the draft model's pages."""
        if self.draft is None:
            return 0
        return self.drafting().memory.slices * self.draft.layout.slice_bytes

    def drafting(self) -> EngineSpec:
        """The spec of the draft model. Its pages store as many tokens; on rank 0 of a gang, those
        of all ranks."""
        draft = self.draft
        assert draft is not None
        limit = positions(draft.hf_config.get_text_config(decoder=True))
        return replace(
            self,
            config=replace(
                self.config,
                model=replace(self.config.model, name=draft.directory.name),
                speculation=SpeculationConfig(),
            ),
            directory=draft.directory,
            hf_config=draft.hf_config,
            shape=draft.shape,
            layout=draft.layout,
            weights=draft.weights,
            memory=replace(
                self.memory,
                slices=self.memory.slices * self.memory.ranks,
                max_model_len=min(self.memory.max_model_len, limit),
                ranks=1,
            ),
            draft=None,
            host_slices=0,
        )


def positions(text: PretrainedConfig) -> int:
    """How many positions the model is made for; dynamic rotary multiplies them by its factor."""
    limit = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
    rope = getattr(text, "rope_parameters", None) or {}
    return int(limit * rope["factor"]) if rope.get("rope_type") == "dynamic" else limit
