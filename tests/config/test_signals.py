"""sqlbroker serve --config: the first signal stops it, a second one ends it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faststream_sqlbroker import SqlBroker
from tests.config.conftest import on_sqlite
from tests.faststream.conftest import Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
COMMAND = "from faststream_sqlbroker.cli import main; main()"
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
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", "--config", str(write(SERVICE))],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
                "PYTHONUNBUFFERED": "1",
                "SQLBROKER_URL": database_url,
            },
            stdout=out,
            stderr=out,
        )
    try:

        async def handling() -> bool:
            assert process.poll() is None, log.read_text()
            [row] = await look.rows()
            return bool(row["state"] == "PROCESSING")

        await eventually(handling)
        process.send_signal(number)
        await eventually(lambda: "a second signal ends at once" in log.read_text())
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
