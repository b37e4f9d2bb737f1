"""Sends prompts to gangs: which one, what is open where, and what to do when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.calls import EngineLost, Handle
from cluster.gangs import LOOK_S, Gangs
from worker import wire


@dataclass(frozen=True, slots=True)
class Target:
    """A gang that was chosen, and the way to it."""

    gang: str
    handle: Handle


class Dispatcher:
    """One ingress's view of where its requests are."""

    def __init__(self, gangs: Gangs, handle: Handle) -> None:
        self.gangs, self._handle = gangs, handle
        self._open: dict[str, dict[str, int]] = {}  # by gang: attempts by request

    def choose(self, submit: wire.Submit, avoid: Collection[str]) -> Target | None:
        """The gang that should serve a prompt; None where all that are ready are to be avoided."""
        candidates = [gang for gang in self.gangs.ready() if gang not in avoid]
        if not candidates:
            return None
        gang = min(candidates, key=lambda gang: (len(self._open.get(gang, ())), gang))
        return Target(gang, self._handle.to(gang))

    async def wait(self, submit: wire.Submit, avoid: Collection[str], wait_s: float) -> Target:
        """The same, waiting for a gang to become ready. One to be avoided is better than none.

        Raises EngineLost when there is none in `wait_s`.
        """
        try:
            async with asyncio.timeout(wait_s):
                while (chosen := self.choose(submit, avoid) or self.choose(submit, ())) is None:
                    await asyncio.sleep(LOOK_S)
                return chosen
        except TimeoutError:
            raise EngineLost(f"no worker was ready for {wait_s:g} s") from None

    @contextlib.contextmanager
    def opened(self, target: Target, submit: wire.Submit) -> Iterator[None]:
        """A stream is open while the block runs."""
        there = self._open.setdefault(target.gang, {})
        there[submit.id] = submit.attempt
        try:
            yield
        finally:
            del there[submit.id]
            if not there:
                self._open.pop(target.gang, None)
