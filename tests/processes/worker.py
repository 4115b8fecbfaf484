"""A worker process for the tests: python -m tests.processes.worker URL FOLDER HANDLER [OPTIONS as
JSON].

Every start of a handler is one line in FOLDER/<process id>, written at once: it survives SIGKILL.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from faststream import FastStream
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow.deliver import fetch
from faststream_sqlbroker.flow.deliver.leases import StuckReleaser
from faststream_sqlbroker.flow.deliver.prefetch import HandlerTimes
from tests.processes.patience import be_patient, note_listening


def gate(folder: Path) -> Path:
    """The file for which some handlers wait: the test decides when they end."""
    return folder.parent / "gate"


class Handlers:
    """A worker's actions, by the body."""

    def __init__(self, folder: Path) -> None:
        self._opened = gate(folder)
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def _gate(self) -> None:
        while not self._opened.exists():
            await asyncio.sleep(0.05)

    def note(self, body: int) -> None:
        """Write that `body` has been started."""
        os.write(self._file, f"{body}\n".encode())

    async def quick(self, body: int) -> None:
        """Note and be done."""
        self.note(body)

    async def slow(self, body: int) -> None:
        """Take half a second."""
        self.note(body)
        await asyncio.sleep(0.5)

    async def steady(self, body: int) -> None:
        """Take a fifth of a second."""
        self.note(body)
        await asyncio.sleep(0.2)

    async def gated(self, body: int) -> None:
        """Take half a second, and as long as the gate is closed."""
        self.note(body)
        await asyncio.sleep(0.5)
        await self._gate()

    async def stalls(self, body: int) -> None:
        """Wait for the gate at each two hundredth body, and take no time for the others."""
        self.note(body)
        if body and body % 200 == 0:
            await self._gate()

    async def hang_later(self, body: int) -> None:
        """Never end, but for the first forty bodies."""
        self.note(body)
        if body >= 40:
            await asyncio.Event().wait()

    async def hang(self, body: int) -> None:
        """Never end."""
        self.note(body)
        await asyncio.Event().wait()

    def block(self, body: int) -> None:
        """Hold a thread until the gate is open."""
        self.note(body)
        while not self._opened.exists():
            time.sleep(0.02)

    async def poison(self, body: int) -> None:
        """Die of body 0."""
        self.note(body)
        if body == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def _never(_releaser: StuckReleaser) -> float:
    return 600.0


def _change(options: dict[str, Any]) -> None:
    """Take out of `options` what is none of the subscriber's: how this process differs from all
    others."""
    fetch.MAX_PREFETCH_WAIT = options.pop("longest_wait", fetch.MAX_PREFETCH_WAIT)
    if options.pop("counts_as_quick", False):
        HandlerTimes.count_upcoming_starts = lambda *_: 10_000  # type: ignore[method-assign]
    if not options.pop("searches", True):
        StuckReleaser.tick = _never  # type: ignore[method-assign]


def main() -> None:
    """Run until SIGTERM."""
    url, folder, handler, *rest = sys.argv[1:]
    options = json.loads(rest[0]) if rest else {}
    graceful_timeout = options.pop("graceful_timeout", 15.0)
    forwards = options.pop("forwards", {})
    interval = options.pop("presence_interval", 5.0)
    _change(options)
    be_patient()
    broker = SqlBroker(
        create_async_engine(url),
        graceful_timeout=graceful_timeout,
        presence_interval=interval,
        logger=None,
    )
    handle: Callable[[int], Awaitable[None]] = getattr(Handlers(Path(folder)), handler)
    broker.subscriber("q", **options)(handle)
    for queue, forward_to in forwards.items():
        broker.subscriber(queue, **options, forward_to=forward_to)
    app = FastStream(broker, logger=None, on_startup=[lambda: note_listening(folder)])
    asyncio.run(app.run())


if __name__ == "__main__":
    main()
