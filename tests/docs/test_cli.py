"""FastStream's command line with the example app."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.helpers import eventually

ROOT = Path(__file__).parent.parent.parent
APP = "docs.examples.basic_app:app"
pytestmark = pytest.mark.capability("`faststream run --workers`, `faststream publish`")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_two_workers(database_url: str, tmp_path: Path) -> None:
    """Fleets on each database are in tests/processes."""
    await _run_and_publish(database_url, tmp_path, 2)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_one_process(database_url: str, tmp_path: Path) -> None:
    await _run_and_publish(database_url, tmp_path, 1)


async def _run_and_publish(database_url: str, tmp_path: Path, workers: int) -> None:
    env = {**os.environ, "DATABASE_URL": database_url, "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    log.touch()
    running: forked.Process
    if workers == 1:
        running = forked.python("-m", "faststream", "run", APP, said=log, env=env)
    else:  # by multiprocessing, which forked processes may not use
        command = [sys.executable, "-m", "faststream", "run", APP, "--workers", str(workers)]
        with log.open("wb") as out:
            running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        ready = "waiting for messages"
        await eventually(lambda: log.read_text().count(ready) == workers, timeout=200)
        body = '{"name": "Ada"}'
        publish = ("-m", "faststream", "publish", APP)
        done = forked.finished(*publish, body, "--queue", "greetings", env=env)
        assert done.returncode == 0, done.stderr
        await eventually(lambda: "hello Ada\n" in log.read_text())
        options = ["--queue", "greetings", "--rpc", "--timeout", "120"]
        asked = forked.finished(*publish, '{"name": "Grace"}', *options, env=env)
        assert asked.returncode == 0, asked.stderr
        assert "body=b'hello Grace'" in asked.stdout, asked.stdout + asked.stderr
        running.send_signal(signal.SIGTERM)
        await eventually(lambda: running.poll() is not None, timeout=200)
        assert log.read_text().count("hello Ada") == 1
        said = log.read_text()
        assert "Traceback" not in said, said
    finally:
        running.kill()


async def test_missing_tables_are_the_first_thing_said(database_url: str, tmp_path: Path) -> None:
    """Before the hundred lines of traceback in which FastStream shows an error."""
    lines = (
        "from faststream import FastStream",
        "from faststream_sqlbroker import SqlBroker",
        f"app = FastStream(SqlBroker({database_url!r}))",
    )
    (tmp_path / "empty_app.py").write_text("\n".join(lines))
    command = ("-m", "faststream", "run", "--app-dir", str(tmp_path), "empty_app:app")
    done = forked.finished(*command)
    said = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if "FastStream app starting" not in line
    ]
    assert done.returncode != 0
    assert "the broker's tables are missing: in development, create them with" in said[0], said
