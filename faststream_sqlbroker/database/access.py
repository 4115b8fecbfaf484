"""Finds the rights that a process needs and its database user lacks.

Nothing is written. PostgreSQL has functions that tell rights. MySQL and MariaDB check rights at
EXPLAIN as they do for the statement itself. SQLite is asked by an UPDATE that changes no row.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Table, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.access import Access, Activities, Activity, Lack
from faststream_sqlbroker.database.dialects import Dialect
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.mysql.errors import DENIED, NO_COLUMN, NO_TABLE
from faststream_sqlbroker.database.rights import Right, rights
from faststream_sqlbroker.database.sqlite.dialect import READ_ONLY, result_code
from faststream_sqlbroker.schema.types import MYSQL, is_mariadb

_UNSEEN = " (or the table does not exist: MariaDB does not tell a user without a right on it)"

Denied = tuple[Right, Sequence[str]]
"""A right and those of its columns that are denied; none: all of it."""


class AccessChecks:
    """Asks the database; nothing is written.

    Raises (from every operation but `ping`):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def find_lacks(self, activities: Activities) -> Access:
        """Which rights and tables the database user lacks for `activities`."""

        def ask(connection: Connection) -> Access:
            needed = rights(self._dialect.tables, connection.dialect, activities)
            if self._dialect.name == "postgresql":
                return _ask_postgresql(self._dialect, connection, needed)
            if self._dialect.name in MYSQL:
                return _ask_mysql(self._dialect, connection, needed)
            return _ask_sqlite(self._dialect, connection, needed)

        return await self._database.run(ask, write=False)

    def on_denied(
        self,
        call: Callable[[Activities], None],
        find_lacks: Callable[[Activities], Awaitable[Access]],
    ) -> None:
        """Call `call` with the activities of a statement that lacked a right or a table.

        `find_lacks` then finds out what is missing, for the error's text; it may cache its answer
        for a short time.
        """
        self._database.errors.tell_denied(call, find_lacks)

    async def ping(self, timeout: float | None, activities: Activities = frozenset()) -> bool:
        """Whether the database answers within `timeout` seconds and has the tables that
        `activities` need; without activities, the message table.

        Nothing is locked. A table does not count as missing if it exists and the user only has no
        right on it. A timeout of None is `statement_timeout`.
        """
        dialect = self._dialect

        def has_tables(connection: Connection) -> bool:
            needed = rights(dialect.tables, connection.dialect, activities)
            tables = list(dict.fromkeys(right.table for right in needed))
            tables = tables or [dialect.tables.message]
            names = {table.name for table in tables}
            if dialect.name == "postgresql":
                return names <= _ids(dialect, connection, tables).keys()
            if dialect.name not in MYSQL:
                return names <= _sqlite_tables(dialect, connection, tables)
            binds = {"names": [table.name for table in tables], "schema": tables[0].schema}
            existing = set(connection.execute(dialect.sql["known_tables"], binds).scalars())
            if not activities:
                # They hide a table from users without a right on it, so ask by a statement: its
                # error tells which of the two it is. Rights are checked before any lock, so it
                # cannot block.
                existing |= {table.name for table in tables if not _is_gone(connection, table)}
            return names <= existing

        return await self._database.ping(timeout, has_tables)


def _is_gone(connection: Connection, table: Table) -> bool:
    name = connection.dialect.identifier_preparer.format_table(table)
    try:
        connection.exec_driver_sql(f"SELECT 1 FROM {name} WHERE 1 = 0")
    except DBAPIError as error:
        if error.orig is None or error.orig.args[:1] not in {(code,) for code in NO_TABLE | DENIED}:
            raise
        return error.orig.args[0] in NO_TABLE
    return False


# PostgreSQL: its functions for rights tell what each GRANT would add.


def _ids(dialect: Dialect, connection: Connection, tables: Sequence[Table]) -> dict[str, Any]:
    """The tables that exist, by name: their id, their schema, and whether the user may use it."""
    names = list(dict.fromkeys(table.name for table in tables))
    found = connection.execute(
        dialect.sql["table_ids"], {"names": names, "schema": tables[0].schema or ""}
    )
    return {row.name: row for row in found if row.id is not None}


def _ask_postgresql(dialect: Dialect, connection: Connection, needed: Sequence[Right]) -> Access:
    user = connection.execute(text("SELECT current_user")).scalar_one()
    if not needed:
        return Access(f"the role {user}")
    existing = _ids(dialect, connection, [right.table for right in needed])
    lacks = list(_not_there(connection, needed, existing))
    there = [right for right in needed if right.table.name in existing]
    lacks += _closed_schemas(connection, there, existing, user)
    # PostgreSQL does not answer for tables of a closed schema: look again after that GRANT.
    open_ = [right for right in there if existing[right.table.name].allowed]
    lacks += _grants(
        connection, _denied_rights(dialect, connection, open_, existing), existing, user
    )
    return Access(f"the role {user}", lacks)


def _closed_schemas(
    connection: Connection, there: Sequence[Right], existing: dict[str, Any], user: str
) -> Iterator[Lack]:
    """What is lacking for each schema that the user may not use."""
    quote = connection.dialect.identifier_preparer.quote
    for schema in sorted({table.schema for table in existing.values() if not table.allowed}):
        activities = _union(right for right in there if existing[right.table.name].schema == schema)
        cure = f"GRANT USAGE ON SCHEMA {quote(schema)} TO {quote(user)};"
        yield Lack(f"USAGE on schema {schema}", cure, activities)


def _denied_rights(
    dialect: Dialect, connection: Connection, asked: Sequence[Right], existing: dict[str, Any]
) -> list[Denied]:
    lacked = _lacked_columns(dialect, connection, asked, existing)
    return [
        (right, [column for column in right.columns if column in lacked[at]])
        for at, right in enumerate(asked)
        if at in lacked
    ]


def _grants(
    connection: Connection, denied: Sequence[Denied], existing: dict[str, Any], user: str
) -> Iterator[Lack]:
    """What is denied on each table, and on the sequence of its ids."""
    quote = connection.dialect.identifier_preparer.quote
    for table, of_table in _by_table(denied):
        name = f"{quote(existing[table.name].schema)}.{quote(table.name)}"
        if rest := [each for each in of_table if each[0].verb != "USAGE"]:
            yield _grant(connection, rest, name, quote(user))
        if ids := [each for each in of_table if each[0].verb == "USAGE"]:
            statement = text("SELECT pg_get_serial_sequence(:name, 'id')")
            sequence = connection.execute(statement, {"name": name}).scalar_one()
            yield _grant(connection, ids, f"SEQUENCE {sequence}", quote(user))


def _lacked_columns(
    dialect: Dialect, connection: Connection, asked: Sequence[Right], existing: dict[str, Any]
) -> dict[int, set[str]]:
    """The denied columns of each right in `asked`, by its index.

    An empty name stands for the whole table.
    """
    each = [
        (at, existing[right.table.name].id, right.verb, column)
        for at, right in enumerate(asked)
        for column in right.columns or ("",)
    ]
    if not each:
        return {}
    ats, ids, verbs, names = zip(*each, strict=True)
    binds = {"ats": [*map(str, ats)], "ids": [*map(str, ids)], "verbs": [*verbs], "names": [*names]}
    found: dict[int, set[str]] = {}
    for at, column in connection.execute(dialect.sql["lacked_rights"], binds):
        found.setdefault(at, set()).add(column)
    return found


# MySQL and MariaDB: EXPLAIN of a statement that touches no row checks its rights.


def _ask_mysql(dialect: Dialect, connection: Connection, needed: Sequence[Right]) -> Access:
    asked = connection.execute(text("SELECT CURRENT_USER(), DATABASE()")).one()
    name, _, host = str(asked[0]).rpartition("@")
    to = f"{_literal(name)}@{_literal(host)}"
    quote = connection.dialect.identifier_preparer.quote
    mariadb = is_mariadb(connection.dialect)
    denied, gone = _explain_all(dialect, connection, needed)
    existing = {right.table.name: right for right in needed if right.table.name not in gone}
    lacks = list(_not_there(connection, needed, existing))
    for table, of_table in _by_table(denied):
        on = f"{quote(table.schema or str(asked[1]))}.{quote(table.name)}"
        lack = _grant(connection, of_table, on, to)
        unseen = mariadb and len(of_table) == sum(right.table is table for right in needed)
        lacks.append(replace(lack, cure=lack.cure + _UNSEEN) if unseen else lack)
    return Access(f"the user {to}", lacks)


def _explain_all(
    dialect: Dialect, connection: Connection, needed: Sequence[Right]
) -> tuple[list[Denied], set[str]]:
    """What is denied, and the names of the tables that do not exist."""
    denied: list[Denied] = []
    gone: set[str] = set()
    for right in needed:
        answer = _explain(dialect, connection, right, right.columns)
        if answer in NO_TABLE:
            gone.add(right.table.name)
        elif answer in DENIED | NO_COLUMN:
            # The error tells of one column at most, so each is asked for.
            columns = [
                c for c in right.columns if _explain(dialect, connection, right, (c,)) in DENIED
            ]
            if columns or not right.columns:
                denied.append((right, columns))
    return denied, gone


def _explain(
    dialect: Dialect, connection: Connection, right: Right, columns: Sequence[str]
) -> int | None:
    """The number of the error that such a statement gets; None if it may run."""
    preparer = connection.dialect.identifier_preparer
    table = preparer.format_table(right.table)
    names = [preparer.quote(column) for column in columns]
    listed = ", ".join(names)
    nulls = ", ".join("NULL" for _ in names)
    statement = {
        "SELECT": f"SELECT {listed} FROM {table} WHERE 1 = 0",
        "INSERT": f"INSERT INTO {table} ({listed}) SELECT {nulls} FROM DUAL WHERE 1 = 0",
        "UPDATE": f"UPDATE {table} SET {', '.join(f'{name} = NULL' for name in names)} WHERE 1 = 0",
        "DELETE": f"DELETE FROM {table} WHERE 1 = 0",
    }[right.verb]
    try:
        connection.exec_driver_sql(f"EXPLAIN {statement}")
    except DBAPIError as error:
        if error.connection_invalidated or error.orig is None or dialect.is_transient(error.orig):
            raise
        # Rights are checked before values, so any other error (1364, no default) says that the
        # statement is allowed.
        return int(error.orig.args[0])
    return None


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


# SQLite: a file that can be written, or cannot.


def _ask_sqlite(dialect: Dialect, connection: Connection, needed: Sequence[Right]) -> Access:
    existing = _sqlite_tables(dialect, connection, [right.table for right in needed])
    file = connection.execute(
        text("SELECT file FROM pragma_database_list WHERE name = 'main'")
    ).scalar_one()
    lacks = list(_not_there(connection, needed, dict.fromkeys(existing)))
    there = [right for right in needed if right.table.name in existing]
    if there:
        table = there[0].table
        column = next(iter(there[0].table.columns.keys()))
        preparer = connection.dialect.identifier_preparer
        name = preparer.quote(column)
        try:
            # BEGIN IMMEDIATE succeeds on a file that cannot be written; only a write fails.
            connection.exec_driver_sql(
                f"UPDATE {preparer.format_table(table)} SET {name} = {name} WHERE 0"
            )
        except DBAPIError as error:
            if result_code(error.orig) != READ_ONLY:
                raise
            # A connection to a file that was opened read-only stays read-only: drop it.
            connection.connection.invalidate(soft=True)
            cure = (
                "let the process write the file and its folder, where SQLite keeps -wal and -shm "
                "files, and open it without mode=ro and query_only"
            )
            lacks.append(Lack(f"the right to write {file} ({error.orig})", cure, _union(there)))
    return Access("the account of this process", lacks)


def _sqlite_tables(dialect: Dialect, connection: Connection, tables: Sequence[Table]) -> set[str]:
    binds = {"names": [table.name for table in tables]}
    return set(connection.execute(dialect.sql["known_tables"], binds).scalars())


# What is missing, in words.


def _not_there(
    connection: Connection, needed: Sequence[Right], existing: dict[str, Any]
) -> Iterator[Lack]:
    preparer = connection.dialect.identifier_preparer
    for table in dict.fromkeys(right.table for right in needed if right.table.name not in existing):
        of = _union(right for right in needed if right.table is table)
        cure = "run the migrations, or await broker.create_tables() while developing"
        yield Lack(f"the table {preparer.format_table(table)}", cure, of, is_table=True)


def _verb(right: Right, columns: Sequence[str], connection: Connection) -> str:
    if right.whole or not right.columns:
        return right.verb
    quote = connection.dialect.identifier_preparer.quote
    return f"{right.verb} ({', '.join(quote(column) for column in columns)})"


def _by_table(denied: Sequence[Denied]) -> list[tuple[Table, list[Denied]]]:
    tables = dict.fromkeys(right.table for right, _ in denied)
    return [(table, [each for each in denied if each[0].table is table]) for table in tables]


def _grant(connection: Connection, denied: Sequence[Denied], on: str, to: str) -> Lack:
    """What is denied on one table or sequence, and the GRANT."""
    verbs = ", ".join(_verb(right, columns, connection) for right, columns in denied)
    activities = _union(right for right, _ in denied)
    # Each publish writes a body, so without INSERT on `payload` no message can be published.
    every = any(right.verb == "INSERT" and "payload" in columns for right, columns in denied)
    return Lack(
        f"{verbs} on {on}",
        f"GRANT {verbs} ON {on} TO {to};",
        activities,
        every_publish=every and Activity.PUBLISH in activities,
    )


def _union(rights: Iterable[Right]) -> Activities:
    return frozenset().union(*(right.activities for right in rights))
