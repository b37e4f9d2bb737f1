"""The secret that names cached blocks, the same in all processes of a Ray cluster."""

from __future__ import annotations

import secrets

NAME = b"kvatlas/block-secret"
SECRET_BYTES = 32


def shared_secret() -> bytes:
    """Drawn by whoever asks first and kept by Ray, so that a process that starts later, or an
    application that is deployed anew, finds the blocks that others have."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(NAME, secrets.token_bytes(SECRET_BYTES), overwrite=False)
    kept: bytes = internal_kv._internal_kv_get(NAME)
    return kept
