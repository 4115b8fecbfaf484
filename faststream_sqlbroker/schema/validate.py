"""Compare the tables in the database with those that this version needs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Index, Table, inspect, text
from sqlalchemy.exc import DBAPIError, NoSuchTableError
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable
from sqlalchemy.types import (
    JSON,
    DateTime,
    Integer,
    LargeBinary,
    String,
    Text,
    TypeEngine,
    Uuid,
)

from faststream_sqlbroker.schema.partitions import is_partitioned, not_partitioned
from faststream_sqlbroker.schema.tables import Tables, sorted_indexes
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb

OURS = {"lease_token", "lease_expires_at", "dedup_id", "publish_count"}
"""Columns by which the broker's message table is recognised."""
ARCHIVE_OURS = {"reason", "dedup_id", "publish_count"}
_MISSING_TABLE = " is missing: "
_DENIED = frozenset({1142, 1143})
"""MySQL and MariaDB show a table's definition only to users with SELECT on the whole table."""


def name_types_plainly(connection: Connection) -> None:
    """Let PostgreSQL name types as SQLAlchemy knows them, until the transaction ends: under
    `quote_all_identifiers` they come in quotes.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL quote_all_identifiers = off"))


def foreign_tables(connection: Connection, tables: Tables) -> list[str]:
    """Tables with the broker's names that belong to another program, each with what to do."""
    return _foreign(inspect(connection), tables)


def _foreign(inspector: Any, tables: Tables) -> list[str]:
    found = []
    for table, marks in ((tables.message, OURS), (tables.archive, ARCHIVE_OURS)):
        if table is None or not _may_see(inspector, table):
            continue
        if not inspector.has_table(table.name, schema=table.schema):
            continue
        names = {c["name"] for c in inspector.get_columns(table.name, schema=table.schema)}
        if names & marks:
            continue
        if "deliveries_count" in names:
            found.append(
                f"table {table.fullname!r} exists and is the table of faststream-sqlbroker 0.1, "
                "which this package cannot use: give SqlBrokerSchemaConfig other table names, or "
                "rename it and copy its messages"
            )
        else:
            found.append(
                f"table {table.fullname!r} exists and is not a table of this package (it has the "
                f"columns {', '.join(sorted(names))}): give SqlBrokerSchemaConfig other table "
                "names, or rename it"
            )
    return found


def differences(connection: Connection, tables: Tables) -> list[str]:
    """What differs, one line for each difference, with the statement that mends it.

    Columns and indexes that are not the broker's are left alone, and so are tables that the user
    may not look at: a producer needs no right to read.
    """
    name_types_plainly(connection)
    inspector = inspect(connection)  # it keeps what it has read
    foreign = _foreign(inspector, tables)
    if foreign:
        return foreign
    found: list[str] = []
    for table in tables.for_dialect(connection.dialect.name).ours:
        if not _may_see(inspector, table):
            continue
        if inspector.has_table(table.name, schema=table.schema):
            found += _columns(connection, inspector, table)
            found += _indexes(connection, inspector, table)
            if table.name == tables.config.message_archive_table_name:
                found += _partitions(connection, tables)
        else:
            statement = _compiled(connection, CreateTable(table))
            found.append(f"table {table.fullname!r}{_MISSING_TABLE}{statement}")
    return found


def advice(problems: Sequence[str]) -> str:
    """What to do about the `problems` that `differences` has found: in one line, and then each of
    them.
    """
    upgrade = (
        "`sqlbroker migrate` or faststream_sqlbroker.schema.migrate.upgrade(connection), "
        "which need the extra 'migrations'"
    )
    own = "your own Alembic with include_tables(metadata)"
    if are_missing(problems):
        head = (
            "the broker's tables are missing: while developing, create them by FastStream(broker, "
            f"on_startup=[broker.create_tables]); in production, by {upgrade}, or by {own}"
        )
    else:
        head = (
            f"the tables are not those that this version needs: upgrade them by {upgrade}, by "
            f"{own}, or by the statements named here"
        )
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return f"{head}\n{listed}"


def are_missing(problems: Sequence[str]) -> bool:
    """Whether all of the `problems` are tables that do not exist."""
    return all(problem.startswith("table ") and _MISSING_TABLE in problem for problem in problems)


def _may_see(inspector: Any, table: Table) -> bool:
    """Whether the user may read the definition of `table`, or would be told that it is missing."""
    try:
        inspector.get_columns(table.name, schema=table.schema)
    except NoSuchTableError:
        return True
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] not in {(code,) for code in _DENIED}:
            raise
        return False
    return True


def _columns(connection: Connection, inspector: Any, table: Table) -> list[str]:
    there = {c["name"]: c for c in inspector.get_columns(table.name, schema=table.schema)}
    found = []
    for column in table.columns:
        name = f"column {table.fullname}.{column.name}"
        have = there.get(column.name)
        if have is None:
            found.append(f"{name} is missing: {_add(connection, column)}")
        else:
            found += [f"{name} {what}" for what in _differences(connection, column, have)]
    return found


def _differences(
    connection: Connection, column: Column[Any], have: Mapping[str, Any]
) -> Iterator[str]:
    """What is wrong with an existing column, each with the statement that mends it."""
    wanted = _kind(column.type, connection)
    if _kind(have["type"], connection) != wanted:
        yield f"is {have['type']!s}, not {wanted}: {_alter(connection, column, 'TYPE')}"
    # A primary key's NOT NULL and numbering are the database's, and so is what is computed.
    if column.computed is not None or column.primary_key:
        return
    if have["nullable"] != column.nullable:
        state = "nullable" if have["nullable"] else "NOT NULL"
        yield f"is {state}: {_alter(connection, column, 'NULL')}"
    if column.server_default is not None and have.get("default") is None:
        yield f"has no default: {_alter(connection, column, 'DEFAULT')}"


def _indexes(connection: Connection, inspector: Any, table: Table) -> list[str]:
    there = {
        (tuple(i["column_names"]), bool(i["unique"]))
        for i in inspector.get_indexes(table.name, schema=table.schema)
    }
    found = []
    for index in sorted_indexes(table):
        if (_index_columns(index), bool(index.unique)) not in there:
            statement = _compiled(connection, CreateIndex(index))
            found.append(f"index {index.name} on {table.fullname} is missing: {statement}")
    return found


def _partitions(connection: Connection, tables: Tables) -> list[str]:
    wanted = tables.config.archive_partitions is not None
    if not wanted or is_partitioned(connection, tables.archive):
        return []
    assert tables.archive is not None  # noqa: S101 - the config names it
    return [not_partitioned(tables.archive)]


def _index_columns(index: Index) -> tuple[str | None, ...]:
    return tuple(column.name for column in index.columns)


def _kind(kind: TypeEngine[Any], connection: Connection) -> str:
    """The family of a type, and the length of a name: enough to tell a wrong column from a right
    one.
    """
    kind = kind.dialect_impl(connection.dialect)
    kind = getattr(kind, "impl_instance", kind)
    name = next((n for f, n in _FAMILIES if isinstance(kind, f)), type(kind).__name__.lower())
    length = 32 if name == "uuid" else getattr(kind, "length", None)
    if connection.dialect.name == "sqlite":
        # SQLite keeps what is declared, but stores anything in it.
        return "text" if name in {"uuid", "varchar"} else name
    if connection.dialect.name in MYSQL:
        return _mysql_kind(kind, name, length, mariadb=is_mariadb(connection.dialect))
    return f"varchar({length})" if name == "varchar" else name


def _mysql_kind(kind: TypeEngine[Any], name: str, length: int | None, *, mariadb: bool) -> str:
    if name == "json" and mariadb:
        return "longtext"  # what MariaDB makes of JSON
    if type(kind).__name__ in {"LONGTEXT", "LONGBLOB"} or name in {"bytes", "text"}:
        return type(kind).__name__.lower()
    return f"varchar({length})" if name in {"uuid", "varchar"} else name


_FAMILIES: tuple[tuple[type[TypeEngine[Any]], str], ...] = (
    (JSON, "json"),
    (Uuid, "uuid"),
    (DateTime, "timestamp"),
    (LargeBinary, "bytes"),
    (Text, "text"),
    (String, "varchar"),
    (Integer, "integer"),
)


def _compiled(connection: Connection, element: Any) -> str:
    text = str(element.compile(dialect=connection.dialect))
    return " ".join(text.split()) + ";"


def _add(connection: Connection, column: Column[Any]) -> str:
    definition = _compiled(connection, CreateColumn(column)).rstrip(";")
    return f"ALTER TABLE {_table(connection, column)} ADD COLUMN {definition};"


def _alter(connection: Connection, column: Column[Any], what: str) -> str:
    table = _table(connection, column)
    preparer = connection.dialect.identifier_preparer
    name = preparer.quote(column.name)
    if connection.dialect.name == "sqlite":
        return (
            "SQLite cannot alter a column: rename the table, let the migrations create it anew, "
            "and copy the rows"
        )
    definition = _compiled(connection, CreateColumn(column)).rstrip(";")
    if connection.dialect.name in MYSQL:
        return f"ALTER TABLE {table} MODIFY COLUMN {definition};"
    kind = column.type.compile(dialect=connection.dialect)
    default = definition.partition(" DEFAULT ")[2].removesuffix(" NOT NULL")
    change = {
        "TYPE": f"TYPE {kind} USING {name}::{kind}",
        "NULL": "DROP NOT NULL" if column.nullable else "SET NOT NULL",
        "DEFAULT": f"SET DEFAULT {default}",
    }[what]
    return f"ALTER TABLE {table} ALTER COLUMN {name} {change};"


def _table(connection: Connection, column: Column[Any]) -> str:
    return connection.dialect.identifier_preparer.format_table(column.table)
