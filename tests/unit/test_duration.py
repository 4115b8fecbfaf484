"""Durations: the grammar, exactness, and what is refused."""

from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker import (
    BlockingWait,
    ConstantRetryStrategy,
    Debounce,
    Delay,
    MaxDepth,
    NotReadyYet,
    Once,
    Postpone,
    Retention,
    Throttle,
    next_hop,
)
from faststream_sqlbroker.admin.filters import parse_time_or_age, parse_time_or_delay
from faststream_sqlbroker.core.times import (
    MAX_SECONDS,
    parse_delay,
    parse_duration,
    parse_lease,
    parse_positive,
    parse_wait,
)
from faststream_sqlbroker.exceptions import PublishError, SetupError
from faststream_sqlbroker.publisher.rows import make_row
from faststream_sqlbroker.subscriber.options import make_settings

UNITS = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}

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
        ("30d", 2_592_000.0),
        ("1d12h", 129_600.0),
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
        ".",
        ".s",
        "1..s",
        "+",
        "s",
        "1 s",
        " 1s",
        "1s ",
        "1s\n",
        "5",
        "00",
        "0.0",
        "1h30",
        "1w",
        "1 d",
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
        SetupError, match=r"^delay cannot be .*: use seconds, a timedelta, or text like"
    ):
        parse_duration(value, name="delay")


@pytest.mark.parametrize("value", ["-2h45m", -1, -0.5, timedelta(days=-1), "-.5s"])
def test_p13_a_negative_delay_is_at_once(value: float | timedelta | str) -> None:
    assert parse_delay(value) == 0.0
    with pytest.raises(SetupError, match=r"^lease must be longer than 0 seconds"):
        parse_positive("lease", value)


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
        SetupError, match=r"^delay must be a finite duration of at most 1e\+11 seconds"
    ):
        parse_duration(value, name="delay")


def test_an_integer_without_a_text_form_is_refused() -> None:
    with pytest.raises(SetupError, match=r"got a larger integer$"):
        parse_duration(-(10**5000))


TAKERS: dict[str, Callable[[Any], object]] = {
    "Once": Once,
    "Delay": Delay,
    "Debounce": Debounce,
    "Throttle": lambda length: Throttle(1, per=length),
    "BlockingWait": BlockingWait,
    "Retention": lambda length: Retention(completed=length),
    "MaxDepth": lambda length: MaxDepth(5, "wait", timeout=length),
    "retry strategy": lambda length: ConstantRetryStrategy(delay_seconds=length),
    "handler_timeout": lambda length: make_settings("q", {"handler_timeout": length}),
    "publish": lambda length: make_row("q", b"", None, {"delay": length}),
    "next_attempt_at": lambda length: make_row("q", b"", None, {"next_attempt_at": length}),
    "expires_in": lambda length: make_row("q", b"", None, {"expires_in": length}),
    "Postpone": Postpone,
    "NotReadyYet": lambda length: NotReadyYet(retry_in="1s", give_up_after=length),
    "an operator's age": lambda length: parse_time_or_age("since", length),
    "an operator's delay": lambda length: parse_time_or_delay("due", length),
    "a lease": parse_lease,
    "a wait": parse_wait,
    "a tier": lambda length: next_hop("30d", [length]),
}
"""What takes lengths of time."""


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("text", ["30d", "1d12h", "2h45m", "500s"])
def test_p13_a_text_is_accepted_wherever_a_length_of_time_is(taker: str, text: str) -> None:
    TAKERS[taker](text)


@pytest.mark.parametrize("taker", sorted(TAKERS.keys() - {"next_attempt_at"}))
@pytest.mark.parametrize("text", ["5", "30 days", "1w"])
def test_a_text_that_is_none_is_refused_everywhere(taker: str, text: str) -> None:
    """A number alone might be days as well as seconds; next_attempt_at takes Unix seconds."""
    with pytest.raises((SetupError, PublishError), match="each number with its unit"):
        TAKERS[taker](text)


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


@given(st.floats(-MAX_SECONDS, MAX_SECONDS))
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
    assert abs(seconds) <= MAX_SECONDS
    timedelta(seconds=seconds)
