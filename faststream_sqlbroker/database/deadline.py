"""The time limit of the one statement in flight on a connection that is kept.

A timer for each statement costs as much as what is sent with it: 4 µs. Here one timer serves many:
it looks at what is in flight when it ends, and begins again for the rest.
"""

import asyncio


class Deadline:
    """Cancels the task that waits for longer than it may; one task at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is in flight yet."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def begin(self, seconds: float) -> None:
        """The current task waits from now on."""
        self._task = task = asyncio.current_task(self._loop)
        self._cancelling = 0 if task is None else task.cancelling()
        self._is_over = False
        self._at = at = self._loop.time() + seconds
        timer = self._timer
        if timer is None or timer.when() > at:
            self.close()
            self._timer = self._loop.call_at(at, self._look)

    def end(self) -> bool:
        """The task waits no longer. Whether only the time has cancelled it: that is taken back."""
        task, self._task = self._task, None
        if not self._is_over or task is None:
            return False
        return task.uncancel() <= self._cancelling

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._at > self._loop.time():
            self._timer = self._loop.call_at(self._at, self._look)
        else:
            self._is_over = True
            self._task.cancel()
