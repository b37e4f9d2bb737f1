"""Calls to an engine: in a fresh context, with a deadline, and cancelled unless they succeed.

Handle calls made inside one HTTP request would share Serve's request id and hang a router, so each
call runs in an empty context. A client's disconnect then does not reach the worker by itself: the
caller cancels the call.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Awaitable
from typing import Any, Protocol

KEEP_ALIVE_S = 2.0
"""How often a worker with no message to send sends a keep-alive."""

SILENCE_S = 3 * KEEP_ALIVE_S
"""A stream without a message for this long is lost: a frozen process raises nothing."""

POLLS = 3
"""The time that a worker may be silent is divided into this many polls."""

LATE_S = 0.5
"""A poll later than this was delayed by the caller's own event loop, which received nothing in the
meantime: it proves nothing, and the worker's time starts again."""


class EngineLost(Exception):
    """The worker did not answer: dead, frozen, or cut off."""


class Undelivered(EngineLost):
    """The worker does not exist any more, and has not received this call."""


class Misrouted(Exception):
    """A worker's answer to a call that is addressed to another one."""


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
    """Calls one worker, or any of them; `ServeHandle` is the real one."""

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
        return await _received(reply, deadline_s)
    except TimeoutError:
        raise EngineLost(f"{method} had no answer in {deadline_s:g} s") from None
    except asyncio.CancelledError:
        _raise_unless_cancelled(f"{method} was cancelled by the worker")
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
    """A streaming method of a worker: call `next()` until the last message, then leave `with`.

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

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            self._items.cancel()

    async def next(self) -> Any:
        """The next message. Raises EngineLost or DeadlinePassed."""
        try:
            return await _received(self._items.__anext__(), self._silence_s, self._deadline)
        except DeadlinePassed:
            raise
        except TimeoutError:
            raise EngineLost(f"the worker said nothing for {self._silence_s:g} s") from None
        except StopAsyncIteration:
            raise EngineLost("the worker ended the stream before its last message") from None
        except asyncio.CancelledError:
            _raise_unless_cancelled("the worker cancelled the stream")
            raise
        except Misrouted as error:
            raise Undelivered(f"the call was not delivered: {_shown(error)}") from None
        except Exception as error:
            raise EngineLost(f"the stream broke: {_shown(error)}") from error


async def _received(message: Awaitable[Any], silence_s: float, until: float = math.inf) -> Any:
    """A worker's next message. Raises TimeoutError after `silence_s` without one, in which this
    event loop was never blocked, and DeadlinePassed at the loop's time `until`.

    A message that has arrived counts, however late it is read. One read goes on through all polls,
    because ending it would end the whole call.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(message)
    silent = 0
    try:
        while True:
            poll_s = min(loop.time() + silence_s / POLLS, until)
            await asyncio.wait((task,), timeout=max(0.0, poll_s - loop.time()))
            if task.done():
                return task.result()
            if poll_s == until:
                raise DeadlinePassed
            silent = silent + 1 if loop.time() < poll_s + LATE_S else 0
            if silent == POLLS:
                raise TimeoutError
    finally:
        task.cancel()
        if task.done():
            _ignore(task)
        else:
            task.add_done_callback(_ignore)


def _ignore(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a read that nobody awaits any more, so asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _raise_unless_cancelled(message: str) -> None:
    """Raises EngineLost if the cancellation came from the worker, not from this task's owner."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise EngineLost(message) from None


def _shown(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:160]
