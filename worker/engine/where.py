"""Where a token's keys lie, and whose tokens lie in a block: for one worker and for a gang.

A block table lists gang-wide block numbers, `rank * per_rank + physical`, in the order of the
tokens. Addresses are those of the rank's own process.
"""

from __future__ import annotations

from typing import Any

from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from worker.engine.engine import Engine
from worker.gang.member import RankInfo, arenas
from worker.startup.spec import EngineSpec


class AddressMap:
    def __init__(
        self, engine: Engine, spec: EngineSpec, gang: str, epoch: int, ranks: list[RankInfo]
    ) -> None:
        self._engine, self._spec = engine, spec
        self._gang, self._epoch, self._ranks = gang, epoch, ranks
        self._store = engine.runner.model.store

    def locate(self, request_id: str, token: int, choice: int) -> dict[str, Any] | None:
        """Where the keys of a request's token lie; None where the request is not here.

        Raises ValueError where the request is here but has no such choice, or no such token in its
        pages.
        """
        request = self._engine.requests.get(request_id)
        if request is None:
            return None
        if not 0 <= choice < len(request.sequences):
            raise ValueError(f"request {request.id} has {len(request.sequences)} choices")
        sequence = request.sequences[choice]
        stored = sequence.computed
        if not 0 <= token < stored:
            raise ValueError(
                f"token {token} of request {request_id} is not in its pages: it has {stored} of "
                f"{len(sequence.tokens)} tokens there"
            )
        assert sequence.table is not None
        layout, table = self._spec.layout, sequence.table
        places = [self._place(table, token, group) for group in range(len(table.pools))]
        kept = [place for place in places if "out_of_window" not in place]
        if not kept:
            widest = max(group.shape.window or 0 for group in layout.groups)
            raise ValueError(
                f"token {token} of request {request_id} is not in its pages any more: its block "
                f"was freed, for no layer sees more than the last {widest} tokens"
            )
        first = {name: value for name, value in kept[0].items() if name != "group"}
        return {
            "request": request_id,
            "token": token,
            "choice": choice,
            "degree": len(table.ranks),
            "gang": self._gang,
            "epoch": self._epoch,
            "ranks": len(self._ranks),
            "tp": 0,
            "logical_block": token // layout.block_size,
            **first,
            "layers": layout.num_layers,
            "bytes_per_token": layout.bytes_per_token,
            "dtype": self._spec.kv_dtype,
            "groups": places,
        }

    def holders(self, rank: int, block: int, group: int) -> dict[str, Any]:
        """Whose tokens lie in a rank's physical block: requests, and their positions from `first`
        to before `end`. Raises ValueError where there is no such block."""
        layout, size = self._spec.layout, self._spec.layout.block_size
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
                found += [
                    {
                        "request": request.id,
                        "choice": sequence.choice,
                        "first": index * size,
                        "end": min((index + 1) * size, sequence.computed),
                    }
                    for index, held in enumerate(blocks)
                    if held == rank * own + block and index * size < sequence.computed
                ]
        place = {"gang": self._gang, "rank": rank, "group": group, "physical_block": block}
        return {**place, **self._at(rank, group, block, 0), "holders": found}

    def _place(self, table: BlockTable, token: int, group: int) -> dict[str, Any]:
        size, own = self._spec.layout.block_size, self._per_rank(group)
        if table.blocks[group][token // size] == NULL_BLOCK:
            return {"group": group, "window": table.windows[group], "out_of_window": True}
        blocks = [*table.blocks[group]]
        for index in reversed(range(table.first[group])):  # freed ones count in tables of ranks
            rank = table.rank_at(index)
            blocks[index] = blocks[index + 1] if rank is None else rank * own
        at, offset = divmod(token, size)
        rank, physical = divmod(blocks[at], own)
        return {
            "group": group,
            "rank": rank,
            "cp": rank,
            "local_block": sum(block // own == rank for block in blocks[:at]),
            "physical_block": physical,
            "offset": offset,
            **self._at(rank, group, physical, offset),
        }

    def _at(self, rank: int, group: int, block: int, offset: int) -> dict[str, Any]:
        """Host, process and address on a rank, whose pages are laid out as those of this one."""
        info, arena = self._ranks[rank], self._spec.layout.groups[group].arena
        found = self._store.locate(group, block, offset)
        shift = info.arenas[arena] - arenas(self._store)[arena]
        return {
            "host": info.host,
            "pid": info.pid,
            "device": info.device,
            **found,
            "address": found["address"] + shift,
        }

    def _per_rank(self, group: int) -> int:
        return len(self._store.arenas[self._spec.layout.groups[group].arena])
