"""Where a token's keys lie, and whose tokens lie in a block: for one worker and for a gang.

Blocks have gang-wide numbers: `rank * per_rank + physical`, and a table says them in the order of
the tokens. Addresses are those of the rank's own process.
"""

from __future__ import annotations

from typing import Any

from context_parallel.shard import ShardMap
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from worker.engine.engine import Engine
from worker.gang.member import RankInfo, arenas
from worker.request import Request, Sequence
from worker.startup.start import EngineSpec


class Pages:
    """The pages of a gang, or of one worker. `ranks` are the facts of each rank."""

    def __init__(
        self, engine: Engine, launch: EngineSpec, gang: str, epoch: int, ranks: list[RankInfo]
    ) -> None:
        self._engine, self._launch = engine, launch
        self._gang, self._epoch, self._ranks = gang, epoch, ranks
        self._store = engine.runner.model.store

    def locate(self, request_id: str, token: int, choice: int) -> dict[str, Any] | None:
        """Where the keys of a request's token lie; None when the request is not here.

        Raises ValueError where the request is here but the token is not in its pages.
        """
        request = self._engine.requests.get(request_id)
        if request is None:
            return None
        sequence = _sequence(request, choice)
        stored = _stored(sequence)
        if not 0 <= token < stored:
            raise ValueError(
                f"token {token} of request {request_id} is not in its pages: it has {stored} of "
                f"{len(sequence.tokens)} tokens there"
            )
        assert sequence.table is not None
        layout = self._launch.layout
        table = sequence.table
        places = [self._place(table, token, group) for group in range(len(table.pools))]
        kept = [place for place in places if "out_of_window" not in place]
        if not kept:
            widest = max(group.shape.window or 0 for group in layout.groups)
            raise ValueError(
                f"token {token} of request {request_id} is not in its pages any more: its block "
                f"was given back, for no layer sees more than the last {widest} tokens"
            )
        first = {name: value for name, value in kept[0].items() if name != "group"}
        return {
            "request": request_id,
            "token": token,
            "choice": choice,
            "degree": len(sequence.table.ranks),
            "gang": self._gang,
            "epoch": self._epoch,
            "ranks": len(self._ranks),
            "tp": 0,
            "logical_block": token // layout.block_size,
            **first,
            "layers": layout.num_layers,
            "bytes_per_token": layout.bytes_per_token,
            "dtype": self._launch.kv_dtype,
            "groups": places,
        }

    def holders(self, rank: int, block: int, group: int) -> dict[str, Any]:
        """Whose tokens lie in a rank's physical block: requests, and their positions from `first`
        to before `end`. Raises ValueError for a block that there is not."""
        layout, size = self._launch.layout, self._launch.layout.block_size
        if not 0 <= group < len(layout.groups):
            raise ValueError(f"group {group}: the model has {len(layout.groups)} layer groups")
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"rank {rank}: gang {self._gang} has {len(self._ranks)} ranks")
        own = self._per_rank(group)
        if not 0 <= block < own:
            raise ValueError(f"block {block}: rank {rank} has {own} blocks in group {group}")
        found: list[dict[str, Any]] = []
        for request in self._engine.requests.values():
            for sequence in request.sequences:
                blocks = [] if sequence.table is None else sequence.table.blocks[group]
                stored = _stored(sequence)
                physical, logical = ShardMap(blocks, own, size).local(rank)
                found += [
                    {
                        "request": request.id,
                        "choice": sequence.choice,
                        "first": index * size,
                        "end": min((index + 1) * size, stored),
                    }
                    for index in logical[physical == block].tolist()
                    if index * size < stored
                ]
        place = {"gang": self._gang, "rank": rank, "group": group, "physical_block": block}
        return {**place, **self._at(rank, group, block, 0), "holders": found}

    def _place(self, table: BlockTable, token: int, group: int) -> dict[str, Any]:
        size, own = self._launch.layout.block_size, self._per_rank(group)
        if table.blocks[group][token // size] == NULL_BLOCK:
            return {"group": group, "window": table.windows[group], "out_of_window": True}
        blocks = [*table.blocks[group]]
        for index in reversed(range(table.first[group])):  # counted as in the tables of the ranks
            rank = table.rank_at(index)
            blocks[index] = blocks[index + 1] if rank is None else rank * own
        place = ShardMap(blocks, own, size).locate(token)
        return {
            "group": group,
            "rank": place.rank,
            "cp": place.rank,
            "local_block": place.local,
            "physical_block": place.block,
            "offset": place.offset,
            **self._at(place.rank, group, place.block, place.offset),
        }

    def _at(self, rank: int, group: int, block: int, offset: int) -> dict[str, Any]:
        """Host, process and address on a rank, whose pages are laid out as those of this one."""
        facts, arena = self._ranks[rank], self._launch.layout.groups[group].arena
        found = self._store.locate(group, block, offset)
        shift = facts.arenas[arena] - arenas(self._store)[arena]
        return {
            "host": facts.host,
            "pid": facts.pid,
            "device": facts.device,
            **found,
            "address": found["address"] + shift,
        }

    def _per_rank(self, group: int) -> int:
        return self._store.blocks(self._launch.layout.groups[group].arena)


def _sequence(request: Request, choice: int) -> Sequence:
    if not 0 <= choice < len(request.sequences):
        raise ValueError(f"request {request.id} has {len(request.sequences)} choices")
    return request.sequences[choice]


def _stored(sequence: Sequence) -> int:
    """Tokens whose keys are in pages."""
    return 0 if sequence.table is None else sequence.computed
