"""A server in a process of its own."""

import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests import forked
from tests.helpers import eventually


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

        found = await eventually(address)
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
