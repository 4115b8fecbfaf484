"""Find the rights that a process needs and its database user lacks, by a rehearsal.

Each right has a statement with its verb, table and columns that matches no row. Every database
checks rights before it searches for rows, and refuses writes in a read-only session. All of it is
rolled back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

from sqlalchemy import Connection, Table, delete, func, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker.core.access import Access, Activities, Activity, MissingRight
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.rights import Right, list_required_rights
from faststream_sqlbroker.exceptions import AccessError, StoreError
from faststream_sqlbroker.schema.types import is_mariadb

_MARIADB_HINT = (
    " (or the table does not exist: MariaDB hides that from a user without rights on it)"
)
_WRITE_HINT = (
    "give the process write access to the file and its folder, where SQLite keeps -wal and -shm "
    "files, and open the file without mode=ro and query_only"
)
PROBE = "probe"
"""The scope of a state that is inserted and deleted in one transaction."""

SchemaAccess = tuple[str, bool]
"""The schema of a table, and whether the user may use it."""


class AccessChecks(StoreSubject):
    """Checks of the database user's rights; nothing that is written stays.

    Raises (from every operation but `ping`):
        TransientStoreError, StoreError: as `Store`.
    """

    async def find_missing_rights(self, activities: Activities) -> Access:
        """Find the rights and tables that the database user lacks for `activities`.

        Tries the statements that the activities need, on no rows, and rolls back. All are tried
        together first; only after a refusal is each tried separately.

        Raises:
            TransientStoreError: also if the server or session is read-only.
        """

        def rehearse(connection: Connection) -> Access:
            required_rights = list_required_rights(
                self._dialect.tables, connection.dialect, activities
            )
            user, grantee = self._read_user(connection)
            if self._find_refusal(connection, required_rights) is None:
                return Access(user)
            return Access(user, self._list_missing_rights(connection, required_rights, grantee))

        return await self._database.run(rehearse, write=False)

    def on_denied(
        self,
        call: Callable[[Activities], None],
        find_missing_rights: Callable[[Activities], Awaitable[Access]],
    ) -> None:
        """Call `call` with the activities of a statement that lacked a right or a table.

        `find_missing_rights` then finds the missing rights for the error message; it may cache the
        result for a short time.
        """
        self._database.errors.set_denied_hooks(call, find_missing_rights)

    async def ping(self, timeout: float | None, activities: Activities = frozenset()) -> bool:
        """Return True if the database answers in time and has the tables that `activities` need.

        Without activities, only the message table is checked. Nothing is locked. A table that
        exists does not count as missing if the user only has no right on it. A `timeout` of None is
        `statement_timeout` (seconds).
        """

        def has_tables(connection: Connection) -> bool:
            tables = self._dialect.tables
            required_rights = list_required_rights(tables, connection.dialect, activities)
            required_tables = {right.table for right in required_rights} or {tables.message}
            return all(
                self._find_schema(connection, table) is not None for table in required_tables
            )

        limit = self._database.timeout if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + limit
        # A connection slot of its own: a check must not wait for the broker's other transactions.
        try:
            return await self._database.run(
                has_tables, write=False, deadline=deadline, connection_slots=asyncio.Semaphore()
            )
        except StoreError:
            return False

    async def try_write(self) -> None:
        """Commit a write that leaves nothing behind, to see that the server is not read-only.

        A user without the right to write proves that, too, because a read-only server refuses
        first. Uses a connection slot of its own, so as not to wait for other transactions.

        Raises:
            TransientStoreError, StoreError: the database accepts no writes.
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
            await self._database.run(
                write, locks=False, retry_lock_timeout=False, connection_slots=asyncio.Semaphore()
            )

    def _list_missing_rights(
        self, connection: Connection, required_rights: Sequence[Right], grantee: str
    ) -> list[MissingRight]:
        """Try each right separately, and describe the missing rights, with the remedy.

        For a table that does not exist the remedy is a migration. Otherwise it is a GRANT, or on
        SQLite write access to the file.
        """
        denied_parts = (self._find_denied_part(connection, right) for right in required_rights)
        denied = [denied_part for denied_part in denied_parts if denied_part is not None]
        schemas = {right.table: self._find_schema(connection, right.table) for right in denied}
        missing = [
            _build_missing_table(connection, table, required_rights)
            for table, schema in schemas.items()
            if schema is None
        ]
        grants: dict[str, list[Right]] = {}
        for right in denied:
            if (schema := schemas[right.table]) is not None:
                target, denied_part = _locate_right(connection, right, schema)
                grants.setdefault(target, []).append(denied_part)
        if self._dialect.name == "sqlite":
            missing += [
                _build_read_only_file(connection, denied_rights)
                for denied_rights in grants.values()
            ]
        else:
            missing += [
                _build_missing_grant(connection, target, denied_rights, required_rights, grantee)
                for target, denied_rights in grants.items()
            ]
        return missing

    def _find_schema(self, connection: Connection, table: Table) -> SchemaAccess | None:
        """Return the schema of `table`, None if the table does not exist. Nothing is locked.

        A refusal for a missing right shows that the table exists.
        """
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

    def _read_user(self, connection: Connection) -> tuple[str, str]:
        """Return the database user's name for a sentence of an error, and quoted for a GRANT."""
        if self._dialect.name == "sqlite":
            return "the account of this process", ""
        user = str(connection.execute(select(func.current_user())).scalar_one())
        if self._dialect.name == "postgresql":
            return f"the role {user}", connection.dialect.identifier_preparer.quote(user)
        name, _, host = user.rpartition("@")
        grantee = f"{_quote_literal(name)}@{_quote_literal(host)}"
        return f"the user {grantee}", grantee

    def _find_refusal(
        self, connection: Connection, required_rights: Sequence[Right]
    ) -> BaseException | None:
        """Try a harmless statement for each right; return the driver's first error, or None.

        Everything runs in a savepoint that is rolled back, so that the transaction stays usable.

        Raises:
            DBAPIError: a failure that says nothing about rights, such as a lost connection.
        """
        if not required_rights:
            return None
        try:
            with connection.begin_nested() as savepoint:
                # Writes first: SQLite waits for another writer only if the transaction begins with
                # a write.
                for right in sorted(required_rights, key=lambda right: right.verb == "SELECT"):
                    connection.exec_driver_sql(_build_statement(connection, right))
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

    def _find_denied_part(self, connection: Connection, right: Right) -> Right | None:
        """Return `right` reduced to the denied columns, None if nothing is denied.

        The columns are tried one by one: a refusal names one column at most, and an error that is
        not a refusal, such as a missing column, says nothing about the others.
        """
        error = self._find_refusal(connection, [right])
        if error is None:
            return None
        if self._is_denied(error) and (right.is_table_wide or not right.columns):
            return right
        columns = tuple(
            column
            for column in right.columns
            if self._is_denied(self._find_refusal(connection, [replace(right, columns=(column,))]))
        )
        return replace(right, columns=columns) if columns else None


def _build_statement(connection: Connection, right: Right) -> str:
    """Build the statement that needs exactly `right`, and reads or writes no row.

    The database checks rights even if no row matches, so a refusal shows a missing right.
    """
    preparer = connection.dialect.identifier_preparer
    table = preparer.format_table(right.table)
    names = [preparer.quote(column) for column in right.columns]
    column_list = ", ".join(names)
    literal = table.replace("'", "''")
    nulls = ", ".join("NULL" for _name in names)
    return {
        "SELECT": f"SELECT {column_list} FROM {table} WHERE 1 = 0",
        "INSERT": f"INSERT INTO {table} ({column_list}) SELECT {nulls} LIMIT 0",
        "UPDATE": f"UPDATE {table} SET {' = NULL, '.join(names)} = NULL WHERE 1 = 0",
        "DELETE": f"DELETE FROM {table} WHERE 1 = 0",
        # The number drawn from the sequence is not used.
        "USAGE": f"SELECT nextval(pg_get_serial_sequence('{literal}', 'id'))",
    }[right.verb]


# Descriptions of missing rights.


def _build_missing_table(
    connection: Connection, table: Table, required_rights: Sequence[Right]
) -> MissingRight:
    """Describe a table that does not exist; the remedy is a migration."""
    return MissingRight(
        f"the table {connection.dialect.identifier_preparer.format_table(table)}",
        "run the migrations, or await broker.create_tables() while developing",
        _merge_activities(right for right in required_rights if right.table is table),
        is_table=True,
    )


def _build_read_only_file(connection: Connection, denied: Sequence[Right]) -> MissingRight:
    """Describe missing write access to the file; SQLite has no other rights."""
    statement = text("SELECT file FROM pragma_database_list WHERE name = 'main'")
    file = connection.execute(statement).scalar_one()
    # A connection to a file that was opened read-only stays read-only: drop it.
    connection.connection.invalidate(soft=True)
    return MissingRight(
        f"write access to {file}, which is read-only", _WRITE_HINT, _merge_activities(denied)
    )


def _build_missing_grant(
    connection: Connection,
    target: str,
    denied: Sequence[Right],
    required_rights: Sequence[Right],
    grantee: str,
) -> MissingRight:
    """Describe the rights that are denied on a table, sequence or schema, with the GRANT to run."""
    verbs = ", ".join(dict.fromkeys(_format_verb(connection, right) for right in denied))
    activities = _merge_activities(denied)
    # Each publish writes a body, so without INSERT on `payload` no message can be published.
    denies_insert = any(right.verb == "INSERT" and "payload" in right.columns for right in denied)
    some_allowed = len(denied) < sum(right.table is denied[0].table for right in required_rights)
    hint = "" if some_allowed or not is_mariadb(connection.dialect) else _MARIADB_HINT
    return MissingRight(
        f"{verbs} on {target}",
        f"GRANT {verbs} ON {target} TO {grantee};{hint}",
        activities,
        every_publish=denies_insert and Activity.PUBLISH in activities,
    )


def _locate_right(
    connection: Connection, right: Right, schema_access: SchemaAccess
) -> tuple[str, Right]:
    """Return the object that the GRANT must name, and the right on that object.

    In PostgreSQL a schema that the user may not use comes first: nothing in it can be tried before.
    """
    if connection.dialect.name == "sqlite":
        return "the file", right
    quote = connection.dialect.identifier_preparer.quote
    schema, allowed = schema_access
    if not allowed:
        # Nothing in the schema can be tried before that GRANT.
        return f"SCHEMA {quote(schema)}", replace(right, verb="USAGE", columns=())
    name = f"{quote(schema)}.{quote(right.table.name)}"
    if right.verb != "USAGE":
        return name, right
    statement = text("SELECT pg_get_serial_sequence(:name, 'id')")
    sequence = connection.execute(statement, {"name": name}).scalar_one()
    return f"SEQUENCE {sequence}", right


def _format_verb(connection: Connection, right: Right) -> str:
    """Return the right as named in a GRANT, with the columns unless table-wide."""
    if right.is_table_wide or not right.columns:
        return right.verb
    quote = connection.dialect.identifier_preparer.quote
    return f"{right.verb} ({', '.join(map(quote, right.columns))})"


def _quote_literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _merge_activities(rights: Iterable[Right]) -> Activities:
    return frozenset().union(*(right.activities for right in rights))
