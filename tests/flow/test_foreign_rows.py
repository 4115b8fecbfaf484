"""Whatever another program puts into the table, it is handled or rejected, and the rest goes on."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

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
    await rig.execute(f"INSERT INTO message (queue, payload, headers, \"key\") VALUES ('q', {values})")
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
        await rig.execute(f"INSERT INTO message (queue, payload, {column}) VALUES ('q', '1', '{value}')")


@pytest.mark.parametrize("database", MYSQL, indirect=True)
async def test_a_zero_date_is_a_dead_letter(rig: Rig) -> None:
    async with rig.store.engine.begin() as connection:
        await connection.execute(text("SET SESSION sql_mode = ''"))
        await connection.execute(
            text("INSERT INTO message (queue, payload, created_at) VALUES ('q', '1', '0000-00-00')")
        )
        await connection.execute(text("SET SESSION sql_mode = DEFAULT"))
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    await eventually(lambda: _archived(rig))
    assert len(rig.handled) == 1
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
@pytest.mark.parametrize("column", ["created_at", "expires_at", "attempts_count", "first_attempt_at"])
async def test_a_row_that_cannot_be_a_message_is_a_dead_letter(rig: Rig, column: str) -> None:
    await rig.execute(f"INSERT INTO message (queue, payload, {column}) VALUES ('q', x'31', 'nonsense')")
    await rig.put(1)
    consumer = rig.consumer(max_fetch_interval=0.05)
    await consumer.start()
    rows = await eventually(lambda: _archived(rig))
    bad = next(r for r in rows if r["id"] == 1)
    assert (bad["state"], bad["reason"], bytes(bad["payload"])) == ("FAILED", "undecodable", b"1")
    assert len(rig.handled) == 1
    assert rig.logged("cannot be read and is rejected")
    assert consumer.healthy


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 1500 + "]" * 1500], ids=["huge number", "deep"])
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
        result = await connection.exec_driver_sql("SELECT id, state, reason, payload FROM message_archive")
        rows = [dict(row._mapping) for row in result]
    return rows if len(rows) == 2 else None
