"""What is worked out of counts and names."""

from typing import Any

import pytest

from faststream_sqlbroker.core.overview import Count, QueueOverview, find_similar_name


def overview(**given: Any) -> QueueOverview:
    zero = dict.fromkeys(("ready", "delayed", "in_flight", "retrying"), Count(0))
    fields: dict[str, Any] = {
        "queue": "q",
        **zero,
        "oldest_due_age": 0.0,
        "in_per_minute": 0.0,
        "out_per_minute": None,
        "live_subscribers": 0,
        "paused": None,
        "used": True,
    }
    return QueueOverview(**{**fields, **given})


def test_an_estimate_says_that_it_is_one() -> None:
    assert str(Count(999)) == "999"
    assert str(Count(12_000, "about")) == "about 12000"
    assert str(Count(500, "at least")) == "at least 500"
    assert Count(1) + Count(2) == Count(3)
    assert Count(1) + Count(5, "at least") == Count(5, "at least") + Count(1)
    assert Count(1, "about") + Count(5, "at least") == Count(6, "about")
    assert Count(5, "at least") + Count(1, "about") == Count(6, "about")
    assert Count(1) + Count(5_000, "about") == Count(5_001, "about")
    assert Count(5_000, "about").share(10, 1_000) == 50


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"ready": Count(3)}, "no live subscriber"),
        ({"delayed": Count(3)}, "no live subscriber"),
        ({"in_flight": Count(1)}, "no live subscriber"),
        ({"standing": Count(1)}, "no live subscriber"),
        ({"ready": Count(3), "live_subscribers": 1}, None),
        ({}, None),
        ({"used": False, "live_subscribers": 2}, None),
        (
            {"used": False, "live_subscribers": 2, "nearest": "ordres"},
            "it has never had a message; did you mean 'ordres'?",
        ),
        ({"used": False}, None),
        ({"ready": Count(3), "nearest": "orders"}, "no live subscriber; did you mean 'orders'?"),
    ],
)
def test_a_queue_that_only_one_side_knows_has_a_problem(
    given: dict[str, Any], problem: str | None
) -> None:
    assert overview(**given).problem == problem


def test_what_stands_by_is_a_problem_once_no_claim_looks_at_it() -> None:
    assert overview(standing=Count(2), standing_overdue=599.0).late_standing is None
    late = overview(standing=Count(2), standing_overdue=600.0).late_standing
    assert late == "2 standby messages have not been checked for 600 s"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("ordres", "orders"), ("orders", None), ("order", "orders"), ("email", None), ("", None)],
)
def test_the_nearest_name_is_nearly_the_same(name: str, nearest: str | None) -> None:
    assert find_similar_name(name, ["orders", "invoices", "sms"]) == nearest
