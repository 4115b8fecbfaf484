"""Old messages are removed from the archive, on every database, if that is asked for."""

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import insert, literal_column
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import Pruned, Retention, RightsError, SetupError, SqlBroker
from faststream_sqlbroker.database import retention as subject
from faststream_sqlbroker.database.parts import sizes
from faststream_sqlbroker.flow.tasks import archive_upkeep as loop
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.types import later
from tests.accounts import account
from tests.faststream.conftest import QUICK, Heard, Look, Make
from tests.faststream.test_operating_cli import Shell
from tests.faststream.test_rights import start_with_what_it_asks_for
from tests.helpers import eventually

pytestmark = pytest.mark.capability("retention: old messages leave the archive, `sqlbroker prune`")

HOUR = 3_600


class Archive:
    """Fills the archive with messages that ended some time ago."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._next = 1

    async def put(self, state: str, *hours: float) -> list[int]:
        """Messages in `state` that ended so many hours ago; their ids."""
        table = self._look.tables.archive
        assert table is not None
        ids = list(range(self._next, self._next + len(hours)))
        self._next += len(hours)
        async with self._look.engine.begin() as connection:
            for message_id, ago in zip(ids, hours, strict=True):
                at: Any = later(literal_column(str(round(-ago * HOUR * 1_000_000))))
                row = {"id": message_id, "queue": "q", "payload": b"x", "state": state}
                times = {"created_at": at, "next_attempt_at": at, "archived_at": at}
                await connection.execute(insert(table).values(**row, **times))
        return ids

    async def left(self) -> list[int]:
        return [row["id"] for row in await self._look.rows(archive=True)]


@pytest.fixture
def archive(broker: SqlBroker, look: Look) -> Archive:
    return Archive(look)


async def test_each_state_has_an_age_of_its_own(broker: SqlBroker, archive: Archive) -> None:
    done = await archive.put("COMPLETED", 50, 40, 10)
    failed = await archive.put("FAILED", 50, 40, 10)
    dropped = await archive.put("DISCARDED", 50, 40, 10)
    waiting = await broker.publish("x", "q")
    retention = Retention(completed="45h", failed="20h")
    found = await broker.admin.prune(retention, dry_run=True)
    assert found == Pruned(completed=1, failed=2, discarded=0)
    assert len(await archive.left()) == 9
    assert await broker.admin.audit() == []
    assert await broker.admin.prune(retention, by="ola") == found
    [action] = await broker.admin.audit()
    assert (action.action, action.by, action.state) == ("prune", "ola", "ended")
    assert (action.done, action.expected, action.note) == (3, 3, None)
    assert action.arguments == {"completed": 45 * 3_600.0, "failed": 20 * 3_600.0}
    assert action.ended_at is not None
    assert await archive.left() == [*done[1:], failed[2], *dropped]
    assert await broker.admin.prune(retention) == Pruned()
    assert await broker.pop("q") is not None
    assert waiting is not None


async def test_of_too_many_the_oldest_go(broker: SqlBroker, archive: Archive) -> None:
    old = await archive.put("FAILED", 9, 8)
    done = await archive.put("COMPLETED", 7, 6, 5, 4)
    dropped = await archive.put("DISCARDED", 3, 2)
    with patch.object(subject, "MAX_SCANNED_ROWS", 3):
        assert await broker.admin.prune(Retention(max_rows=8)) == Pruned()
        found = await broker.admin.prune(Retention(max_rows=5), dry_run=True)
        assert found == Pruned(completed=1, failed=2)
        assert await broker.admin.prune(Retention(max_rows=5)) == found
    assert await archive.left() == [*done[1:], *dropped]
    both = Retention(max_rows=4, discarded="2.5h")
    assert await broker.admin.prune(both) == Pruned(completed=1, discarded=1)
    assert await archive.left() == [*done[2:], dropped[1]]
    assert old


async def test_small_steps_that_were_cut_off_go_on(broker: SqlBroker, archive: Archive) -> None:
    await archive.put("COMPLETED", *(range(30, 10, -1)))
    young = await archive.put("COMPLETED", 1)
    steps = 0
    inner = subject.ArchiveRetention.remove

    async def remove(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise asyncio.CancelledError
        return await inner(*arguments)

    retention = Retention(completed="5h")
    cut_off = patch.object(subject.ArchiveRetention, "remove", remove)
    with patch.object(subject, "BATCH", 3), cut_off:
        with pytest.raises(asyncio.CancelledError):
            await broker.admin.prune(retention)
        [action] = await broker.admin.audit()
        assert (action.state, action.done) == ("planned", 0)
        assert "was cut off" in str(action)
        assert await broker.admin.resume_job(action.id) == action, "it is no bulk action"
        assert len(await archive.left()) == 21 - 9
        assert await broker.admin.prune(retention) == Pruned(completed=11)
    assert await archive.left() == young


async def test_a_message_that_has_ended_again_is_young(
    broker: SqlBroker, archive: Archive, look: Look
) -> None:
    """Between the look and the removal it was brought back, and has ended anew."""
    [first, second] = await archive.put("FAILED", 9, 1)
    inner = sizes.iter_chunks

    def chunks(ids: Sequence[int]) -> Any:
        assert list(ids) == [first]
        return inner([first, second])

    with patch.object(subject, "iter_chunks", chunks):
        assert await broker.admin.prune(Retention(failed="5h")) == Pruned(failed=1)
    assert await archive.left() == [second]


async def test_the_broker_removes_by_itself_in_one_process(
    make: Make, archive: Archive, look: Look, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PRUNE_INTERVAL", 0.1)
    await archive.put("COMPLETED", *(range(20, 10, -1)))
    young = await archive.put("COMPLETED", 1)
    both = [make(retention=Retention(completed="5h")) for _ in range(2)]
    for each in both:
        await each.start()

    async def gone() -> bool:
        return await archive.left() == young

    await eventually(gone)
    held = await both[0].admin.locks()
    assert [lock.key for lock in held] == [loop.PRUNE_LOCK]
    # The other goes on when one has stopped, whichever has the lock.
    for each in both:
        await each.stop()
        await archive.put("COMPLETED", 9)
        await eventually(gone)
        await each.start()

    def told() -> bool:
        texts = heard.texts("old messages were removed from the archive")
        return sum(int(text.split()[0]) for text in texts) == 12

    await eventually(told)


async def test_a_message_that_just_ended_is_removed_at_its_age(
    make: Make, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PRUNE_INTERVAL", 0.1)
    monkeypatch.setattr(subject, "FULL_SCAN_INTERVAL", 0.0)
    pruning = make(retention=Retention(completed=1.0))

    @pruning.subscriber("q", **QUICK)
    async def handle(_body: Any) -> None:
        pass

    await pruning.start()
    for number in range(5):
        await broker.publish(number, "q")

    async def empty() -> bool:
        return not await look.rows() and not await look.rows(archive=True)

    await eventually(empty)


async def test_without_retention_nothing_goes_and_the_start_says_so(
    make: Make, archive: Archive, heard: Heard
) -> None:
    await archive.put("COMPLETED", 2, 1)
    await archive.put("FAILED", 30)
    keeping = make()

    @keeping.subscriber("q", **QUICK)
    async def handle(_body: Any) -> None:
        pass

    await keeping.start()
    [told] = heard.texts("the archive grows")
    assert told == (
        "the archive grows by about 2 messages a day and has no retention: to prune it, "
        'set SqlBroker(retention=Retention(completed="30d"))'
    )
    assert len(await archive.left()) == 3


async def _nothing(_body: Any) -> None:
    pass


async def test_an_empty_archive_is_not_told(make: Make, broker: SqlBroker, heard: Heard) -> None:
    keeping = make()
    keeping.subscriber("q", **QUICK)(_nothing)
    await keeping.start()
    assert heard.texts("the archive grows") == []


async def test_without_an_archive_there_is_nothing_to_prune(engine: AsyncEngine) -> None:
    config = SqlBrokerSchemaConfig(message_table_name="m", message_archive_table_name=None)
    bare = SqlBroker(engine, logger=None, schema=config)
    with pytest.raises(SetupError, match="there is no archive"):
        await bare.admin.prune(Retention(completed="1d"))
    with pytest.raises(SetupError, match="prune needs a Retention"):
        await bare.admin.prune(None)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="there is no archive"):
        SqlBroker(engine, schema=config, retention=Retention(completed="1d"))
    await bare.stop()


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_the_start_asks_for_the_rights(
    broker: SqlBroker, archive: Archive, database_url: str
) -> None:
    await archive.put("COMPLETED", 9)
    with account(database_url) as user:
        engine = user.engine()
        pruning = SqlBroker(engine, logger=None, retention=Retention(completed="5h"))
        with pytest.raises(RightsError, match="to remove old messages from the archive"):
            await pruning.start()
        await start_with_what_it_asks_for(pruning, user)

        async def gone() -> bool:
            return await archive.left() == []

        await eventually(gone)
        await pruning.stop()
        await engine.dispose()


async def test_the_command(broker: SqlBroker, archive: Archive, database_url: str) -> None:
    shell = Shell(database_url)
    await archive.put("COMPLETED", 50, 40)
    await archive.put("FAILED", 50)
    shown = await shell.run("prune", "--completed", "1d", "--dry-run")
    assert "2 completed, 0 failed and 0 discarded messages would be removed" in shown
    assert "Continue?" in await shell.run("prune", "--completed", "1d", answer="n\n", code=1)
    assert len(await archive.left()) == 3
    found = await shell.json("prune", "--completed", "45h", "--yes", "--by", "ola")
    assert [each["by"] for each in await shell.json("audit")] == ["ola"]
    counts = {"completed": 1, "failed": 0, "discarded": 0}
    assert found == {**counts, "differing": [], "partitions": [], "dry_run": False}
    shown = await shell.run("prune", "--max-rows", "1", "--yes")
    assert "0 completed, 1 failed and 0 discarded messages removed" in shown
    result = await shell.result("prune", "--yes")
    assert isinstance(result.exception, SetupError)
    assert "give --completed, --failed, --discarded or --max-rows" in str(result.exception)
    assert len(await archive.left()) == 1
