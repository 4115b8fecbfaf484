"""Finds the rights that a process needs and its database user lacks, by a rehearsal.

For each right there is a statement with its verb, table and columns, which has no row to work on.
The same holds on every database: it checks rights before it looks for rows, and tells a session
that may not write. All of it is rolled back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

from sqlalchemy import Connection, Table, delete, func, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.access import Access, Activities, Activity, Lack
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.rights import Right, rights
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.schema.types import is_mariadb

_UNSEEN = " (or the table does not exist: MariaDB does not tell a user without a right on it)"
_MAY_WRITE = (
    "let the process write the file and its folder, where SQLite keeps -wal and -shm files, and "
    "open it without mode=ro and query_only"
)
PROBE = "probe"
"""The scope of a state that is inserted and deleted in one transaction."""

Home = tuple[str, bool]
"""The schema of a table, and whether the user may use it."""


class AccessChecks:
    """Asks the database; nothing that is written stays.

    Raises (from every operation but `ping`):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def find_lacks(self, activities: Activities) -> Access:
        """Which rights and tables the database user lacks for `activities`.

        Raises:
            TransientStoreError: also of a server or session that is read-only.
        """

        def rehearse(connection: Connection) -> Access:
            needed = rights(self._dialect.tables, connection.dialect, activities)
            who, grantee = self._user(connection)
            if self._refusal(connection, needed) is None:
                return Access(who)
            return Access(who, self._lacks(connection, needed, grantee))

        return await self._database.run(rehearse, write=False)

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

        def has_tables(connection: Connection) -> bool:
            tables = self._dialect.tables
            needed = rights(tables, connection.dialect, activities)
            needed_tables = {right.table for right in needed} or {tables.message}
            return all(self._home(connection, table) is not None for table in needed_tables)

        limit = self._database.timeout if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + limit
        try:
            return await self._database.run(
                has_tables, write=False, deadline=deadline, places=asyncio.Semaphore()
            )
        except StoreError:
            return False

    async def try_write(self) -> None:
        """Commit a write of which nothing is left.

        A user who may not write it proves only that the server is not read-only, which is refused
        first.

        Raises:
            TransientStoreError, StoreError: the database takes no writes.
        """

        def write(connection: Connection) -> None:
            if self._dialect.sql.has("try_write"):
                connection.execute(self._dialect.sql["try_write"])
                return
            table = self._dialect.tables.policy_state
            row = {"scope": PROBE, "key": str(uuid4())}
            connection.execute(insert(table).values(row))
            connection.execute(delete(table).filter_by(**row))

        with suppress(AccessError):
            await self._database.run(write, locks=False, patient=False, places=asyncio.Semaphore())

    def _lacks(self, connection: Connection, needed: Sequence[Right], grantee: str) -> list[Lack]:
        """Try each right by itself."""
        parts = (self._denied_part(connection, right) for right in needed)
        denied = [part for part in parts if part is not None]
        homes = {right.table: self._home(connection, right.table) for right in denied}
        lacks = [
            _missing_table(connection, table, needed)
            for table, home in homes.items()
            if home is None
        ]
        grants: dict[str, list[Right]] = {}
        for right in denied:
            if (home := homes[right.table]) is not None:
                on, part = _placed(connection, right, home)
                grants.setdefault(on, []).append(part)
        if self._dialect.name == "sqlite":
            lacks += [_read_only_file(connection, each) for each in grants.values()]
        else:
            lacks += [_grant(connection, on, each, needed, grantee) for on, each in grants.items()]
        return lacks

    def _home(self, connection: Connection, table: Table) -> Home | None:
        """None: there is no such table. Nothing is locked."""
        if self._dialect.name == "postgresql":
            binds = {"name": table.name, "schema": table.schema or ""}
            row = connection.execute(self._dialect.sql["table_home"], binds).one_or_none()
            return None if row is None else (row.schema, row.allowed)
        try:
            exists = inspect(connection).has_table(table.name, table.schema)
        except DBAPIError as error:
            if error.orig is None or not self._dialect.is_denied(error.orig):
                raise
            exists = True
        schema = table.schema or connection.dialect.default_schema_name
        return (str(schema), True) if exists else None

    def _user(self, connection: Connection) -> tuple[str, str]:
        """What to call the user in a sentence, and in a GRANT."""
        if self._dialect.name == "sqlite":
            return "the account of this process", ""
        user = str(connection.execute(select(func.current_user())).scalar_one())
        if self._dialect.name == "postgresql":
            return f"the role {user}", connection.dialect.identifier_preparer.quote(user)
        name, _, host = user.rpartition("@")
        grantee = f"{_literal(name)}@{_literal(host)}"
        return f"the user {grantee}", grantee

    def _refusal(self, connection: Connection, needed: Sequence[Right]) -> BaseException | None:
        """The driver's error of the first statement that fails."""
        if not needed:
            return None
        try:
            with connection.begin_nested() as savepoint:
                # SQLite waits for another writer only where a transaction begins with a write.
                for right in sorted(needed, key=lambda each: each.verb == "SELECT"):
                    connection.exec_driver_sql(_statement(connection, right))
                savepoint.rollback()
        except DBAPIError as error:
            if (
                error.connection_invalidated
                or error.orig is None
                or (self._dialect.is_transient(error.orig) and not self._is_denied(error.orig))
            ):
                raise
            return error.orig
        return None

    def _is_denied(self, error: BaseException | None) -> bool:
        return error is not None and self._dialect.is_denied(error)

    def _denied_part(self, connection: Connection, right: Right) -> Right | None:
        """`right` with the columns that are denied; None if nothing is.

        An error that is no refusal, such as that of a missing column, says nothing of the other
        columns, and a refusal tells of one column at most: each is tried.
        """
        error = self._refusal(connection, [right])
        if error is None:
            return None
        if self._is_denied(error) and (right.whole or not right.columns):
            return right
        columns = tuple(
            column
            for column in right.columns
            if self._is_denied(self._refusal(connection, [replace(right, columns=(column,))]))
        )
        return replace(right, columns=columns) if columns else None


def _statement(connection: Connection, right: Right) -> str:
    preparer = connection.dialect.identifier_preparer
    table = preparer.format_table(right.table)
    names = [preparer.quote(column) for column in right.columns]
    listed = ", ".join(names)
    literal = table.replace("'", "''")
    nulls = ", ".join("NULL" for _ in names)
    return {
        "SELECT": f"SELECT {listed} FROM {table} WHERE 1 = 0",
        "INSERT": f"INSERT INTO {table} ({listed}) SELECT {nulls} LIMIT 0",
        "UPDATE": f"UPDATE {table} SET {' = NULL, '.join(names)} = NULL WHERE 1 = 0",
        "DELETE": f"DELETE FROM {table} WHERE 1 = 0",
        # The one number that it takes is not used.
        "USAGE": f"SELECT nextval(pg_get_serial_sequence('{literal}', 'id'))",
    }[right.verb]


# What is missing, in words.


def _missing_table(connection: Connection, table: Table, needed: Sequence[Right]) -> Lack:
    return Lack(
        f"the table {connection.dialect.identifier_preparer.format_table(table)}",
        "run the migrations, or await broker.create_tables() while developing",
        _union(right for right in needed if right.table is table),
        is_table=True,
    )


def _read_only_file(connection: Connection, denied: Sequence[Right]) -> Lack:
    """SQLite has only the rights of the file."""
    statement = text("SELECT file FROM pragma_database_list WHERE name = 'main'")
    file = connection.execute(statement).scalar_one()
    # A connection to a file that was opened read-only stays read-only: drop it.
    connection.connection.invalidate(soft=True)
    return Lack(f"the right to write {file}, which is readonly", _MAY_WRITE, _union(denied))


def _grant(
    connection: Connection, on: str, denied: Sequence[Right], needed: Sequence[Right], grantee: str
) -> Lack:
    """The rights that are denied on one table, sequence or schema."""
    verbs = ", ".join(dict.fromkeys(_verb(connection, right) for right in denied))
    activities = _union(denied)
    # Each publish writes a body, so without INSERT on `payload` no message can be published.
    every = any(right.verb == "INSERT" and "payload" in right.columns for right in denied)
    known = len(denied) < sum(right.table is denied[0].table for right in needed)
    unseen = "" if known or not is_mariadb(connection.dialect) else _UNSEEN
    return Lack(
        f"{verbs} on {on}",
        f"GRANT {verbs} ON {on} TO {grantee};{unseen}",
        activities,
        every_publish=every and Activity.PUBLISH in activities,
    )


def _placed(connection: Connection, right: Right, home: Home) -> tuple[str, Right]:
    """The object of the GRANT, and the right to that object."""
    if connection.dialect.name == "sqlite":
        return "the file", right
    quote = connection.dialect.identifier_preparer.quote
    schema, allowed = home
    if not allowed:
        # Nothing in it can be tried before that GRANT.
        return f"SCHEMA {quote(schema)}", replace(right, verb="USAGE", columns=())
    name = f"{quote(schema)}.{quote(right.table.name)}"
    if right.verb != "USAGE":
        return name, right
    statement = text("SELECT pg_get_serial_sequence(:name, 'id')")
    sequence = connection.execute(statement, {"name": name}).scalar_one()
    return f"SEQUENCE {sequence}", right


def _verb(connection: Connection, right: Right) -> str:
    if right.whole or not right.columns:
        return right.verb
    quote = connection.dialect.identifier_preparer.quote
    return f"{right.verb} ({', '.join(map(quote, right.columns))})"


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _union(rights: Iterable[Right]) -> Activities:
    return frozenset().union(*(right.activities for right in rights))
