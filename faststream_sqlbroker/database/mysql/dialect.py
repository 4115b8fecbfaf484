"""MySQL and MariaDB: SKIP LOCKED, JSON_TABLE, READ COMMITTED.

Differs from PostgreSQL: no UPDATE … RETURNING, so a claim locks and reads, then updates by id; no
partial index, so the ready index leads with `claimable`, a generated column that is 1 or NULL;
`state IN (…)` ahead of the order would sort the whole queue.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import datetime
from math import ceil
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import Connection, text
from sqlalchemy.dialects.mysql.reserved_words import RESERVED_WORDS_MARIADB, RESERVED_WORDS_MYSQL
from sqlalchemy.exc import DBAPIError, IntegrityError

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    ClaimRequest,
    NewMessage,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.multi_statement import (
    MultiStatementDialect,
    mark_prefetched,
    to_utc,
)
from faststream_sqlbroker.database.mysql.error_codes import DUPLICATE_ENTRY, MysqlErrors
from faststream_sqlbroker.database.mysql.many_queues import PairsClaim
from faststream_sqlbroker.database.operations import UNRESTORED
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.policy_state import ORDERED, SCOPE, raise_versions
from faststream_sqlbroker.database.parts.sizes import SizeLimit, create_packet_limit, iter_chunks
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import is_mariadb

MAX_TIMEOUT = 31_536_000
"""Maximum value of wait_timeout and idle_transaction_timeout: a year (seconds)."""

_SIZE_LIMIT = "sqlbroker_size_limit"

_CERTIFIES = "sqlbroker_certifies"

_CLUSTERS = (
    "SHOW GLOBAL VARIABLES WHERE (Variable_name = 'wsrep_on' AND Value = 'ON') "
    "OR (Variable_name = 'group_replication_group_name' AND Value <> '')"
)
"""Finds a row on a server of Galera or of group replication. Their other servers may take writes
now, or after a change of the cluster's mode while this process runs.
"""

_RENAMED_IN = (11, 1)
"""The MariaDB version that renamed the variable of the isolation level to MySQL's name; it warns
about the old name.
"""


SELECT_DENIED = (1142, 1143)
"""On the table, on a column; for an inserting statement, the same codes say that INSERT is denied.
"""


class MysqlDialect(MysqlErrors, MultiStatementDialect):
    """All SQL for MySQL and MariaDB."""

    name = "mysql"
    outwaits_clients = True
    claimed_expressions: ClassVar[Mapping[str, str]] = {
        "key": "`key`",
        "acquired_at": "UTC_TIMESTAMP(6) AS claimed_at",
    }
    insert_row = (
        "(:queue, :payload, :headers, :priority, :key, :dedup_id, "
        "UTC_TIMESTAMP(6), COALESCE(:at, UTC_TIMESTAMP(6) + INTERVAL :delay MICROSECOND), "
        "UTC_TIMESTAMP(6) + INTERVAL :expires MICROSECOND)"
    )
    _server: str | None = None
    _can_use_returning = True
    """False after MariaDB has refused RETURNING."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`.

        The URL does not say yet whether it leads to MySQL or MariaDB, so the reserved words of both
        are quoted.
        """
        sqlalchemy_dialect = copy(sqlalchemy_dialect)
        preparer = sqlalchemy_dialect.identifier_preparer = copy(
            sqlalchemy_dialect.identifier_preparer
        )
        preparer.reserved_words = RESERVED_WORDS_MYSQL | RESERVED_WORDS_MARIADB
        super().__init__(tables, sqlalchemy_dialect)
        self._select_statements(sqlalchemy_dialect)

    def _select_statements(self, sqlalchemy_dialect: Any) -> None:
        """Use the statements of this server, MySQL or MariaDB: plans differ, rows do not.

        Called again after the first connection: before, a URL may not say which of them it leads
        to.
        """
        server = "mariadb" if is_mariadb(sqlalchemy_dialect) else "mysql"
        if server != self._server:
            self._server = server
            self.sql = self.load_statements(server)

    def setup(self, connection: Connection) -> None:
        """Refuse settings under which statements fail, and detect the server, MySQL or MariaDB."""
        self._select_statements(connection.dialect)
        refuse_settings(connection)
        self.get_size_limit(connection)

    def get_size_limit(self, connection: Connection) -> SizeLimit:
        """Return the maximum size of a message, read once for each connection.

        A session keeps the limit (max_allowed_packet) that the server had when it began.
        """
        limit: SizeLimit | None = connection.info.get(_SIZE_LIMIT)
        if limit is None:
            max_packet = connection.exec_driver_sql(
                "SELECT @@SESSION.max_allowed_packet"
            ).scalar_one()
            limit = connection.info[_SIZE_LIMIT] = create_packet_limit(int(max_packet))
        self.known_size_limit = limit
        return limit

    def lock_order(self, connection: Connection, queues: Sequence[str]) -> set[str]:
        """Lock the claims of free queues as the base does, in a cluster by a write."""
        locked = super().lock_order(connection, queues)
        return self._write_locked(connection, ORDERED, locked)

    def lock_scopes(self, connection: Connection, names: Sequence[str]) -> set[str]:
        """Lock free budgets as the base does, in a cluster by a write."""
        locked = super().lock_scopes(connection, names)
        return self._write_locked(connection, SCOPE, locked)

    def _write_locked(self, connection: Connection, scope: str, locked: set[str]) -> set[str]:
        """Raise the versions of the locked rows on a server of a cluster; return `locked`.

        A cluster with several writers does not lock a row on its other servers. It compares the
        rows that two transactions have written, and refuses the COMMIT of one of them.
        """
        info = connection.info
        if locked and _CERTIFIES not in info:
            info[_CERTIFIES] = connection.exec_driver_sql(_CLUSTERS).first() is not None
        if locked and info[_CERTIFIES]:
            raise_versions(connection, self.tables.policy_state, scope, sorted(locked))
        return locked

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """Request READ COMMITTED for this transaction only, and set the idle limit (seconds).

        SQLAlchemy's `isolation_level` option sets the session's level at every checkout and back at
        every return, each with a COMMIT: five round trips instead of a single one.
        """
        if idle_limit is not None:
            name = _get_server_statement(connection, "begin_limited")
            version: Any = connection.dialect.server_version_info
            if is_mariadb(connection.dialect) and version[:2] < _RENAMED_IN:
                name += "_10"
            connection.info[UNRESTORED] = True
            connection.execute(self.sql[name], {"limit": _to_timeout(idle_limit)})
        elif connection.default_isolation_level != "READ COMMITTED":
            connection.execute(self.sql["read_committed"])
        # A driver in an autocommit mode that SQLAlchemy does not know of would commit each
        # statement.
        driver: Any = connection.connection.driver_connection
        if driver.get_autocommit():
            connection.execute(self.sql["start"])
        refuse_plain_backslashes(driver)

    def set_idle_limit(self, connection: Connection, seconds: float) -> None:
        """Change the idle limit by a single statement; MariaDB has its own variable for that."""
        name = _get_server_statement(connection, "allow_idling")
        connection.execute(self.sql[name], {"limit": _to_timeout(seconds)})

    def restore(self, connection: Connection) -> None:
        """Restore the settings by a single statement."""
        connection.execute(self.sql[_get_server_statement(connection, "restore")])
        del connection.info[UNRESTORED]

    @contextmanager
    def limit_lock_wait(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Set the session's limit, and restore the old limit: the session belongs to the pool."""
        connection.execute(self.sql["lock_wait"], {"seconds": max(1, int(seconds))})
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.execute(self.sql["lock_wait_again"])

    def build_delete_binds(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return the ids as a single JSON array."""
        return {"ids": json.dumps(list(ids))}

    def bind_time(self, value: datetime) -> datetime:
        """Return UTC without a zone, the form of DATETIME(6)."""
        return to_utc(value).replace(tzinfo=None)

    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """Insert all rows in a single statement; return their ids.

        MariaDB returns all ids, MySQL the first id, to which the step is added. MariaDB wants
        SELECT on all columns for RETURNING; without that right it returns the first id, too. The
        step is read each time: a cluster changes it when a node joins. Source: MySQL manual,
        "AUTO_INCREMENT Handling in InnoDB": a simple insert gets its ids at once.
        """
        refuse_plain_backslashes(connection.connection.driver_connection)
        if not (is_mariadb(connection.dialect) and self._can_use_returning):
            return self._insert_by_first_id(connection, rows)
        try:
            statement = self.get_insert_statement(len(rows), "RETURNING id")
            return list(connection.execute(statement, self.build_insert_binds(rows)).scalars())
        except DBAPIError as error:
            if error.orig is None or error.orig.args[:1] not in {(code,) for code in SELECT_DENIED}:
                raise
        ids = self._insert_by_first_id(connection, rows)
        self._can_use_returning = False
        return ids

    def _insert_by_first_id(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """Insert the rows, and compute their ids from the first id and the server's step.

        The server returns only the first id. The ids of one insert have a constant distance.
        """
        first: int = connection.execute(
            self.get_insert_statement(len(rows)), self.build_insert_binds(rows)
        ).lastrowid
        step = 1 if len(rows) == 1 else connection.execute(self.sql["id_step"]).scalar_one()
        return [first + n * step for n in range(len(rows))]

    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """Insert the row; a duplicate leaves the transaction usable.

        InnoDB undoes only the failed statement.
        """
        try:
            return self.insert_plain(connection, [row])[0]
        except IntegrityError as error:
            if error.orig is not None and error.orig.args[:1] == (DUPLICATE_ENTRY,):
                return None
            raise

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:
        """Read the rows with the dedup_ids, locking only the rows.

        An INSERT that waits for a duplicate also locks the gap before it. All messages of that
        queue without a dedup_id belong in this gap, so no transaction could publish them until the
        wait is over.
        """
        for row in rows:
            if row.dedup_id is not None:
                binds = {"queue": row.queue, "dedup_id": row.dedup_id}
                connection.execute(self.sql["dedup_id"], binds)

    def build_claim(self, request: ClaimRequest) -> Work[ClaimedMessages]:
        """Build a claim: a statement for each of a few pairs of queue and priority.

        Of many pairs, the first and those with many rows get a statement of their own. MySQL has no
        UPDATE … RETURNING, so the claim locks and reads the rows first, then leases them by id.
        """

        def claim(connection: Connection) -> ClaimedMessages:
            """Lock the first due rows of the pairs, then lease the locked rows by id."""
            messages = PairsClaim(self, connection, request).run()
            token = request.token
            prefetch = request.prefetch
            # Rows that start now get the handler's lease, rows that wait for a worker another.
            starting = messages if prefetch is None else mark_prefetched(messages, prefetch)
            self.lease_rows(connection, starting, request.lease, token)
            if prefetch is not None:
                self.lease_rows(connection, messages[prefetch.start_count :], prefetch.lease, token)
            return messages

        return claim

    def lock_claimable(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspect_rule: SuspectRule | None,
    ) -> ClaimedMessages:
        """Lock and read the rows; `suspect_rule` separates suspects, which are not leased.

        `lease_rows` leases the others afterwards: there is no UPDATE … RETURNING.
        """
        rows = self.to_messages(connection.execute(self.sql[statement], binds), token)
        return ClaimedMessages.from_rows(rows, suspect_rule)

    def to_messages(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Convert rows to messages; valid times of first deliveries are decoded on first use.

        That is the fast way for nearly all rows: publish and due time are times, and there is no
        expiry or earlier attempt. Other rows are checked and converted value by value.
        """
        make: Any = ClaimedMessage  # of as many values as there are columns
        return [
            make(r[0], r[1], load_payload(r[2]), *r[3:14], r[14], token, r[15])
            if r[9].__class__ is datetime
            and r[10].__class__ is datetime
            and r[11] is r[12] is r[13] is None
            else self._to_message(r, token)
            for r in rows
        ]

    def lease_rows(
        self, connection: Connection, rows: Sequence[ClaimedMessage], lease: float, token: UUID
    ) -> None:
        """Lease the rows by id, and update the messages as the statement updates the rows."""
        if not rows:
            return
        # The claim has selected the database's time in place of the column.
        now = rows[0].acquired_at
        binds = {
            "now": now.replace(tzinfo=None),
            "token": token.hex,
            "lease": round(lease * 1_000_000),
        }
        for part in iter_chunks(sorted(m.id for m in rows)):
            connection.execute(self.sql["claim_update"], {**binds, "ids": list(part)})
        for message in rows:
            message.acquired = now
            message.deliveries_count += 1

    def release_stuck(
        self,
        connection: Connection,
        queues: Sequence[str],
        limit: int,
        before: datetime | None = None,
    ) -> int:
        """Lock up to `limit` free rows with an expired lease, then release the rows by id.

        An UPDATE cannot skip rows that another transaction, such as a handler's, has locked.
        """
        ids: list[int] = []
        bound_time = None if before is None else self.bind_time(before)
        for names in iter_chunks(queues):
            if len(ids) < limit:
                binds = {"queues": list(names), "limit": limit - len(ids), "before": bound_time}
                ids += connection.execute(self.sql["stuck"], binds).scalars()
        for part in iter_chunks(sorted(ids)):
            connection.execute(self.sql["release_stuck"], {"ids": list(part)})
        return len(ids)

    def get_seconds_to_lease_end(
        self, connection: Connection, queues: Sequence[str]
    ) -> float | None:
        """Return the seconds until the first lease ends; reads only leased rows of the index."""
        delays: list[float] = []
        for names in iter_chunks(queues):
            expires_in = connection.execute(
                self.sql["lease_ends_in"], {"queues": list(names)}
            ).scalar_one()
            delays += [] if expires_in is None else [float(expires_in)]
        return min(delays, default=None)

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Find the rows leased by `token`, then lock and release the rows by id.

        The delivery is uncharged (no longer counted), because the claim's answer never arrived.
        """
        leased_ids: list[int] = []
        for names in iter_chunks(queues):
            binds = {"queues": list(names), "token": token.hex}
            leased_ids += connection.execute(self.sql["claimed_by"], binds).scalars()
        ids = self.lock(connection, [(message_id, token) for message_id in leased_ids])
        for part in iter_chunks(sorted(ids)):
            for statement in ("uncharge", "release_stuck"):
                connection.execute(self.sql[statement], {"ids": list(part)})
        return len(ids)


class MariadbDialect(MysqlDialect):
    """`MysqlDialect` under the name that `mariadb+` URLs give."""

    name = "mariadb"


def _get_server_statement(connection: Connection, name: str) -> str:
    return f"{name}_mariadb" if is_mariadb(connection.dialect) else name


def _to_timeout(limit: float) -> int:
    return min(max(1, ceil(limit)), MAX_TIMEOUT)


# Refused settings of servers and connections.

_SETTINGS = "SELECT @@log_bin, @@binlog_format, @@sql_select_limit, @@sql_safe_updates"
NO_LIMIT = 2**64 - 1
"""The default of sql_select_limit."""
_SETTING_HINT = (
    "change it for the engine's connections: "
    'create_async_engine(url, connect_args={{"init_command": "SET SESSION {}"}})'
)
NO_BACKSLASH_ESCAPES = 0x200
"""Bit of the status in the server's answers: a backslash in a literal escapes nothing."""


def refuse_plain_backslashes(driver: Any) -> None:
    """Refuse a connection on which a part of a body could run as SQL.

    aiomysql and asyncmy always escape quotes in bytes by backslashes, even if the server takes a
    backslash for a plain character.

    Raises:
        SetupError: the connection's sql_mode has NO_BACKSLASH_ESCAPES.
    """
    # A synchronous driver of the application may have no such attribute.
    if getattr(driver, "server_status", 0) & NO_BACKSLASH_ESCAPES:
        msg = (
            "sql_mode has 'NO_BACKSLASH_ESCAPES', with which this driver cannot send bytes safely: "
            "a quote in a body would end the literal, and the rest would run as SQL. Remove it "
            "from the server's sql_mode, or " + _SETTING_HINT.format("sql_mode=...")
        )
        raise SetupError(msg)


def refuse_settings(connection: Connection) -> None:
    """Refuse settings under which statements of the broker fail or work only in part.

    Raises:
        SetupError: the binary log holds statements, which READ COMMITTED cannot write; a SELECT
            gives a part of its rows; or MariaDB refuses each settlement.
    """
    log, log_format, max_rows, safe = connection.execute(text(_SETTINGS)).one()
    if log and str(log_format).upper() == "STATEMENT":
        msg = (
            "binlog_format must be 'ROW' or 'MIXED', got 'STATEMENT', which does not support the "
            "broker's isolation level READ COMMITTED; set binlog_format=ROW on the server"
        )
        raise SetupError(msg)
    if int(max_rows) < NO_LIMIT:
        msg = (
            f"sql_select_limit is {max_rows}, so the broker would read only {max_rows} rows of a "
            "result and treat the others as lost; "
            + _SETTING_HINT.format(f"sql_select_limit={NO_LIMIT}")
        )
        raise SetupError(msg)
    # MySQL checks the key of the table that loses rows; MariaDB checks all tables of the statement,
    # and the list of ids is a table without a key.
    if int(safe) and is_mariadb(connection.dialect):
        msg = (
            "sql_safe_updates is on, so MariaDB refuses the statements that settle messages; "
            + _SETTING_HINT.format("sql_safe_updates=0")
        )
        raise SetupError(msg)
