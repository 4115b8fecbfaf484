"""The horizon of SQLite, which has one writer at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from pyspark_sqlbroker.horizon.base import Horizon, Question

LONGEST_WAIT = 5.0
"""Seconds to wait for another writer's lock."""


def find(question: Question, patience: float) -> Horizon:
    """Take the write lock for an instant: no writer is active then, and later ones write later
    times.
    """
    connection = question.connection
    database = question.database
    with _waiting(connection, min(patience, LONGEST_WAIT)):
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except OperationalError as error:
            return question.lagging(
                database.now(connection), f"a writer has its lock ({error.orig})"
            )
    try:
        # On a read-only file BEGIN IMMEDIATE succeeds without a lock, and only a write fails. This
        # write changes nothing.
        version = int(database.scalar(connection, "PRAGMA user_version"))
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")
        clock = database.now(connection)
    except OperationalError as error:
        return question.lagging(
            database.now(connection), f"the file cannot be locked ({error.orig})"
        )
    finally:
        connection.exec_driver_sql("ROLLBACK")
    return Horizon(
        clock, "transactions", "no writer was under way: its lock was taken for an instant"
    )


@contextmanager
def _waiting(connection: Connection, seconds: float) -> Iterator[None]:
    before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")
