"""An archive in partitions: made, converted, added to, dropped; PostgreSQL only."""

import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    create_engine,
    event,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker import SqlBrokerSchemaConfig
from faststream_sqlbroker.exceptions import SchemaError
from faststream_sqlbroker.schema import partitions as module
from faststream_sqlbroker.schema.config import (
    PARTITIONS_AHEAD,
    get_partition_start,
    list_required_partitions,
)
from faststream_sqlbroker.schema.migrate import create_all, upgrade
from faststream_sqlbroker.schema.partitions import (
    add_partition,
    convert_archive,
    drop_partition,
    is_partitioned,
    list_partitions,
)
from faststream_sqlbroker.schema.tables import Tables, build_tables
from faststream_sqlbroker.schema.validate import find_differences
from tests.accounts import account

pytestmark = [
    pytest.mark.capability("an archive in partitions of time (`archive_partitions`)"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.timeout(900),  # it may wait for the next week
]

WEEKS = SqlBrokerSchemaConfig(archive_partitions="week")
PLAIN = SqlBrokerSchemaConfig()
DAY = timedelta(days=1)
A_TEST = 300.0
"""Seconds that none of these tests takes, even if it stands still several times."""


@pytest.fixture
def owner(database_url: str) -> Any:
    """A synchronous engine, in a week that does not end within the test."""
    engine = create_engine(make_url(database_url).set(drivername="postgresql+psycopg"))
    left = (get_partition_start(now(engine) + 7 * DAY, "week") - now(engine)).total_seconds()
    if left < A_TEST:
        time.sleep(left)
    yield engine
    engine.dispose()


def tables(config: SqlBrokerSchemaConfig = WEEKS) -> Tables:
    return build_tables(config, dialect_name="postgresql")


def put(connection: Connection, *rows: tuple[int, datetime]) -> None:
    archive = tables().archive
    assert archive is not None
    for message_id, at in rows:
        row = {"id": message_id, "queue": "q", "payload": b"x", "state": "COMPLETED"}
        times = {"created_at": at, "next_attempt_at": at, "archived_at": at}
        connection.execute(insert(archive).values(**row, **times))


def ids(engine: Engine, table: str = "message_archive") -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(text(f"SELECT id FROM {table} ORDER BY id")))


def now(engine: Engine) -> datetime:
    with engine.connect() as connection:
        found: datetime = connection.scalars(text("SELECT statement_timestamp()")).one()
        return found


def add_all(engine: Engine, config: SqlBrokerSchemaConfig = WEEKS) -> list[str]:
    names = []
    for _ in range(20):
        with engine.begin() as connection:
            name = add_partition(connection, config)
        if name is None:
            return names
        names.append(name)
    raise AssertionError("it never came to its end")


def convert(engine: Engine, config: SqlBrokerSchemaConfig = WEEKS) -> bool:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        return convert_archive(connection, config)


@pytest.mark.parametrize("by", ["create_all", "upgrade"])
def test_new_tables_have_a_default_partition_and_four_ahead(
    owner: Engine, database: str, by: str
) -> None:
    with owner.begin() as connection:
        if by == "upgrade":
            upgrade(connection, WEEKS)
        else:
            create_all(connection, tables())
            create_all(connection, tables())
        assert is_partitioned(connection, tables().archive)
        assert find_differences(connection, tables()) == []
    moment = now(owner)
    assert len(add_all(owner)) == PARTITIONS_AHEAD + 1
    assert add_all(owner) == []
    with owner.begin() as connection:
        found = list_partitions(connection, tables().archive)
        assert [(each.start, each.end) for each in found] == list_required_partitions(
            moment, "week"
        )
        put(connection, (1, moment), (2, moment - 100 * DAY), (3, moment + 1000 * DAY))
    assert ids(owner, "message_archive_default") == [2, 3]
    assert ids(owner) == [1, 2, 3]


def test_a_range_that_the_default_partition_has_rows_of_is_left(
    owner: Engine, database: str
) -> None:
    with owner.begin() as connection:
        create_all(connection, tables())
    moment = now(owner)
    with owner.begin() as connection:
        put(connection, (1, moment))
    assert len(add_all(owner)) == PARTITIONS_AHEAD
    assert ids(owner, "message_archive_default") == [1]


def test_an_archive_with_rows_is_converted(owner: Engine, database: str, database_url: str) -> None:
    """Rights, rows and indexes stay; a second conversion does nothing."""
    with owner.begin() as connection:
        create_all(connection, tables(PLAIN))
    moment = now(owner)
    with owner.begin() as connection:
        put(connection, *((n, moment - n * DAY) for n in range(1, 30)))
        assert find_differences(connection, tables(PLAIN)) == []
    with account(database_url) as user:
        with owner.begin() as connection:
            connection.execute(text(f"GRANT SELECT, INSERT ON message_archive TO {user.name}"))
            connection.execute(text(f"GRANT UPDATE (id) ON message_archive TO {user.name}"))
        assert convert(owner)
        assert not convert(owner)
        with owner.begin() as connection:
            may = text("SELECT has_table_privilege(:u, 'message_archive', :r)")
            rights = {"SELECT": True, "INSERT": True, "DELETE": False}
            for right, expected in rights.items():
                assert connection.scalar(may, {"u": user.name, "r": right}) is expected
            one = text("SELECT has_column_privilege(:u, 'message_archive', 'id', 'UPDATE')")
            assert connection.scalar(one, {"u": user.name})
            connection.execute(text(f"REVOKE ALL ON message_archive FROM {user.name}"))
            connection.execute(text(f"REVOKE ALL ON message_archive_p0 FROM {user.name}"))
    assert ids(owner) == ids(owner, "message_archive_p0") == list(range(1, 30))
    with owner.begin() as connection:
        assert find_differences(connection, tables()) == []
        key = inspect(connection).get_pk_constraint("message_archive")
        assert (key["name"], key["constrained_columns"]) == (
            "message_archive_pkey",
            ["id", "archived_at"],
        )
        names = {each["name"] for each in inspect(connection).get_indexes("message_archive_p0")}
        assert names == {
            "message_archive_p0_archived",
            "message_archive_p0_queue",
            "message_archive_p0_uncompleted",
        }
        checks = inspect(connection).get_check_constraints("message_archive_p0")
        assert [each["name"] for each in checks] == ["message_archive_state_check"]
    # What the first partition has is not made again.
    assert len(add_all(owner)) == PARTITIONS_AHEAD - 1
    with owner.begin() as connection:
        put(connection, (100, moment), (101, moment + 15 * DAY))
    assert 100 in ids(owner, "message_archive_p0")
    assert ids(owner, "message_archive_default") == []


def test_a_conversion_that_was_cut_off_goes_on(
    owner: Engine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves no check behind that would refuse rows, and an invalid index is built anew."""
    with owner.begin() as connection:
        create_all(connection, tables(PLAIN))
    moment = now(owner)
    with owner.begin() as connection:
        put(connection, (1, moment))

    def fail(*_given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "_exchange_tables", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(owner)
    with owner.begin() as connection:
        put(connection, (2, moment + 1000 * DAY))
        connection.execute(text("DELETE FROM message_archive WHERE id = 2"))
        index = "to_regclass('message_archive_by_id')"
        connection.execute(
            text(f"UPDATE pg_index SET indisvalid = false WHERE indexrelid = {index}")
        )
    assert convert(owner)
    assert ids(owner, "message_archive_p0") == [1]


def test_changes_wait_for_locks_a_little_only(owner: Engine, database: str) -> None:
    with owner.begin() as connection:
        create_all(connection, tables(PLAIN))
    archive = tables().archive
    assert archive is not None
    # The index is built without a limit: it waits for every transaction, and blocks none.
    with owner.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        module._build_key(connection, archive)
    with pytest.MonkeyPatch.context() as patched, owner.connect() as reader:
        patched.setattr(module, "LOCK_TIMEOUT", "200ms")
        reader.execute(text("LOCK TABLE message_archive IN ROW EXCLUSIVE MODE"))
        reader.execute(text("SELECT * FROM message_archive"))
        with pytest.raises(DBAPIError, match="lock timeout"):
            convert(owner)
        reader.rollback()
    assert convert(owner)


def test_partitions_that_are_old_are_dropped(owner: Engine, database: str) -> None:
    with owner.begin() as connection:
        create_all(connection, tables())
        moment = connection.scalars(text("SELECT statement_timestamp()")).one()
        for weeks in (5, 4, 3):
            start = get_partition_start(moment - weeks * 7 * DAY, "week")
            connection.execute(
                text(
                    f"CREATE TABLE old_{weeks} PARTITION OF message_archive FOR VALUES FROM "
                    f"('{start.isoformat()}') TO ('{(start + 7 * DAY).isoformat()}')".replace(
                        ":", "\\:"
                    )
                )
            )
        put(connection, (5, moment - 35 * DAY), (3, moment - 21 * DAY), (99, moment - 90 * DAY))
    before = get_partition_start(moment - 21 * DAY, "week")

    def drop(empty: bool) -> str | None:
        with owner.begin() as connection:
            return drop_partition(connection, WEEKS, before, empty=empty)

    assert drop(empty=True) == "old_4"
    assert drop(empty=True) is None
    assert drop(empty=False) == "old_5"
    assert drop(empty=False) is None
    assert ids(owner) == [3, 99]


def test_a_row_that_comes_after_the_look_is_not_dropped(owner: Engine, database: str) -> None:
    """An archive that a lake may lack rows of loses empty partitions only."""
    with owner.begin() as connection:
        create_all(connection, tables())
        moment = connection.scalars(text("SELECT statement_timestamp()")).one()
        start = get_partition_start(moment - 35 * DAY, "week")
        bounds = f"FROM ('{start.isoformat()}') TO ('{(start + 7 * DAY).isoformat()}')"
        made = f"CREATE TABLE old_5 PARTITION OF message_archive FOR VALUES {bounds}"
        connection.execute(text(made.replace(":", "\\:")))
    looks = 0

    def late_row(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal looks
        if statement.startswith("SELECT 1 FROM old_5"):
            looks += 1
            if looks == 1:
                with owner.begin() as other:
                    put(other, (5, start + DAY))

    with owner.begin() as connection:
        event.listen(connection, "after_cursor_execute", late_row)
        before = get_partition_start(moment - 21 * DAY, "week")
        assert drop_partition(connection, WEEKS, before, empty=True) is None
    assert looks == 2
    assert ids(owner) == [5]


def test_a_plain_archive_is_named(owner: Engine, database: str) -> None:
    with owner.begin() as connection:
        with pytest.raises(SchemaError, match="does not exist: create the tables first"):
            convert_archive(connection, WEEKS)
        create_all(connection, tables(PLAIN))
        with pytest.raises(SchemaError, match=r"has no partitions.*convert_archive"):
            add_partition(connection, WEEKS)
        [told] = find_differences(connection, tables())
        assert "convert_archive" in told
        with pytest.raises(SchemaError, match="give archive_partitions="):
            convert_archive(connection, PLAIN)


def test_ids_are_found_by_an_index_in_each_partition(owner: Engine, database: str) -> None:
    archive = tables().archive
    assert archive is not None
    with owner.begin() as connection:
        create_all(connection, tables())
    add_all(owner)
    with owner.begin() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        asked = select(archive.c.payload).where(archive.c.id == 7)
        plain = str(
            asked.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
        )
        plan = "\n".join(connection.scalars(text(f"EXPLAIN {plain}")).all())
    assert plan.count("_pkey") == PARTITIONS_AHEAD + 2
    assert "Seq Scan" not in plan
