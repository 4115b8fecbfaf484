"""Durations: the grammar, exactness, and what is refused."""

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.times import (
    LONGEST_SECONDS,
    delay_seconds,
    parse_duration,
    positive_seconds,
)
from faststream_sqlbroker.exceptions import SetupError

UNITS = {"ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60), "h": Fraction(3600)}

parts = st.lists(
    st.tuples(
        st.integers(0, 10**5),
        st.one_of(st.none(), st.from_regex(r"[0-9]{1,9}", fullmatch=True).filter(str.isascii)),
        st.sampled_from(list(UNITS)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("60s", 60.0),
        ("1.5h", 5400.0),
        ("2h45m", 9900.0),
        ("500ms", 0.5),
        ("-1.5h", -5400.0),
        ("+1m30s", 90.0),
        ("0s", 0.0),
        ("1m1ms", 60.001),
        ("0.1s0.2s", 0.3),
        ("30m2h", 9000.0),
        (".5s", 0.5),
        ("1.s", 1.0),
        ("-.5h1.m", -1860.0),
        ("0", 0.0),
        ("+0", 0.0),
        ("-0", 0.0),
        (5, 5.0),
        (0.25, 0.25),
        (-3, -3.0),
        (timedelta(minutes=2, microseconds=1), 120.000001),
        (timedelta(days=-1), -86400.0),
    ],
)
def test_p13_a_length_of_time_becomes_seconds(
    value: float | timedelta | str, seconds: float
) -> None:
    """P13, with the forms of Go's ParseDuration."""
    result = parse_duration(value, name="delay")
    assert result == seconds
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5",
        "00",
        "0.0",
        ".",
        ".s",
        "1..s",
        "+",
        "s",
        "1 s",
        " 1s",
        "1s ",
        "1s\n",
        "1d",
        "1S",
        "01s0",
        "--1s",
        "1s-2s",
        "1e3s",
        "1,5s",
        "\u0661s",
        "infs",
        "1us",
        "9" * 31 + "s",
        "1s" * 21,
    ],
)
def test_other_text_is_refused(value: str) -> None:
    with pytest.raises(
        SetupError, match=r"^delay cannot be .*: it takes seconds, a timedelta, or text like"
    ):
        parse_duration(value, name="delay")


def test_days_are_told_as_hours() -> None:
    with pytest.raises(SetupError, match=r"^delay cannot be '2d': .* and a day is \"24h\"$"):
        parse_duration("2d", name="delay")


@pytest.mark.parametrize("value", ["-2h45m", -1, -0.5, timedelta(days=-1), "-.5s"])
def test_p13_a_negative_delay_is_at_once(value: float | timedelta | str) -> None:
    assert delay_seconds(value) == 0.0
    with pytest.raises(SetupError, match=r"^lease must be longer than 0 seconds"):
        positive_seconds("lease", value)


@pytest.mark.parametrize("value", [True, False, None, b"1s", [1], 1j])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(SetupError, match=rf"^delay cannot be .* of type {type(value).__name__}"):
        parse_duration(value, name="delay")


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), float("-inf"), 10**400, 2e11, timedelta.max, "999999999999h"],
)
def test_infinite_and_too_long_durations_are_refused(value: float | timedelta | str) -> None:
    with pytest.raises(
        SetupError, match=r"^delay must be a finite length of at most 1e\+11 seconds"
    ):
        parse_duration(value, name="delay")


def test_an_integer_without_a_text_form_is_refused() -> None:
    with pytest.raises(SetupError, match=r"got a larger integer$"):
        parse_duration(-(10**5000))


@given(sign=st.sampled_from(["", "+", "-"]), chosen=parts)
def test_text_is_the_exact_sum_of_its_parts(
    sign: str, chosen: list[tuple[int, str | None, str]]
) -> None:
    text = sign
    total = Fraction()
    for whole, fraction, unit in chosen:
        number = str(whole) if fraction is None else f"{whole}.{fraction}"
        text += number + unit
        total += Fraction(number) * UNITS[unit]
    assert parse_duration(text) == float(-total if sign == "-" else total)


@given(st.timedeltas(min_value=timedelta(days=-10_000), max_value=timedelta(days=10_000)))
def test_timedelta_written_as_text_means_the_same(value: timedelta) -> None:
    micros = abs(value) // timedelta(microseconds=1)
    seconds, rest = divmod(micros, 10**6)
    sign = "-" if value < timedelta() else ""
    text = f"{sign}{seconds // 3600}h{seconds % 3600 // 60}m{seconds % 60}.{rest:06}s"
    assert timedelta(seconds=parse_duration(text)) == value
    assert parse_duration(text) == pytest.approx(parse_duration(value), rel=1e-15)


@given(st.floats(-LONGEST_SECONDS, LONGEST_SECONDS))
def test_seconds_stay_what_they_are(value: float) -> None:
    assert parse_duration(value) == value


@given(st.text(max_size=30) | st.floats() | st.integers() | st.timedeltas())
def test_anything_either_becomes_finite_seconds_or_is_a_setup_error(
    value: float | timedelta | str,
) -> None:
    try:
        seconds = parse_duration(value)
    except SetupError:
        return
    assert abs(seconds) <= LONGEST_SECONDS
    timedelta(seconds=seconds)
