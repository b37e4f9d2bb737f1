"""Block hashes of a prompt, computed as the workers do: what an ingress looks up in the index.

The hash of a full block covers its tokens and all before them. It is keyed with the cluster's
secret, and depends on the model and on the salt that keeps tenants apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvpaging import hashing
from worker.scheduling.prefix import PROBE_BLOCKS, PROBE_SALT


class BlockHasher:
    """Block hashes keyed with the cluster's secret `key`. A worker's `info` describes its model."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._root = lru_cache(1024)(self._root_of)

    def block_hashes(self, info: dict[str, Any], tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """The hashes of a prompt's full blocks in order; none without a prefix cache."""
        parts = info["hash_inputs"]
        if parts is None:
            return []
        root = self._root(tuple(parts.items()), salt)
        return hashing.block_hashes(root, tokens, info["block_size"], key=self._key)

    def _root_of(self, parts: tuple[tuple[str, Any], ...], salt: bytes) -> bytes:
        return hashing.root(**dict(parts), salt=salt, key=self._key)

    def problem(self, info: dict[str, Any]) -> str:
        """Why this ingress and a worker cannot serve together; empty if they can."""
        tokens = range(PROBE_BLOCKS * info["block_size"])
        if self.block_hashes(info, tokens, PROBE_SALT) == info["probe"]:
            return ""
        return (
            "ingress and worker give the same blocks different names: they run different versions, "
            "or KVATLAS_CACHE_SECRET is not the same for both"
        )
