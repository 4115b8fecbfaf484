"""Destinations and due times in headers of any producer."""

import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker import DESTINATION
from faststream_sqlbroker.core.routing import (
    MAX_DUE_TIME,
    find_loop,
    from_unix_time,
    get_destination,
    parse_publish_after,
)

CREATED = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
UTC = timezone.utc

json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("value", "due"),
    [
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (1_700_000_000, datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        (1_700_000_000.25, datetime(2023, 11, 14, 22, 13, 20, 250_000, tzinfo=UTC)),
        ("1700000000", datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        ("1700000000.5", datetime(2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC)),
        ("2024-06-01T12:00:00Z", datetime(2024, 6, 1, 12, tzinfo=UTC)),
        ("2024-06-01t12:00:00z", datetime(2024, 6, 1, 12, tzinfo=UTC)),
        ("2024-06-01T12:00:00.5+02:00", datetime(2024, 6, 1, 10, 0, 0, 500_000, tzinfo=UTC)),
        ("1.5h", CREATED + timedelta(hours=1, minutes=30)),
        ("2h45m", CREATED + timedelta(hours=2, minutes=45)),
        ("-1h", CREATED - timedelta(hours=1)),
        (None, None),
    ],
)
def test_when_a_message_is_due(value: Any, due: datetime | None) -> None:
    """P1 and P2: Unix seconds, a date and time, or a duration from when it was published."""
    assert parse_publish_after({"publish_after": value}, CREATED) == due


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        "",
        "soon",
        "5 minutes",
        "2024-06-01T12:00:00",
        "2024-06-01",
        "2024-13-01T00:00:00Z",
        [],
        {},
        float("nan"),
        float("inf"),
        "nan",
        1e18,
        10**30,
        1_700_000_000_000,
        "9999-12-31T00:00:00Z",
        "99999999999h",
        "0001-01-01T00:00:00+10:00",
    ],
)
def test_an_invalid_time_is_reported(value: Any) -> None:
    """P3."""
    with pytest.raises(
        ValueError, match=r"^its header 'publish_after' must be Unix seconds, .*, got"
    ):
        parse_publish_after({"publish_after": value}, CREATED)


@given(json)
def test_any_header_is_a_time_or_a_value_error(value: Any) -> None:
    try:
        due = parse_publish_after({"publish_after": value}, CREATED)
    except ValueError:
        return
    assert due is None or (due.utcoffset() == timedelta() and due <= MAX_DUE_TIME)


@given(json)
def test_any_header_is_a_destination_or_a_value_error(value: Any) -> None:
    try:
        queue = get_destination({"destination": value}, {"front"})
    except ValueError:
        return
    assert queue == value
    assert 1 <= len(queue) <= 255


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({}, "it has no header 'destination'"),
        ({"destination": None}, "it has no header 'destination'"),
        ({"destination": ""}, "must not be empty"),
        ({"destination": 7}, "must be a string, not int"),
        ({"destination": "x" * 256}, "at most 255"),
        ({"destination": "front"}, "its own queue"),
    ],
)
def test_an_invalid_destination_is_reported(headers: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        get_destination(headers, {"front"})


def test_unix_seconds_are_a_time() -> None:
    assert from_unix_time(-1) == datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    for value in (1e300, float("inf"), 10**400):
        with pytest.raises(OverflowError):
            from_unix_time(value)
    with pytest.raises(ValueError, match="NaN"):
        from_unix_time(float("nan"))


def test_the_constant_shows_as_it_is_written() -> None:
    assert repr(DESTINATION) == "DESTINATION"


@pytest.mark.parametrize(
    ("hops", "loop"),
    [
        ([], None),
        ([("a", "b"), ("b", "c"), ("a", "c")], None),
        ([("a", "b"), ("b", "a")], ["a", "b", "a"]),
        ([("x", "a"), ("a", "b"), ("b", "c"), ("c", "a")], ["a", "b", "c", "a"]),
        ([("a", "b"), ("a", "c"), ("c", "a")], ["a", "c", "a"]),
        ([("d", "e"), ("a", "a")], ["a", "a"]),
    ],
)
def test_loops_of_forwards_are_found(hops: list[tuple[str, str]], loop: list[str] | None) -> None:
    assert find_loop(hops) == loop


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("abcdef")), max_size=12))
def test_a_loop_is_found_exactly_where_there_is_one(hops: list[tuple[str, str]]) -> None:
    found = find_loop(hops)
    if found is not None:
        assert found[0] == found[-1]
        assert all(hop in hops for hop in itertools.pairwise(found))
        return
    left = set(hops)  # without a loop, queues can be taken away until nothing is left
    while left:
        ends = {end for _, end in left} - {start for start, _ in left}
        assert ends
        left = {(start, end) for start, end in left if end not in ends}
