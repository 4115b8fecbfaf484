"""A process ends at SIGTERM, though handlers of it cannot be ended."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faststream_sqlbroker.core.rows import NewMessage
from tests.forked import ROOT
from tests.helpers import eventually
from tests.processes.conftest import Fleet

STUCK = "tests.processes.stuck"
HANDLERS = ("blocks", "blocks_on_batch", "swallows", "retries", "swallows_in_its_task")
MESSAGES = 2
"""For each of the handlers, as many as its workers."""
STARTS = {"blocks": MESSAGES + 1, "blocks_on_batch": 1, "retries": MESSAGES}
STARTS["swallows"] = 2 * MESSAGES + 1
"""Each schedule calls a handler, and so does one of the others."""
SERVICE = f"""\
broker: {{url: "${{STUCK_URL}}", graceful_timeout: 0.2s}}
queues:
  blocks: {{handler: "{STUCK}:blocks", max_workers: {MESSAGES}}}
  swallows: {{handler: "{STUCK}:swallows", max_workers: {MESSAGES}}}
"""
SERVE = "from faststream_sqlbroker.cli import main; main()"


@contextmanager
def stuck(fleet: Fleet, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """An interpreter of its own: what is tested is how it ends."""
    env = {"STUCK_URL": fleet.url, "STUCK_FOLDER": str(fleet.folder), "PYTHONPATH": str(ROOT)}
    with fleet.said.open("ab") as out:
        command = [sys.executable, *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ended(fleet: Fleet, process: "subprocess.Popen[bytes]", starts: dict[str, int]) -> int:
    """Let all handlers begin, and send SIGTERM; the exit code."""

    def all_run() -> bool:
        assert process.poll() is None, fleet.said.read_text()
        begun = Counter(path.name.split("-")[0] for path in fleet.folder.iterdir())
        return all(begun[name] >= count for name, count in starts.items())

    await eventually(all_run, timeout=240, step=0.1)
    process.send_signal(signal.SIGTERM)
    await eventually(lambda: process.poll() is not None, timeout=240, step=0.1)
    said = fleet.said.read_text()
    for trouble in ("Fatal Python", "Exception ignored", "was destroyed", "never awaited"):
        assert trouble not in said
    return process.wait()


async def put(fleet: Fleet, *queues: str) -> None:
    headers = '{"content-type": "application/json"}'
    await fleet.store.insert(
        [NewMessage(q, b"1", headers) for q in queues for _ in range(MESSAGES)]
    )


def abandoned(fleet: Fleet) -> Counter[str]:
    """How often the log tells of each handler and schedule."""
    lines = [line for line in fleet.said.read_text().splitlines() if "is abandoned after" in line]
    return Counter(line.split("'")[1] for line in lines)


async def leased(fleet: Fleet, queue: str) -> int:
    """Messages as a dead process leaves them."""
    charged = "deliveries_count = 1 AND attempts_count = 0 AND lease_token IS NOT NULL"
    return await fleet.count(f"state = 'PROCESSING' AND {charged} AND queue = '{queue}'")


async def check(fleet: Fleet) -> None:
    """Each handler is told of, and what it had is leased."""
    told = abandoned(fleet)
    assert told.pop("blocks_on_batch") == 1
    others = [name for name in HANDLERS if name != "blocks_on_batch"]
    schedules = {"blocking": 1, "swallowing": 1}
    assert told == {**dict.fromkeys(others, MESSAGES), **schedules}
    for name in others:
        assert await leased(fleet, name) == MESSAGES
    assert await leased(fleet, "blocks_on_batch") >= 1
    assert await fleet.count(archive=True) == 0
    assert await fleet.count("queue = 'ticks'") == 0


async def test_asyncio_run_ends(fleet: Fleet) -> None:
    await put(fleet, *HANDLERS)
    with stuck(fleet, "-m", STUCK) as process:
        assert await ended(fleet, process, STARTS) == 0
    await check(fleet)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("runner", ["faststream run", "uvicorn"])
async def test_what_runs_applications_ends(fleet: Fleet, runner: str) -> None:
    await put(fleet, *HANDLERS)
    program, *words = runner.split()
    application = f"{STUCK}:{'api' if program == 'uvicorn' else 'app'}"
    with stuck(fleet, "-m", program, *words, application, *PORT.get(program, ())) as process:
        code = await ended(fleet, process, STARTS)
    assert code in ({0, -signal.SIGTERM} if program == "uvicorn" else {0})
    await check(fleet)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_service_from_a_file_ends(fleet: Fleet, tmp_path: Path) -> None:
    queues = ("blocks", "swallows")
    await put(fleet, *queues)
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE)
    with stuck(fleet, "-c", SERVE, "serve", "--config", str(file)) as process:
        assert await ended(fleet, process, dict.fromkeys(queues, MESSAGES)) == 0
    assert abandoned(fleet) == dict.fromkeys(queues, MESSAGES)
    for queue in queues:
        assert await leased(fleet, queue) == MESSAGES


PORT = {"uvicorn": ("--port", "0")}
