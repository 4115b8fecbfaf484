"""Window: start messages only at certain times of certain days, in a time zone."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from zoneinfo import ZoneInfo

from faststream_sqlbroker.core.policies.argument_checks import set_attributes
from faststream_sqlbroker.core.times import TICK, find_zone, from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])")
_MIDNIGHT = time(0, 0)
_MAX_SEARCH_DAYS = 400
"""Days to search for the next opening. A window on one day of the week opens within two weeks, even
if a change of the clock skips an opening; the rest is reserve."""
_MAX_OPEN = timedelta(days=14)
"""More than any window stays open. A window that is closed on a single day of the week stays open
for 12 days if its zone skips that day."""


@dataclass(frozen=True, init=False)
class Window:
    """Messages start between `start` and `end` on the days `days`, and otherwise wait unclaimed.

    Times are those of the wall clock in `tz`, with their date. A window opens at the first moment
    at which that clock shows `start` or later, and closes at the moment from which it never again
    shows less than `end`. So in Europe/Berlin, where the hour from 02:00 is skipped in spring and
    comes twice in autumn:

    * In spring a start or an end within the skipped hour is the moment of the change. A window that
      lies completely within this hour does not open on that day.
    * In autumn a start at 02:00 or within the repeated hour is its first pass. An end within that
      hour is its second pass, and the window is open from its start all the time until then. An end
      at 02:00 is its first pass, an end at 03:00 comes once, after both.

    An end that is earlier than the start is on the next day; `days` are those on which a window
    opens: Window("22:00", "06:00", days=["fri"]) closes on Saturday morning. Window("00:00",
    "24:00") is a day from its first moment to its last, 23 or 25 hours where the clock is changed.
    Windows that touch or overlap are one.
    """

    start: time
    end: time
    """00:00 is the end of the day."""
    tz: str
    days: frozenset[int]
    """Days on which the window opens; 0 is Monday."""
    _last: tuple[int, int, int] = field(default=(0, 0, 0), init=False, repr=False, compare=False)
    """A cache, because every claim asks: the time from which the last span found is valid, and the
    two ends of the span. A race between threads is harmless: the tuple is replaced as a whole."""

    def __init__(
        self,
        start: str | time,
        end: str | time,
        *,
        tz: str = "UTC",
        days: Iterable[str] | None = None,
    ) -> None:
        """Set the times and days.

        Args:
            start: "HH:MM", or a datetime.time without a zone.
            end: The same; "24:00" is the end of the day.
            tz: A name of the IANA database, such as "Europe/Berlin".
            days: Days on which the window opens, of mon, tue, wed, thu, fri, sat, sun; None is all.

        Raises:
            SetupError: an invalid time, an unknown zone or day, or a window that never opens or
                never closes.
        """
        start_time = _parse_time("start", start)
        end_time = _parse_time("end", end)
        if start_time == end_time:
            raise SetupError(
                f"Window({start!r}, {end!r}) opens and closes at the same time, so it never "
                'opens: choose different times, "00:00" and "24:00" for whole days, or '
                "remove the policy"
            )
        find_zone(tz, "Window's")
        set_attributes(self, start=start_time[1], end=end_time[1], tz=tz, days=_parse_days(days))

    def __str__(self) -> str:
        days = (
            ""
            if len(self.days) == len(DAYS)
            else f", days={','.join(DAYS[d] for d in sorted(self.days))}"
        )
        return f"Window({_format_time(self.start)}-{_format_time(self.end)} {self.tz}{days})"

    def span(self, now: int) -> tuple[int, int]:
        """Return the opening and closing time of the window that is open at `now`, or the next.

        Times are microseconds since 1970, UTC. At the closing time the window is closed.
        """
        since, opens, closes = self._last
        if since <= now < closes:
            return opens, closes
        zone = ZoneInfo(self.tz)
        today = from_microseconds(now).astimezone(zone).date()
        for opens, closes in self._iter_spans(today - _MAX_OPEN, zone):
            if closes > now:
                object.__setattr__(self, "_last", (now, opens, closes))
                return opens, closes
        msg = f"{self} does not open within {_MAX_SEARCH_DAYS} days"
        raise SetupError(msg)

    def _iter_spans(self, day: date, zone: ZoneInfo) -> Iterator[tuple[int, int]]:
        """Yield the openings from `day` on; touching or overlapping openings are merged.

        As (opens, closes) in microseconds since 1970. The search ends after `_MAX_SEARCH_DAYS`.
        """
        open_at = close_at = None
        for n in range(_MAX_SEARCH_DAYS):
            at = day + timedelta(days=n)
            if at.weekday() not in self.days:
                continue
            next_day = timedelta(days=int(self.end <= self.start))
            opens = _find_opening(datetime.combine(at, self.start, tzinfo=zone))
            closes = _find_closing(datetime.combine(at + next_day, self.end, tzinfo=zone))
            if closes <= opens:
                continue  # the opening is within a skipped hour
            if close_at is not None and open_at is not None and opens > close_at:
                yield open_at, close_at
                open_at = None
            open_at, close_at = opens if open_at is None else open_at, closes
        if open_at is not None and close_at is not None:
            yield open_at, close_at


def _find_opening(wall: datetime) -> int:
    """Return the first time (microseconds since 1970) at which the clock shows `wall` or later.

    If a clock change skips `wall`, that is the moment of the change. If the clock shows `wall`
    twice, the first time counts.
    """
    first = wall.replace(fold=0).astimezone(timezone.utc)
    return to_microseconds(
        first if _to_wall_time(first, wall) == _to_naive(wall) else _find_clock_change(wall)
    )


def _find_closing(wall: datetime) -> int:
    """Return the time from which the clock never again shows less than `wall` (µs since 1970).

    So a window stays open during an hour that the clock repeats, and closes at the change if a
    clock change skips `wall`.
    """
    last = wall.replace(fold=1).astimezone(timezone.utc)
    if _to_wall_time(last, wall) != _to_naive(wall):
        return to_microseconds(_find_clock_change(wall))
    if _to_wall_time(last - TICK, wall) < _to_naive(wall):
        return to_microseconds(last)
    # The clock was set back exactly to `wall`, so it never shows less after the first pass.
    return to_microseconds(wall.replace(fold=0).astimezone(timezone.utc))


def _to_naive(wall: datetime) -> datetime:
    return wall.replace(tzinfo=None, fold=0)


def _to_wall_time(utc: datetime, wall: datetime) -> datetime:
    """Return the time that the clock of `wall` shows at `utc`."""
    return _to_naive(utc.astimezone(wall.tzinfo))


def _find_clock_change(wall: datetime) -> datetime:
    """Find the clock change that skips `wall` by bisection, to the second.

    The offsets before and after the change give the two bounds of the search.
    """
    low, high = (wall.replace(fold=fold).astimezone(timezone.utc) for fold in (1, 0))
    old_offset = low.astimezone(wall.tzinfo).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) // 2
        if middle.astimezone(wall.tzinfo).utcoffset() == old_offset:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


def _format_time(at: time) -> str:
    """Format a time, with seconds only if there are any."""
    return at.isoformat("auto" if at.second or at.microsecond else "minutes")


def _parse_time(name: str, value: object) -> tuple[int, time]:
    """Return minutes since midnight and the time; 24:00 is minute 1440 and 00:00.

    The minutes distinguish the end of a day from its beginning, which the time does not.
    """
    if isinstance(value, time) and value.tzinfo is None:
        return value.hour * 60 + value.minute, value
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[1] == "24" and match[2] != "00"):
        raise SetupError(
            f'Window\'s {name} must be "HH:MM" from "00:00" to "24:00", or a datetime.time without '
            f"a zone, got {value!r}"
        )
    hour = int(match[1])
    minute = int(match[2])
    if name == "start" and hour == 24:  # noqa: PLR2004 - hours of a day
        raise SetupError(
            f'Window\'s start cannot be {value!r}: use "00:00", the beginning of the day'
        )
    return hour * 60 + minute, _MIDNIGHT if hour == 24 else time(hour, minute)  # noqa: PLR2004


def _parse_days(days: Iterable[str] | None) -> frozenset[int]:
    """Return the weekdays as numbers, 0 is Monday; None means all days.

    Raises:
        SetupError: there is no day, or an unknown one.
    """
    if days is None:
        return frozenset(range(len(DAYS)))
    names = [days] if isinstance(days, str) else list(days)
    for name in names:
        if name not in DAYS:
            raise SetupError(f"Window's days must be among {', '.join(DAYS)}, got {name!r}")
    if not names:
        raise SetupError(
            "Window's days is empty, so it never opens: name at least one day, or omit days for "
            "all days"
        )
    return frozenset(DAYS.index(name) for name in names)
