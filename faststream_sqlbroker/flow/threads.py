"""Threads for the application's functions, which nothing can cancel.

They are daemons: one that does not end keeps no process. Python waits at its exit for the threads
of asyncio, anyio and `concurrent.futures`.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from anyio import CancelScope

from faststream_sqlbroker.flow.publish_on_ack import current_delivery

try:
    from anyio._core._eventloop import claim_worker_thread, get_async_backend, threadlocals
except ImportError:  # they are private; without them `anyio.from_thread` fails in these threads
    claim_worker_thread = None  # type: ignore[assignment]
try:
    import sniffio
except ModuleNotFoundError:  # anyio uses it if it is there
    sniffio = None  # type: ignore[assignment]

MAX_IDLE = 10.0
"""Seconds that a thread waits for its next call."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    ended: "asyncio.Future[Any]"
    backend: Any
    scope: CancelScope
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        if self.ended.cancelled():
            return
        try:
            with self._for_anyio():
                self.result = self.function()
        except StopIteration as stopped:  # no future takes it
            self.error = RuntimeError("a function in a thread raised StopIteration")
            self.error.__cause__ = stopped
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.error = error

    def _for_anyio(self) -> AbstractContextManager[None]:
        if claim_worker_thread is None:
            return nullcontext()
        threadlocals.current_cancel_scope = self.scope
        return claim_worker_thread(self.backend, self.ended.get_loop())

    def report(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self.ended.get_loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self.ended.cancelled():
            return
        if self.error is None:
            self.ended.set_result(self.result)
        else:
            self.ended.set_exception(self.error)


_Calls = SimpleQueue[_Call]
_idle: deque[_Calls] = deque()
"""What the threads without a call wait for, the last one at the end."""
_own: "dict[asyncio.Task[Any] | None, str]" = {}
"""The function of a schedule, by name, that a task waits for in `own_in_thread`."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # the threads stay with the parent


async def in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a thread; as many run as are called.

    A cancellation ends the wait, not the function. It may use `anyio.from_thread`.
    """
    await asyncio.sleep(0)  # a cancellation that is pending comes before the start
    ended = asyncio.get_running_loop().create_future()
    context = copy_context()
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, None)  # for `anyio.run` in the function
    call = partial(context.run, function, *args, **kwargs)
    try:
        calls = _idle.pop()
    except IndexError:
        calls = SimpleQueue()
        Thread(target=_work, args=(calls,), name="sqlbroker-thread", daemon=True).start()
    backend = None if claim_worker_thread is None else get_async_backend()
    calls.put(_Call(call, ended, backend, CancelScope(shield=True)))
    return await ended


def _work(calls: _Calls) -> None:
    """Run one call after the other."""
    while True:
        try:
            call = calls.get(timeout=MAX_IDLE)
        except Empty:
            try:
                _idle.remove(calls)
            except ValueError:
                continue  # it was given a call just now
            return
        call.run()
        # Before the report, by which the next call is made.
        _idle.append(calls)
        call.report()
        del call  # nothing of it is kept while the thread waits


async def own_in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`in_thread` for a handler, a dependency of it, or the function of a schedule: who ends them
    finds what they wait for.

    Of a handler it is noted where its worker works, as a middleware may run it in another task.
    """
    name = getattr(function, "__name__", None) or repr(function)
    if (here := current_delivery.get()) is not None:
        here.threads.append(name)
        try:
            return await in_thread(function, *args, **kwargs)
        finally:
            here.threads.remove(name)
    task = asyncio.current_task()
    _own[task] = name
    try:
        return await in_thread(function, *args, **kwargs)
    finally:
        _own.pop(task, None)


def own_of(task: "asyncio.Task[Any] | None") -> str | None:
    """The name of the function of a schedule that `task` waits for in `own_in_thread`; cancelling
    the task would only end the wait.
    """
    return _own.get(task)
