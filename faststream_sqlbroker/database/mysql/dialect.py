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

from faststream_sqlbroker.core.rows import Claimed, ClaimedMessage, NewMessage, Prefetch, ReadyPair
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.multi_statement import (
    MultiStatementDialect,
    note_prefetched,
    utc,
)
from faststream_sqlbroker.database.mysql.errors import DUPLICATE_ENTRY, MysqlErrors
from faststream_sqlbroker.database.mysql.queues import PairsClaim
from faststream_sqlbroker.database.operations import UNRESTORED
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.sizes import SizeLimit, chunks, max_allowed_packet
from faststream_sqlbroker.database.query import Work
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.schema.types import is_mariadb

MOST_SECONDS = 31_536_000
"""The longest value of wait_timeout and idle_transaction_timeout: a year."""

_SIZE_LIMIT = "sqlbroker_size_limit"

_NEW_NAME = (11, 1)
"""The MariaDB that has renamed the variable of the isolation level to MySQL's name; it warns of the
old one."""


SELECT_DENIED = (1142, 1143)
"""On the table, on a column: of a statement that inserts the same codes tell that INSERT is denied.
"""


class MysqlDialect(MysqlErrors, MultiStatementDialect):
    """All SQL for MySQL and MariaDB."""

    name = "mysql"
    outwaits_clients = True
    claimed_as: ClassVar[Mapping[str, str]] = {
        "key": "`key`",
        "acquired_at": "UTC_TIMESTAMP(6) AS claimed_at",
    }
    insert_row = (
        "(:queue, :payload, :headers, :priority, :key, :dedup_id, "
        "UTC_TIMESTAMP(6), COALESCE(:at, UTC_TIMESTAMP(6) + INTERVAL :delay MICROSECOND), "
        "UTC_TIMESTAMP(6) + INTERVAL :expires MICROSECOND)"
    )
    _server: str | None = None
    _may_return = True
    """Whether MariaDB has not refused RETURNING yet."""

    def __init__(self, tables: Tables, sqlalchemy_dialect: Any) -> None:
        """Prepare the statements of `tables`.

        It is not known yet which of the two databases the URL leads to: what either reserves is
        quoted.
        """
        sqlalchemy_dialect = copy(sqlalchemy_dialect)
        preparer = sqlalchemy_dialect.identifier_preparer = copy(
            sqlalchemy_dialect.identifier_preparer
        )
        preparer.reserved_words = RESERVED_WORDS_MYSQL | RESERVED_WORDS_MARIADB
        super().__init__(tables, sqlalchemy_dialect)
        self._send_to(sqlalchemy_dialect)

    def _send_to(self, sqlalchemy_dialect: Any) -> None:
        """Take the statements of this server, MySQL or MariaDB: plans differ, rows do not."""
        server = "mariadb" if is_mariadb(sqlalchemy_dialect) else "mysql"
        if server != self._server:
            self._server = server
            self.sql = self.statements_of(server)

    def setup(self, connection: Connection) -> None:
        """Refuse settings under which statements fail; look which of the two servers it is."""
        self._send_to(connection.dialect)
        refuse_settings(connection)
        self.size_limit(connection)

    def size_limit(self, connection: Connection) -> SizeLimit:
        """The server is asked once for each connection, which keeps what it began with."""
        found: SizeLimit | None = connection.info.get(_SIZE_LIMIT)
        if found is None:
            most = connection.exec_driver_sql("SELECT @@SESSION.max_allowed_packet").scalar_one()
            found = connection.info[_SIZE_LIMIT] = max_allowed_packet(int(most))
        self.known_limit = found
        return found

    def begin(self, connection: Connection, idle_limit: float | None = None) -> None:
        """Ask for READ COMMITTED, for this transaction only; after `idle_limit` idle seconds the
        server ends the session.

        SQLAlchemy's `isolation_level` option sets the session's level at every checkout and back at
        every return, each with a COMMIT: five round trips where this is one.
        """
        if idle_limit is not None:
            name = _of_server(connection, "begin_limited")
            version: Any = connection.dialect.server_version_info
            if is_mariadb(connection.dialect) and version[:2] < _NEW_NAME:
                name += "_10"
            connection.info[UNRESTORED] = True
            connection.execute(self.sql[name], {"limit": _whole_seconds(idle_limit)})
        elif connection.default_isolation_level != "READ COMMITTED":
            connection.execute(self.sql["read_committed"])
        # A driver in autocommit mode, of which SQLAlchemy does not know, would commit each
        # statement.
        driver: Any = connection.connection.driver_connection
        if driver.get_autocommit():
            connection.execute(self.sql["start"])
        refuse_plain_backslashes(driver)

    def allow_idling(self, connection: Connection, seconds: float) -> None:
        """One statement."""
        name = _of_server(connection, "allow_idling")
        connection.execute(self.sql[name], {"limit": _whole_seconds(seconds)})

    def restore(self, connection: Connection) -> None:
        """One statement."""
        connection.execute(self.sql[_of_server(connection, "restore")])
        del connection.info[UNRESTORED]

    @contextmanager
    def lock_wait_limit(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Set for the session, which has it from the pool, and back."""
        connection.execute(self.sql["lock_wait"], {"seconds": max(1, int(seconds))})
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.execute(self.sql["lock_wait_again"])

    def delete_binds(self, ids: Sequence[int]) -> dict[str, Any]:
        """The ids as one JSON array."""
        return {"ids": json.dumps(list(ids))}

    def bind_time(self, value: datetime) -> datetime:
        """UTC without a zone, as DATETIME(6) holds it."""
        return utc(value).replace(tzinfo=None)

    def insert_plain(self, connection: Connection, rows: Sequence[NewMessage]) -> list[int]:
        """One multi-row INSERT; MariaDB tells the ids, MySQL the first of them and the step.

        MariaDB wants SELECT on all columns for RETURNING; who only may insert is told the first id
        there, too. The step is read each time: a cluster changes it when a node joins. Source:
        MySQL manual, "AUTO_INCREMENT Handling in InnoDB": a simple insert gets its ids at once.
        """
        refuse_plain_backslashes(connection.connection.driver_connection)
        if not (is_mariadb(connection.dialect) and self._may_return):
            return self._insert_told_the_first(connection, rows)
        try:
            statement = self.insert_statement(len(rows), "RETURNING id")
            return list(connection.execute(statement, self.insert_binds(rows)).scalars())
        except DBAPIError as error:
            if error.orig is None or error.orig.args[:1] not in {(code,) for code in SELECT_DENIED}:
                raise
        ids = self._insert_told_the_first(connection, rows)
        self._may_return = False
        return ids

    def _insert_told_the_first(
        self, connection: Connection, rows: Sequence[NewMessage]
    ) -> list[int]:
        first: int = connection.execute(
            self.insert_statement(len(rows)), self.insert_binds(rows)
        ).lastrowid
        step = 1 if len(rows) == 1 else connection.execute(self.sql["id_step"]).scalar_one()
        return [first + n * step for n in range(len(rows))]

    def insert_dedup(self, connection: Connection, row: NewMessage) -> int | None:
        """InnoDB undoes only the failed statement, so a duplicate leaves the transaction usable."""
        try:
            return self.insert_plain(connection, [row])[0]
        except IntegrityError as error:
            if error.orig is not None and error.orig.args[:1] == (DUPLICATE_ENTRY,):
                return None
            raise

    def wait_for_dedup_ids(self, connection: Connection, rows: Sequence[NewMessage]) -> None:
        """Read them with a lock on the row alone.

        An INSERT that waits for a duplicate also locks the gap before it. All messages of that
        queue without a dedup_id belong in this gap, so no transaction could publish them until the
        wait is over.
        """
        for row in rows:
            if row.dedup_id is not None:
                binds = {"queue": row.queue, "dedup_id": row.dedup_id}
                connection.execute(self.sql["dedup_id"], binds)

    def claiming(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Work[Claimed]:
        """A statement for each of a few pairs; of many, for the first and for those that have many
        rows.
        """

        def claim(connection: Connection) -> Claimed:
            def lock_pair(pair: ReadyPair, most: int) -> Claimed:
                return self._lock_pair(connection, pair, most, token, suspicion)

            found = PairsClaim(self, limit, token, suspicion, lock_pair).run(connection, pairs)
            starting = found if prefetch is None else note_prefetched(found, prefetch)
            self.take(connection, starting, lease, token)
            if prefetch is not None:
                self.take(connection, found[prefetch.after :], prefetch.lease, token)
            return found

        return claim

    def _lock_pair(
        self,
        connection: Connection,
        pair: ReadyPair,
        limit: int,
        token: UUID,
        suspicion: Suspicion | None,
    ) -> Claimed:
        """Lock up to `limit` due rows of `pair`, in their order; what is locked elsewhere is
        skipped.
        """
        binds: dict[str, Any] = {"queue": pair.queue, "priority": pair.priority, "limit": limit}
        if suspicion is None or suspicion.told:
            return self.find(connection, "claim", binds, token, suspicion)
        return self.find(connection, "claim_others", binds | suspicion.binds, token, suspicion)

    def find(
        self,
        connection: Connection,
        statement: str,
        binds: dict[str, Any],
        token: UUID,
        suspicion: Suspicion | None,
    ) -> Claimed:
        """Lock and read."""
        found = self.claimed(connection.execute(self.sql[statement], binds), token)
        return Claimed.without_suspects(found, suspicion)

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """As everywhere; times of first deliveries, which are dates as nearly always, wait for who
        looks.
        """
        make: Any = ClaimedMessage  # of as many values as there are columns
        return [
            make(r[0], r[1], load_payload(r[2]), *r[3:14], r[14], token, r[15])
            if r[9].__class__ is datetime
            and r[10].__class__ is datetime
            and r[11] is r[12] is r[13] is None
            else self._claimed_row(r, token)
            for r in rows
        ]

    def take(
        self, connection: Connection, found: Sequence[ClaimedMessage], lease: float, token: UUID
    ) -> None:
        """Lease by id."""
        if not found:
            return
        now = found[0].acquired_at
        binds = {
            "now": now.replace(tzinfo=None),
            "token": token.hex,
            "lease": round(lease * 1_000_000),
        }
        for part in chunks(sorted(m.id for m in found)):
            connection.execute(self.sql["claim_update"], {**binds, "ids": list(part)})
        for message in found:
            message.acquired = now
            message.deliveries_count += 1

    def release_stuck(
        self,
        connection: Connection,
        queues: Sequence[str],
        limit: int,
        before: datetime | None = None,
    ) -> int:
        """Lock what is free, then update by id."""
        ids: list[int] = []
        moment = None if before is None else self.bind_time(before)
        for names in chunks(queues):
            if len(ids) < limit:
                binds = {"queues": list(names), "limit": limit - len(ids), "before": moment}
                ids += connection.execute(self.sql["stuck"], binds).scalars()
        for part in chunks(sorted(ids)):
            connection.execute(self.sql["release_stuck"], {"ids": list(part)})
        return len(ids)

    def lease_ends_in(self, connection: Connection, queues: Sequence[str]) -> float | None:
        """Reads what is leased in the index, and nothing else."""
        found: list[float] = []
        for names in chunks(queues):
            ends_in = connection.execute(
                self.sql["lease_ends_in"], {"queues": list(names)}
            ).scalar_one()
            found += [] if ends_in is None else [float(ends_in)]
        return min(found, default=None)

    def release_claim(self, connection: Connection, queues: Sequence[str], token: UUID) -> int:
        """Find what the token holds; then lock it and give it back, by id."""
        found: list[int] = []
        for names in chunks(queues):
            binds = {"queues": list(names), "token": token.hex}
            found += connection.execute(self.sql["claimed_by"], binds).scalars()
        ids = self.lock(connection, [(each, token) for each in found])
        for part in chunks(sorted(ids)):
            for statement in ("uncharge", "release_stuck"):
                connection.execute(self.sql[statement], {"ids": list(part)})
        return len(ids)


class MariadbDialect(MysqlDialect):
    """The same under the name that `mariadb+` URLs give."""

    name = "mariadb"


def _of_server(connection: Connection, name: str) -> str:
    return f"{name}_mariadb" if is_mariadb(connection.dialect) else name


def _whole_seconds(limit: float) -> int:
    return min(max(1, ceil(limit)), MOST_SECONDS)


# Settings of servers and connections that are refused.

_SETTINGS = "SELECT @@log_bin, @@binlog_format, @@sql_select_limit, @@sql_safe_updates"
NO_LIMIT = 2**64 - 1
"""The default of sql_select_limit."""
_ANOTHER = (
    "set another one for the engine's connections: "
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
            "sql_mode has 'NO_BACKSLASH_ESCAPES', under which this driver cannot send bytes: a "
            "quote in a body would end the literal, and the rest would run as SQL. Take it out of "
            "the server's sql_mode, or " + _ANOTHER.format("sql_mode=...")
        )
        raise SetupError(msg)


def refuse_settings(connection: Connection) -> None:
    """Refuse a server or a session with settings under which the broker's statements fail, or do a
    part of what they say.

    Raises:
        SetupError: the binary log holds statements, which READ COMMITTED cannot write; a SELECT
            gives a part of its rows; or MariaDB refuses each settlement.
    """
    log, log_format, most_rows, safe = connection.execute(text(_SETTINGS)).one()
    if log and str(log_format).upper() == "STATEMENT":
        msg = (
            "binlog_format is 'STATEMENT', but the broker writes under READ COMMITTED, which needs "
            "'MIXED' or 'ROW'; set binlog_format=ROW on the server"
        )
        raise SetupError(msg)
    if int(most_rows) < NO_LIMIT:
        msg = (
            f"sql_select_limit is {most_rows}, so a statement would read the first {most_rows} of "
            "its rows and take the others for lost; "
            + _ANOTHER.format(f"sql_select_limit={NO_LIMIT}")
        )
        raise SetupError(msg)
    # MySQL looks at the key of the table that loses rows; MariaDB at all tables of the statement,
    # and the list of ids is one that has no key.
    if int(safe) and is_mariadb(connection.dialect):
        msg = (
            "sql_safe_updates is on, under which MariaDB refuses to settle messages, though the "
            "statement names them by their ids; " + _ANOTHER.format("sql_safe_updates=0")
        )
        raise SetupError(msg)
