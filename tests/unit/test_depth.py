"""When a process counts a queue with a `max_depth`, and what it believes in between."""

from typing import Any

import pytest

from faststream_sqlbroker import MaxDepth, SetupError, SqlBroker
from faststream_sqlbroker.core.depth import (
    COUNT_LIFETIME,
    FULL_RECHECK,
    REST_FACTOR,
    DepthEstimate,
    validate_depths,
)

URL = "sqlite+aiosqlite:///never_made.db"


def test_the_first_publish_waits_for_a_count() -> None:
    assert DepthEstimate(10).get_count_delay(0.0) == 0.0


def test_a_count_that_found_room_stands_for_a_while() -> None:
    depth = DepthEstimate(10)
    depth.record_count(3, now=100.0, duration=0.001)
    assert not depth.is_full
    assert depth.get_count_delay(100.0 + COUNT_LIFETIME - 0.1) is None
    assert depth.get_count_delay(100.0 + COUNT_LIFETIME) == 0.0


def test_a_process_refuses_nothing_by_its_own_publishes_alone() -> None:
    depth = DepthEstimate(10)
    depth.record_count(3, now=100.0, duration=0.01)
    depth.add(7)
    assert depth.is_full
    # They may be handled already: a count tells, after the rest that the last count asks for.
    assert depth.get_count_delay(100.0) == pytest.approx(REST_FACTOR * 0.01)
    assert depth.get_count_delay(100.1) == 0.0
    depth.record_count(0, now=101.0, duration=0.01)
    assert not depth.is_full


def test_only_a_large_limit_lets_publishes_go_without_a_count() -> None:
    """For those that cannot wait for the next one."""
    large = DepthEstimate(1_000_000)
    small = DepthEstimate(10)
    for depth in (large, small):
        depth.record_count(depth.limit - 1, now=100.0, duration=1.0)
        assert not depth.can_skip_count(100.0)
        depth.add(1)
    assert large.can_skip_count(101.0)
    assert not small.can_skip_count(101.0)
    assert not large.can_skip_count(100.0 + REST_FACTOR), "the next count is due"
    large.record_count(1_000_000, now=200.0, duration=1.0)
    assert not large.can_skip_count(200.0), "a count has found it full"


def test_a_full_queue_is_counted_again_soon_but_not_for_each_publish() -> None:
    depth = DepthEstimate(10)
    depth.record_count(10, now=100.0, duration=0.001)
    assert depth.get_count_delay(100.0 + FULL_RECHECK / 2) is None
    assert depth.is_full
    assert depth.get_count_delay(100.01 + FULL_RECHECK) == 0.0
    assert depth.get_recount_delay(100.0) == pytest.approx(FULL_RECHECK)
    assert depth.get_recount_delay(200.0) == 0.0


def test_slow_counts_come_seldom() -> None:
    depth = DepthEstimate(1_000_000)
    depth.record_count(1_000_000, now=100.0, duration=0.5)
    assert depth.get_count_delay(100.0 + REST_FACTOR * 0.5 - 0.1) is None
    depth.record_count(999_999, now=200.0, duration=0.5)
    assert depth.get_count_delay(200.0 + COUNT_LIFETIME) is None
    assert depth.get_count_delay(200.0 + REST_FACTOR * 0.5) == 0.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"messages": 0}, "from 1 to 1000000, got 0"),
        ({"messages": 1_000_001}, "from 1 to 1000000"),
        ({"messages": True}, "got True"),
        ({"messages": 5, "when_full": "block"}, "'wait', 'raise', 'drop'"),
        ({"messages": 5, "timeout": -1}, "0 or more seconds"),
        ({"messages": 5, "timeout": "soon"}, "timeout of MaxDepth"),
    ],
)
def test_a_limit_is_checked_where_it_is_written(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        MaxDepth(**values)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([("q", 1)], "must be a mapping"),
        (10, "must be a mapping"),
        ({"q": "10"}, "must be a MaxDepth or a whole number, got '10'"),
        ({"q": True}, "must be a MaxDepth or a whole number"),
        ({"": 10}, "must not be empty"),
        ({3: 10}, "must be a string"),
    ],
)
def test_the_option_is_checked_by_the_broker(given: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        SqlBroker(URL, max_depth=given)


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "1k"])
def test_max_payload_is_a_number_of_bytes(given: Any) -> None:
    with pytest.raises(SetupError, match="max_payload must be a whole number of 1 or more"):
        SqlBroker(URL, max_payload=given)


def test_a_number_is_a_limit_that_waits() -> None:
    assert validate_depths({"q": 10}) == {"q": MaxDepth(10, "wait", 30.0)}
    assert validate_depths(None) == {}
    assert MaxDepth(1, timeout=None).timeout_seconds is None
    assert MaxDepth(1, timeout="1.5m").timeout_seconds == 90.0
