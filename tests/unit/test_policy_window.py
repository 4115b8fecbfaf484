"""Window against a model that looks at every minute (P6).

`SQLBROKER_MODELS=10` tries every zone at the changes of its clock between 2000 and 2037.
"""

import os
from datetime import date, datetime, time, timedelta, timezone
from functools import cache, lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Window
from faststream_sqlbroker.core.policies.stored import dump_policies
from faststream_sqlbroker.core.policies.window import DAYS
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import WaitingMessage, parse_subscriber
from faststream_sqlbroker.database.explain.policy_waits import PolicyDetails
from faststream_sqlbroker.database.explain.policy_waits import explain_window as explain_window
from faststream_sqlbroker.database.policies.rows import PolicyRows

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MINUTE = 60_000_000
DAY = 24 * 60
LONGER = int(os.environ.get("SQLBROKER_MODELS", "1"))
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
WITHOUT_FRIDAY = [day for day in DAYS if day != "fri"]


@cache
def changes(zone: str) -> list[str]:
    """The days from 2000 to 2037 on which a zone's clock is changed, and one more."""
    noon = datetime(2000, 1, 1, 12, tzinfo=timezone.utc)
    local = ZoneInfo(zone)
    offsets = [(noon + timedelta(days=n)).astimezone(local).utcoffset() for n in range(38 * 365)]
    first = date(2000, 1, 2)
    return ["2024-06-15"] + [
        str(first + timedelta(days=n))
        for n, (before, after) in enumerate(pairwise(offsets))
        if before != after
    ]


@lru_cache(32)
def walls(zone: str, day: str) -> tuple[int, list[datetime]]:
    """The first minute (UTC, since 1970) round `day`, and what the clock on the wall shows from
    there."""
    first = datetime.fromisoformat(day).replace(tzinfo=timezone.utc) - timedelta(days=SPAN // 2)
    begin = (first - EPOCH) // timedelta(minutes=1)
    local = ZoneInfo(zone)
    shown = [
        (first + timedelta(minutes=n)).astimezone(local).replace(tzinfo=None, fold=0)
        for n in range(SPAN * DAY)
    ]
    return begin, shown


def near(shown: list[datetime], wall: datetime) -> range:
    """The minutes of two days round `wall`: no zone is moved by more."""
    middle = (wall - shown[0]) // timedelta(minutes=1)
    return range(*(min(max(0, middle + n * 2 * DAY), len(shown)) for n in (-1, 1)))


@lru_cache(1000)
def first_from(zone: str, day: str, wall: datetime) -> int:
    """The first minute at which the wall shows `wall` or later."""
    _, shown = walls(zone, day)
    return next((n for n in near(shown, wall) if shown[n] >= wall), len(shown))


@lru_cache(1000)
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
    often = st.sampled_from(
        [0, 15, 30, 59, 60, 90, 105, 119, 120, 135, 150, 179, 180, 1380, 1410, 1439]
    )
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
def everywhere(draw: st.DrawFn) -> tuple[str, str]:
    zone = draw(st.sampled_from(sorted(available_timezones())))
    return zone, draw(st.sampled_from(changes(zone)))


@st.composite
def asked(draw: st.DrawFn) -> tuple[Window, str, list[int]]:
    zone, day = draw(st.sampled_from(CHANGES) if LONGER == 1 else everywhere())
    minutes = st.lists(st.integers(16 * DAY, 22 * DAY), min_size=1, max_size=4)
    return draw(windows(zone)), day, draw(minutes)


@settings(deadline=None, max_examples=120 * LONGER)
@given(asked())
@example((Window("02:30", "02:45", tz="Europe/Berlin"), "2024-03-31", [18 * DAY]))
@example((Window("02:15", "02:45", tz="Europe/Berlin"), "2024-10-27", [18 * DAY]))
@example((Window("00:00", "02:00", tz="Europe/Berlin"), "2024-10-27", [18 * DAY, 18 * DAY + 30]))
@example((Window("00:00", "01:30", tz="Australia/Lord_Howe"), "2025-04-06", [17 * DAY + 900]))
@example((Window("00:00", "00:30", tz="America/Havana"), "2024-03-10", [18 * DAY]))
@example(
    (Window("00:00", "24:00", tz="Pacific/Apia", days=WITHOUT_FRIDAY), "2011-12-30", [22 * DAY])
)
@example((Window("00:00", "24:00", tz="UTC", days=DAYS[:5]), "2024-12-31", [21 * DAY]))
@example((Window("09:00", "17:00", tz="Pacific/Apia", days=["fri"]), "2011-12-30", [18 * DAY]))
def test_a_span_agrees_with_the_model_of_minutes(case: tuple[Window, str, list[int]]) -> None:
    """Both directions of summer time, half hours, changes at midnight, days, windows over midnight,
    whole days."""
    window, day, minutes = case
    begin, _ = walls(window.tz, day)
    is_open = open_minutes(window, window.tz, day)
    for minute in minutes:
        opens, closes = window.span((begin + minute) * MINUTE)
        assert opens % MINUTE == closes % MINUTE == 0
        first = opens // MINUTE - begin
        last = closes // MINUTE - begin
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
    assert window.span((monday - EPOCH) // timedelta(microseconds=1)) == (
        opens,
        opens + 8 * 60 * MINUTE,
    )


BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"
HAVANA = "America/Havana"
SAO_PAULO = "America/Sao_Paulo"
APIA = "Pacific/Apia"
EDGES = [
    # At 02:00+01:00 the clock is put forward to 03:00+02:00.
    (BERLIN, "00:00", "02:00", None, "2024-03-31T00:00+01:00", "2024-03-31T03:00+02:00"),
    (BERLIN, "00:00", "02:30", None, "2024-03-31T00:00+01:00", "2024-03-31T03:00+02:00"),
    (BERLIN, "22:00", "02:30", None, "2024-03-30T22:00+01:00", "2024-03-31T03:00+02:00"),
    (BERLIN, "02:00", "04:00", None, "2024-03-31T03:00+02:00", "2024-03-31T04:00+02:00"),
    (BERLIN, "02:30", "04:00", None, "2024-03-31T03:00+02:00", "2024-03-31T04:00+02:00"),
    (BERLIN, "00:00", "24:00", ["sun"], "2024-03-31T00:00+01:00", "2024-04-01T00:00+02:00"),
    # At 03:00+02:00 the clock is put back to 02:00+01:00.
    (BERLIN, "00:00", "02:00", None, "2024-10-27T00:00+02:00", "2024-10-27T02:00+02:00"),
    (BERLIN, "22:00", "02:00", ["sat"], "2024-10-26T22:00+02:00", "2024-10-27T02:00+02:00"),
    (BERLIN, "00:00", "02:30", None, "2024-10-27T00:00+02:00", "2024-10-27T02:30+01:00"),
    (BERLIN, "22:00", "02:30", ["sat"], "2024-10-26T22:00+02:00", "2024-10-27T02:30+01:00"),
    (BERLIN, "00:00", "03:00", None, "2024-10-27T00:00+02:00", "2024-10-27T03:00+01:00"),
    (BERLIN, "02:00", "03:00", None, "2024-10-27T02:00+02:00", "2024-10-27T03:00+01:00"),
    (BERLIN, "02:15", "02:45", None, "2024-10-27T02:15+02:00", "2024-10-27T02:45+01:00"),
    (BERLIN, "02:30", "04:00", None, "2024-10-27T02:30+02:00", "2024-10-27T04:00+01:00"),
    (BERLIN, "03:00", "04:00", None, "2024-10-27T03:00+01:00", "2024-10-27T04:00+01:00"),
    (BERLIN, "00:00", "24:00", ["sun"], "2024-10-27T00:00+02:00", "2024-10-28T00:00+01:00"),
    # The night before ends after the next has begun: they are one.
    (BERLIN, "02:30", "02:15", None, "2024-10-26T02:30+02:00", "2024-10-28T02:15+01:00"),
    # At 02:00+11:00 back to 01:30+10:30; at 02:00+10:30 forward to 02:30+11:00.
    (LORD_HOWE, "00:00", "01:30", None, "2025-04-06T00:00+11:00", "2025-04-06T01:30+11:00"),
    (LORD_HOWE, "00:00", "01:45", None, "2025-04-06T00:00+11:00", "2025-04-06T01:45+10:30"),
    (LORD_HOWE, "01:30", "03:00", None, "2025-04-06T01:30+11:00", "2025-04-06T03:00+10:30"),
    (LORD_HOWE, "02:15", "04:00", None, "2024-10-06T02:30+11:00", "2024-10-06T04:00+11:00"),
    # Midnight comes twice: at 01:00-04:00 back to 00:00-05:00.
    (HAVANA, "22:00", "24:00", ["sat"], "2024-11-02T22:00-04:00", "2024-11-03T00:00-04:00"),
    (HAVANA, "00:00", "24:00", ["sun"], "2024-11-03T00:00-04:00", "2024-11-04T00:00-05:00"),
    # The hour before midnight comes twice: at midnight back to 23:00-03:00.
    (SAO_PAULO, "20:00", "23:00", None, "2018-02-17T20:00-02:00", "2018-02-17T23:00-02:00"),
    (SAO_PAULO, "20:00", "24:00", None, "2018-02-17T20:00-02:00", "2018-02-18T00:00-03:00"),
    (SAO_PAULO, "00:00", "24:00", ["sun"], "2018-02-18T00:00-03:00", "2018-02-19T00:00-03:00"),
    # After Thursday, 2011-12-29 comes Saturday: what opens on Friday evening opens with Saturday.
    (APIA, "22:00", "06:00", ["fri"], "2011-12-31T00:00+14:00", "2011-12-31T06:00+14:00"),
    (APIA, "00:00", "24:00", WITHOUT_FRIDAY, "2011-12-24T00:00-10:00", "2012-01-06T00:00+14:00"),
]


@pytest.mark.parametrize(("zone", "start", "end", "days", "opens", "closes"), EDGES)
def test_a_window_at_a_clock_change(
    zone: str, start: str, end: str, days: list[str] | None, opens: str, closes: str
) -> None:
    """The promise of the docstring, asked before, in and at the last moment of the span."""
    first, end_of = (
        (datetime.fromisoformat(text) - EPOCH) // timedelta(microseconds=1)
        for text in (opens, closes)
    )
    for moment in (first - 1, first, (first + end_of) // 2, end_of - 1):
        assert Window(start, end, tz=zone, days=days).span(moment) == (first, end_of)
    assert Window(start, end, tz=zone, days=days).span(end_of)[0] > end_of


def test_a_window_within_the_skipped_hour_opens_on_the_next_day() -> None:
    window = Window("02:15", "02:45", tz=BERLIN)
    opens = datetime.fromisoformat("2024-04-01T02:15+02:00")
    before = datetime.fromisoformat("2024-03-30T02:45+01:00")
    us = timedelta(microseconds=1)
    assert window.span((before - EPOCH) // us)[0] == (opens - EPOCH) // us


@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2024-10-27T01:59:59+02:00", None),
        ("2024-10-27T02:00+02:00", "2024-10-28T00:00+01:00"),
        ("2024-10-27T02:00+01:00", "2024-10-28T00:00+01:00"),
    ],
)
def test_explain_says_the_same(now: str, until: str | None) -> None:
    """It reads the window from what the subscriber has told of itself."""
    at = datetime.fromisoformat(now)
    message = WaitingMessage(
        id=1,
        queue="q",
        key=None,
        state=MessageState.PENDING,
        attempts_count=0,
        deliveries_count=0,
        next_attempt_at=at,
        expired=False,
        policy_marks=0,
        now=at,
    )
    window = Window("00:00", "02:00", tz=BERLIN)
    subscribers = [parse_subscriber("w", {"rules": dump_policies([window])}, at, at)]
    facts = PolicyDetails(PolicyRows(None, None, "q"), at, subscribers)  # type: ignore[arg-type] # no reads
    reasons = explain_window(facts, message)
    assert [reason.until for reason in reasons] == (
        [] if until is None else [datetime.fromisoformat(until)]
    )
