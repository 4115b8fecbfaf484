"""What the broker asks of a MySQL or MariaDB server, and what it sets in a session."""

from math import ceil
from typing import Any

from sqlalchemy import Connection, TextClause, text

from faststream_sqlbroker.dialects.base import UNRESTORED
from faststream_sqlbroker.dialects.sizes import SizeLimit, max_allowed_packet
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.types import is_mariadb

MOST_SECONDS = 31_536_000
"""Of wait_timeout and idle_transaction_timeout: a year."""

_SIZE_LIMIT = "sqlbroker_size_limit"

# `was` is the application's own limit, which is kept if it is less; 0 is none in MariaDB.
_LEAST_MARIADB = "CASE {was} WHEN 0 THEN :limit ELSE LEAST({was}, :limit) END"
_LEAST_MYSQL = "CAST(LEAST({was}, :limit) AS UNSIGNED)"
_MARIADB = "@@SESSION.idle_transaction_timeout"
_MYSQL = "@@SESSION.wait_timeout"


def _set(variable: str, least: str, isolation: str) -> str:
    limit = least.replace("{was}", variable)
    return (
        f"SET @sqlbroker_idle = {variable},\n  {variable} = {limit},\n"
        f"  @@{isolation} = 'READ-COMMITTED'"
    )


STATEMENTS = {
    # Its limit is that of all idling, not only within transactions.
    "begin_limited": _set(_MYSQL, _LEAST_MYSQL, "transaction_isolation"),
    "begin_limited_mariadb": _set(_MARIADB, _LEAST_MARIADB, "transaction_isolation"),
    # 11.1 has given the variable MySQL's name, and warns of the old one.
    "begin_limited_mariadb_10": _set(_MARIADB, _LEAST_MARIADB, "tx_isolation"),
    "allow_idling": f"SET {_MYSQL} = " + _LEAST_MYSQL.replace("{was}", "@sqlbroker_idle"),
    "allow_idling_mariadb": f"SET {_MARIADB} = "
    + _LEAST_MARIADB.replace("{was}", "@sqlbroker_idle"),
    "restore": f"SET {_MYSQL} = @sqlbroker_idle",
    "restore_mariadb": f"SET {_MARIADB} = @sqlbroker_idle",
}
_NEW_NAME = (11, 1)


def begin_limited(connection: Connection, sql: dict[str, TextClause], idle_limit: float) -> None:
    """Ask for READ COMMITTED, and that the server ends the session if it idles for `idle_limit`
    seconds.
    """
    name = _of_server(connection, "begin_limited")
    version: Any = connection.dialect.server_version_info
    if is_mariadb(connection.dialect) and version[:2] < _NEW_NAME:
        name += "_10"
    connection.info[UNRESTORED] = True
    connection.execute(sql[name], {"limit": _whole_seconds(idle_limit)})


def size_limit(connection: Connection) -> SizeLimit:
    """What a packet may have; the server is asked at the first time."""
    found: SizeLimit | None = connection.info.get(_SIZE_LIMIT)
    if found is None:
        most = connection.exec_driver_sql("SELECT @@SESSION.max_allowed_packet").scalar_one()
        found = connection.info[_SIZE_LIMIT] = max_allowed_packet(int(most))
    return found


def allow_idling(connection: Connection, sql: dict[str, TextClause], seconds: float) -> None:
    """Set the limit anew, in the same transaction."""
    connection.execute(
        sql[_of_server(connection, "allow_idling")], {"limit": _whole_seconds(seconds)}
    )


def restore(connection: Connection, sql: dict[str, TextClause]) -> None:
    """Put back what the application's limit was."""
    connection.execute(sql[_of_server(connection, "restore")])
    del connection.info[UNRESTORED]


def _of_server(connection: Connection, name: str) -> str:
    return f"{name}_mariadb" if is_mariadb(connection.dialect) else name


def _whole_seconds(limit: float) -> int:
    return min(max(1, ceil(limit)), MOST_SECONDS)


# What a MySQL or MariaDB server must not be, and its connections.

NO_BACKSLASH_ESCAPES = 0x200
"""Bit of the status that the server sends with its answers: a backslash in a literal is just that.
"""


def refuse_plain_backslashes(driver: Any) -> None:
    """Refuse a connection that would take a part of a body for SQL.

    aiomysql and asyncmy write bytes into the statement with backslashes before their quotes,
    whatever the server makes of them.

    Raises:
        SetupError: the connection's sql_mode has NO_BACKSLASH_ESCAPES.
    """
    # A synchronous driver of the application may not tell.
    if getattr(driver, "server_status", 0) & NO_BACKSLASH_ESCAPES:
        msg = (
            "sql_mode has 'NO_BACKSLASH_ESCAPES', under which this driver cannot send bytes: a "
            "quote in a body would end the literal, and the rest would run as SQL. Take it out of "
            "the server's sql_mode, or set another one for the engine's connections: "
            'create_async_engine(url, connect_args={"init_command": "SET SESSION sql_mode=..."})'
        )
        raise SetupError(msg)


def refuse_log_of_statements(connection: Connection) -> None:
    """Refuse a server whose binary log cannot hold what READ COMMITTED writes.

    Raises:
        SetupError: binlog_format is STATEMENT.
    """
    log = connection.execute(text("SELECT @@log_bin, @@binlog_format")).one()
    if log[0] and str(log[1]).upper() == "STATEMENT":
        msg = (
            "binlog_format is 'STATEMENT', but the broker writes under READ COMMITTED, which needs "
            "'MIXED' or 'ROW'; set binlog_format=ROW on the server"
        )
        raise SetupError(msg)
