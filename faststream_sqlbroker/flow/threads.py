"""Threads for the application's functions, which nothing can cancel.

They are daemon threads: a thread that does not end does not keep the process alive. At its exit
Python waits for the threads of asyncio, anyio and `concurrent.futures`.
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

from faststream_sqlbroker.flow.publish_on_ack import current_delivery_var

try:
    from anyio._core._eventloop import claim_worker_thread, get_async_backend, threadlocals
except ImportError:  # these are private; without them `anyio.from_thread` fails in these threads
    claim_worker_thread = None  # type: ignore[assignment]
try:
    import sniffio
except ModuleNotFoundError:  # anyio uses it if it is there
    sniffio = None  # type: ignore[assignment]

MAX_IDLE_SECONDS = 10.0
"""Seconds that a thread waits for its next call."""


@dataclass(slots=True, eq=False)
class _ThreadCall:
    function: Callable[[], Any]
    future: "asyncio.Future[Any]"
    backend: Any
    scope: CancelScope
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        """Call the function in this thread, and keep the result or the error for `report`.

        If the caller has been cancelled before the start, the function is not called.
        """
        if self.future.cancelled():
            return
        try:
            with self._enter_anyio():
                self.result = self.function()
        except StopIteration as stop:  # a future does not accept it
            self.error = RuntimeError("a function in a thread raised StopIteration")
            self.error.__cause__ = stop
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self.error = error

    def _enter_anyio(self) -> AbstractContextManager[None]:
        """Return a context in which the function can use `anyio.from_thread`.

        anyio allows that only in its own worker threads, so this marks the thread as such by
        anyio's private functions; without them the context does nothing.
        """
        if claim_worker_thread is None:
            return nullcontext()
        threadlocals.current_cancel_scope = self.scope
        return claim_worker_thread(self.backend, self.future.get_loop())

    def report(self) -> None:
        """Hand the result over to the event loop of the caller, which alone may set the future."""
        with suppress(RuntimeError):  # the event loop is closed
            self.future.get_loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Set the result of the caller's future; runs in the event loop.

        A caller that was cancelled no longer waits, and its future accepts no result.
        """
        if self.future.cancelled():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


_CallQueue = SimpleQueue[_ThreadCall]
_idle_queues: deque[_CallQueue] = deque()
"""Queues of the threads without a call, the last one at the end."""
_schedule_functions: "dict[asyncio.Task[Any] | None, str]" = {}
"""Name of the schedule's function that a task waits for in `run_in_tracked_thread`."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle_queues.clear)  # the threads stay with the parent


async def run_in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a daemon thread; every call gets a thread at once.

    Unlike with `asyncio.to_thread`, no call waits for a free thread of a pool, and a function that
    does not end cannot keep the process from exiting. A cancellation ends the wait, not the
    function. The function may use `anyio.from_thread`.
    """
    await asyncio.sleep(0)  # a pending cancellation comes before the start
    future = asyncio.get_running_loop().create_future()
    context = copy_context()
    if sniffio is not None:
        # Else `anyio.run` in the function would believe that an event loop runs in its thread.
        context.run(sniffio.current_async_library_cvar.set, None)
    call = partial(context.run, function, *args, **kwargs)
    try:
        calls = _idle_queues.pop()
    except IndexError:
        calls = SimpleQueue()
        Thread(target=_run_calls, args=(calls,), name="sqlbroker-thread", daemon=True).start()
    backend = None if claim_worker_thread is None else get_async_backend()
    calls.put(_ThreadCall(call, future, backend, CancelScope(shield=True)))
    return await future


def _run_calls(calls: _CallQueue) -> None:
    """Run calls from the queue of this thread, which ends after some idle seconds.

    Each thread has a queue of its own. While it is in `_idle_queues`, `run_in_thread` may take it
    and put the next call there.
    """
    while True:
        try:
            call = calls.get(timeout=MAX_IDLE_SECONDS)
        except Empty:
            try:
                _idle_queues.remove(calls)
            except ValueError:
                continue  # `run_in_thread` has just taken the queue: its call comes next
            return
        call.run()
        # Before the report, because the next call may follow it at once.
        _idle_queues.append(calls)
        call.report()
        del call  # keep no reference while the thread waits


async def run_in_tracked_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a handler, a dependency, or a schedule's function in a thread that can be found later.

    The shutdown must know which workers wait for a thread: these are abandoned, not cancelled,
    because their messages must not be released. The function is noted in the worker's current
    delivery, because a middleware may run the handler in another task. Without a delivery it is a
    schedule's function, noted for its task.
    """
    name = getattr(function, "__name__", None) or repr(function)
    if (delivery := current_delivery_var.get()) is not None:
        delivery.threads.append(name)
        try:
            return await run_in_thread(function, *args, **kwargs)
        finally:
            delivery.threads.remove(name)
    task = asyncio.current_task()
    _schedule_functions[task] = name
    try:
        return await run_in_thread(function, *args, **kwargs)
    finally:
        _schedule_functions.pop(task, None)


def find_thread_function(task: "asyncio.Task[Any] | None") -> str | None:
    """Return the name of the schedule's function that `task` waits for in a thread, or None.

    A stop logs such a function as abandoned: to cancel the task would only end the wait.
    """
    return _schedule_functions.get(task)
