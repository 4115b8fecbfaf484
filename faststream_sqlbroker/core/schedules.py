"""A schedule as the database remembers it. Times are the database's (aware, UTC)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

Missed = Literal["one", "all", "skip"]
MISSED: tuple[Missed, ...] = ("one", "all", "skip")


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule of the fleet, as its processes left it in the database."""

    name: str
    expression: str
    tz: str
    last_fire_at: datetime | None
    """The newest fire time whose message was published; None: none was."""
    next_fire_at: datetime | None
    """The next fire time; one in the past is late. None: there is none within 50 years."""
    failures_count: int
    """How often in a row the function of the schedule has failed for that fire time."""


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """What is kept of a schedule between two fire times."""

    expression: str
    tz: str
    next_at: datetime | None
    last_at: datetime | None = None
    decided_at: datetime | None = None
    """Until when fire times are being published; None: nothing has begun."""
    failures_count: int = 0
    becomes: tuple[str, str] | None = None
    """The expression and zone to go on with when that has been done."""

    def fired(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """The fire time `at` was published (None: there was nothing to publish); the same work goes on at `next_at`."""
        return replace(self, last_at=at or self.last_at, next_at=next_at, failures_count=0)

    def ended(self, at: datetime | None, next_at: datetime | None) -> "ScheduleState":
        """As `fired`, and it was the last one that was due."""
        expression, tz = self.definition_to_come
        return ScheduleState(expression, tz, next_at, at or self.last_at)

    @property
    def definition_to_come(self) -> tuple[str, str]:
        """The expression and zone that decide when it fires next."""
        return self.becomes or (self.expression, self.tz)

    def listed(self, name: str) -> Schedule:
        """As operators see it."""
        return Schedule(
            name, self.expression, self.tz, self.last_at, self.next_at, self.failures_count
        )

    def dump(self) -> dict[str, Any]:
        """As JSON; `load_state` reads it."""
        return {
            "expression": self.expression,
            "tz": self.tz,
            "next_at": _text(self.next_at),
            "last_at": _text(self.last_at),
            "decided_at": _text(self.decided_at),
            "failures_count": self.failures_count,
            "becomes": None if self.becomes is None else list(self.becomes),
        }


def load_state(info: Mapping[str, Any] | None) -> ScheduleState | None:
    """A state as `dump` wrote it; None for a row that has none yet, or one that cannot be read."""
    try:
        given = dict(info or {})
        becomes = given.get("becomes")
        return ScheduleState(
            str(given["expression"]),
            str(given["tz"]),
            _time(given["next_at"]),
            _time(given.get("last_at")),
            _time(given.get("decided_at")),
            int(given.get("failures_count", 0)),
            None if becomes is None else (str(becomes[0]), str(becomes[1])),
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _text(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(timezone.utc).isoformat()


def _time(value: str | None) -> datetime | None:
    return None if value is None else datetime.fromisoformat(value).astimezone(timezone.utc)
