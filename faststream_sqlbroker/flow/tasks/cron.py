"""When a schedule fires: cron expressions in a time zone, and what becomes of missed fire
times.
"""

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from faststream_sqlbroker.core.status import Missed
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import find_zone
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError

ON_TIME = timedelta(seconds=60)
"""A fire time is missed when it is this late: a deployment or a failover is no reason to leave one
out."""
MOST_MISSED = 1_000
"""Fire times that are published at most after a time without a process (missed="all"): the newest.
"""
LONGEST_EXPRESSION = 255
"""Characters; the length of the column that keeps it."""

_SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)
_TICK = timedelta(microseconds=1)
"""The databases' resolution of time: the first moment after another."""


class Cron:
    """A cron expression in a time zone; two are the same if their texts are."""

    def __init__(self, expression: str, tz: str) -> None:
        """Read both.

        Raises:
            SetupError: an expression that is none, or that never comes true; an unknown zone.
            MissingExtraError: cronsim is not installed.
        """
        self._simulate, refusal = _cronsim()
        if not isinstance(expression, str) or len(expression) > LONGEST_EXPRESSION:
            raise SetupError(
                f"a schedule's cron expression cannot be {short(expression)}: {_EXPRESSION}"
            )
        self.expression = " ".join(expression.split())
        self.tz = tz
        self.zone = find_zone(tz, "a schedule's")
        try:
            never = self.after(_SOME_DAY) is None
        except (
            refusal,
            ArithmeticError,
            AssertionError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise SetupError(
                f"a schedule's cron expression cannot be {short(expression)} ({error}): "
                f"{_EXPRESSION}"
            ) from error
        if never:
            raise SetupError(
                f"the cron expression {short(expression)} never comes true: {_EXPRESSION}"
            )

    @property
    def definition(self) -> tuple[str, str]:
        """Expression and zone."""
        return self.expression, self.tz

    def after(self, moment: datetime) -> datetime | None:
        """The first fire time after `moment` (UTC); None if there is none within 50 years."""
        return next(self._following(moment), None)

    def _following(self, moment: datetime) -> Iterator[datetime]:
        """The fire times after `moment`, rising."""
        for found in self._simulate(self.expression, moment.astimezone(self.zone)):
            # In an hour that summer time repeats the simulation may go back to its first pass.
            fire_at = found.astimezone(timezone.utc)
            if fire_at > moment:
                moment = fire_at
                yield fire_at

    def newest(self, first: datetime, until: datetime, most: int) -> list[datetime]:
        """The newest `most` fire times from `first`, which is one, to `until`, rising.

        Looked for from the end, so that a long time costs no more than a short one.
        """
        span = ON_TIME
        while True:
            begin = max(first, until - span)
            found = deque([first] if begin == first else [], most)
            for fire_at in self._following(begin):
                if fire_at > until:
                    break
                found.append(fire_at)
            if begin == first or len(found) >= most:
                return list(found)
            span *= 4

    def due(self, first: datetime, until: datetime, missed: Missed) -> list[datetime]:
        """What to publish of the fire times from `first`, itself one, to `until`; in order."""
        if missed == "all":
            return self.newest(first, until, MOST_MISSED)
        on_time = until - ON_TIME + _TICK
        if first >= on_time:
            return self.newest(first, until, MOST_MISSED)
        found = [
            at for at in self.newest(first, until, round(ON_TIME.total_seconds())) if at >= on_time
        ]
        return found if found or missed == "skip" else self.newest(first, until, 1)


_EXPRESSION = (
    'give five fields, minute hour day-of-month month day-of-week, such as "0 3 * * *" for every '
    "day at 03:00, or six with the second first"
)


def _cronsim() -> tuple[Any, type[Exception]]:
    try:
        from cronsim import CronSim, CronSimError  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = "schedules need cronsim: pip install 'sqlbroker[schedule]'"
        raise MissingExtraError(msg) from error
    return CronSim, CronSimError
