"""sqlbroker serve --config: the first signal stops it, a second one ends it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from faststream_sqlbroker import SqlBroker
from tests import forked
from tests.config.conftest import on_sqlite
from tests.faststream.conftest import Look
from tests.helpers import eventually
from tests.http.running import COMMAND, STARTED

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
SERVICE = """\
broker:
  url: ${SQLBROKER_URL}
  graceful_timeout: 1h
queues:
  jobs: {handler: "endless:handle"}
"""
HANDLER = """\
import asyncio


async def handle(body: object) -> None:
    await asyncio.Event().wait()
"""


@on_sqlite
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(
    broker: SqlBroker,
    look: Look,
    database_url: str,
    write: Callable[[str], Path],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    """A handler that does not end holds up the stop; the lease ends by its time."""
    (tmp_path / "endless.py").write_text(HANDLER)
    await broker.publish(b"1", "jobs")
    log = tmp_path / "log"
    log.write_bytes(b"")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "SQLBROKER_URL": database_url}
    command = ("-c", COMMAND, "serve", "--config", str(write(SERVICE)))
    process = forked.python(*command, said=log, env=env)
    try:

        async def handling() -> bool:
            assert process.poll() is None, log.read_text()
            [row] = await look.rows()
            return bool(row["state"] == "PROCESSING")

        await eventually(handling, timeout=STARTED)
        process.send_signal(number)
        await eventually(lambda: "a second signal ends the process immediately" in log.read_text())
        assert process.poll() is None
        process.send_signal(number)
        await eventually(lambda: process.poll() is not None)
        assert process.returncode == -number
        assert "Traceback" not in log.read_text()
        [row] = await look.rows()
        assert row["state"] == "PROCESSING"
    finally:
        process.kill()
        process.wait()
