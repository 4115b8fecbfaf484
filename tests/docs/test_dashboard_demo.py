"""`./dev dashboard`: a shop with live traffic, until a signal ends it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.helpers import eventually


async def test_the_demo_trades_and_shows_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "docs.examples.dashboard_demo", "--port", "0"],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=out,
        )
    try:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"serving (http\S+)", log.read_text())
            return found[1] if found else None

        base = await eventually(address, timeout=60)
        assert base is not None
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:

            async def trades() -> bool:
                page = (await client.get("/ui/messages?archived=on&state=COMPLETED")).text
                return "/ui/queue?name=orders" in page

            await eventually(trades, timeout=60, step=0.2)
            assert "is &#39;orders&#39; meant?" in (await client.get("/")).text
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 60)
        assert (code, "Traceback" in log.read_text()) == (0, False), log.read_text()
    finally:
        process.kill()
        process.wait()
