"""The names of a prompt's blocks, as the workers give them: how an ingress asks the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpaging import hashing
from worker.scheduling.prefix import PROBE_BLOCKS, PROBE_SALT


class Identities:
    """Names blocks with the cluster's secret, by what a worker says of its model in `info`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._roots: tuple[dict[str, Any], dict[bytes, bytes]] = ({}, {})

    def chain(self, info: dict[str, Any], tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """The identities of the full blocks of a prompt; none where nothing is indexed."""
        parts = info["identity"]
        if parts is None:
            return []
        known, roots = self._roots
        if known != parts:
            roots = {}
            self._roots = (parts, roots)
        if salt not in roots:
            if len(roots) > 1024:
                roots.clear()
            roots[salt] = hashing.root(**parts, salt=salt, key=self._key)
        return hashing.chain(roots[salt], tokens, info["block_size"], key=self._key)

    def problem(self, info: dict[str, Any]) -> str:
        """Why this ingress and a worker cannot serve together; empty where they can."""
        tokens = range(PROBE_BLOCKS * info["block_size"])
        if self.chain(info, tokens, PROBE_SALT) == info["probe"]:
            return ""
        return (
            "ingress and worker give the same blocks different names: they run different versions, "
            "or KVATLAS_CACHE_SECRET is not the same for both"
        )
