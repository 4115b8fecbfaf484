"""What a MySQL or MariaDB server must not be, and its connections."""

from typing import Any

from sqlalchemy import Connection, text

from faststream_sqlbroker.exceptions import SetupError

NO_BACKSLASH_ESCAPES = 0x200
"""Bit of the status that the server sends with its answers: a backslash in a literal is just that."""


def refuse_plain_backslashes(driver: Any) -> None:
    """Refuse a connection that would take a part of a body for SQL.

    aiomysql and asyncmy write bytes into the statement with backslashes before their quotes, whatever the server makes of them.

    Raises:
        SetupError: the connection's sql_mode has NO_BACKSLASH_ESCAPES.
    """
    # A synchronous driver of the application may not tell.
    if getattr(driver, "server_status", 0) & NO_BACKSLASH_ESCAPES:
        msg = (
            "sql_mode has 'NO_BACKSLASH_ESCAPES', under which this driver cannot send bytes: a quote in a body would end "
            "the literal, and the rest would run as SQL. Take it out of the server's sql_mode, or set another one for the "
            'engine\'s connections: create_async_engine(url, connect_args={"init_command": "SET SESSION sql_mode=..."})'
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
