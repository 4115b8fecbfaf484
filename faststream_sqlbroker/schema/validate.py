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

from faststream_sqlbroker.schema.partitions import format_not_partitioned, is_partitioned
from faststream_sqlbroker.schema.tables import Tables, list_indexes
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb

MESSAGE_COLUMNS = {"lease_token", "lease_expires_at", "dedup_id", "publish_count"}
"""Columns by which the broker's message table is recognised."""
ARCHIVE_COLUMNS = {"reason", "dedup_id", "publish_count"}
_MISSING_TABLE = " is missing: "
_DENIED = frozenset({1142, 1143})
"""Error codes of MySQL and MariaDB, which show a table's definition only to users with SELECT on
the complete table."""


def disable_type_quotes(connection: Connection) -> None:
    """Let PostgreSQL return unquoted type names until the transaction ends.

    SQLAlchemy does not know the quoted names that the setting `quote_all_identifiers` causes.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL quote_all_identifiers = off"))


def find_foreign_tables(connection: Connection, tables: Tables) -> list[str]:
    """Find tables with the broker's names that belong to another program, each with the remedy."""
    return _find_foreign(inspect(connection), tables)


def _find_foreign(inspector: Any, tables: Tables) -> list[str]:
    """Return an error for each table with a broker's name but without the broker's columns.

    Correcting such a table would damage another program's data. Tables that are missing, or that
    the user may not read, are skipped.
    """
    errors = []
    for table, columns in ((tables.message, MESSAGE_COLUMNS), (tables.archive, ARCHIVE_COLUMNS)):
        if table is None or not _can_read_definition(inspector, table):
            continue
        if not inspector.has_table(table.name, schema=table.schema):
            continue
        names = {c["name"] for c in inspector.get_columns(table.name, schema=table.schema)}
        if names & columns:
            continue
        if "deliveries_count" in names:
            errors.append(
                f"table {table.fullname!r} belongs to faststream-sqlbroker 0.1, which this "
                "package cannot use: give SqlBrokerSchemaConfig other table names, or "
                "rename the table and copy its messages"
            )
        else:
            errors.append(
                f"table {table.fullname!r} exists and is not a table of this package (it has the "
                f"columns {', '.join(sorted(names))}): give SqlBrokerSchemaConfig other table "
                "names, or rename the table"
            )
    return errors


def find_differences(connection: Connection, tables: Tables) -> list[str]:
    """Return the differences, each with the statement that fixes the difference.

    Each difference is a single line. Columns and indexes that are not the broker's are ignored, and
    so are tables that the user may not read: a producer needs no right to read.
    """
    disable_type_quotes(connection)
    inspector = inspect(connection)  # caches its results
    foreign = _find_foreign(inspector, tables)
    if foreign:
        return foreign
    errors: list[str] = []
    for table in tables.for_dialect(connection.dialect.name).broker_tables:
        if not _can_read_definition(inspector, table):
            continue
        if inspector.has_table(table.name, schema=table.schema):
            errors += _compare_columns(connection, inspector, table)
            errors += _compare_indexes(connection, inspector, table)
            if table.name == tables.config.message_archive_table_name:
                errors += _check_partitions(connection, tables)
        else:
            statement = _compile_sql(connection, CreateTable(table))
            errors.append(f"table {table.fullname!r}{_MISSING_TABLE}{statement}")
    return errors


def format_advice(differences: Sequence[str]) -> str:
    """Format the result of `find_differences` together with the remedy."""
    upgrade = (
        "`sqlbroker migrate` or faststream_sqlbroker.schema.migrate.upgrade(connection), "
        "which need the extra 'migrations'"
    )
    own_alembic = "your own Alembic with include_tables(metadata)"
    if are_missing(differences):
        heading = (
            "the broker's tables are missing: in development, create them with FastStream(broker, "
            f"on_startup=[broker.create_tables]); in production, with {upgrade}, or with "
            f"{own_alembic}"
        )
    else:
        heading = (
            f"the tables differ from those that this version needs: upgrade them with {upgrade}, "
            f"with {own_alembic}, or with the statements below"
        )
    listed = "\n".join(f"  - {difference}" for difference in differences)
    return f"{heading}\n{listed}"


def are_missing(differences: Sequence[str]) -> bool:
    """Return True if all of the `differences` are tables that do not exist."""
    return all(
        difference.startswith("table ") and _MISSING_TABLE in difference
        for difference in differences
    )


def _can_read_definition(inspector: Any, table: Table) -> bool:
    """Return True if the user may read the definition of `table`, or `table` is missing.

    The user of a producer may lack this right on MySQL and MariaDB, and must still be able to
    start.
    """
    try:
        inspector.get_columns(table.name, schema=table.schema)
    except NoSuchTableError:
        return True
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] not in {(code,) for code in _DENIED}:
            raise
        return False
    return True


def _compare_columns(connection: Connection, inspector: Any, table: Table) -> list[str]:
    """Return the missing and different columns of `table`, each with the correcting statement.

    Columns of other programs are ignored.
    """
    existing = {c["name"]: c for c in inspector.get_columns(table.name, schema=table.schema)}
    errors = []
    for column in table.columns:
        name = f"column {table.fullname}.{column.name}"
        column_info = existing.get(column.name)
        if column_info is None:
            errors.append(f"{name} is missing: {_build_add_column(connection, column)}")
        else:
            errors += [
                f"{name} {difference}"
                for difference in _compare_column(connection, column, column_info)
            ]
    return errors


def _compare_column(
    connection: Connection, column: Column[Any], column_info: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences of an existing column, each with the statement to fix the column.

    `column_info` describes the column as SQLAlchemy found it in the database.
    """
    expected = _get_type_family(column.type, connection)
    if _get_type_family(column_info["type"], connection) != expected:
        statement = _build_alter_column(connection, column, "TYPE")
        yield f"is {column_info['type']!s}, not {expected}: {statement}"
    # The database decides about NOT NULL and defaults of primary keys and computed columns.
    if column.computed is not None or column.primary_key:
        return
    if column_info["nullable"] != column.nullable:
        state = "nullable" if column_info["nullable"] else "NOT NULL"
        yield f"is {state}: {_build_alter_column(connection, column, 'NULL')}"
    if column.server_default is not None and column_info.get("default") is None:
        yield f"has no default: {_build_alter_column(connection, column, 'DEFAULT')}"


def _compare_indexes(connection: Connection, inspector: Any, table: Table) -> list[str]:
    """Return the missing indexes of `table`, by columns and uniqueness; names do not matter.

    Each has the statement that creates it.
    """
    existing = {
        (tuple(i["column_names"]), bool(i["unique"]))
        for i in inspector.get_indexes(table.name, schema=table.schema)
    }
    errors = []
    for index in list_indexes(table):
        if (_get_index_columns(index), bool(index.unique)) not in existing:
            statement = _compile_sql(connection, CreateIndex(index))
            errors.append(f"index {index.name} on {table.fullname} is missing: {statement}")
    return errors


def _check_partitions(connection: Connection, tables: Tables) -> list[str]:
    """Return an error if the archive should have partitions, but has none.

    A plain ALTER TABLE cannot add partitions: the archive must be converted.
    """
    required = tables.config.archive_partitions is not None
    if not required or is_partitioned(connection, tables.archive):
        return []
    assert tables.archive is not None  # noqa: S101 - the config names it
    return [format_not_partitioned(tables.archive)]


def _get_index_columns(index: Index) -> tuple[str | None, ...]:
    return tuple(column.name for column in index.columns)


def _get_type_family(kind: TypeEngine[Any], connection: Connection) -> str:
    """Return the family of a type, with the length of a name: enough to detect a wrong column.

    A family is a name for equivalent types: the database reports other classes than those that the
    columns were declared with.
    """
    kind = kind.dialect_impl(connection.dialect)
    kind = getattr(kind, "impl_instance", kind)
    name = next(
        (family for type_, family in _FAMILIES if isinstance(kind, type_)),
        type(kind).__name__.lower(),
    )
    length = 32 if name == "uuid" else getattr(kind, "length", None)
    if connection.dialect.name == "sqlite":
        # SQLite remembers the declared type, but stores any value.
        return "text" if name in {"uuid", "varchar"} else name
    if connection.dialect.name in MYSQL:
        return _get_mysql_type(kind, name, length, mariadb=is_mariadb(connection.dialect))
    return f"varchar({length})" if name == "varchar" else name


def _get_mysql_type(kind: TypeEngine[Any], name: str, length: int | None, *, mariadb: bool) -> str:
    """Return the name of a type in MySQL and MariaDB, with the length of a VARCHAR.

    The size of text and bytes matters there: a BLOB is too short where a LONGBLOB is needed.
    """
    if name == "json" and mariadb:
        return "longtext"  # JSON is an alias in MariaDB
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


def _compile_sql(connection: Connection, element: Any) -> str:
    text = str(element.compile(dialect=connection.dialect))
    return " ".join(text.split()) + ";"


def _build_add_column(connection: Connection, column: Column[Any]) -> str:
    definition = _compile_sql(connection, CreateColumn(column)).rstrip(";")
    return f"ALTER TABLE {_quote_table(connection, column)} ADD COLUMN {definition};"


def _build_alter_column(connection: Connection, column: Column[Any], aspect: str) -> str:
    """Return the statement that corrects a column; for SQLite, the remedy as text.

    `aspect` is the difference: "TYPE", "NULL" (nullable or not) or "DEFAULT". MySQL and MariaDB
    need the complete definition for each of them.
    """
    table = _quote_table(connection, column)
    preparer = connection.dialect.identifier_preparer
    name = preparer.quote(column.name)
    if connection.dialect.name == "sqlite":
        return (
            "SQLite cannot alter a column: rename the table, let the migrations create it again, "
            "and copy the rows"
        )
    definition = _compile_sql(connection, CreateColumn(column)).rstrip(";")
    if connection.dialect.name in MYSQL:
        return f"ALTER TABLE {table} MODIFY COLUMN {definition};"
    kind = column.type.compile(dialect=connection.dialect)
    default = definition.partition(" DEFAULT ")[2].removesuffix(" NOT NULL")
    change = {
        "TYPE": f"TYPE {kind} USING {name}::{kind}",
        "NULL": "DROP NOT NULL" if column.nullable else "SET NOT NULL",
        "DEFAULT": f"SET DEFAULT {default}",
    }[aspect]
    return f"ALTER TABLE {table} ALTER COLUMN {name} {change};"


def _quote_table(connection: Connection, column: Column[Any]) -> str:
    return connection.dialect.identifier_preparer.format_table(column.table)
