"""sqlbroker top and tail: what goes on, until it is interrupted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from sqlalchemy import func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.app import app
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`sqlbroker top` and `tail`: what goes on")


async def run(url: str, *words: str) -> str:
    runner = CliRunner(env={"SQLBROKER_URL": url, "COLUMNS": "200", "TERM": "dumb"})
    result = await asyncio.to_thread(runner.invoke, app, list(words))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def consume(broker: SqlBroker) -> None:
    @broker.subscriber("orders", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        if body == "bad":
            raise ValueError(body)


async def test_top_shows_the_queues_at_each_turn(broker: SqlBroker, database_url: str) -> None:
    await broker.publish_batch("a", "b", queue="orders")
    shown = await run(database_url, "top", "--count", "2", "--interval", "50ms")
    assert shown.count("Queues at ") == 2
    assert shown.count("orders") == 2
    found = lines(
        await run(database_url, "top", "orders", "--count", "2", "--interval", "50ms", "--json")
    )
    assert [[q["queue"] for q in each["queues"]] for each in found] == [["orders"]] * 2
    assert found[0]["at"] < found[1]["at"]


async def test_tail_prints_each_end_once(
    broker: SqlBroker, look: Look, engine: AsyncEngine, database_url: str
) -> None:
    """What ended before it began to look, what ends then, and what is committed late."""
    consume(broker)
    await broker.start()
    await broker.publish("good", "orders")
    await look.archived()
    words = ["tail", "--since", "1h", "--interval", "20ms", "--json"]
    program = [sys.executable, "-c", "from faststream_sqlbroker.cli import main; main()", *words]
    environment = {**os.environ, "SQLBROKER_URL": database_url, "PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(
        *program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        await _follow(process, broker, look, engine)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def _follow(
    process: asyncio.subprocess.Process, broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    async def next_end() -> dict[str, Any]:
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        return found

    first = await next_end()
    assert (first["queue"], first["state"], first.get("body")) == ("orders", "COMPLETED", None)
    await broker.publish("bad", "orders")
    second = await next_end()
    assert (second["state"], "ValueError" in second["last_error"]) == ("FAILED", True)
    # Dated a second before the row that was shown last.
    late = await broker.publish("late", "other")
    archive = look.tables.archive
    assert archive is not None
    message = look.tables.message
    shared = [c.name for c in message.columns if c.name in archive.columns]
    values = [literal("COMPLETED") if name == "state" else message.c[name] for name in shared]
    oldest = select(func.min(archive.c.archived_at)).scalar_subquery()
    rows = select(*values, oldest).where(message.c.id == late)
    async with engine.begin() as connection:
        await connection.execute(insert(archive).from_select([*shared, "archived_at"], rows))
    third = await next_end()
    assert third["id"] == late
    process.send_signal(signal.SIGINT)
    rest, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, rest) == (0, b""), errors.decode()
    assert b"Traceback" not in errors


async def test_tail_shows_what_is_asked_for(
    broker: SqlBroker, look: Look, database_url: str
) -> None:
    consume(broker)
    await broker.start()
    await broker.publish_batch("good", "bad", queue="orders")
    await look.archived(2)
    words = ("tail", "--since", "1h", "--count", "1")
    shown = await run(database_url, *words)
    assert len(shown.splitlines()) == 2
    [failed] = (await run(database_url, *words, "--state", "FAILED")).splitlines()
    assert " orders FAILED " in failed
    assert failed.endswith("ValueError: bad")
    assert await run(database_url, *words, "--queue", "none") == ""


async def test_nothing_is_told_twice_over_many_looks(
    broker: SqlBroker, look: Look, database_url: str
) -> None:
    consume(broker)
    await broker.start()
    await broker.publish_batch(*("x" for _ in range(20)), queue="orders")
    await eventually(lambda: look.archived(20))
    shown = lines(
        await run(
            database_url, "tail", "--since", "1h", "--count", "5", "--interval", "20ms", "--json"
        )
    )
    assert len({each["id"] for each in shown}) == len(shown) == 20
