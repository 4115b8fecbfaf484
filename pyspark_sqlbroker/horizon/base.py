"""The horizon, and the query that each database's module answers with a horizon."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import Connection

from pyspark_sqlbroker.databases import ArchiveDatabase

Source = Literal["transactions", "primary", "safety lag"]


@dataclass(frozen=True)
class Horizon:
    """The time up to which the archive is complete.

    Attributes:
        time: Aware, UTC. Every row archived before it is committed, and none will be added.
        source: "transactions": the running transactions were queried. "primary": the same on the
            primary, and the standby has replayed up to there. "safety lag": transactions cannot be
            seen, and none is assumed to last longer than the lag.
        detail: The reason in one sentence, for logs and people.
    """

    time: datetime
    source: Source
    detail: str


@dataclass(frozen=True)
class HorizonQuery:
    """Parameters of the search for a horizon.

    Attributes:
        database: The database's dialect.
        connection: A connection in autocommit.
        lag: Longest duration of a transaction that cannot be seen.
        margin: Longest time from the start of a statement until the server shows it.
        max_wait: Maximum seconds to wait for a standby, a lock or a refreshed list.
        sleep: Sleeps for a number of seconds.
    """

    database: ArchiveDatabase
    connection: Connection
    lag: timedelta
    margin: timedelta
    max_wait: float
    sleep: Callable[[float], object] = time.sleep

    def create_lagging(self, clock: datetime, reason: str) -> Horizon:
        """Return a horizon `lag` before `clock`, for a database whose transactions cannot be seen.

        It holds only if no transaction lasts longer than the lag.
        """
        detail = f"{reason}, so rows of the last {format_seconds(self.lag)} are skipped for now"
        return Horizon(clock - self.lag, "safety lag", detail)


def get_earlier(first: Horizon, second: Horizon) -> Horizon:
    """Return the earlier of two horizons, before which both say that the archive is complete."""
    return min(first, second, key=lambda horizon: horizon.time)


def format_seconds(duration: timedelta) -> str:
    """Format a duration in seconds."""
    return f"{duration.total_seconds():g} s"
