"""The horizon of a PostgreSQL standby, which sees no transaction of its primary."""

import time

from sqlalchemy import URL, Connection

from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.exceptions import SetupError, TransientStoreError
from pyspark_sqlbroker.address import parse_address
from pyspark_sqlbroker.databases import database_of
from pyspark_sqlbroker.horizon import postgresql
from pyspark_sqlbroker.horizon.base import Horizon, Question

RECOVERING = "SELECT pg_is_in_recovery()"
IDENTITY = "SELECT system_identifier || '/' || current_database() FROM pg_control_system()"
# The insert position may lie behind a page header that is written only with the next record, so
# that the standby would never reach it. No record ends inside a page header: the start of the page
# serves as well.
POSITION = """
SELECT lsn - CASE WHEN mod(lsn - '0/0', 8192) <= 40 THEN mod(lsn - '0/0', 8192) ELSE 0 END
FROM pg_current_wal_insert_lsn() lsn
"""
STEP = 0.05
"""Seconds between two looks at how far the standby has replayed."""


def find(question: Question, primary: str | URL | None, patience: float) -> Horizon:
    """The primary's horizon once it has been replayed here; else a lag behind what was replayed."""
    if primary is None:
        return _replayed(question)
    there = database_of(parse_address(primary))
    if there.kind != "postgresql":
        raise SetupError(
            f"primary is a {there.kind} database: give the primary of this PostgreSQL standby"
        )
    with there.connect() as connection:
        if there.scalar(connection, RECOVERING):
            raise SetupError("primary is a standby itself: give the server that it follows")
        if there.scalar(connection, IDENTITY) != question.database.scalar(
            question.connection, IDENTITY
        ):
            raise SetupError(
                "primary is another cluster or database than the standby: give the one that it "
                "follows"
            )
        found = postgresql.find(Question(there, connection, question.lag, question.margin))
        position = str(there.scalar(connection, POSITION))
    _wait(question.connection, question, position, patience)
    source = "primary" if found.source == "transactions" else found.source
    return Horizon(found.moment, source, f"taken on the primary and replayed here: {found.detail}")


def _wait(connection: Connection, question: Question, position: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    statement = f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
    while not question.database.scalar(connection, statement):
        if time.monotonic() > deadline:
            raise TransientStoreError(
                f"the standby has not replayed the primary's position {position} within "
                f"{patience:g} s: see whether its replay is paused or behind, or leave primary= "
                "out to go by the safety lag"
            )
        time.sleep(STEP)


def _replayed(question: Question) -> Horizon:
    database = question.database
    connection = question.connection
    replayed = database.scalar(
        connection, f"SELECT {database.microseconds('pg_last_xact_replay_timestamp()')}"
    )
    if replayed is None:
        raise TransientStoreError(
            "this standby has replayed no transaction since it started, so its position is "
            "unknown: give primary=, or try again after the primary's next commit"
        )
    upto = min(database.now(connection), from_microseconds(replayed))
    why = (
        "this is a standby without primary=, which has replayed what was committed by "
        f"{upto.isoformat()}"
    )
    return question.lagging(upto, why)
