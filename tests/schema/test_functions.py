"""The SQL functions for programs without Python: what they store and refuse, who may call them."""

import json
import os
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from faststream_sqlbroker import SchemaError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.exceptions import NotSupportedError
from faststream_sqlbroker.schema.functions import (
    VERSION,
    install_functions,
    render_functions,
)
from faststream_sqlbroker.schema.migrate import upgrade
from faststream_sqlbroker.schema.tables import Tables, build_tables
from tests.accounts import account
from tests.conftest import Servers, _driver, _emptied
from tests.helpers import eventually
from tests.kept_tables import KeptTables
from tests.quick_tables import QuickTables

pytestmark = pytest.mark.capability("SQL functions to publish, cancel and read the load of a queue")
CONFIG = SqlBrokerSchemaConfig(sql_functions=True)
TABLES = build_tables(CONFIG)


class Sql:
    """Calls of the functions, as another program writes them."""

    def __init__(self, engine: AsyncEngine, prefix: str = "sqlbroker") -> None:
        self.engine = engine
        self.prefix = prefix
        self.postgresql = engine.dialect.name == "postgresql"

    async def publish(self, queue: str, body: str | None, **options: Any) -> int | None:
        async with self.engine.begin() as connection:
            return await self.publish_in(connection, queue, body, **options)

    async def publish_in(
        self, connection: AsyncConnection, queue: str | None, body: str | None, **options: Any
    ) -> int | None:
        if self.postgresql:
            return await self._named(
                connection, "publish", queue, {"body": (body, "jsonb")}, options
            )
        return await self._out(
            connection, "publish", [queue, body, json.dumps(options) if options else None]
        )

    async def publish_bytes(
        self, queue: str, body: bytes, content_type: str | None = None, **options: Any
    ) -> int | None:
        async with self.engine.begin() as connection:
            if self.postgresql:
                given = {"body": (body, "bytea"), "content_type": (content_type, "text")}
                return await self._named(connection, "publish_bytes", queue, given, options)
            binds = [queue, body, content_type, json.dumps(options) if options else None]
            return await self._out(connection, "publish_bytes", binds)

    async def cancel(self, message_id: int | None, why: str | None = None) -> bool:
        async with self.engine.begin() as connection:
            return await self.cancel_in(connection, message_id, why)

    async def cancel_in(
        self, connection: AsyncConnection, message_id: int | None, why: str | None = None
    ) -> bool:
        if self.postgresql:
            call = f"SELECT {self.prefix}_cancel(CAST(:id AS bigint), CAST(:why AS text))"
            return await connection.scalar(text(call), {"id": message_id, "why": why})
        return bool(await self._out(connection, "cancel", [message_id, why]))

    async def load(self, queue: str) -> int:
        async with self.engine.connect() as connection:
            call = text(f"SELECT {self.prefix}_load(:queue)")
            return int(await connection.scalar(call, {"queue": queue}))

    async def _named(
        self,
        connection: AsyncConnection,
        verb: str,
        queue: Any,
        given: dict[str, Any],
        options: Any,
    ) -> int | None:
        types = {"delay": "interval", "expires_in": "interval", "due_at": "timestamptz"}
        types |= {"headers": "jsonb", "priority": "integer", "notify": "boolean"}
        values = {"queue": (queue, "text"), **given}
        for name, value in options.items():
            shown = json.dumps(value) if name == "headers" else value
            if isinstance(value, float | int) and types.get(name) == "interval":
                shown = timedelta(seconds=value)
            values[name] = (shown, types.get(name, "text"))
        parts = ", ".join(f"{n} => CAST(:{n} AS {kind})" for n, (_, kind) in values.items())
        call = text(f"SELECT {self.prefix}_{verb}({parts})")
        return await connection.scalar(call, {n: value for n, (value, _) in values.items()})

    async def _out(self, connection: AsyncConnection, verb: str, binds: list[Any]) -> Any:
        places = ", ".join(f":b{n}" for n in range(len(binds)))
        call = text(f"CALL {self.prefix}_{verb}({places}, @answer)")
        await connection.execute(call, {f"b{n}": value for n, value in enumerate(binds)})
        return await connection.scalar(text("SELECT @answer"))


@pytest.fixture(params=["postgresql", "mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> str:
    """SQLite has no functions."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def with_functions() -> KeptTables:
    """The tables and functions, kept from test to test where nothing has changed them."""
    return KeptTables(QuickTables(), lambda connection: upgrade(connection, CONFIG))


@pytest.fixture
def database_url(
    database: str, servers: Servers, with_functions: KeptTables, request: pytest.FixtureRequest
) -> str:
    """Of a database with functions, for tests that call them; else of an empty one."""
    if "sql" not in request.fixturenames:
        empty: str = request.getfixturevalue("database_url")
        return empty
    admin = servers.admin(database)
    name = f"sqlbroker_functions_{database}_{os.getpid()}"
    inside = servers.inside(database, name)
    if inside is None or not with_functions.empty(
        inside if database == "postgresql" else admin, name
    ):
        with_functions.create(_emptied(servers, database, name, inside), name)
    url = admin.url.set(drivername=f"{database}+{_driver(database)}", database=name)
    return url.render_as_string(hide_password=False)


@pytest.fixture
async def sql(engine: AsyncEngine) -> Sql:
    return Sql(engine)


@pytest.fixture
async def broker(engine: AsyncEngine, sql: Sql) -> AsyncIterator[SqlBroker]:
    broker = SqlBroker(engine, logger=None, schema=CONFIG)
    yield broker
    await broker.stop()


async def rows(
    engine: AsyncEngine, *, archive: bool = False, tables: Tables = TABLES
) -> list[dict[str, Any]]:
    table = tables.archive if archive else tables.message
    assert table is not None
    async with engine.connect() as connection:
        found = await connection.execute(select(table).order_by(table.c.id))
        return [dict(row._mapping) for row in found]


# -- publish ---------------------------------------------------------------------------------------


async def test_a_message_is_handled_like_any_other(sql: Sql, broker: SqlBroker) -> None:
    got: list[Any] = []

    @broker.subscriber("orders", max_fetch_interval=0.05)
    async def handle(body: Any) -> None:
        got.append(body)

    await broker.start()
    bodies = [
        {"order": 3, "note": 'it\'s "new" é 😀 C:\\temp %s :x'},
        [1, None, 2.5],
        "text",
        None,
        17,
    ]
    for body in bodies:
        assert await sql.publish("orders", json.dumps(body))
    await sql.publish_bytes("orders", b"plain \xc3\xa9", "text/plain")
    await sql.publish_bytes("orders", bytes(range(256)))
    await eventually(lambda: len(got) == len(bodies) + 2)
    for body in [*bodies, "plain é", bytes(range(256))]:
        assert body in got


async def test_without_options_all_is_as_a_plain_publish_writes_it(
    sql: Sql, broker: SqlBroker, engine: AsyncEngine
) -> None:
    first = await sql.publish("q", '{"a": 1}')
    await broker.publish({"a": 1}, "q")
    ours, theirs = await rows(engine)
    assert ours["id"] == first
    assert json.loads(ours.pop("payload")) == json.loads(theirs.pop("payload"))
    assert abs(ours["created_at"] - theirs["created_at"]) < timedelta(minutes=1)
    assert ours["next_attempt_at"] == ours["created_at"]
    for name in ("id", "created_at", "next_attempt_at"):
        ours.pop(name)
        theirs.pop(name)
    assert ours == theirs


async def test_every_option_is_stored(sql: Sql, engine: AsyncEngine) -> None:
    await sql.publish(
        "q",
        "1",
        headers={"a": "é", "nested": {"b": None}},
        priority=-7,
        key="k",
        dedup_id="d",
        delay=90.5,
        expires_in=3600,
        correlation_id="c-1",
        reply_to="answers",
    )
    [row] = await rows(engine)
    assert (row["priority"], row["key"], row["dedup_id"]) == (-7, "k", "d")
    assert row["next_attempt_at"] - row["created_at"] == timedelta(seconds=90.5)
    assert row["expires_at"] - row["created_at"] == timedelta(hours=1)
    assert row["headers"] == {
        "content-type": "application/json",
        "correlation_id": "c-1",
        "reply_to": "answers",
        "a": "é",
        "nested": {"b": None},
    }


async def test_headers_of_the_caller_come_first(sql: Sql, engine: AsyncEngine) -> None:
    await sql.publish("q", "1", headers={"content-type": "application/cloudevents+json"})
    await sql.publish_bytes("q", b"x")
    first, second = await rows(engine)
    assert first["headers"] == {"content-type": "application/cloudevents+json"}
    assert second["headers"] is None


async def test_a_moment_and_a_negative_delay(sql: Sql, engine: AsyncEngine, database: str) -> None:
    from datetime import datetime, timezone

    moment = datetime(2031, 5, 4, 3, 2, 1, 250_000, timezone.utc)
    given = moment if database == "postgresql" else "2031-05-04 03:02:01.25"
    await sql.publish("q", "1", due_at=given)
    await sql.publish("q", "1", delay=-5)
    first, second = await rows(engine)
    assert first["next_attempt_at"] == moment
    assert second["next_attempt_at"] == second["created_at"]


async def test_a_dedup_id_is_stored_once(sql: Sql, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        assert await sql.publish_in(connection, "q", "1", dedup_id="d")
        assert await sql.publish_in(connection, "q", "2", dedup_id="d") is None
        assert await sql.publish_in(connection, "other", "3", dedup_id="d")
    assert [row["payload"] for row in await rows(engine)] == [b"1", b"3"]


async def test_a_message_is_part_of_the_callers_transaction(sql: Sql, engine: AsyncEngine) -> None:
    async with engine.connect() as connection, connection.begin() as transaction:
        assert await sql.publish_in(connection, "q", "1")
        await transaction.rollback()
    assert await rows(engine) == []


REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (None, "1", {}, "queue (cannot|must) be"),
    ("", "1", {}, "queue (cannot|must) be"),
    ("x" * 256, "1", {}, "queue (cannot|must) be"),
    ("q ", "1", {}, "queue (cannot|must) be"),
    ("logs.{level}", "1", {}, "template"),
    ("q", None, {}, "body cannot be NULL"),
    ("q", "1", {"key": ""}, "key (cannot|must) be"),
    ("q", "1", {"key": "x" * 600}, "key (cannot|must) be"),
    ("q", "1", {"dedup_id": "d "}, "dedup_id (cannot|must) be"),
    ("q", "1", {"priority": 101}, "priority must be from -100 to 100, got 101"),
    ("q", "1", {"expires_in": 0}, "expires_in must be"),
    ("q", "1", {"headers": [1]}, "headers must be a JSON object"),
]


async def test_what_cannot_be_stored_is_refused(sql: Sql, engine: AsyncEngine) -> None:
    """And the caller's transaction can go on, where the database lets it."""
    wrong = {}
    for queue, body, options, said in REFUSED:
        async with engine.connect() as connection:
            try:
                await sql.publish_in(connection, queue, body, **options)
            except DBAPIError as error:
                answer = str(error)
            else:
                answer = "stored"
            await connection.rollback()
        if not re.search(said, answer):
            wrong[str((queue, body, options))] = answer
    assert not wrong
    assert await rows(engine) == []


async def test_a_delay_and_a_moment_contradict(
    sql: Sql, engine: AsyncEngine, database: str
) -> None:
    from datetime import datetime, timezone

    moment: Any = datetime(2031, 5, 4, tzinfo=timezone.utc)
    given = moment if database == "postgresql" else "2031-05-04 00:00:00"
    with pytest.raises(DBAPIError, match="give delay or due_at, not both"):
        await sql.publish("q", "1", delay=1, due_at=given)


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prio": 5}, r"unknown options \[\"prio\"\]"),
    ({"priority": "high"}, "priority must be a whole number"),
    ({"priority": 1.5}, "priority must be a whole number"),
    ({"delay": "1h"}, "delay must be seconds"),
    ({"key": 5}, "key must be a text, got 5"),
    ({"key": "a\x00b"}, "key must be a text of 1 to 255 characters without NUL"),
    ({"due_at": "tomorrow"}, "due_at must be a text such as"),
    ({"due_at": "2031-05-04 03:02:01+05:00"}, "due_at must be a text such as"),
    ({"due_at": "2031-05-04T03:02:01Z"}, "due_at must be a text such as"),
    ({"due_at": "0000-00-00"}, "due_at must be a text such as"),
    ({"due_at": "2031-00-04"}, "Incorrect|Truncated"),
    ({"due_at": "2031-02-30"}, "Incorrect|Truncated"),
    ({"delay": 1e13}, "beyond the year 9999|overflow|Out of range|Truncated"),
]


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_options_are_checked_where_they_are_json(sql: Sql, engine: AsyncEngine) -> None:
    wrong = {}
    for options, said in WRONG_OPTIONS:
        try:
            answer = f"stored as {await sql.publish('q', '1', **options)}"
        except DBAPIError as error:
            answer = str(error)
        if not re.search(said, answer):
            wrong[str(options)] = answer
    assert not wrong
    async with engine.begin() as connection:
        with pytest.raises(DBAPIError, match="options must be NULL or a JSON object"):
            await connection.execute(text("CALL sqlbroker_publish('q', '1', '[]', @id)"))
        with pytest.raises(DBAPIError, match=r"body must be JSON|Invalid JSON text"):
            await connection.execute(text("CALL sqlbroker_publish('q', '{', NULL, @id)"))
    assert await rows(engine) == []


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_an_unknown_option_is_no_argument_of_postgresqls(
    sql: Sql, engine: AsyncEngine
) -> None:
    """Its arguments have names and types."""
    with pytest.raises(DBAPIError, match="does not exist"):
        async with engine.begin() as connection:
            await connection.execute(text("SELECT sqlbroker_publish('q', '1', prio => 5)"))


async def test_jsons_null_is_no_value(sql: Sql, engine: AsyncEngine, database: str) -> None:
    await sql.publish("q", "1", **dict.fromkeys(("key", "delay", "headers", "correlation_id")))
    [row] = await rows(engine)
    assert row["key"] is None
    assert row["headers"] == {"content-type": "application/json"}


async def test_the_settings_of_a_session_change_nothing(
    sql: Sql, engine: AsyncEngine, database: str
) -> None:
    if database == "postgresql":
        sets = ["SET standard_conforming_strings = off", "SET search_path = pg_temp"]
    else:
        sets = ["SET SESSION sql_mode = ''", "SET SESSION sql_mode = 'ANSI_QUOTES'"]
    for number, each in enumerate(sets):
        async with engine.connect() as connection:
            await connection.execute(text(each))
            prefix = "public." if database == "postgresql" else ""
            other = Sql(engine, f"{prefix}sqlbroker")
            await other.publish_in(connection, "q", "1", key="k")
            with pytest.raises(DBAPIError, match=r"queue (cannot|must) be"):
                async with connection.begin_nested():
                    await other.publish_in(connection, "x" * 256, "1")
            await connection.commit()
            await connection.invalidate()
        assert len(await rows(engine)) == number + 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_listeners_are_told_only_when_asked(sql: Sql, engine: AsyncEngine) -> None:
    heard: list[str] = []
    async with engine.connect() as connection:
        raw = await connection.get_raw_connection()
        driver: Any = raw.driver_connection
        await driver.add_listener(CONFIG.channel, lambda *_: heard.append(_[-1]))
        await sql.publish("silent", "1")
        await sql.publish("later", "1", notify=True, delay=60)
        await sql.publish("told", "1", notify=True, dedup_id="d")
        await sql.publish("twice", "1", notify=True, dedup_id="d")
        await sql.publish("told", "2", notify=True, dedup_id="d")
        await eventually(lambda: "twice" in heard)
        await driver.remove_listener(CONFIG.channel, lambda *_: None)
    assert heard == ["told", "twice"]


# -- cancel ----------------------------------------------------------------------------------------


async def test_a_waiting_message_is_cancelled(
    sql: Sql, broker: SqlBroker, engine: AsyncEngine
) -> None:
    message_id = await sql.publish("q", '{"a": 1}', key="k", delay=60, headers={"h": "1"})
    [live] = await rows(engine)
    assert await sql.cancel(message_id, "not wanted") is True
    assert await rows(engine) == []
    [ended] = await rows(engine, archive=True)
    assert (ended["state"], ended["reason"]) == ("DISCARDED", "cancelled")
    assert ended["last_error"].startswith("cancelled by ")
    assert ended["last_error"].endswith(": not wanted")
    for name in ("id", "queue", "key", "payload", "headers", "created_at", "next_attempt_at"):
        assert ended[name] == live[name]
    assert await sql.cancel(message_id) is False
    assert await sql.cancel(None) is False
    assert await sql.cancel(4_711) is False


async def test_a_running_message_is_not_cancelled(
    sql: Sql, broker: SqlBroker, engine: AsyncEngine
) -> None:
    message_id = await sql.publish("q", "1")
    reservation = await broker.reserve("q")
    assert reservation is not None
    assert await sql.cancel(message_id) is False
    await reservation.rollback()
    assert await sql.cancel(message_id) is True
    [ended] = await rows(engine, archive=True)
    assert ended["last_error"].startswith("cancelled by ")


async def test_a_locked_message_is_not_waited_for(sql: Sql, engine: AsyncEngine) -> None:
    message_id = await sql.publish("q", "1")
    async with engine.connect() as connection, connection.begin():
        await connection.execute(
            text("SELECT id FROM message WHERE id = :id FOR UPDATE"), {"id": message_id}
        )
        assert await sql.cancel(message_id) is False
    assert len(await rows(engine)) == 1


async def test_a_cancel_is_part_of_the_callers_transaction(sql: Sql, engine: AsyncEngine) -> None:
    """MySQL's procedure must neither commit it, nor be cut in two without one."""
    message_id = await sql.publish("q", "1")
    async with engine.connect() as connection, connection.begin() as transaction:
        other = await sql.publish_in(connection, "q", "2")
        assert await sql.cancel_in(connection, message_id) is True
        await transaction.rollback()
    assert [row["id"] for row in await rows(engine)] == [message_id]
    assert await rows(engine, archive=True) == []
    assert other is not None


async def test_a_cancel_alone_is_whole_or_nothing(
    sql: Sql, engine: AsyncEngine, database: str
) -> None:
    message_id = await sql.publish("q", "1")
    # The copy works, the removal fails.
    fails = "CREATE TRIGGER no BEFORE DELETE ON message FOR EACH ROW"
    if database == "postgresql":
        no = "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no'; END$$"
        breaking = [no, f"{fails} EXECUTE FUNCTION no()"]
    else:
        breaking = [f"{fails} SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'no'"]
    async with engine.begin() as connection:
        for statement in breaking:
            await connection.execute(text(statement))
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(DBAPIError, match="no"):
            await sql.cancel_in(autocommit, message_id)
    assert len(await rows(engine)) == 1
    assert await rows(engine, archive=True) == []
    async with engine.begin() as connection:
        await connection.execute(
            text("DROP TRIGGER no" + (" ON message" if database == "postgresql" else ""))
        )
    async with engine.connect() as connection:
        autocommit = await connection.execution_options(isolation_level="AUTOCOMMIT")
        assert await sql.cancel_in(autocommit, message_id) is True
    assert await rows(engine) == []
    assert len(await rows(engine, archive=True)) == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_the_load_is_counted_up_to_a_limit(sql: Sql, engine: AsyncEngine) -> None:
    for _ in range(3):
        await sql.publish("q", "1")
    async with engine.connect() as connection:
        for most, load in (("2", 2), ("NULL", 3), ("0", 0), ("-1", 0)):
            found = await connection.execute(text(f"SELECT sqlbroker_load('q', {most})"))
            assert found.scalar() == load, most


# -- who may call ----------------------------------------------------------------------------------


async def test_a_user_needs_no_right_on_the_tables(
    sql: Sql, engine: AsyncEngine, database_url: str, database: str
) -> None:
    with account(database_url) as user:
        its_engine = user.engine()
        its_sql = Sql(its_engine)
        try:
            with pytest.raises(DBAPIError):
                await its_sql.publish("q", "1")
            for grant in _grants(database, "publish"):
                user.execute(grant)
            assert await its_sql.publish("q", "1")
            with pytest.raises(DBAPIError):
                await its_sql.cancel(1)
            with pytest.raises(DBAPIError):
                await its_sql.load("q")
            assert len(user.try_as("SELECT id FROM message", "DELETE FROM message")) == 2
            # What the user makes must not be taken for what the function uses.
            if database == "postgresql":
                async with its_engine.begin() as connection:
                    await connection.execute(text("CREATE TEMP TABLE message (id int)"))
                    assert await its_sql.publish_in(connection, "q", "2")
        finally:
            await its_engine.dispose()
    found = [row["payload"] for row in await rows(engine)]
    assert found == ([b"1", b"2"] if database == "postgresql" else [b"1"])


def _grants(database: str, verb: str) -> list[str]:
    if database == "postgresql":
        types = "text, jsonb, jsonb, integer, text, text, interval, timestamptz, interval, "
        return [
            f"GRANT EXECUTE ON FUNCTION sqlbroker_{verb}({types}text, text, boolean) TO {{who}}"
        ]
    return [f"GRANT EXECUTE ON PROCEDURE sqlbroker_{verb} TO {{who}}"]


# -- versions and names ----------------------------------------------------------------------------


async def test_they_can_be_installed_again(sql: Sql, engine: AsyncEngine, database: str) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(lambda c: install_functions(c, CONFIG))
        if database == "postgresql":
            comments = (
                "SELECT obj_description(oid) FROM pg_proc "
                "WHERE starts_with(proname::text, 'sqlbroker_')".replace("::", "\\:\\:")
            )
        else:
            comments = (
                "SELECT routine_comment FROM information_schema.routines "
                "WHERE routine_schema = DATABASE()"
            )
        found = list((await connection.scalars(text(comments))).all())
    assert found == [f"faststream_sqlbroker functions, version {VERSION}"] * 4
    assert await sql.publish("q", "1")


@pytest.mark.parametrize("name", ["events", "a$sqlbroker$b"])
async def test_tables_of_another_name_have_functions_of_another_name(
    sql: Sql, engine: AsyncEngine, name: str
) -> None:
    config = SqlBrokerSchemaConfig(
        message_table_name=name, message_archive_table_name=None, sql_functions=True
    )
    other = SqlBroker(engine, logger=None, schema=config)
    await other.create_tables()
    events = Sql(engine, name)
    message_id = await events.publish("q", "1")
    assert await events.load("q") == 1
    assert await sql.load("q") == 0
    assert await events.cancel(message_id) is True
    assert await rows(engine, tables=build_tables(config)) == []
    await other.stop()


async def test_without_tables_there_are_no_functions(engine: AsyncEngine) -> None:
    with pytest.raises(SchemaError, match="'message' is missing"):
        async with engine.begin() as connection:
            await connection.run_sync(install_functions)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_sqlite_has_no_functions(engine: AsyncEngine) -> None:
    with pytest.raises(NotSupportedError, match=r"insert rows .* docs/howto/plain_sql\.md"):
        async with engine.begin() as connection:
            await connection.run_sync(install_functions)
    with pytest.raises(NotSupportedError):
        render_functions("sqlite")
    with pytest.raises(NotSupportedError):
        await SqlBroker(engine, logger=None, schema=CONFIG).create_tables()
