"""The cluster's secret, which keys block hashes: only workers and ingresses can compute them.

A block hash alone therefore reveals nothing about the tokens of its block.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping

VARIABLE = "KVATLAS_CACHE_SECRET"
SHORTEST = 16
_NAME = b"kvatlas:cache-secret"


def given(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret from the environment, None without one. Raises ValueError."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    if len(text) < SHORTEST:
        raise ValueError(f"{VARIABLE} has {len(text)} characters, at least {SHORTEST} are needed")
    return hashlib.sha256(text.encode()).digest()


def of_this_cluster() -> bytes:
    """The given secret, else a random one that the first caller stores for the cluster. It lives as
    long as the cluster, because Serve would restart an application whose secret has changed.

    Raises ValueError.
    """
    if (found := given()) is not None:
        return found
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_NAME, secrets.token_bytes(32), overwrite=False)
    drawn: bytes = internal_kv._internal_kv_get(_NAME)
    return drawn
