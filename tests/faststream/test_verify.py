"""broker.admin.verify and `sqlbroker verify`: each damage that is planted is named, no other."""

import base64
import json
import uuid
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import insert, text, update

from faststream_sqlbroker import SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.admin import Verification
from faststream_sqlbroker.core import verification as kinds
from faststream_sqlbroker.core.loaded_windows import (
    DIFFERING_SCOPE,
    LOADED_SCOPE,
    LoadedWindow,
    RowSum,
)
from faststream_sqlbroker.core.status import build_worker_name
from faststream_sqlbroker.database import verification
from faststream_sqlbroker.database.parts import message_walks
from faststream_sqlbroker.database.parts import window_rows as records
from faststream_sqlbroker.database.parts.live_subscribers import SUBSCRIBER
from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.schema.tables import build_tables
from tests.faststream.conftest import Look, Make
from tests.faststream.test_operating_cli import Shell

pytestmark = pytest.mark.capability("`broker.admin.verify`: rows that cannot be, by name")

PAST = datetime(2026, 3, 1, tzinfo=timezone.utc)
TOKEN = uuid.UUID(int=7)
CHECKS = ("message_state_check", "message_lease_check", "message_token_check")
LIVE: dict[str, dict[str, Any]] = {
    kinds.UNKNOWN_STATE: {"state": "LOST"},
    kinds.NO_LEASE: {"state": "PROCESSING"},
    kinds.LEFT_LEASE: {"lease_token": TOKEN, "lease_expires_at": PAST},
    kinds.NO_OWNER: {"state": "PROCESSING", "lease_token": TOKEN, "lease_expires_at": PAST},
    kinds.NO_ATTEMPT: {"state": "RETRYABLE"},
}
"""By damage what a live row of it has."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of a few rows, so that each part has several."""
    monkeypatch.setattr(message_walks, "STEP_SIZE", 2)
    monkeypatch.setattr(verification, "STEP_SIZE", 2)
    monkeypatch.setattr(verification, "JOBS", 2)
    monkeypatch.setattr(records, "PAGE_SIZE", 2)


class Planted:
    """Writes what the tables do not allow."""

    def __init__(self, look: Look, database: str) -> None:
        self._look = look
        self._database = database

    async def unchecked(self, *statements: Any) -> None:
        """Run statements as if the tables had no checks."""
        async with self._look.engine.begin() as connection:
            if self._database == "sqlite":
                await connection.execute(text("PRAGMA ignore_check_constraints = ON"))
            else:
                archive = "ALTER TABLE message_archive DROP CONSTRAINT message_archive_state_check"
                for name in CHECKS:
                    await connection.execute(text(f"ALTER TABLE message DROP CONSTRAINT {name}"))
                await connection.execute(text(archive))
            for statement in statements:
                await connection.execute(statement)
            if self._database == "sqlite":
                await connection.execute(text("PRAGMA ignore_check_constraints = OFF"))

    def live(self, message_id: int, **values: Any) -> Any:
        table = self._look.tables.message
        return insert(table).values(id=message_id, queue="q", payload=b"x", **values)

    def archived(self, message_id: int, at: datetime = PAST, **values: Any) -> Any:
        assert self._look.tables.archive is not None
        times = {"created_at": at, "next_attempt_at": at, "archived_at": at}
        row = {"queue": "q", "payload": b"x", "state": "COMPLETED", **times, **values}
        return insert(self._look.tables.archive).values(id=message_id, **row)

    def record(self, scope: str, key: str, **values: Any) -> Any:
        return insert(self._look.tables.policy_state).values(scope=scope, key=key, **values)


@pytest.fixture
def planted(broker: SqlBroker, look: Look, database: str) -> Planted:
    return Planted(look, database)


def window(key: str, start: datetime, *ids: int) -> LoadedWindow:
    return LoadedWindow(key, start, start + timedelta(days=1), RowSum(len(ids), sum(ids)), "lake")


def found(verified: Verification) -> list[tuple[str, int | str | None]]:
    return [(d.kind, d.message_id or d.name) for d in verified.damages]


async def test_a_message_without_a_lease_is_explained_with_its_repair(
    broker: SqlBroker, planted: Planted, look: Look
) -> None:
    """No lease will expire, so no subscriber releases it."""
    await planted.unchecked(planted.live(100, **LIVE[kinds.NO_LEASE]))
    [reason] = (await broker.admin.explain(100)).reasons
    assert reason.code == kinds.NO_LEASE
    assert reason.text.endswith(
        "set its state to PENDING, and its lease_token and lease_expires_at to NULL"
    )
    table = look.tables.message
    repair = update(table).values(state="PENDING", lease_token=None, lease_expires_at=None)
    async with look.engine.begin() as connection:
        await connection.execute(repair)
    assert await broker.pop("q") is not None


async def test_each_damage_of_a_row_is_named(
    broker: SqlBroker, planted: Planted, small: None
) -> None:
    rows = [planted.live(100 + n, **values) for n, values in enumerate(LIVE.values())]
    ahead = datetime.now(timezone.utc) + timedelta(days=2)
    await planted.unchecked(
        *rows,
        planted.live(200),
        planted.archived(200),
        planted.live(201, state="RETRYABLE", attempts_count=1, deliveries_count=1),
        planted.live(202, state="PROCESSING", lease_token=TOKEN, lease_expires_at=ahead),
        planted.archived(300, state="PENDING"),
        planted.archived(301, ahead),
        planted.archived(302),
    )
    verified = await broker.admin.verify()
    assert found(verified) == [
        *((kind, 100 + n) for n, kind in enumerate(LIVE)),
        (kinds.IN_BOTH, 200),
        (kinds.UNKNOWN_STATE, 300),
        (kinds.IN_FUTURE, 301),
    ]
    assert (verified.rows, verified.after, verified.ok) == (12, None, False)
    assert verified.counts[kinds.UNKNOWN_STATE] == 2
    assert str(verified.damages[0]) == (
        "unknown_state: message 100 of queue 'q': the state is not valid in this table (LOST)"
    )


async def test_a_lease_has_no_owner_only_after_a_while(broker: SqlBroker, planted: Planted) -> None:
    just_over = datetime.now(timezone.utc) - timedelta(minutes=5)
    leased = {"state": "PROCESSING", "lease_token": TOKEN, "lease_expires_at": just_over}
    await planted.unchecked(planted.live(1, **leased))
    assert (await broker.admin.verify(lease_over="1h")).ok
    verified = await broker.admin.verify(lease_over="1m")
    assert found(verified) == [(kinds.NO_OWNER, 1)]


async def test_a_lease_whose_holder_lives_has_an_owner(broker: SqlBroker, planted: Planted) -> None:
    """A transactional handler holds its message by a lock that nothing else gets past; others see
    the lease end."""
    now = datetime.now(timezone.utc)
    holders = {1: (b"living..", now + timedelta(days=1)), 2: (b"dead....", PAST)}
    statements = []
    for message_id, (holder, until) in holders.items():
        token = uuid.UUID(bytes=holder + bytes(8))
        leased = {"state": "PROCESSING", "lease_token": token, "lease_expires_at": PAST}
        name = build_worker_name("host:1", holder)
        statements += [
            planted.live(message_id, **leased),
            planted.record(SUBSCRIBER, name, info={}, lease_expires_at=until),
        ]
    await planted.unchecked(*statements)
    verified = await broker.admin.verify()
    assert found(verified) == [(kinds.NO_OWNER, 2)]
    assert verified.counts == {kinds.NO_OWNER: 1}


async def test_jobs_and_windows_of_a_lake_are_compared(
    broker: SqlBroker, look: Look, planted: Planted, small: None
) -> None:
    days = [PAST + timedelta(days=n) for n in range(4)]
    same = window("a", days[0], 101, 102, 103)
    other = window("b", days[1], 104, 105, 106, 107)
    apart = window("c", days[2], 109)
    loaded = [
        planted.record(scope, each.name, info=each.to_json(), due_at=each.end)
        for scope, each in (
            (LOADED_SCOPE + "shop", same),
            (LOADED_SCOPE + "shop", other),
            (DIFFERING_SCOPE + "shop", apart),
        )
    ]
    empty = planted.record(LOADED_SCOPE + "shop", "d", info=window("d", days[3]).to_json())
    await planted.unchecked(
        *(planted.archived(n, days[0]) for n in (101, 102, 103)),
        *(planted.archived(n, days[1]) for n in (104, 105, 106, 108)),
        *loaded,
        empty,
    )
    for _ in range(3):
        await broker.publish("x", "q")
    job = await broker.admin.bulk_move("other", queue="q", dry_run=False, wait=False)
    await broker.admin.pause("q")
    await broker.admin.resume("q")
    jobs = look.tables.policy_state
    async with look.engine.begin() as connection:
        await connection.execute(update(jobs).where(jobs.c.scope == "job").values(due_at=None))
    verified = await broker.admin.verify()
    assert found(verified) == [
        (kinds.JOB_WITHOUT_DUE_TIME, job.id),
        (kinds.DIFFERS, "window b of lake 'shop'"),
        (kinds.DIFFERS, "window c of lake 'shop'"),
    ]
    assert verified.damages[1].found == f"{RowSum(4, 423)}, not {RowSum(4, 422)}"


async def test_a_record_that_changes_during_the_look_is_not_taken_for_damage(
    broker: SqlBroker, look: Look, planted: Planted, small: None
) -> None:
    """A prune lowers it between two pages of the same look."""
    loaded = window("a", PAST, 1, 2, 3)
    await planted.unchecked(
        *(planted.archived(n) for n in (1, 2, 3)),
        planted.record(LOADED_SCOPE + "shop", "a", info=loaded.to_json(), due_at=loaded.end),
    )
    first = await broker.admin.verify(rows=6)
    assert (first.ok, first.after is None) == (True, False)
    lowered = window("a", PAST, 2, 3).to_json()
    table = look.tables.policy_state
    archive = look.tables.archive
    assert archive is not None
    async with look.engine.begin() as connection:
        of_lake = table.c.scope == LOADED_SCOPE + "shop"
        await connection.execute(update(table).where(of_lake).values(counter=1, info=lowered))
        await connection.execute(archive.delete().where(archive.c.id == 1))
    assert (await broker.admin.verify(after=first.after)).ok
    assert (await broker.admin.verify()).ok


async def test_a_redrive_is_a_note_and_a_lost_row_stays_damage(
    broker: SqlBroker, look: Look, planted: Planted, small: None
) -> None:
    """Two lakes have recorded the day; what the undo puts back is no row of it."""
    days = [PAST, PAST + timedelta(days=1)]
    loaded = [
        planted.record(LOADED_SCOPE + lake, each.name, info=each.to_json(), due_at=each.end)
        for lake in ("shop", "other")
        for each in (window("a", days[0], 1, 2, 3), window("b", days[1], 4, 5))
    ]
    failed = [planted.archived(n, days[0], state="FAILED") for n in (1, 2)]
    rest = [
        planted.archived(3, days[0]),
        planted.archived(4, days[1]),
        planted.archived(5, days[1]),
    ]
    await planted.unchecked(*failed, *rest, *loaded)
    job = await broker.admin.redrive(queue="q", dry_run=False)
    assert (job.done, job.state) == (2, "ended")
    verified = await broker.admin.verify()
    assert (verified.ok, verified.complete) == (True, True)
    assert [(n.kind, n.name, n.found) for n in verified.notes] == [
        (kinds.BROUGHT_BACK, f"window a of lake {lake!r}", "2 brought back, 1 left")
        for lake in ("other", "shop")
    ]
    assert str(verified.notes[0]).startswith("window_brought_back: window a of lake 'other': ")
    archive = look.tables.archive
    assert archive is not None
    undone = await broker.admin.undo(job.id)
    assert (undone.done, undone.state) == (2, "ended")
    again = await broker.admin.verify()
    assert (again.ok, again.notes) == (True, verified.notes)
    async with look.engine.begin() as connection:
        await connection.execute(archive.delete().where(archive.c.id == 3))
    verified = await broker.admin.verify()
    assert found(verified) == [
        (kinds.DIFFERS, f"window a of lake {lake!r}") for lake in ("other", "shop")
    ]
    assert verified.notes == ()


async def test_it_ends_after_so_many_rows_and_goes_on(
    broker: SqlBroker, planted: Planted, small: None
) -> None:
    bad = range(1, 8)
    await planted.unchecked(*(planted.live(n, state="RETRYABLE") for n in bad))
    seen: list[Any] = []
    calls = 0
    after = None
    while calls == 0 or after is not None:
        verified = await broker.admin.verify(after=after, rows=2, limit=1)
        seen += verified.damages
        assert verified.counts.get(kinds.NO_ATTEMPT, 0) <= 2
        after, calls = verified.after, calls + 1
    assert [each.message_id for each in seen] == [1, 3, 5, 7]
    assert calls == 4
    ticks = iter([0.0, 5.0, 10.0])
    with patch.object(
        verification, "Clock", lambda: SimpleNamespace(monotonic=lambda: next(ticks))
    ):
        timed = await broker.admin.verify(time_limit=10.0)
    assert (timed.rows, timed.after is None) == (4, False)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_arguments_are_refused(broker: SqlBroker) -> None:
    wrong_cursors = (
        ["live", ["a"]],
        ["live", [2**63]],
        ["live", {"a": 1}],
        ["archive", []],
        ["archive", [1e30, 1]],
        ["archive", [10**18, 1]],
        ["windows", ["lake:a", "b", 0, 1, None, 0, "0"]],
        ["windows", ["lake:a", "b", 0, None, None, 0, "x"]],
        ["windows", ["lake:a", "b", "c", None, None, 0, "0"]],
    )
    made = [base64.urlsafe_b64encode(json.dumps(each).encode()).decode() for each in wrong_cursors]
    cut = verification._dump_cursor("live", [17, 18, 19])[:-4]
    for cursor in ("x", "W10=", cut, *made):
        with pytest.raises(
            SetupError, match="after must be the value that the previous call returned"
        ):
            await broker.admin.verify(after=cursor)
    for wrong in ({"limit": 0}, {"lease_over": -1}, {"lease_over": 1e11}, {"time_limit": 0}):
        with pytest.raises(SetupError):
            await broker.admin.verify(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limit must be 1"):
        await broker.admin.verify(rows=0)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_an_id_twice_in_a_partitioned_archive_is_named(make: Make, look: Look) -> None:
    weeks = SqlBrokerSchemaConfig(archive_partitions="week")
    broker = make(schema=weeks)
    planted = Planted(look, "postgresql")
    async with look.engine.begin() as connection:
        await connection.run_sync(create_all, build_tables(weeks, dialect_name="postgresql"))
        for days in (0, 30):
            await connection.execute(planted.archived(1, PAST + timedelta(days=days)))
        await connection.execute(planted.archived(2))
    verified = await broker.admin.verify()
    assert found(verified) == [(kinds.ARCHIVED_TWICE, 1), (kinds.ARCHIVED_TWICE, 1)]


async def test_without_an_archive_the_rest_is_looked_at(make: Make, look: Look) -> None:
    broker = make(schema=SqlBrokerSchemaConfig(message_archive_table_name=None))
    await broker.create_tables()
    await broker.publish("x", "q")
    verified = await broker.admin.verify()
    assert (verified.rows, verified.ok) == (1, True)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_command_names_damage_and_its_exit_code_says_so(
    broker: SqlBroker, planted: Planted, database_url: str
) -> None:
    shell = Shell(database_url)
    await broker.publish("x", "q")
    assert "1 row checked, no damage found" in await shell.run("verify")
    assert await shell.json("verify") == {
        "ok": True,
        "complete": True,
        "rows": 1,
        "counts": {},
        "damages": [],
        "after": None,
        "notes": [],
    }
    await planted.unchecked(planted.live(7, state="RETRYABLE"))
    said = await shell.run("verify", code=1)
    assert "retry_without_attempt" in said
    assert "1 retry_without_attempt: it is RETRYABLE but had no attempt" in said
    told = await shell.json("verify", "--limit", "5", code=1)
    assert [d["message_id"] for d in told["damages"]] == [7]
    with patch.object(verification, "STEP_SIZE", 1), patch.object(message_walks, "STEP_SIZE", 1):
        damaged = await shell.run("verify", "--rows", "2", "--partial", code=1)
    assert "1 retry_without_attempt" in damaged


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_run_that_ends_early_has_an_exit_code_of_its_own(
    broker: SqlBroker, planted: Planted, database_url: str
) -> None:
    shell = Shell(database_url)
    await broker.publish_batch("x", "y", queue="q")
    one = ("verify", "--rows", "1")
    with patch.object(verification, "STEP_SIZE", 1), patch.object(message_walks, "STEP_SIZE", 1):
        assert "not all rows were checked: continue with --after" in await shell.run(*one, code=3)
        told = await shell.json(*one, code=3)
        assert (told["ok"], told["complete"], told["after"] is None) == (True, False, False)
        assert "no damage found" in await shell.run(*one, "--partial")
        assert (await shell.json("verify", "--after", told["after"]))["complete"]
        await planted.unchecked(planted.live(0, state="RETRYABLE"))
        assert not (await shell.json(*one, code=1))["complete"]
