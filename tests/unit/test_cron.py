"""Cron expressions in time zones: their fire times, and which missed ones are published."""

import sys
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker import MissingExtraError, SetupError
from faststream_sqlbroker.core.status import ScheduleState, load_state
from faststream_sqlbroker.flow.tasks.cron import MAX_MISSED, ON_TIME, Cron

SPRING = datetime(2024, 3, 30, 22, tzinfo=timezone.utc)
"""The evening before Berlin skips 02:00 to 03:00."""
AUTUMN = datetime(2024, 10, 26, 21, tzinfo=timezone.utc)
"""The evening before Berlin has 02:00 to 03:00 twice."""


def times(expression: str, start: datetime, count: int, tz: str = "Europe/Berlin") -> list[str]:
    """The next `count` fire times, as day, hour and minute in UTC."""
    cron = Cron(expression, tz)
    found = []
    at = start
    for _ in range(count):
        following = cron.find_next(at)
        assert following is not None
        assert following > at
        at = following
        found.append(f"{at:%d %H:%M}")
    return found


def test_a_time_that_does_not_exist_is_the_moment_of_the_change() -> None:
    """Z9: where minute and hour are given, a day is not left out."""
    assert times("30 2 * * *", SPRING, 2) == ["31 01:00", "01 00:30"]
    assert times("0,30 2,3 * * *", SPRING, 3) == ["31 01:00", "31 01:30", "01 00:00"]


def test_a_time_that_exists_twice_fires_in_its_first_pass() -> None:
    assert times("30 2 * * *", AUTUMN, 2) == ["27 00:30", "28 01:30"]
    # Asked between both passes.
    assert times("30 2 * * *", datetime(2024, 10, 27, 1, 10, tzinfo=timezone.utc), 1) == [
        "28 01:30"
    ]


def test_intervals_go_by_the_time_that_passes() -> None:
    """With * as minute or hour, or with seconds: skipped hours have none, repeated ones two."""
    assert times("30 * * * *", SPRING.replace(hour=23), 3) == ["30 23:30", "31 00:30", "31 01:30"]
    assert times("30 * * * *", AUTUMN.replace(hour=23), 4) == [
        "26 23:30",
        "27 00:30",
        "27 01:30",
        "27 02:30",
    ]
    assert times("0 30 2 * * *", SPRING, 1) == ["01 00:30"]
    assert times("0 30 2 * * *", AUTUMN, 3) == ["27 00:30", "27 01:30", "28 01:30"]


@given(
    st.sampled_from(
        [
            "30 2 * * *",
            "0 0 * * *",
            "*/7 * * * *",
            "15 1-3 * * *",
            "0 */5 * * * *",
            "59 23 L * *",
            "0 0 29 2 MON",
        ]
    ),
    st.sampled_from(
        [
            "UTC",
            "Europe/Berlin",
            "America/Havana",
            "Australia/Lord_Howe",
            "Asia/Kathmandu",
            "Pacific/Apia",
        ]
    ),
    st.datetimes(datetime(2010, 1, 1), datetime(2026, 1, 1)),
    st.integers(0, 40),
)
def test_fire_times_do_not_depend_on_the_start_of_the_count(
    expression: str, tz: str, start: datetime, steps: int
) -> None:
    """Each fire time follows from any moment since the one before; the newest ones are those at the
    end."""
    cron = Cron(expression, tz)
    first = Cron(expression, tz).find_next(start.replace(tzinfo=timezone.utc))
    assert first is not None
    found = [first]
    for _ in range(steps):
        following = cron.find_next(found[-1])
        assert following is not None
        middle = found[-1] + (following - found[-1]) / 2
        assert cron.find_next(middle) == following
        assert cron.find_next(following - timedelta(microseconds=1)) == following
        found.append(following)
    until = found[-1] + timedelta(microseconds=1)
    assert cron.find_latest(first, until, 10_000) == found
    assert cron.find_latest(first, until, 3) == found[-3:]
    assert cron.find_due(first, until, "all") == found[-MAX_MISSED:]
    late = [at for at in found if at > until - ON_TIME]
    assert cron.find_due(first, until, "skip") == late
    assert cron.find_due(first, until, "one") == (late or found[-1:])


def test_a_minute_late_is_missed_and_less_is_not() -> None:
    cron = Cron("0 3 * * *", "UTC")
    at = datetime(2024, 5, 1, 3, tzinfo=timezone.utc)
    assert cron.find_due(at, at, "skip") == [at]
    assert cron.find_due(at, at + timedelta(seconds=59.9), "skip") == [at]
    assert cron.find_due(at, at + timedelta(seconds=60), "skip") == []
    assert cron.find_due(at, at + timedelta(seconds=60), "one") == [at]


def test_a_long_outage_is_not_counted_second_by_second() -> None:
    cron = Cron("* * * * * *", "Europe/Berlin")
    until = datetime(2024, 5, 1, tzinfo=timezone.utc)
    found = cron.find_due(until - timedelta(days=3000), until, "all")
    assert found == [until - timedelta(seconds=n) for n in range(MAX_MISSED - 1, -1, -1)]


def test_a_first_fire_time_of_older_rules_is_published_too() -> None:
    """The database remembers it; the zone's rules, or cronsim, may have changed since."""
    cron = Cron("0 3 * * *", "UTC")
    first = datetime(2024, 5, 1, 2, tzinfo=timezone.utc)
    assert cron.find_due(first, first + timedelta(minutes=5), "one") == [first]
    assert cron.find_due(first, first + timedelta(hours=2), "all") == [
        first,
        first + timedelta(hours=1),
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * *",
        "61 * * * *",
        "0 0 30 2 *",
        "@daily",
        "* * * * * * *",
        "every day",
        "*/0 * * * *",
        "0 3 * * * *" * 40,
        None,
        5,
        b"* * * * *",
        "0 0 1-0 * *",
        "L * * * *",
    ],
)
def test_an_invalid_expression_is_refused_with_an_example(expression: Any) -> None:
    with pytest.raises(SetupError, match=r'use five fields, .* such as "0 3 \* \* \*"'):
        Cron(expression, "UTC")


@pytest.mark.parametrize(
    "tz", ["Mars/Phobos", "", "../etc/passwd", None, 5, ZoneInfo("UTC"), "x" * 5000]
)
def test_an_invalid_zone_is_refused_with_an_example(tz: Any) -> None:
    with pytest.raises(SetupError, match="a name of the IANA database"):
        Cron("* * * * *", tz)


def test_without_cronsim_the_extra_is_named() -> None:
    with (
        patch.dict(sys.modules, {"cronsim": None}),
        pytest.raises(MissingExtraError, match=r"pip install 'sqlbroker\[schedule\]'"),
    ):
        Cron("* * * * *", "UTC")


def test_a_state_is_read_back_as_written_and_garbage_is_ignored() -> None:
    at = datetime(2024, 5, 1, 3, tzinfo=timezone.utc)
    for state in (
        ScheduleState("* * * * *", "UTC", None),
        ScheduleState("* * * * *", "UTC", at, at, at, 3, ("0 * * * *", "Europe/Berlin")),
        ScheduleState("* * * * *", "UTC", at, paused_at=at, paused_by="ola"),
        ScheduleState("* * * * *", "UTC", at, skipped_until=at, run_at=at),
    ):
        assert load_state(state.dump()) == state
    for garbage in (
        {},
        None,
        {"expression": "x"},
        {"expression": "x", "tz": "y", "next_at": "soon"},
    ):
        assert load_state(garbage) is None
