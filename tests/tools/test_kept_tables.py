"""Tables that tests share one after the other are as new, or are not kept."""

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from tests.conftest import Servers, _drop
from tests.kept_tables import EMPTIED, KeptTables
from tests.quick_tables import QuickTables

MESSAGE = """INSERT INTO message (queue, payload, state) VALUES ('q', 'x', 'PENDING')"""
CHANGES = {
    "column": "ALTER TABLE message ADD COLUMN more INTEGER",
    "type": "ALTER TABLE message_archive ALTER COLUMN reason TYPE text",
    "default": "ALTER TABLE message ALTER COLUMN priority SET DEFAULT 7",
    "nullable": "ALTER TABLE message ALTER COLUMN queue DROP NOT NULL",
    "index": "CREATE INDEX more ON message (state)",
    "dropped index": "DROP INDEX message_key",
    "table": "CREATE TABLE more (id INTEGER)",
    "dropped table": "DROP TABLE message_archive",
    "dropped version": "DROP TABLE message_schema_version",
    "right": "GRANT SELECT ON message TO PUBLIC",
    "column's right": "GRANT SELECT (id) ON message TO PUBLIC",
    "schema": "CREATE SCHEMA more",
    "statistics": f"{MESSAGE}; ANALYZE message",
    "version": "UPDATE message_schema_version SET version_num = '0002'",
    "function": "CREATE FUNCTION more() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
    "trigger": "CREATE TRIGGER more BEFORE UPDATE ON message FOR EACH ROW "
    "EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "row security": "ALTER TABLE message ENABLE ROW LEVEL SECURITY",
    "storage": "ALTER TABLE message SET (fillfactor = 50)",
}
"""What a test may have done to PostgreSQL's tables."""
MYSQL_CHANGES = {
    "column": "ALTER TABLE message ADD COLUMN more INTEGER",
    "type": "ALTER TABLE message_archive MODIFY COLUMN reason TEXT",
    "index": "CREATE INDEX more ON message (state)",
    "dropped index": "DROP INDEX message_key ON message",
    "table": "CREATE TABLE more (id INTEGER)",
    "view": "CREATE VIEW more AS SELECT 1",
    "dropped table": "DROP TABLE message_archive",
    "replaced table": "DROP TABLE message_archive; CREATE TABLE more (id INTEGER)",
    "version": "UPDATE message_schema_version SET version_num = '0002'",
    "trigger": "CREATE TRIGGER more BEFORE INSERT ON message FOR EACH ROW SET NEW.priority = 1",
    "routine": "CREATE FUNCTION more() RETURNS INTEGER DETERMINISTIC RETURN 1",
    "event": "CREATE EVENT more ON SCHEDULE EVERY 1 DAY DO SELECT 1",
    "character set": "ALTER DATABASE CHARACTER SET ucs2",
}


@pytest.fixture
def inside(servers: Servers, database: str) -> Iterator[Engine]:
    """A database of the test's own."""
    name = f"sqlbroker_kept_{os.getpid()}"
    _drop(servers.admin(database), name)
    yield servers.create(database, name)
    _drop(servers.admin(database), name)


@pytest.fixture
def kept(inside: Engine) -> KeptTables:
    """Whose tables have just been created in the test's database."""
    kept = KeptTables(QuickTables())
    kept.create(inside, str(inside.url.database))
    return kept


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_rows_are_gone_and_numbers_start_anew(inside: Engine, kept: KeptTables) -> None:
    name = str(inside.url.database)
    for _ in range(2):
        with inside.connect() as connection:
            for _ in range(3):
                connection.execute(text(MESSAGE))
            numbers = connection.scalars(text("SELECT id FROM message ORDER BY id")).all()
        assert numbers == [1, 2, 3]
        assert kept.empty(inside, name)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_numbers_start_anew_where_no_row_is_left(inside: Engine, kept: KeptTables) -> None:
    name = str(inside.url.database)
    with inside.connect() as connection:
        connection.execute(text(MESSAGE))
        connection.execute(text("DELETE FROM message"))
    assert kept.empty(inside, name)
    with inside.connect() as connection:
        transaction = connection.execution_options(isolation_level="READ COMMITTED").begin()
        connection.execute(text(MESSAGE))
        transaction.rollback()
    assert kept.empty(inside, name)
    with inside.connect() as connection:
        connection.execute(text(MESSAGE))
        assert connection.scalar(text("SELECT id FROM message")) == 1


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    "start", ["nextval('message_id_seq')", "setval('message_id_seq', 7, false)"]
)
def test_a_number_that_no_row_has_is_given_again(
    inside: Engine, kept: KeptTables, start: str
) -> None:
    with inside.connect() as connection:
        connection.execute(text(f"SELECT {start}"))
        assert kept.empty(inside, str(inside.url.database))
        connection.execute(text(MESSAGE))
        assert connection.scalar(text("SELECT id FROM message")) == 1


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
def test_rows_of_every_table_are_gone(inside: Engine, kept: KeptTables) -> None:
    """Each alone: only tables that were used are emptied."""
    rows = {
        "message_archive": "(id, queue, payload, state, created_at, next_attempt_at) "
        "VALUES (1, 'q', 'x', 'COMPLETED', '2026-01-01', '2026-01-01')",
        "message_policy_state": "(scope, `key`) VALUES ('s', 'k')",
    }
    assert {"message", *rows} == set(EMPTIED)
    for table, values in rows.items():
        quoted = values.replace("`", '"') if inside.dialect.name == "postgresql" else values
        with inside.connect() as connection:
            connection.execute(text(f"INSERT INTO {table} {quoted}"))
        assert kept.empty(inside, str(inside.url.database))
        with inside.connect() as connection:
            assert connection.scalar(text(f"SELECT count(*) FROM {table}")) == 0, table


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_what_no_test_asked_for_is_forgotten(inside: Engine, kept: KeptTables) -> None:
    """The next test may want to see how the tables are made."""
    name = str(inside.url.database)
    assert name in kept._quick.there
    kept.forget(name)
    assert name not in kept._quick.there
    assert kept.empty(inside, name)


@pytest.mark.parametrize(
    ("database", "change"),
    [
        *(("postgresql", change) for change in CHANGES),
        *((kind, change) for kind in ("mariadb", "mysql") for change in MYSQL_CHANGES),
    ],
    indirect=["database"],
)
def test_changed_tables_are_not_kept(
    database: str, change: str, inside: Engine, kept: KeptTables
) -> None:
    name = str(inside.url.database)
    changes = CHANGES if database == "postgresql" else MYSQL_CHANGES
    with inside.connect() as connection:
        for statement in changes[change].split("; "):
            connection.execute(text(statement))
    assert not kept.empty(inside, name)
