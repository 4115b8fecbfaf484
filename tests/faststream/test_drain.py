"""An operator drains a worker: it claims nothing more, ends what it runs, and stays alive."""

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SetupError, SqlBroker
from tests.faststream.conftest import GRACE, QUICK, Look
from tests.faststream.test_operating_cli import Shell
from tests.helpers import eventually

pytestmark = pytest.mark.capability("drain and undrain: one worker, or all of a process")

SOON = 0.2
"""Seconds between two signs of life."""


async def ignore(_body: Any) -> None:
    """A handler."""


async def test_a_drained_worker_ends_what_it_runs_and_others_take_its_queue(
    engine: AsyncEngine, look: Look, database_url: str, logger: Any
) -> None:
    ours = SqlBroker(engine, logger=logger, graceful_timeout=GRACE, presence_interval=SOON)
    other_engine = create_async_engine(database_url)
    other = SqlBroker(other_engine, logger=logger, graceful_timeout=GRACE, presence_interval=SOON)
    await ours.create_tables()
    gate = asyncio.Event()
    ended: list[Any] = []
    taken: list[Any] = []
    started = asyncio.Event()

    @ours.subscriber("q", **QUICK)
    async def handle(body: Any) -> None:
        started.set()
        await gate.wait()
        ended.append(body)

    @other.subscriber("q", **QUICK)
    async def take(body: Any) -> None:
        taken.append(body)

    await ours.publish(1, "q")
    await ours.start()
    await started.wait()
    [worker] = await eventually(other.admin.subscribers)
    assert await other.admin.drain(worker.worker, by="Ann") == [worker.worker]
    assert await other.admin.drain(worker.worker, by="Ann") == []
    registration = ours.subscribers[0].consumer.registration  # type: ignore[attr-defined]
    await eventually(lambda: registration.open_queues == ())

    first = await ours.publish(2, "q")
    await ours.publish(3, "q")
    await says_that_it_is_drained(ours, Shell(database_url), worker.worker, first)
    await other.start()
    await eventually(lambda: sorted(taken) == [2, 3])
    assert ended == []
    gate.set()
    await look.archived(3)
    assert ended == [1]
    [still] = [each for each in await ours.admin.subscribers() if each.drained]
    assert (still.worker, still.claims) == (worker.worker, False)
    assert still.lease_expires_at > worker.lease_expires_at, "its signs of life go on"
    [overview] = await ours.admin.queues("q")
    assert (overview.live_subscribers, overview.drained_subscribers) == (2, 1)
    assert overview.problem is None

    await other.stop()
    await ours.publish(4, "q")
    assert await ours.admin.undrain(worker.worker, by="Bob") == [worker.worker]
    await eventually(lambda: ended == [1, 4])
    done = [(each.action, each.by, each.arguments) for each in await ours.admin.audit()]
    given = {"worker": worker.worker}
    assert done == [("undrain", "Bob", given), ("drain", "Ann", given)]
    await ours.stop()
    await other_engine.dispose()


async def says_that_it_is_drained(
    broker: SqlBroker, shell: Shell, worker: str, message_id: int | None
) -> None:
    """Every view that shows workers, and what a message waits for."""
    explained = await shell.json("explain", str(message_id))
    [reason] = explained["reasons"]
    assert (reason["code"], reason["worker"]) == ("drained", worker)
    [overview] = await broker.admin.queues("q")
    assert overview.problem == "every live subscriber is drained"
    assert (await broker.admin.health()).drained == (worker,)
    found = {each["what"]: each for each in await shell.json("check", code=1)}
    assert (found["drained"]["ok"], found["drained"]["text"]) == (True, worker)
    assert found["queue q"]["text"] == "every live subscriber is drained"
    [listed] = await shell.json("subscribers")
    assert listed["drained"]
    assert "drained" in await shell.run("subscribers")


async def listed(broker: SqlBroker, count: int) -> bool:
    """Whether so many subscribers live, and claim."""
    return [each.claims for each in await broker.admin.subscribers()] == [True] * count


async def test_the_commands_drain_a_process_until_it_starts_again(
    broker: SqlBroker, database_url: str
) -> None:
    broker.subscriber("a", **QUICK)(ignore)
    broker.subscriber("b", **QUICK)(ignore)
    await broker.start()
    await eventually(lambda: listed(broker, 2))
    found = await broker.admin.subscribers()
    process = found[0].process
    names = sorted(each.worker for each in found)
    shell = Shell(database_url)
    assert "Aborted" in await shell.run("drain", process, answer="n\n", code=1)
    assert await shell.json("drain", process, "--yes") == {"worker": process, "drained": names}
    assert "was already drained" in await shell.run("drain", process, "--yes")
    assert json.loads(await shell.run("undrain", names[0], "--json"))["undrained"] == names[:1]
    assert f"{names[1]} claims again" in await shell.run("undrain", process)
    assert "was not drained" in await shell.run("undrain", process)
    [last, *_] = await broker.admin.audit()
    assert (last.action, last.done) == ("undrain", 1)
    assert await broker.admin.drain(process) == names
    await broker.stop()
    await broker.start()
    await eventually(lambda: listed(broker, 2))
    registrations = [each.consumer.registration for each in broker.subscribers]  # type: ignore[attr-defined]
    await eventually(lambda: all(each.open_queues for each in registrations))


async def test_an_unknown_worker_is_named_with_the_nearest(broker: SqlBroker) -> None:
    broker.subscriber("a", **QUICK)(ignore)
    await broker.start()
    await eventually(lambda: listed(broker, 1))
    [live] = await broker.admin.subscribers()
    for given in (live.worker[:-1], live.process + "9"):
        with pytest.raises(SetupError, match=r"no live subscriber or .*; did you mean '.*'\?"):
            await broker.admin.drain(given)
    with pytest.raises(SetupError, match="no live subscriber or process is named 'x': broker"):
        await broker.admin.undrain("x")
    wrong: tuple[Any, ...] = (7, "a\0", "a\ud800")
    for given in wrong:
        with pytest.raises(SetupError, match="worker must be the name of a subscriber, got "):
            await broker.admin.drain(given)
    assert await broker.admin.audit() == []
