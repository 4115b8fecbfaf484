"""The horizon, and the question that each database's module answers with one."""

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
    """Up to where the archive is complete.

    Attributes:
        moment: Aware, UTC. Every row archived before it is committed, and none will be added.
        source: "transactions": the running ones were looked at. "primary": the same on the primary,
            and the standby has replayed up to there. "safety lag": transactions cannot be seen, and
            none is assumed to last longer than the lag.
        detail: Why, in one sentence for logs and people.
    """

    moment: datetime
    source: Source
    detail: str


@dataclass(frozen=True)
class Question:
    """What is asked of a database.

    Attributes:
        database: Its SQL.
        connection: In autocommit.
        lag: How long a transaction may last that cannot be seen.
        margin: How long a server may take from the start of a statement until the statement can be
            seen.
        patience: Seconds to wait at most for what may hold the answer up.
        sleep: Waits so many seconds.
    """

    database: ArchiveDatabase
    connection: Connection
    lag: timedelta
    margin: timedelta
    patience: float
    sleep: Callable[[float], object] = time.sleep

    def lagging(self, clock: datetime, why: str) -> Horizon:
        """The horizon where transactions cannot be seen."""
        detail = f"{why}, so rows of the last {seconds(self.lag)} are left for later"
        return Horizon(clock - self.lag, "safety lag", detail)


def earlier(one: Horizon, other: Horizon) -> Horizon:
    """The horizon of the earlier moment."""
    return min(one, other, key=lambda horizon: horizon.moment)


def seconds(length: timedelta) -> str:
    """`length` for people."""
    return f"{length.total_seconds():g} s"
