"""The pages of all ranks of a gang as one store, for transfers between gangs.

Blocks go over a channel of their own, from any thread, so no step waits for them; a transfer waits
for the copies to and from the host that rank 0 has sent before it. All groups of a logical block
lie on one rank, so a column of block numbers has one owner.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from context_parallel.exchange import ExchangeFailed
from context_parallel.group import Channel
from kvpaging import codec
from kvpaging.host_pool import Moves
from kvpaging.host_store import Copying, HostStore
from kvpaging.store import BlockStore
from kvpaging.windows import NULL_BLOCK

log = logging.getLogger("kvatlas.worker")

STOP, HEARTBEAT, EXPORT, IMPORT = range(4)

Bytes = NDArray[np.uint8]


class Copied:
    """Counts one rank's copies of blocks to or from its host memory. All ranks copy in the order of
    rank 0's messages, so a count means the same on each."""

    def __init__(self) -> None:
        self.times = 0
        self._changed = threading.Condition()

    def move(self, host: HostStore, moves: Moves, rank: int) -> Copying:
        """Do `rank`'s part of gang-wide moves. Steps wait for copies in both directions, as nothing
        reports when another rank's have ended. A copy that fails counts too."""
        try:
            return host.move(host.local(moves, rank), wait=True)
        finally:
            with self._changed:
                self.times += 1
                self._changed.notify_all()

    def wait(self, times: int, within_s: float) -> None:
        """Wait for copy number `times`. Raises ValueError after `within_s` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.times >= times, within_s):
                raise ValueError(f"copies to or from the host have not ended in {within_s:g} s")


class GangPages:
    """Rank 0's end. Blocks are gang-wide; `export` and `import_` are those of `BlockStore`.

    One transfer at a time; the channel's deadline bounds each. Raises ExchangeFailed after it, and
    ValueError where a rank refuses its part. `failed` is called before an ExchangeFailed is raised:
    another rank may still write, so the engine has to end before blocks are allocated again.
    """

    def __init__(
        self,
        store: BlockStore,
        channel: Channel,
        copied: Copied,
        failed: Callable[[Exception], None],
    ) -> None:
        self.store, self.channel, self.copied, self.failed = store, channel, copied, failed
        self._lock = threading.Lock()
        self._stopped = False

    def export(self, blocks: Sequence[Sequence[int]]) -> Any:
        share = _Share(self.store, blocks)
        out = np.empty(share.bytes, np.uint8)
        share.put(out, share.export(0), [0])
        if share.others:
            for rank, part in enumerate(self._request(EXPORT, share.columns)[1:], 1):
                share.put(out, np.frombuffer(part, np.uint8), [rank])
        return out

    def import_(self, blocks: Sequence[Sequence[int]], data: Any) -> None:
        share, size = _Share(self.store, blocks), memoryview(data).nbytes
        if size != share.bytes:
            raise ValueError(f"{size} bytes were given for blocks of {share.bytes} bytes")
        combined = np.frombuffer(data, np.uint8) if size else np.empty(0, np.uint8)
        if share.others:
            self._request(IMPORT, share.columns, share.take(combined, share.others).tobytes())
        share.import_(0, combined)

    def bytes_of(self, blocks: Sequence[Sequence[int]]) -> int:
        return _Share(self.store, blocks).bytes

    def heartbeat(self) -> None:
        """Show that rank 0 is alive: the others wait for its next message, but not for ever."""
        with self._channel_lock():
            if not self._stopped:
                self.channel.broadcast(_packed(HEARTBEAT))

    def stop(self) -> None:
        """Let the other ranks leave; sent once."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                self.channel.broadcast(_packed(STOP))
            except ExchangeFailed as error:
                log.info("the other ranks have left already: %s", error)

    def _request(self, kind: int, columns: list[list[int]], data: bytes = b"") -> list[bytes]:
        """Each rank's answer to a request. Raises ValueError where one refuses."""
        message = _packed(kind, columns, data, self.copied.times)
        with self._channel_lock():
            self.channel.broadcast(message)
            gathered = self.channel.all_gather(codec.pack(("", b"")))
        assert gathered is not None
        answers = [codec.unpack(answer) for answer in gathered]
        for rank, (refusal, _) in enumerate(answers):
            if refusal:
                raise ValueError(f"rank {rank}: {refusal}")
        return [part for _, part in answers]

    @contextmanager
    def _channel_lock(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except ExchangeFailed as error:
                self.failed(error)
                raise


def _packed(
    kind: int, columns: Sequence[Sequence[int]] = (), data: bytes = b"", times: int = 0
) -> bytes:
    """A message of rank 0, which has sent `times` copies to and from the host before."""
    return codec.pack((kind, columns, data, times))


def serve_pages(store: BlockStore, channel: Channel, copied: Copied, within_s: float) -> None:
    """Another rank's end: does its part of rank 0's transfers until rank 0 sends a stop.

    A transfer waits for the copies to and from the host that rank 0 sent before it: they empty and
    fill the same blocks. It is refused where these take longer than `within_s`, which has to be
    less than rank 0 waits. Raises ExchangeFailed where the channel fails.
    """
    while True:
        kind, columns, data, times = codec.unpack(channel.broadcast(None))
        if kind == STOP:
            return
        if kind == HEARTBEAT:
            continue
        refusal, part = "", b""
        try:
            share = _Share(store, columns)
            copied.wait(times, within_s)
            if kind == EXPORT:
                part = share.export(channel.rank).tobytes()
            else:
                combined = np.empty(share.bytes, np.uint8)
                share.put(combined, np.frombuffer(data, np.uint8), share.others)
                share.import_(channel.rank, combined)
        except ValueError as error:
            refusal = str(error)
        channel.all_gather(codec.pack((refusal, part)))


class _Share:
    """Gang-wide blocks, `columns[g]` of group g: the rank of each, and where its bytes are in the
    combined bytes of all. NULL_BLOCK has no rank and no bytes."""

    def __init__(self, store: BlockStore, columns: Sequence[Sequence[int]]) -> None:
        groups = store.layout.groups
        if len(columns) != len(groups) or any(len(c) != len(columns[0]) for c in columns):
            raise ValueError(f"{len(groups)} equally long block lists are needed")
        per_rank = np.array([len(store.arenas[group.arena]) for group in groups])[:, None]
        self.store = store
        self.columns = [list(column) for column in columns]
        ids = np.array(self.columns, np.int64)
        owners, blocks = np.divmod(ids, per_rank)
        present = ids != NULL_BLOCK
        self.owner = np.where(present, owners, 0).max(0)
        if (present & (owners != self.owner)).any():
            raise ValueError("the groups of a block lie on several ranks")
        self._blocks = np.where(present, blocks, NULL_BLOCK)
        sizes = np.array([group.block_bytes for group in groups])[:, None]
        self._ends = np.append(0, (present * sizes).sum(0).cumsum())
        self.others = sorted({*self.owner.tolist()} - {0})  # ranks other than 0

    @property
    def bytes(self) -> int:
        return int(self._ends[-1])

    def export(self, rank: int) -> Bytes:
        """The bytes of this rank's blocks."""
        found: Bytes = self.store.export(self._of(rank))
        return found

    def import_(self, rank: int, combined: Bytes) -> None:
        """Fill this rank's blocks from the combined bytes."""
        self.store.import_(self._of(rank), self.take(combined, [rank]))

    def take(self, combined: Bytes, ranks: Sequence[int]) -> Bytes:
        """The bytes of these ranks' blocks, out of the combined ones."""
        parts = [combined[start:end] for start, end in self._spans(ranks)]
        return np.concatenate(parts) if parts else combined[:0]

    def put(self, combined: Bytes, part: Bytes, ranks: Sequence[int]) -> None:
        """Write the bytes of these ranks' blocks to their places in `combined`. Raises ValueError
        where `part` has not exactly these blocks' bytes."""
        spans, at = self._spans(ranks), 0
        if len(part) != sum(end - start for start, end in spans):
            raise ValueError(f"{len(part)} bytes came for the blocks of ranks {list(ranks)}")
        for start, end in spans:
            combined[start:end] = part[at : at + end - start]
            at += end - start

    def _spans(self, ranks: Sequence[int]) -> list[tuple[int, int]]:
        at = np.flatnonzero(np.isin(self.owner, ranks))
        return [*zip(self._ends[at].tolist(), self._ends[at + 1].tolist(), strict=True)]

    def _of(self, rank: int) -> list[list[int]]:
        mine: list[list[int]] = self._blocks[:, self.owner == rank].tolist()
        return mine
