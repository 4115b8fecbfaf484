"""A process of its own without the second that a new interpreter takes to import everything.

Forked from a server that has imported the worker and opened nothing: SQLite must not be carried over a fork.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.worker"])


class Forked:
    """A process that calls `run` with `arguments`; used like `subprocess.Popen`."""

    def __init__(self, run: Callable[..., object], *arguments: Any) -> None:
        """Start it; `run` is a function of a module."""
        self._process = _CONTEXT.Process(target=_quietly, args=(run, *arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            TimeoutError: it still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without asking."""
        self.send_signal(signal.SIGKILL)


def _quietly(run: Callable[..., object], *arguments: Any) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    sys.stdin.close()
    run(*arguments)
