"""The cluster's secret: with it workers and ingresses name cached blocks alike, and nobody else.

Block hashes are keyed with it, so that whoever sees one learns nothing of the tokens behind it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping

VARIABLE = "KVATLAS_CACHE_SECRET"
SHORTEST = 16
_NAME = b"kvatlas:cache-secret"


class SecretError(ValueError):
    """The secret that was given is none."""


def given(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that the environment gives, None without one. Raises SecretError."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    if len(text) < SHORTEST:
        raise SecretError(f"{VARIABLE} has {len(text)} characters, at least {SHORTEST} are needed")
    return hashlib.sha256(text.encode()).digest()


def of_this_cluster() -> bytes:
    """The one given, else one that the first who asks draws for all. Another one means another
    application to Serve, which would restart it, so it lives as long as the cluster.

    Raises SecretError.
    """
    if (found := given()) is not None:
        return found
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_NAME, secrets.token_bytes(32), overwrite=False)
    drawn: bytes = internal_kv._internal_kv_get(_NAME)
    return drawn
