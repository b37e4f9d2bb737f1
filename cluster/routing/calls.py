"""The one way to call an engine: fresh context, deadline, cancelled in every case but success.

Handle calls made inside one HTTP request would share Serve's request id and hang a router, so each
call runs in an empty context. A disconnect then no longer reaches the worker by itself: whoever
opened a call cancels it.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Protocol

KEEP_ALIVE_S = 2.0
"""How often a worker with nothing to say says so."""

SILENCE_S = 3 * KEEP_ALIVE_S
"""A stream that says nothing for this long is lost: a frozen process raises nothing."""

LOOKS = 3
"""Looks in a row that find nothing, spread over the time that a worker may be silent."""

LATE_S = 0.5
"""A look that comes later than this was held up by the caller's own event loop, which heard nobody
meanwhile: it proves nothing, and the worker has all its time again."""


class EngineLost(Exception):
    """The worker did not answer: dead, frozen, or cut off."""


class Undelivered(EngineLost):
    """The worker that was meant is not there any more: it has seen nothing of this call."""


class Misrouted(Exception):
    """What a worker answers to a call that is meant for another one."""


class Refused(Exception):
    """The worker answered that it cannot do what was asked."""


class DeadlinePassed(Exception):
    """The request took longer than it may."""


class Cancellable(Protocol):
    def cancel(self) -> Any: ...


class Reply(Awaitable[Any], Cancellable, Protocol):
    """The future answer of a worker's method."""


class Items(Cancellable, Protocol):
    """The future messages of a worker's stream."""

    async def __anext__(self) -> Any: ...


class Handle(Protocol):
    """A worker as an ingress sees it, or any of them; `ServeHandle` is the real one."""

    def to(self, gang: str) -> Handle: ...

    def stream(self, method: str, *arguments: Any) -> Items: ...

    def ask(self, method: str, *arguments: Any) -> Reply: ...


class ServeHandle:
    """A `Handle` over Serve's handle of the deployment `app.Worker`, whose router is `Delivery`."""

    def __init__(self, handle: Any, gang: str = "") -> None:
        self._handle, self._gang = handle, gang
        self._call = handle.options(method_name="call")
        self._stream = handle.options(method_name="stream", stream=True)

    def to(self, gang: str) -> ServeHandle:
        """The same for one gang."""
        return ServeHandle(self._handle, gang)

    def stream(self, method: str, *arguments: Any) -> Items:
        items: Items = self._stream.remote(self._gang, method, *arguments)
        return items

    def ask(self, method: str, *arguments: Any) -> Reply:
        reply: Reply = self._call.remote(self._gang, method, *arguments)
        return reply


async def ask(handle: Handle, method: str, *arguments: Any, deadline_s: float) -> Any:
    """The answer of a worker's method.

    Raises Refused where the method raised ValueError, EngineLost when no answer came in time.
    """
    reply = contextvars.Context().run(handle.ask, method, *arguments)
    try:
        return await _heard(reply, deadline_s)
    except TimeoutError:
        raise EngineLost(f"{method} had no answer in {deadline_s:g} s") from None
    except asyncio.CancelledError:
        _unless_ours(f"{method} was cancelled by the worker")
        raise
    except ValueError as error:
        raise Refused(str(getattr(error, "cause", error))) from None
    except Misrouted as error:
        raise Undelivered(f"{method} was not delivered: {_shown(error)}") from None
    except Exception as error:
        raise EngineLost(f"{method} failed: {_shown(error)}") from error
    finally:
        reply.cancel()


class Stream:
    """A worker's method that speaks for long: `next()` until the last message, then leave `with`.

    A worker that is killed ends it within milliseconds, one that is frozen after `silence_s`.
    """

    def __init__(
        self,
        handle: Handle,
        method: str,
        *arguments: Any,
        deadline_s: float = math.inf,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._deadline = asyncio.get_running_loop().time() + deadline_s
        self._silence_s = silence_s
        self._items = contextvars.Context().run(handle.stream, method, *arguments)
        self.finished = False

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.finished:
            self._items.cancel()

    async def next(self) -> Any:
        """The next message. Raises EngineLost or DeadlinePassed."""
        try:
            return await _heard(self._items.__anext__(), self._silence_s, self._deadline)
        except DeadlinePassed:
            raise
        except TimeoutError:
            raise EngineLost(f"the worker said nothing for {self._silence_s:g} s") from None
        except StopAsyncIteration:
            raise EngineLost("the worker ended the stream before its last message") from None
        except asyncio.CancelledError:
            _unless_ours("the worker cancelled the stream")
            raise
        except Misrouted as error:
            raise Undelivered(f"the call was not delivered: {_shown(error)}") from None
        except Exception as error:
            raise EngineLost(f"the stream broke: {_shown(error)}") from error


async def _heard(said: Awaitable[Any], silence_s: float, until: float = math.inf) -> Any:
    """What a worker says next. Raises TimeoutError after `silence_s` of its silence, in which this
    event loop ran all the while, and DeadlinePassed at the loop's time `until`.

    What has arrived counts however late it is looked at. The read goes on from look to look, for
    ending one ends the whole call.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(said)
    silent = 0
    try:
        while True:
            look = min(loop.time() + silence_s / LOOKS, until)
            await asyncio.wait((task,), timeout=max(0.0, look - loop.time()))
            if task.done():
                return task.result()
            if look == until:
                raise DeadlinePassed
            silent = silent + 1 if loop.time() < look + LATE_S else 0
            if silent == LOOKS:
                raise TimeoutError
    finally:
        task.cancel()
        if task.done():
            _ignore(task)
        else:
            task.add_done_callback(_ignore)


def _ignore(task: asyncio.Future[Any]) -> None:
    """What comes of a read that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _unless_ours(message: str) -> None:
    """Turns a cancellation that nobody asked this task for into a loss."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise EngineLost(message) from None


def _shown(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]
