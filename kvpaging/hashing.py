"""Chained block hashes: the same bytes in every process, on every machine.

    root        = H("root",  named fields, each length-prefixed)
    hash(-1)    = root
    hash(i)     = H("block", hash(i - 1), tokens of block i as little-endian uint32)

H is BLAKE2b with a 16-byte digest, keyed with the cluster's secret where there is one; the words
in quotes are its personalisation, so that no root is also a block hash. Parents have a fixed length
and the block size is in the root, so blocks need no length prefixes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from operator import index

BLOCK_HASH_BYTES = 16
FORMAT_VERSION = 1
TOKEN_MAX = (1 << 32) - 1


def root(
    *,
    fingerprint: bytes,
    kv_dtype: str,
    block_size: int,
    group: int = 0,
    adapter: str = "",
    salt: bytes = b"",
    key: bytes = b"",
) -> bytes:
    """The parent of every first block: a digest of all that K and V of given tokens depend on.

    `fingerprint` names the model and its rotary choice, `kv_dtype` how K,V are stored, `group` the
    layer group, `adapter` the weights on top, `salt` the tenant. Names and values are each preceded
    by their length, so two different assignments never digest the same bytes.
    """
    if block_size < 1 or group < 0:
        raise ValueError(f"no block hash for block size {block_size} and layer group {group}")
    fields: dict[str, bytes] = {
        "version": b"%d" % FORMAT_VERSION,
        "fingerprint": fingerprint,
        "kv_dtype": kv_dtype.encode(),
        "block_size": b"%d" % block_size,
        "group": b"%d" % group,
        "adapter": adapter.encode(),
        "salt": salt,
    }
    digest = blake2b(digest_size=BLOCK_HASH_BYTES, key=key, person=b"kvatlas.root")
    for name, value in fields.items():
        for part in (name.encode(), value):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def block_hashes(
    root: bytes, tokens: Sequence[int], block_size: int, *, key: bytes = b""
) -> list[bytes]:
    """The block hashes of all full blocks of `tokens`; a partial last block has none.

    `root` is the parent of the first, which may also be an earlier block's hash. Raises ValueError
    for a token that is no integer from 0 to 2^32 - 1, a parent that is not 16 bytes
    long, or a key longer than 64 bytes.
    """
    if len(root) != BLOCK_HASH_BYTES:
        raise ValueError(f"a block hash has {BLOCK_HASH_BYTES} bytes, this parent {len(root)}")
    start = blake2b(digest_size=BLOCK_HASH_BYTES, key=key, person=b"kvatlas.block")
    block_hashes, parent = [], root
    data = _packed(tokens)
    width = 4 * block_size
    for at in range(0, len(tokens) // block_size * width, width):
        digest = start.copy()
        digest.update(parent + data[at : at + width])
        parent = digest.digest()
        block_hashes.append(parent)
    return block_hashes


def _packed(tokens: Sequence[int]) -> bytes:
    # A list, because an array made from bytes would take them for machine words.
    tokens = tokens if isinstance(tokens, list) else list(tokens)
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError):
        bad = next(token for token in tokens if not _is_token(token))
        raise ValueError(f"token {bad!r} is no integer from 0 to {TOKEN_MAX}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _is_token(value: object) -> bool:
    return hasattr(value, "__index__") and 0 <= index(value) <= TOKEN_MAX
