"""What the broker asks of a MySQL or MariaDB server, and what it sets in a session."""

from math import ceil
from typing import Any

from sqlalchemy import Connection, text

from faststream_sqlbroker.database.operations import UNRESTORED
from faststream_sqlbroker.database.parts.sizes import SizeLimit, max_allowed_packet
from faststream_sqlbroker.database.statements import Statements
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.schema.types import is_mariadb

MOST_SECONDS = 31_536_000
"""The longest value of wait_timeout and idle_transaction_timeout: a year."""

_SIZE_LIMIT = "sqlbroker_size_limit"

_NEW_NAME = (11, 1)
"""The MariaDB that has renamed the variable of the isolation level to MySQL's name; it warns of the
old one."""


def begin_limited(connection: Connection, sql: Statements, idle_limit: float) -> None:
    """Set READ COMMITTED; after `idle_limit` idle seconds the server ends the session."""
    name = _of_server(connection, "begin_limited")
    version: Any = connection.dialect.server_version_info
    if is_mariadb(connection.dialect) and version[:2] < _NEW_NAME:
        name += "_10"
    connection.info[UNRESTORED] = True
    connection.execute(sql[name], {"limit": _whole_seconds(idle_limit)})


def size_limit(connection: Connection) -> SizeLimit:
    """The longest statement that the server takes; it is asked once for each connection."""
    found: SizeLimit | None = connection.info.get(_SIZE_LIMIT)
    if found is None:
        most = connection.exec_driver_sql("SELECT @@SESSION.max_allowed_packet").scalar_one()
        found = connection.info[_SIZE_LIMIT] = max_allowed_packet(int(most))
    return found


def allow_idling(connection: Connection, sql: Statements, seconds: float) -> None:
    """Change the idle limit of a transaction that was begun with one."""
    connection.execute(
        sql[_of_server(connection, "allow_idling")], {"limit": _whole_seconds(seconds)}
    )


def restore(connection: Connection, sql: Statements) -> None:
    """Give the session the application's idle limit back."""
    connection.execute(sql[_of_server(connection, "restore")])
    del connection.info[UNRESTORED]


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
