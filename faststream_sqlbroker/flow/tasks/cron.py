"""Fire times of schedules: cron expressions in a time zone, and missed fire times."""

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from faststream_sqlbroker.core.status import MissedRuns
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import find_zone
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError

ON_TIME = timedelta(seconds=60)
"""A fire time counts as missed when it is this late: a deployment or a failover is no reason to
skip one.
"""
MAX_MISSED = 1_000
"""Maximum fire times that are published after a time without a process (missed="all"): the latest
ones.
"""
MAX_EXPRESSION_LENGTH = 255
"""Characters; the length of the column that stores the expression."""

_SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)
_TICK = timedelta(microseconds=1)
"""Resolution of the databases' timestamps: the smallest step from one to the next."""


class Cron:
    """A cron expression in a time zone; two are equal if their texts are."""

    def __init__(self, expression: str, tz: str) -> None:
        """Parse the expression and the time zone.

        An expression is accepted if cronsim can compute a fire time with it. For some texts cronsim
        raises other errors than its own.

        Raises:
            SetupError: the expression is invalid or never comes true, or the zone is unknown.
            MissingExtraError: cronsim is not installed.
        """
        self._simulate, refusal = _import_cronsim()
        if not isinstance(expression, str) or len(expression) > MAX_EXPRESSION_LENGTH:
            raise SetupError(
                f"invalid cron expression {format_value(expression)} of a schedule: {_EXPRESSION}"
            )
        self.expression = " ".join(expression.split())
        self.tz = tz
        self.zone = find_zone(tz, "a schedule's")
        try:
            is_empty = self.find_next(_SOME_DAY) is None
        except (
            refusal,
            ArithmeticError,
            AssertionError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise SetupError(
                f"invalid cron expression {format_value(expression)} of a schedule ({error}): "
                f"{_EXPRESSION}"
            ) from error
        if is_empty:
            raise SetupError(
                f"cron expression {format_value(expression)} of a schedule never fires: "
                f"{_EXPRESSION}"
            )

    @property
    def definition(self) -> tuple[str, str]:
        """Expression and time zone."""
        return self.expression, self.tz

    def find_next(self, timestamp: datetime) -> datetime | None:
        """Return the first fire time after `timestamp` (UTC); None if 50 years have none."""
        return next(self._iter_fire_times(timestamp), None)

    def _iter_fire_times(self, timestamp: datetime) -> Iterator[datetime]:
        """Yield the fire times after `timestamp`, ascending, in UTC.

        cronsim computes in local time, where a clock change skips or repeats an hour.
        """
        for local_time in self._simulate(self.expression, timestamp.astimezone(self.zone)):
            # In the hour that a clock change repeats, the simulation may return to the first pass:
            # fire times that are not later are skipped.
            fire_at = local_time.astimezone(timezone.utc)
            if fire_at > timestamp:
                timestamp = fire_at
                yield fire_at

    def find_latest(self, first: datetime, until: datetime, limit: int) -> list[datetime]:
        """Return the latest `limit` fire times from `first` (included) to `until`, ascending.

        Fire times can only be computed forwards. So the search begins with a short span before the
        end, and makes it longer until there are enough: a long outage costs little more.
        """
        span = ON_TIME
        while True:
            start = max(first, until - span)
            fire_times = deque([first] if start == first else [], limit)
            for fire_at in self._iter_fire_times(start):
                if fire_at > until:
                    break
                fire_times.append(fire_at)
            if start == first or len(fire_times) >= limit:
                return list(fire_times)
            span *= 4

    def find_due(self, first: datetime, until: datetime, missed: MissedRuns) -> list[datetime]:
        """Return the fire times to publish from `first` (included) to `until`, in order.

        A fire time is missed if it is a minute late (`ON_TIME`), because no process ran. With
        `missed` "all", missed times are published too; with "skip" none; else the latest one, but
        only if no fire time is on time.
        """
        if missed == "all":
            return self.find_latest(first, until, MAX_MISSED)
        on_time = until - ON_TIME + _TICK  # fire times from here on are not missed
        if first >= on_time:
            return self.find_latest(first, until, MAX_MISSED)
        fire_times = [
            fire_at
            for fire_at in self.find_latest(first, until, round(ON_TIME.total_seconds()))
            if fire_at >= on_time
        ]
        return fire_times if fire_times or missed == "skip" else self.find_latest(first, until, 1)


_EXPRESSION = (
    'use five fields, minute hour day-of-month month day-of-week, such as "0 3 * * *" for every '
    "day at 03:00, or six fields with the second first"
)


def _import_cronsim() -> tuple[Any, type[Exception]]:
    """Import cronsim, an optional dependency; return the class and the error for bad expressions.

    Imported late, so that only brokers with schedules need it.
    """
    try:
        from cronsim import CronSim, CronSimError  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = "schedules need cronsim: pip install 'sqlbroker[schedule]'"
        raise MissingExtraError(msg) from error
    return CronSim, CronSimError
