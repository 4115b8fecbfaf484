"""Window: messages start only at certain times of the day, on certain days, in a time zone."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from zoneinfo import ZoneInfo

from faststream_sqlbroker.core.times import TICK, find_zone, from_microseconds, to_microseconds
from faststream_sqlbroker.exceptions import SetupError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]?[0-9]|2[0-4]):([0-5][0-9])")
_MIDNIGHT = time(0, 0)
_SEARCHED = 400
"""Days that are searched for the next opening. A window on one day of the week opens within two
weeks, even if a change of the clock skips an opening; the rest is reserve."""
_LONGEST = timedelta(days=14)
"""More than any window stays open. One that is closed on a single day of the week stays open for 12
days if its zone skips that day."""


@dataclass(frozen=True, init=False)
class Window:
    """Messages start from `start` until before `end`, each day of `days`; outside of it they wait
    unclaimed.

    Times are those of the clock on the wall in `tz`, with their date. A window opens at the first
    moment at which that clock shows `start` or later, and closes at the moment from which it never
    again shows less than `end`. So in Europe/Berlin, where the hour from 02:00 is skipped in spring
    and comes twice in autumn:

    * In spring a start or an end within the skipped hour is the moment of the change. A window that
      lies wholly within it does not open on that day.
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
    """0 is Monday: the days on which it opens."""
    _last: tuple[int, int, int] = field(default=(0, 0, 0), init=False, repr=False, compare=False)
    """A cache, because every claim asks: since when the last span found is the answer, and its two
    ends. A race between threads is harmless: the tuple is replaced as a whole."""

    def __init__(
        self,
        start: str | time,
        end: str | time,
        *,
        tz: str = "UTC",
        days: Iterable[str] | None = None,
    ) -> None:
        """Say when.

        Args:
            start: "HH:MM", or a datetime.time without a zone.
            end: The same; "24:00" is the end of the day.
            tz: A name of the IANA database, such as "Europe/Berlin".
            days: Days on which it opens, of mon, tue, wed, thu, fri, sat, sun; None is all.

        Raises:
            SetupError: an invalid time, an unknown zone or day, or a window that never opens or
                never closes.
        """
        begins = _parse("start", start)
        ends = _parse("end", end)
        if begins == ends:
            raise SetupError(
                f"Window({start!r}, {end!r}) opens and closes at the same moment, so it never "
                'opens: choose different times, "00:00" and "24:00" for whole days, or leave the '
                "policy out"
            )
        find_zone(tz, "Window's")
        object.__setattr__(self, "start", begins[1])
        object.__setattr__(self, "end", ends[1])
        object.__setattr__(self, "tz", tz)
        object.__setattr__(self, "days", _days(days))

    def __str__(self) -> str:
        days = (
            ""
            if len(self.days) == len(DAYS)
            else f", days={','.join(DAYS[d] for d in sorted(self.days))}"
        )
        return f"Window({_written(self.start)}-{_written(self.end)} {self.tz}{days})"

    def span(self, now: int) -> tuple[int, int]:
        """When the window that is open at `now`, or else the next one, opens and closes.

        Times are microseconds since 1970, UTC. At the closing time the window is closed.
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
        """The openings from `day` on; those that touch or overlap are merged."""
        open_at = close_at = None
        for n in range(_SEARCHED):
            at = day + timedelta(days=n)
            if at.weekday() not in self.days:
                continue
            next_day = timedelta(days=int(self.end <= self.start))
            opens = _opening(datetime.combine(at, self.start, tzinfo=zone))
            closes = _closing(datetime.combine(at + next_day, self.end, tzinfo=zone))
            if closes <= opens:
                continue  # it lies in an hour that is skipped
            if close_at is not None and open_at is not None and opens > close_at:
                yield open_at, close_at
                open_at = None
            open_at, close_at = opens if open_at is None else open_at, closes
        if open_at is not None and close_at is not None:
            yield open_at, close_at


def _opening(wall: datetime) -> int:
    """The first moment (microseconds since 1970) at which the clock shows `wall` or later."""
    first = wall.replace(fold=0).astimezone(timezone.utc)
    return to_microseconds(first if _shown(first, wall) == _naive(wall) else _skipped(wall))


def _closing(wall: datetime) -> int:
    """From when on the clock never again shows less than `wall` (microseconds since 1970)."""
    last = wall.replace(fold=1).astimezone(timezone.utc)
    if _shown(last, wall) != _naive(wall):
        return to_microseconds(_skipped(wall))
    if _shown(last - TICK, wall) < _naive(wall):
        return to_microseconds(last)
    # The clock was put back to `wall`: nothing less is shown after its first pass.
    return to_microseconds(wall.replace(fold=0).astimezone(timezone.utc))


def _naive(wall: datetime) -> datetime:
    return wall.replace(tzinfo=None, fold=0)


def _shown(utc: datetime, wall: datetime) -> datetime:
    """What the clock of `wall` shows at `utc`."""
    return _naive(utc.astimezone(wall.tzinfo))


def _skipped(wall: datetime) -> datetime:
    """The moment of the clock change that skips `wall`: found by bisection, to the second."""
    low, high = (wall.replace(fold=fold).astimezone(timezone.utc) for fold in (1, 0))
    before = low.astimezone(wall.tzinfo).utcoffset()
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) // 2
        if middle.astimezone(wall.tzinfo).utcoffset() == before:
            low = middle
        else:
            high = middle
    return high.replace(microsecond=0)


def _written(at: time) -> str:
    """With seconds only if there are any."""
    return at.isoformat("auto" if at.second or at.microsecond else "minutes")


def _parse(name: str, value: object) -> tuple[int, time]:
    """Minutes since midnight and the time. 24:00 is minute 1440, though its time is 00:00."""
    if isinstance(value, time) and value.tzinfo is None:
        return value.hour * 60 + value.minute, value
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None or (match[1] == "24" and match[2] != "00"):
        raise SetupError(
            f'Window\'s {name} cannot be {value!r}: it is "HH:MM" from "00:00" to "24:00", or a '
            "datetime.time without a zone"
        )
    hour = int(match[1])
    minute = int(match[2])
    if name == "start" and hour == 24:  # noqa: PLR2004 - hours of a day
        raise SetupError(
            f'Window\'s start cannot be {value!r}: use "00:00", the beginning of the day'
        )
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
            "Window's days is empty, so it never opens: name at least one day, or leave days out "
            "for all"
        )
    return frozenset(DAYS.index(name) for name in names)
