"""Old messages leave the archive only if a lake has them, on every database; without Spark."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import delete, insert, update

from faststream_sqlbroker import Pruned, Retention, SetupError, SqlBroker
from faststream_sqlbroker.core.loaded_windows import LOADED_SCOPE, LoadedWindow, RowSum
from faststream_sqlbroker.database import verified_prune as subject
from faststream_sqlbroker.database.parts import window_rows as statements
from faststream_sqlbroker.database.verified_prune import LoadedWindows
from faststream_sqlbroker.flow.tasks import archive_upkeep as loop
from tests.faststream.conftest import QUICK, Heard, Look, Make
from tests.faststream.test_operating_cli import Shell
from tests.helpers import eventually

pytestmark = pytest.mark.capability(
    "retention: only what a lake has recorded leaves the archive (`unless_loaded_by`)"
)

DAY = timedelta(days=1)
FIRST = datetime(2026, 3, 1, tzinfo=timezone.utc)
BY_LAKE = Retention(completed="1d", discarded="1d", unless_loaded_by="shop")


class Archive:
    """An archive of days, and what a lake has recorded of them."""

    def __init__(self, look: Look) -> None:
        self._look = look
        assert look.tables.archive is not None
        self.table = look.tables.archive
        self.records = look.tables.policy_state

    async def put(self, day: int, *ids: int, state: str = "COMPLETED", queue: str = "q") -> None:
        """Messages that ended on that day, a minute apart."""
        for number, message_id in enumerate(ids):
            at = FIRST + day * DAY + timedelta(minutes=number)
            await self.put_at(at, message_id, state=state, queue=queue)

    async def put_at(
        self, at: datetime, message_id: int, *, state: str = "COMPLETED", queue: str = "q"
    ) -> None:
        """A message that ended at that moment."""
        row = {"id": message_id, "queue": queue, "payload": b"x", "state": state}
        times = {"created_at": at, "next_attempt_at": at, "archived_at": at}
        async with self._look.engine.begin() as connection:
            await connection.execute(insert(self.table).values(**row, **times))

    async def record(self, day: int, *ids: int) -> None:
        """As an export that has these messages of the day in its lake."""
        start = FIRST + day * DAY
        window = LoadedWindow(
            f"{start:%Y-%m-%d}", start, start + DAY, RowSum(len(ids), sum(ids)), "made by hand"
        )
        values = {"scope": LOADED_SCOPE + "shop", "key": window.name, "due_at": window.end}
        async with self._look.engine.begin() as connection:
            await connection.execute(insert(self.records).values(info=window.to_json(), **values))

    async def renew_records(self) -> None:
        """As an export that writes them again with the same rows."""
        of_shop = self.records.c.scope == LOADED_SCOPE + "shop"
        async with self._look.engine.begin() as connection:
            await connection.execute(update(self.records).where(of_shop).values(counter=7))

    async def forget_records(self) -> None:
        """As the first half of an export that writes its record anew."""
        async with self._look.engine.begin() as connection:
            of_lake = self.records.c.scope.startswith("lake")
            await connection.execute(delete(self.records).where(of_lake))

    async def left(self) -> list[int]:
        return sorted(row["id"] for row in await self._look.rows(archive=True))

    async def scopes(self) -> dict[str, tuple[str, Any, int]]:
        """Scope, end while rows are left, and rows of each record."""
        async with self._look.engine.connect() as connection:
            rows = await connection.execute(
                self.records.select().where(self.records.c.scope.startswith("lake"))
            )
            return {row.key: (row.scope, row.due_at, row.info["rows"]) for row in rows}


@pytest.fixture
def archive(broker: SqlBroker, look: Look) -> Archive:
    return Archive(look)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "PAGE_SIZE", 3)
    monkeypatch.setattr(subject, "WINDOWS_PER_PAGE", 2)


async def test_only_recorded_windows_go_and_the_record_is_lowered(
    broker: SqlBroker, archive: Archive
) -> None:
    """Of the fourth day there is no record: its export was killed before that."""
    for day in range(4):
        await archive.put(day, *range(day * 10 + 1, day * 10 + 6))
    await archive.put(1, 18, 19, state="FAILED")
    for day in (0, 2):
        await archive.record(day, *range(day * 10 + 1, day * 10 + 6))
    await archive.record(1, 11, 12, 13, 14, 15, 18, 19)
    found = await broker.admin.prune(BY_LAKE, dry_run=True)
    assert found == Pruned(completed=15)
    assert len(await archive.left()) == 22
    assert await broker.admin.prune(BY_LAKE) == found
    assert await archive.left() == [18, 19, 31, 32, 33, 34, 35]
    left = await archive.scopes()
    assert {key: (end is None, rows) for key, (_, end, rows) in left.items()} == {
        "2026-03-01": (True, 0),
        "2026-03-02": (False, 2),
        "2026-03-03": (True, 0),
    }
    # The failed ones may go later: the record is still that of the rows.
    assert await broker.admin.prune(BY_LAKE) == Pruned()
    assert await broker.admin.prune(replace(BY_LAKE, failed="1d")) == Pruned(failed=2)


async def test_a_window_with_a_row_that_came_late_stays(
    broker: SqlBroker, archive: Archive
) -> None:
    await archive.put(0, 1, 2, 3, 4)
    await archive.record(0, 1, 2, 3)
    await archive.put(1, 11)
    await archive.record(1, 11)
    told = "2026-03-01: 4 rows with the sum of ids 10, not 3 rows with the sum of ids 6"
    assert await broker.admin.prune(BY_LAKE, dry_run=True) == Pruned(completed=1, differing=[told])
    assert await broker.admin.prune(BY_LAKE) == Pruned(completed=1, differing=[told])
    assert await archive.left() == [1, 2, 3, 4]
    assert (await archive.scopes())["2026-03-01"] == ("lake_differs:shop", None, 3)
    # It is told once, and health goes on telling it.
    assert await broker.admin.prune(BY_LAKE) == Pruned()
    health = await broker.admin.health()
    assert health.differing_windows == ("window 2026-03-01 of lake 'shop'",)
    assert any("export again" in problem for problem in health.problems)
    assert await archive.left() == [1, 2, 3, 4]


@pytest.mark.parametrize("moment", ["compared", "removed"])
async def test_a_row_that_comes_while_its_window_is_pruned_stays(
    broker: SqlBroker, archive: Archive, moment: str
) -> None:
    """After all was compared, and after the first page has gone."""
    await archive.put(0, 1, 2, 3, 4, 5, 6, 7)
    await archive.record(0, 1, 2, 3, 4, 5, 6, 7)
    inner = LoadedWindows.remove
    pages = 0

    async def remove(*arguments: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == (1 if moment == "compared" else 2):
            at = FIRST + timedelta(minutes=pages * 3 - 2, seconds=30)
            await archive.put_at(at, 99)
        return await inner(*arguments)

    with patch.object(LoadedWindows, "remove", remove):
        found = await broker.admin.prune(BY_LAKE)
    gone = 0 if moment == "compared" else 3
    assert found == Pruned(completed=gone)
    assert await archive.left() == [*range(gone + 1, 8), 99]
    found = await broker.admin.prune(BY_LAKE)
    assert (found.rows, len(found.differing)) == (0, 1)
    assert 99 in await archive.left()


async def test_a_record_that_an_export_has_renewed_is_compared_anew(
    broker: SqlBroker, archive: Archive
) -> None:
    await archive.put(0, 1, 2, 3)
    await archive.record(0, 1, 2, 3)
    inner = LoadedWindows.remove

    async def remove(*arguments: Any) -> Any:
        await archive.renew_records()
        return await inner(*arguments)

    with patch.object(LoadedWindows, "remove", remove):
        assert await broker.admin.prune(BY_LAKE) == Pruned()
    assert await archive.left() == [1, 2, 3]
    assert await broker.admin.prune(BY_LAKE) == Pruned(completed=3)


async def test_a_redriven_message_leaves_its_window_a_replayed_one_goes_with_it(
    broker: SqlBroker, archive: Archive
) -> None:
    """The lake has both. What an undo puts back belongs to a later window, which has no record."""
    for day, queue in enumerate(("redriven", "replayed")):
        ids = 1001 + day * 10, 1002 + day * 10  # the new messages begin at 1
        await archive.put(day, ids[0], state="FAILED", queue=queue)
        await archive.put(day, ids[1])
        await archive.record(day, *ids)
    redriven = await broker.admin.redrive(queue="redriven", dry_run=False)
    replayed = await broker.admin.replay(queue="replayed", name="again", dry_run=False)
    assert (redriven.done, replayed.done) == (1, 1)
    found = await broker.admin.prune(replace(BY_LAKE, failed="1d"))
    assert (found.rows, found.differing) == (3, [])
    assert await archive.left() == []
    undone = await broker.admin.undo(redriven.id)
    assert (undone.done, await archive.left()) == (1, [1001])
    assert (await broker.admin.verify()).ok
    assert (await archive.scopes())["2026-03-01"][1:] == (None, 0)
    assert await broker.admin.prune(replace(BY_LAKE, failed="1d")) == Pruned()


@pytest.mark.parametrize("export", ["before", "between"])
async def test_what_is_put_back_is_in_no_window_that_an_export_has_recorded(
    broker: SqlBroker, archive: Archive, export: str
) -> None:
    """Also if the lake read the window while 1001 was in its queue."""
    await archive.put(0, 1001, 1002, 1003, state="DISCARDED")
    await archive.record(0, 1001, 1002, 1003)
    only_first: Any = {"state": "DISCARDED", "until": FIRST + timedelta(seconds=30)}
    job = await broker.admin.redrive(**only_first, dry_run=False)
    if export == "between":
        await archive.forget_records()
        await archive.record(0, 1002, 1003)
    undone = await broker.admin.undo(job.id)
    assert (job.done, undone.done) == (1, 1)
    assert (await broker.admin.verify()).ok
    assert await broker.admin.prune(BY_LAKE) == Pruned(discarded=2)
    assert await archive.left() == [1001]


async def test_a_broker_prunes_by_its_lake_and_tells_what_differs_once(
    make: Make, archive: Archive, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "PRUNE_INTERVAL", 0.1)
    await archive.put(0, 1, 2, 3, 4)
    await archive.record(0, 1, 2, 3, 4)
    await archive.put(1, 11, 12)
    await archive.record(1, 11)
    await archive.put(2, 21)
    both = [make(retention=BY_LAKE) for _ in range(2)]
    for each in both:
        each.subscriber("other", **QUICK)(_nothing)
        await each.start()

    async def done() -> bool:
        return await archive.left() == [11, 12, 21] and bool(heard.texts("pruning skips window"))

    await eventually(done)
    await archive.record(2, 21)

    async def gone() -> bool:
        return await archive.left() == [11, 12]

    await eventually(gone)
    [told] = heard.texts("pruning skips window")
    assert "window 2026-03-02" in told
    assert "lake 'shop'" in told


async def _nothing(_body: Any) -> None:
    pass


async def test_other_lakes_do_not_count(broker: SqlBroker, archive: Archive) -> None:
    await archive.put(0, 1)
    await archive.record(0, 1)
    other = Retention(completed="1d", unless_loaded_by="another")
    assert await broker.admin.prune(other) == Pruned()
    # Days that have not ended within the age stay.
    young = Retention(completed=timedelta(days=50_000), unless_loaded_by="shop")
    assert await broker.admin.prune(young) == Pruned()
    assert await archive.left() == [1]
    # With a number, whole windows go, too.
    await archive.put(1, 11, 12)
    few = Retention(max_rows=2, unless_loaded_by="shop")
    assert await broker.admin.prune(few) == Pruned(completed=1)


async def test_the_command(broker: SqlBroker, archive: Archive, database_url: str) -> None:
    shell = Shell(database_url)
    await archive.put(0, 1, 2)
    await archive.record(0, 1, 2)
    await archive.put(1, 11)
    await archive.record(1)
    lake = ("prune", "--completed", "1d", "--unless-loaded-by", "shop")
    shown = await shell.run(*lake, "--dry-run")
    assert "2 completed" in shown
    assert "kept window 2026-03-02" in shown
    found = await shell.json(*lake, "--yes")
    assert (found["completed"], len(found["differing"])) == (2, 1)
    assert "lakes" in await shell.run("check", code=1)


@pytest.mark.parametrize("name", ["", 7, "a" * 256])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(SetupError, match="unless_loaded_by of Retention must be the name"):
        Retention(completed="1d", unless_loaded_by=name)
