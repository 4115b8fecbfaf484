"""FastStream's command line with the example app."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import eventually

ROOT = Path(__file__).parent.parent.parent
FASTSTREAM = [sys.executable, "-m", "faststream"]
APP = "docs.examples.basic_app:app"
MESSAGES = 2
"""Each is published by a process of its own, which takes a second or two to start."""

pytestmark = pytest.mark.capability("`faststream run --workers`, `faststream publish`")


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]], ids=["one process", "two workers"])
async def test_run_and_publish(database_url: str, tmp_path: Path, workers: list[str]) -> None:
    env = {**os.environ, "DATABASE_URL": database_url, "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        running = subprocess.Popen(
            [*FASTSTREAM, "run", APP, *workers], cwd=ROOT, env=env, stdout=out, stderr=out
        )
    try:
        ready = "waiting for messages"
        await eventually(lambda: log.read_text().count(ready) == (2 if workers else 1), timeout=40)
        for number in range(MESSAGES):
            body = f'{{"name": "Ada {number}"}}'
            subprocess.run(
                [*FASTSTREAM, "publish", APP, body, "--queue", "greetings"], cwd=ROOT, env=env, check=True
            )
        await eventually(
            lambda: all(f"hello Ada {n}\n" in log.read_text() for n in range(MESSAGES)), timeout=20
        )
        running.send_signal(signal.SIGTERM)
        await eventually(lambda: running.poll() is not None, timeout=30)
        assert log.read_text().count("hello Ada") == MESSAGES
        said = log.read_text()
        assert "Traceback" not in said, said
    finally:
        running.kill()
