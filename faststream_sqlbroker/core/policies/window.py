"""Window: messages start only at certain times of the day, on certain days, in a time zone."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from faststream_sqlbroker.core.moments import from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])")
_WRITTEN = re.compile(r"Window\((\d\d:\d\d)-(\d\d:\d\d) ([^,)]+)(?:, days=([a-z,]+))?\)")
_MIDNIGHT = time(0, 0)
_SEARCHED = 400
"""Days that are searched for the next opening; every day of the week comes, also past a gap of summer time."""
_LONGEST = timedelta(days=9)
"""More than a window stays open that closes at all: a whole week but for one day, or one minute."""


@dataclass(frozen=True, init=False)
class Window:
    """Messages start from `start` until before `end`, each day of `days`; outside of it they wait unclaimed.

    Times are those of the clock on the wall in `tz`. Where summer time begins, a start in the skipped hour is the
    moment of the change; where it ends, the repeated hour counts from its first and until its last pass. An end that is
    earlier than the start is on the next day: Window("22:00", "06:00", days=["fri"]) closes on Saturday morning.
    """

    start: time
    end: time
    """00:00 is the end of the day."""
    tz: str
    days: frozenset[int]
    """0 is Monday: the days on which it opens."""
    _last: tuple[int, int, int] = field(default=(0, 0, 0), init=False, repr=False, compare=False)
    """From when the span that was found last is the answer, and that: every claim asks."""

    def __init__(
        self, start: str | time, end: str | time, *, tz: str = "UTC", days: Iterable[str] | None = None
    ) -> None:
        """Say when.

        Args:
            start: "HH:MM", or a datetime.time without a zone.
            end: The same; "24:00" is the end of the day.
            tz: A name of the IANA database, such as "Europe/Berlin".
            days: Days on which it opens, of mon, tue, wed, thu, fri, sat, sun; None is all.

        Raises:
            SetupError: a time that is none, an unknown zone or day, or a window that never opens or never closes.
        """
        begins, ends = _parse("start", start), _parse("end", end)
        if begins == ends:
            raise SetupError(
                f"Window({start!r}, {end!r}) opens and closes at the same moment, so it never opens: choose "
                'different times, "00:00" and "24:00" for whole days, or leave the policy out'
            )
        try:
            ZoneInfo(tz)
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError) as error:
            raise SetupError(
                f'Window\'s tz cannot be {tz!r}: it is a name of the IANA database such as "UTC" or "Europe/Berlin"'
            ) from error
        object.__setattr__(self, "start", begins[1])
        object.__setattr__(self, "end", ends[1])
        object.__setattr__(self, "tz", tz)
        object.__setattr__(self, "days", _days(days))

    def __str__(self) -> str:
        days = "" if len(self.days) == len(DAYS) else f", days={','.join(DAYS[d] for d in sorted(self.days))}"
        return f"Window({self.start:%H:%M}-{self.end:%H:%M} {self.tz}{days})"

    @classmethod
    def read(cls, text: str) -> "Window | None":
        """The window that `str` has written as `text`; None for any other text."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            return None
        start, end, zone, days = match.groups()
        return cls(
            start, "24:00" if end == "00:00" else end, tz=zone, days=None if days is None else days.split(",")
        )

    def span(self, now: int) -> tuple[int, int]:
        """The span that is open at `now`, or the next one: when it opens and closes (closing excluded).

        Times are microseconds since 1970, UTC.
        """
        since, opens, closes = self._last
        if since <= now < closes:
            return opens, closes
        zone = ZoneInfo(self.tz)
        today = from_microseconds(now).astimezone(zone).date()
        for opens, closes in self._spans(today - _LONGEST, zone):
            if closes > now:
                object.__setattr__(self, "_last", (now, opens, closes))
                return opens, closes
        msg = f"{self} does not open within {_SEARCHED} days"
        raise SetupError(msg)

    def _spans(self, day: date, zone: ZoneInfo) -> Iterator[tuple[int, int]]:
        """The openings from `day` on; such as touch each other are one."""
        open_at = close_at = None
        for n in range(_SEARCHED):
            at = day + timedelta(days=n)
            if at.weekday() not in self.days:
                continue
            opens = _moment(at, self.start, zone, fold=0)
            closes = _moment(at + timedelta(days=int(self.end <= self.start)), self.end, zone, fold=1)
            if closes <= opens:
                continue  # summer time has swallowed it
            if close_at is not None and open_at is not None and opens > close_at:
                yield open_at, close_at
                open_at = None
            open_at, close_at = opens if open_at is None else open_at, closes
        if open_at is not None and close_at is not None:
            yield open_at, close_at


def _moment(day: date, at: time, zone: ZoneInfo, *, fold: int) -> int:
    """Microseconds since 1970 of a time on the wall; one that is skipped is the moment of the change."""
    wall = datetime.combine(day, at, tzinfo=zone).replace(fold=fold)
    utc = wall.astimezone(timezone.utc)
    if utc.astimezone(zone).replace(tzinfo=None) != wall.replace(tzinfo=None):
        utc = _change(
            wall.replace(fold=1).astimezone(timezone.utc), wall.replace(fold=0).astimezone(timezone.utc), zone
        )
    return to_microseconds(utc)


def _change(low: datetime, high: datetime, zone: ZoneInfo) -> datetime:
    """The moment between `low` and `high` at which the zone's offset changes."""
    before = low.astimezone(zone).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) // 2
        if middle.astimezone(zone).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


def _parse(name: str, value: object) -> tuple[int, time]:
    """Minutes since midnight (24:00 is not 00:00's, but both are the same time), and the time."""
    if isinstance(value, time) and value.tzinfo is None:
        return value.hour * 60 + value.minute, value
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[1] == "24" and match[2] != "00"):
        raise SetupError(
            f'Window\'s {name} cannot be {value!r}: it is "HH:MM" from "00:00" to "24:00", or a datetime.time without '
            "a zone"
        )
    hour, minute = int(match[1]), int(match[2])
    if name == "start" and hour == 24:  # noqa: PLR2004 - hours of a day
        raise SetupError(f'Window\'s start cannot be {value!r}: use "00:00", the beginning of the day')
    return hour * 60 + minute, _MIDNIGHT if hour == 24 else time(hour, minute)  # noqa: PLR2004


def _days(days: Iterable[str] | None) -> frozenset[int]:
    if days is None:
        return frozenset(range(len(DAYS)))
    names = [days] if isinstance(days, str) else list(days)
    for name in names:
        if name not in DAYS:
            raise SetupError(f"Window's days must be of {', '.join(DAYS)}, got {name!r}")
    if not names:
        raise SetupError(
            "Window's days is empty, so it never opens: name at least one day, or leave days out for all"
        )
    return frozenset(DAYS.index(name) for name in names)
