"""Every statement of docs/howto/plain_sql.md, on each database, in the sessions that other programs
may have."""

import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from faststream_sqlbroker import SqlBroker, SqlBrokerMessage
from tests.helpers import eventually

PAGE = (Path(__file__).parent.parent.parent / "docs" / "howto" / "plain_sql.md").read_text()
BLOCK = re.compile(r"<!-- (\w+): (\w+) -->\n```sql\n(.*?)```", re.DOTALL)
LATER = re.compile(r"An hour later: `next_attempt_at` is\s`([^`]+)`")
STATEMENTS = {(kind, name): sql for kind, name, sql in BLOCK.findall(PAGE)}
TIMES = dict(zip(("postgresql", "mysql", "sqlite"), LATER.findall(PAGE), strict=True))
JSON = '{"content-type": "application/json"}'
TEXT = '{"content-type": "text/plain"}'
SESSIONS = {
    "postgresql": [
        "SET standard_conforming_strings = on",
        "SET standard_conforming_strings = off",
        "SET bytea_output = 'escape'",
    ],
    "mysql": [
        "SET SESSION sql_mode = ''",
        "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ANSI_QUOTES'",
        "SET NAMES latin1",
    ],
    "sqlite": ["PRAGMA recursive_triggers = ON"],
}
"""How other programs may have set their sessions; the statements mean the same in each."""

NASTY = 'C:\\temp\\new \\\\ \\x41 it\'s "new" a\r\nb\tc 😀 é 100% :name $1 ? {0} $$ $json$ `'
BODY = {"order": 3, "note": NASTY, NASTY: [None, 1.5, {"": NASTY}]}

Got = list[tuple[Any, str | None, str | None]]
"""Body, content type and key of what was handled."""


def of(database: str) -> str:
    """Whose statements these are on the page."""
    return "mysql" if database == "mariadb" else database


def block(database: str, name: str) -> list[str]:
    """The statements of a block, as drivers take them."""
    parts = STATEMENTS[of(database), name].split(";\n\n")
    return [part.strip().removesuffix(";") for part in parts]


@pytest.fixture
async def got(engine: AsyncEngine) -> AsyncIterator[Got]:
    """What a subscriber of the queue "orders" is given."""
    broker = SqlBroker(engine, logger=None)
    got = Got()

    @broker.subscriber("orders", max_fetch_interval=0.05)
    async def handle(body: Any, message: SqlBrokerMessage) -> None:
        got.append((body, message.content_type, message.raw_message.key))

    await broker.create_tables()
    async with broker:
        await broker.start()
        yield got


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[AsyncEngine]:
    """Another program's connections, which end with their settings."""
    engine = create_async_engine(database_url, poolclass=NullPool)
    yield engine
    await engine.dispose()


async def run(connection: AsyncConnection, *statements: str) -> None:
    for statement in statements:
        await connection.exec_driver_sql(statement)


async def handled(got: Got, count: int) -> Got:
    await eventually(lambda: len(got) >= count)
    return got


def test_the_page_has_all_of_them() -> None:
    names = {"parameters", "literal", "trigger"}
    assert set(STATEMENTS) == {(kind, name) for kind in SESSIONS for name in names}


@pytest.mark.parametrize(("session", "as_bytes"), [(0, False), (1, False), (0, True)])
async def test_parameters(
    database: str, engine: AsyncEngine, other: AsyncEngine, got: Got, session: int, as_bytes: bool
) -> None:
    """The handler gets exactly the body: backslashes, quotes, new lines, all of Unicode, what
    drivers replace."""
    [sql] = block(database, "parameters")
    if as_bytes:
        sql = re.sub(r"(convert_to|CONVERT|CAST)\(:body[^)]*\)", ":body", sql)
    bodies = [(json.dumps(BODY), JSON), (json.dumps(BODY, ensure_ascii=False), JSON), (NASTY, TEXT)]
    sessions = SESSIONS[of(database)]
    async with other.begin() as connection:
        await run(connection, sessions[min(session, len(sessions) - 1)])
        for body, headers in bodies:
            values = {
                "body": body.encode() if as_bytes else body,
                "headers": headers,
                "key": "å 'b'",
            }
            await connection.execute(text(sql), values)
    await handled(got, 3)
    assert sorted(got, key=lambda one: isinstance(one[0], str)) == [
        (BODY, "application/json", "å 'b'"),
        (BODY, "application/json", "å 'b'"),
        (NASTY, "text/plain", "å 'b'"),
    ]


@pytest.mark.parametrize("session", [0, 1, 2])
async def test_a_literal(database: str, other: AsyncEngine, got: Got, session: int) -> None:
    sessions = SESSIONS[of(database)]
    async with other.begin() as connection:
        await run(
            connection, sessions[min(session, len(sessions) - 1)], *block(database, "literal")
        )
    [(body, content_type, key)] = await handled(got, 1)
    path = {} if of(database) == "mysql" else {"path": "C:\\temp"}
    assert (body, content_type, key) == (
        {"order": 3, "said": 'it\'s "new"', **path},
        "application/json",
        None,
    )


@pytest.mark.parametrize("session", [0, 1, 2])
async def test_a_trigger(database: str, other: AsyncEngine, got: Got, session: int) -> None:
    """An order is published with its row or not at all; another session fires the trigger."""
    sessions = SESSIONS[of(database)]
    async with other.begin() as connection:
        await run(
            connection, sessions[min(session, len(sessions) - 1)], *block(database, "trigger")
        )
    insert = text("INSERT INTO orders (id, customer, note) VALUES (:id, :customer, :note)")
    async with other.connect() as connection:
        await connection.execute(insert, {"id": 1, "customer": "rolled back", "note": ""})
        await connection.rollback()
    async with other.begin() as connection:
        await connection.execute(insert, {"id": 2, "customer": "ada 😀", "note": NASTY})
        await connection.execute(insert, {"id": 3, "customer": None, "note": None})
    await handled(got, 2)
    assert sorted(got, key=lambda one: one[0]["order"]) == [
        ({"order": 2, "note": NASTY}, "application/json", "ada 😀"),
        ({"order": 3, "note": None}, "application/json", None),
    ]


async def test_a_due_time_an_hour_later(
    database: str, engine: AsyncEngine, other: AsyncEngine
) -> None:
    """The session's time zone changes nothing."""
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    [sql] = block(database, "literal")
    head, values = sql.split("VALUES (")
    columns = head.rstrip().removesuffix(")")
    row = values.rstrip().removesuffix(")")
    later = f"{columns}, next_attempt_at) VALUES ({row}, "
    zones = {"postgresql": "SET TIME ZONE 'Asia/Tokyo'", "mysql": "SET time_zone = '+09:00'"}
    async with other.begin() as connection:
        if (zone := zones.get(of(database))) is not None:
            await run(connection, zone)
        await run(connection, f"{later}{TIMES[of(database)]})")
    table = broker.config.store.tables.message
    async with engine.connect() as connection:
        row = (await connection.execute(table.select())).one()
    # SQLite's expression is in whole seconds.
    assert (
        timedelta(minutes=59, seconds=58)
        < row.next_attempt_at - row.created_at
        <= timedelta(hours=1)
    )
    await broker.stop()


async def test_a_body_without_a_content_type_is_json_if_it_can_be(
    database: str, other: AsyncEngine, got: Got
) -> None:
    [sql] = block(database, "parameters")
    async with other.begin() as connection:
        for body in (json.dumps(BODY), "no JSON"):
            await connection.execute(text(sql), {"body": body, "headers": None, "key": None})
    await handled(got, 2)
    assert (BODY, None, None) in got
    assert [body for body, _, _ in got if body != BODY] in (["no JSON"], [b"no JSON"])


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_plain_literal_loses_backslashes(other: AsyncEngine, got: Got) -> None:
    """What the page warns of."""
    plain = """INSERT INTO message (queue, payload) VALUES ('orders', '{"path": "C:\\\\temp"}')"""
    async with other.begin() as connection:
        await run(connection, plain)
    assert (await handled(got, 1))[0][0] == {"path": "C:\temp"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_text_in_place_of_bytes_is_handled_alike(other: AsyncEngine, got: Got) -> None:
    async with other.begin() as connection:
        await run(
            connection,
            """INSERT INTO message (queue, payload) VALUES ('orders', '{"é": "\\\\"}')""",
        )
    assert (await handled(got, 1))[0][0] == {"é": "\\"}
