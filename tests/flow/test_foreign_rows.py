"""Rows of other programs: each is handled or rejected, and the others go on."""

from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from faststream_sqlbroker import Debounce
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.exceptions import StoreError
from tests.flow.conftest import Rig
from tests.helpers import MYSQL, eventually

sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


@sqlite
@pytest.mark.parametrize(
    ("values", "payload", "headers", "key"),
    [
        ("'text', NULL, NULL", b"text", {}, None),
        ("5, NULL, NULL", b"5", {}, None),
        ("x'31', 'no json', NULL", b"1", {"value": "no json"}, None),
        ("x'31', x'ff', NULL", b"1", {"value": "\ufffd"}, None),
        ("x'31', NULL, CAST(x'ff61' AS TEXT)", b"1", {}, "\ufffda"),
        ("CAST(x'ff31' AS TEXT), NULL, NULL", b"\xff1", {}, None),
    ],
    ids=["text", "number", "no-json", "binary-headers", "key-of-bytes", "text-of-bytes"],
)
async def test_sqlite_stores_anything(
    rig: Rig, values: str, payload: bytes, headers: dict[str, str], key: str | None
) -> None:
    """Columns there take values of any type."""
    await rig.execute(
        f"INSERT INTO message (queue, payload, headers, \"key\") VALUES ('q', {values})"
    )
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 2)
    first = rig.handled[0]
    assert (first.payload, first.headers, first.key) == (payload, headers, key)
    assert consumer.healthy


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("value", ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC"])
@pytest.mark.parametrize("column", ["created_at", "next_attempt_at", "expires_at"])
async def test_postgresql_refuses_moments_that_python_does_not_have(
    rig: Rig, column: str, value: str
) -> None:
    """One such row would stop every claim of the subscriber."""
    with pytest.raises(IntegrityError, match="message_times_check"):
        await rig.execute(
            f"INSERT INTO message (queue, payload, {column}) VALUES ('q', '1', '{value}')"
        )


@pytest.mark.parametrize("database", MYSQL, indirect=True)
@pytest.mark.parametrize("column", ["created_at", "next_attempt_at"])
@pytest.mark.parametrize("ordered", [False, True])
async def test_p3_a_zero_date_is_delivered_at_once(rig: Rig, column: str, ordered: bool) -> None:
    """P3: with a warning, and its neighbours are, too."""
    said: list[str] = []
    rig.store.dialect.warn = said.append
    async with rig.store.engine.begin() as connection:
        await connection.execute(text("SET SESSION sql_mode = ''"))
        await connection.execute(
            text(f"INSERT INTO message (queue, payload, {column}) VALUES ('q', '1', '0000-00-00')")
        )
        await connection.execute(text("SET SESSION sql_mode = DEFAULT"))
    await rig.put(1)
    pairs = await rig.store.find_ready_pairs(["q"])
    assert [pair.due_in <= 0 for pair in pairs] == [True]
    consumer = rig.consumer(max_fetch_interval=0.05, ordered=ordered)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig))
    assert {row["state"] for row in rows} == {"COMPLETED"}
    first = rig.handled[0]
    assert first.created_at.year == first.next_attempt_at.year == first.acquired_at.year
    assert len(rig.handled) == 2
    [warning] = said
    assert warning.startswith(f"message 1 of queue 'q' is delivered immediately: its {column} is ")
    assert consumer.healthy


UNUSABLE = [
    "datetime('now')",
    "'soon'",
    "''",
    "x'00ff'",
    "CAST(x'ff' AS TEXT)",
    "9e999",
    "-9e999",
    "1700000000000000000",
    "253402300800000000",
    "-9223372036854775808",
]
"""What a foreign producer may write as a time on SQLite: text, bytes, infinities, nanoseconds,
before the year 1."""


@sqlite
@pytest.mark.parametrize(
    "options",
    [{}, {"ordered": True}, {"batch": True}, {"policies": [Debounce("10ms")]}],
    ids=["plain", "ordered", "batch", "policies"],
)
async def test_p3_an_unusable_due_time_is_delivered_at_once(
    rig: Rig, options: dict[str, Any]
) -> None:
    """P3: with a warning. Such a row sorts after, or before, all that are due some day."""
    said: list[str] = []
    rig.store.dialect.warn = said.append
    for n, value in enumerate(UNUSABLE):
        await rig.execute(
            'INSERT INTO message (queue, payload, "key", next_attempt_at) '
            f"VALUES ('q', x'31', 'k{n}', {value})"
        )
    await rig.execute(
        "INSERT INTO message (queue, payload, next_attempt_at) "
        "VALUES ('q', x'31', 253402300799999999)"
    )

    async def handle(rows: Any) -> None:
        for row in rows if isinstance(rows, list | tuple) else [rows]:
            await rig.ack(row)

    consumer = rig.consumer(handle, max_fetch_interval=0.05, **options)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == len(UNUSABLE))
    assert sorted(row.id for row in rig.handled) == list(range(1, len(UNUSABLE) + 1))
    for message_id in range(1, len(UNUSABLE) + 1):
        assert [text for text in said if text.startswith(f"message {message_id} of queue 'q' is ")]
    assert consumer.healthy
    # The year 9999 is a time.
    [left] = await eventually(lambda: _live(rig))
    assert left["id"] == len(UNUSABLE) + 1


@sqlite
async def test_p3_a_row_that_is_not_due_hides_none_that_is_unusable(rig: Rig) -> None:
    await rig.execute(
        "INSERT INTO message (queue, payload, next_attempt_at) "
        "VALUES ('q', x'31', 4102444800000000)"
    )
    assert [pair.has_invalid_due for pair in await rig.store.find_ready_pairs(["q"])] == [False]
    await rig.execute(
        "INSERT INTO message (queue, payload, next_attempt_at) VALUES ('q', x'31', datetime('now'))"
    )
    [pair] = await rig.store.find_ready_pairs(["q"])
    assert pair.has_invalid_due
    assert pair.due_in <= 0
    await rig.consumer(max_fetch_interval=0.05).start()
    await eventually(lambda: [row.id for row in rig.handled] == [2])


@sqlite
@pytest.mark.parametrize(
    "column", ["created_at", "expires_at", "first_attempt_at", "last_attempt_at"]
)
@pytest.mark.parametrize("value", ["datetime('now')", "9e999", "x'00'"])
async def test_p3_another_unusable_time_is_put_right(rig: Rig, column: str, value: str) -> None:
    """P3: delivered with a warning, and what the archive keeps can be read."""
    said: list[str] = []
    rig.store.dialect.warn = said.append
    await rig.execute(
        f"INSERT INTO message (queue, payload, {column}) VALUES ('q', x'31', {value})"
    )
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig))
    assert {row["state"] for row in rows} == {"COMPLETED"}
    [warning] = said
    assert warning.startswith(f"message 1 of queue 'q' is delivered immediately: its {column} is ")
    archive = rig.store.tables.archive
    assert archive is not None
    async with rig.store.engine.connect() as connection:
        assert len((await connection.execute(select(archive))).all()) == 2
    assert consumer.healthy


@sqlite
async def test_a_time_of_zero_is_a_time(rig: Rig) -> None:
    """It expired in 1970; its neighbours in the batch run, uncharged for it."""
    await rig.execute("INSERT INTO message (queue, payload, expires_at) VALUES ('q', x'31', 0)")
    await rig.put(5)

    async def handle(rows: list[ClaimedMessage]) -> None:
        for row in rows:
            await rig.ack(row)

    await rig.consumer(handle, batch=True, max_fetch_interval=0.05).start()
    await eventually(lambda: len(rig.handled) == 5)
    assert {row.deliveries_count for row in rig.handled} == {1}


@sqlite
@pytest.mark.parametrize("column", ["attempts_count", "publish_count"])
async def test_a_row_that_cannot_be_a_message_is_a_dead_letter(rig: Rig, column: str) -> None:
    await rig.execute(
        f"INSERT INTO message (queue, payload, {column}) VALUES ('q', x'31', 'nonsense')"
    )
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig))
    bad = next(r for r in rows if r["id"] == 1)
    assert (bad["state"], bad["reason"], bytes(bad["payload"])) == ("FAILED", "undecodable", b"1")
    assert len(rig.handled) == 1
    assert rig.logged("cannot be read and is rejected")
    assert consumer.healthy


@pytest.mark.parametrize(
    "value", ["1" * 5000, "[" * 1500 + "]" * 1500], ids=["huge number", "deep"]
)
async def test_headers_that_python_refuses_to_parse_stay_text(rig: Rig, value: str) -> None:
    headers = f'{{"n": {value}}}'
    # MariaDB allows 32 levels, MySQL 100 and no number beyond a double's.
    if rig.store.dialect_name == "mysql" or (rig.store.dialect_name == "mariadb" and "[" in value):
        with pytest.raises(StoreError):
            await rig.store.insert([NewMessage("q", b"x", headers=headers)])
        return
    await rig.store.insert([NewMessage("q", b"x", headers=headers)])
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: len(rig.handled) == 2)
    found = rig.handled[0].headers
    assert "n" in found or "n" in found["value"]
    assert consumer.healthy


async def _archived(rig: Rig) -> list[dict[str, object]] | None:
    async with rig.store.engine.connect() as connection:
        result = await connection.exec_driver_sql(
            "SELECT id, state, reason, payload FROM message_archive"
        )
        rows = [dict(row._mapping) for row in result]
    return rows if len(rows) == 2 else None


async def _live(rig: Rig) -> list[dict[str, object]] | None:
    async with rig.store.engine.connect() as connection:
        result = await connection.exec_driver_sql("SELECT id FROM message")
        rows = [dict(row._mapping) for row in result]
    return rows if len(rows) == 1 else None
