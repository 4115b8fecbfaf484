"""sqlbroker top and tail: what goes on, until it is interrupted."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, literal, select
from sqlalchemy.ext.asyncio import AsyncEngine
from typer.testing import CliRunner

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli.app import app
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import QUICK, Look
from tests.forked import python
from tests.helpers import eventually

# A run in the background ignores the interrupt, which its children inherit.
TAIL = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from faststream_sqlbroker.cli import main
main()
"""
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
    broker: SqlBroker, look: Look, engine: AsyncEngine, database_url: str, tmp_path: Path
) -> None:
    """What ended before it began to look, what ends then, and what is committed late."""
    consume(broker)
    await broker.start()
    await broker.publish("good", "orders")
    await look.archived()
    words = ["tail", "--since", "1h", "--interval", "20ms", "--json"]
    program = ["-c", TAIL, *words]
    said, errors = tmp_path / "said", tmp_path / "errors"
    environment = {**os.environ, "SQLBROKER_URL": database_url}
    process = python(*program, said=said, errors=errors, env=environment)

    async def end(number: int) -> dict[str, Any]:
        def told() -> list[dict[str, Any]]:
            assert process.poll() is None, errors.read_text()
            # The last line may not be whole yet.
            text = said.read_text() if said.exists() else ""
            return lines(text[: text.rfind("\n") + 1])[number:]

        found = await eventually(told)
        return found[0]

    try:
        await _follow(end, broker, look, engine)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 0, errors.read_text()
    finally:
        process.kill()
    assert len(lines(said.read_text())) == 3
    assert "Traceback" not in errors.read_text()


async def _follow(
    end: Callable[[int], Awaitable[dict[str, Any]]],
    broker: SqlBroker,
    look: Look,
    engine: AsyncEngine,
) -> None:
    first = await end(0)
    assert (first["queue"], first["state"], first.get("body")) == ("orders", "COMPLETED", None)
    await broker.publish("bad", "orders")
    second = await end(1)
    assert (second["state"], "ValueError" in second["last_error"]) == ("FAILED", True)
    # Dated a second before the row that was shown last.
    [_, newest] = await look.rows(archive=True)
    dated = newest["archived_at"] - timedelta(seconds=1)
    late = await broker.publish("late", "other")
    archive = look.tables.archive
    assert archive is not None
    message = look.tables.message
    shared = [c.name for c in message.columns if c.name in archive.columns]
    values = [literal("COMPLETED") if name == "state" else message.c[name] for name in shared]
    at = literal(dated, archive.c.archived_at.type)
    rows = select(*values, at).where(message.c.id == late)
    async with engine.begin() as connection:
        await connection.execute(insert(archive).from_select([*shared, "archived_at"], rows))
    third = await end(2)
    assert third["id"] == late


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


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_tail_says_what_it_has_skipped(
    broker: SqlBroker, look: Look, engine: AsyncEngine, database_url: str
) -> None:
    """Of more ends than fit into a look only the newest are printed."""
    await broker.create_tables()
    words = ("tail", "--since", "1h", "--count", "2", "--interval", "20ms")
    row = {"queue": "orders", "payload": b"x", "state": "COMPLETED"}
    archive = look.tables.archive
    assert archive is not None
    times = dict.fromkeys(("created_at", "next_attempt_at", "archived_at"), clock())
    for first, last, skipped in ((1, 1_000, 0), (1_001, 1_001, 1)):
        async with engine.begin() as connection:
            for number in range(first, last + 1):
                await connection.execute(insert(archive).values(**row, **times, id=number))
        shown = await run(database_url, *words)
        assert shown.count("were skipped") == skipped
        assert len(shown.splitlines()) == 1_000 + skipped


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
