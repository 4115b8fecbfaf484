"""Window against a model that looks at every minute (P6)."""

from datetime import datetime, time, timedelta, timezone
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Window
from faststream_sqlbroker.core.policies.window import DAYS

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MINUTE = 60_000_000
DAY = 24 * 60
SPAN = 36
"""Days that the model looks at; those that are asked for lie in the middle."""

CHANGES = [
    ("Europe/Berlin", "2024-03-31"),
    ("Europe/Berlin", "2024-10-27"),
    ("America/New_York", "2025-03-09"),
    ("America/New_York", "2025-11-02"),
    # Half an hour.
    ("Australia/Lord_Howe", "2024-10-06"),
    ("Australia/Lord_Howe", "2025-04-06"),
    # Midnight itself is skipped, or comes twice.
    ("America/Havana", "2024-03-10"),
    ("America/Havana", "2024-11-03"),
    ("Asia/Beirut", "2024-03-31"),
    ("Africa/Cairo", "2024-04-26"),
    ("Africa/Cairo", "2024-10-31"),
    ("America/Sao_Paulo", "2018-11-04"),
    ("America/Sao_Paulo", "2018-02-18"),
    # A whole day is missing.
    ("Pacific/Apia", "2011-12-30"),
    # No change, and an odd offset.
    ("Asia/Kathmandu", "2024-06-15"),
    ("UTC", "2024-12-31"),
]


@cache
def walls(zone: str, day: str) -> tuple[int, list[datetime]]:
    """The first minute (UTC, since 1970) round `day`, and what the clock on the wall shows from there."""
    first = datetime.fromisoformat(day).replace(tzinfo=timezone.utc) - timedelta(days=SPAN // 2)
    begin, local = (first - EPOCH) // timedelta(minutes=1), ZoneInfo(zone)
    shown = [
        (first + timedelta(minutes=n)).astimezone(local).replace(tzinfo=None, fold=0)
        for n in range(SPAN * DAY)
    ]
    return begin, shown


def near(shown: list[datetime], wall: datetime) -> range:
    """The minutes of two days round `wall`: no zone is moved by more."""
    middle = (wall - shown[0]) // timedelta(minutes=1)
    return range(*(min(max(0, middle + n * 2 * DAY), len(shown)) for n in (-1, 1)))


@cache
def first_from(zone: str, day: str, wall: datetime) -> int:
    """The first minute at which the wall shows `wall` or later."""
    _, shown = walls(zone, day)
    return next((n for n in near(shown, wall) if shown[n] >= wall), len(shown))


@cache
def past_last_before(zone: str, day: str, wall: datetime) -> int:
    """The minute after the last at which the wall shows less than `wall`."""
    _, shown = walls(zone, day)
    return next((n + 1 for n in reversed(near(shown, wall)) if shown[n] < wall), 0)


def open_minutes(window: Window, zone: str, day: str) -> list[bool]:
    """Minute by minute, whether the window is open."""
    _, shown = walls(zone, day)
    is_open = [False] * len(shown)
    for n in range(SPAN + 4):
        at = shown[0].date() + timedelta(days=n - 2)
        if at.weekday() not in window.days:
            continue
        until = at if window.end > window.start else at + timedelta(days=1)
        opens = first_from(zone, day, datetime.combine(at, window.start))
        closes = past_last_before(zone, day, datetime.combine(until, window.end))
        for minute in range(opens, closes):
            is_open[minute] = True
    return is_open


@st.composite
def windows(draw: st.DrawFn, zone: str) -> Window:
    # Near midnight and near the hours at which clocks are changed as often as anywhere.
    often = st.sampled_from([0, 15, 30, 59, 60, 90, 105, 119, 120, 135, 150, 179, 180, 1380, 1410, 1439])
    start, end = draw(
        st.tuples(st.one_of(often, st.integers(0, DAY - 1)), st.one_of(often, st.integers(1, DAY)))
    )
    days = draw(st.none() | st.lists(st.sampled_from(DAYS), min_size=1, max_size=7))
    if start == end:
        end = start + 1
    return Window(
        time(start // 60, start % 60),
        "24:00" if end == DAY else time(end // 60, end % 60),
        tz=zone,
        days=days,
    )


@st.composite
def asked(draw: st.DrawFn) -> tuple[Window, str, list[int]]:
    zone, day = draw(st.sampled_from(CHANGES))
    minutes = st.lists(st.integers(16 * DAY, 22 * DAY), min_size=1, max_size=4)
    return draw(windows(zone)), day, draw(minutes)


@settings(deadline=None, max_examples=120)
@given(asked())
@example((Window("02:30", "02:45", tz="Europe/Berlin"), "2024-03-31", [18 * DAY]))
@example((Window("02:15", "02:45", tz="Europe/Berlin"), "2024-10-27", [18 * DAY]))
@example((Window("00:00", "00:30", tz="America/Havana"), "2024-03-10", [18 * DAY]))
@example((Window("00:00", "24:00", tz="UTC", days=DAYS[:5]), "2024-12-31", [21 * DAY]))
@example((Window("09:00", "17:00", tz="Pacific/Apia", days=["fri"]), "2011-12-30", [18 * DAY]))
def test_a_span_is_what_the_minutes_say(case: tuple[Window, str, list[int]]) -> None:
    """Both directions of summer time, half hours, changes at midnight, days, windows over midnight, whole days."""
    window, day, minutes = case
    begin, _ = walls(window.tz, day)
    is_open = open_minutes(window, window.tz, day)
    for minute in minutes:
        opens, closes = window.span((begin + minute) * MINUTE)
        assert opens % MINUTE == closes % MINUTE == 0
        first, last = opens // MINUTE - begin, closes // MINUTE - begin
        assert minute < last
        assert (first <= minute) == is_open[minute]
        assert not any(is_open[minute:first]), "it was open before"
        assert all(is_open[max(first, 0) : last]), "it was not open all the time"
        assert last >= len(is_open) or not is_open[last], "it did not close"
        always = len(window.days) == len(DAYS) and window.start == window.end == time(0)
        assert always or first <= 0 or not is_open[first - 1], "it had opened before"


@given(st.integers(0, MINUTE - 1))
def test_the_edges_of_a_span_are_exact(part: int) -> None:
    """The closing minute is outside, to the microsecond; the opening one inside."""
    window = Window("09:00", "17:00")
    opens, closes = window.span(part)
    assert (opens, closes) == (9 * 60 * MINUTE, 17 * 60 * MINUTE)
    assert window.span(opens + part) == (opens, closes)
    assert window.span(closes - 1) == (opens, closes)
    assert window.span(closes + part) == (opens + DAY * MINUTE, closes + DAY * MINUTE)


@pytest.mark.parametrize("day", range(7))
def test_a_night_belongs_to_the_day_on_which_it_begins(day: int) -> None:
    """The promise of the docstring: Friday's night closes on Saturday morning."""
    window = Window("22:00", "06:00", days=[DAYS[day]])
    monday = datetime(2024, 1, 1, 6, tzinfo=timezone.utc)
    opens = (monday + timedelta(days=day, hours=16) - EPOCH) // timedelta(microseconds=1)
    assert window.span((monday - EPOCH) // timedelta(microseconds=1)) == (opens, opens + 8 * 60 * MINUTE)
