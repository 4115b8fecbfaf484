"""A server in a process of its own, and clients of servers."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests import forked
from tests.helpers import eventually

COMMAND = (
    "from faststream_sqlbroker.cli import listening, main\n"
    "from faststream_sqlbroker.flow.fleet import heartbeat\n"
    "from faststream_sqlbroker.http import probes, server\n"
    "listening.SHUTDOWN_TIMEOUT = listening.IDLE_TIMEOUT = probes.LIMIT = 120\n"
    "server.HEAD_TIMEOUT = server.READ_TIMEOUT = 120\n"
    "heartbeat.LEASE_INTERVALS = 100\n"
    "main()"
)
"""`sqlbroker`, whose server no pause of the machine makes cut a client off."""

STARTED = 240.0
"""Seconds: a process that starts while others take the machine needs more than those that run."""


def client_at(address: str, **options: Any) -> httpx.AsyncClient:
    """A client that waits for longer than a machine stands still: httpx's own limit is 5 s."""
    return httpx.AsyncClient(base_url=address, timeout=90, **options)


async def is_ready(client: httpx.AsyncClient) -> bool:
    """Whether the server can do its work."""
    return (await client.get("/health/ready")).status_code == 200


class Client:
    """A client in a process of its own, which says lines."""

    def __init__(self, log: Path, module: str, port: int, *options: str) -> None:
        """Run `python -m MODULE http://127.0.0.1:PORT OPTIONS`; its lines go to the file `log`."""
        self._log = log
        address = f"http://127.0.0.1:{port}"
        self.process = forked.python("-m", module, address, *options, said=log)

    def lines(self) -> list[str]:
        """What it has said."""
        said = self._log.read_text() if self._log.exists() else ""
        return [line for line in said.splitlines(keepends=True) if line.endswith("\n")]

    async def says(self, count: int) -> list[str]:
        """Its first lines, once there are so many."""
        await eventually(lambda: len(self.lines()) >= count, timeout=STARTED)
        return [line.rstrip() for line in self.lines()[:count]]

    def kill(self) -> None:
        """End it, and wait for that."""
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def running(log: Path, *arguments: str, code: int = 0, **env: str) -> AsyncIterator[str]:
    """The address that a Python with `arguments` prints; on a signal it must end with `code`."""
    log.write_bytes(b"")
    process = forked.python(*arguments, said=log, env={**os.environ, **env})
    try:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"serving (http\S+)", log.read_text())
            return found[1] if found else None

        found = await eventually(address, timeout=STARTED)
        assert found is not None
        yield found
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: process.poll() is not None)
        assert (process.returncode, "Traceback" in log.read_text()) == (code, False), (
            log.read_text()
        )
    finally:
        process.kill()
        process.wait()
