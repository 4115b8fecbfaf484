"""Subscribers tell each other their policies as JSON; texts are for people."""

import json
from datetime import datetime, time, timedelta, timezone
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import (
    BlockingWait,
    Concurrency,
    Debounce,
    Delay,
    Header,
    KeepLast,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies.combinations import POLICY_CLASSES
from faststream_sqlbroker.core.policies.stored import dump_policies, read_policies
from faststream_sqlbroker.core.status import build_description, group_by_mode, parse_subscriber

HARD_NAME = 'it\'s, burst=4) "x"\n\\'
"""As a header or a scope it looks like an end, a quote and an option of a text."""
POLICIES: list[Policy] = [
    Delay("5s"),
    Delay(0.000001),
    Delay(timedelta(days=400)),
    Once("1h"),
    Once("1h", key=Header("order")),
    Concurrency(3),
    Concurrency(3, per_key=True),
    Concurrency(3, per_key=Header(HARD_NAME)),
    Concurrency(3, scope=HARD_NAME),
    BlockingWait(2),
    Debounce("1s"),
    Debounce("1s", max_wait="3s"),
    Debounce("1s", edge="leading", key=Header("tenant")),
    KeepLast("300ms"),
    KeepLast("300ms", key=Header(HARD_NAME)),
    Throttle(10, "1s"),
    Throttle(10, timedelta(days=400), burst=3),
    Throttle(10, 0.001, key=True, when_exceeded="drop"),
    Throttle(7, "1m", key=Header(HARD_NAME), burst=2, when_exceeded="backoff"),
    Throttle(7, "1m", scope=HARD_NAME),
    Window("22:00", "06:00", days=["fri", "sat"]),
    Window(time(22, 0, 10), time(22, 0, 50)),
    Window("00:00", "24:00", tz="Europe/Berlin"),
    Window(time(1, 2, 3, 4), "24:00", days=["mon"]),
]
BEYOND_TEXT: list[Policy] = [
    Delay(1234567.891),
    Once("1h", without_key="dead_letter"),
    Concurrency(3, per_key=True, without_key="dead_letter"),
    Debounce("1s", without_key="dead_letter"),
    KeepLast(1.2345678, without_key="dead_letter"),
    Throttle(7, 1.2345678, key=True, without_key="dead_letter"),
]
"""What their texts do not say."""
NOW = datetime(2024, 1, 1, tzinfo=timezone.utc)


def test_every_kind_is_tried() -> None:
    assert {type(policy) for policy in POLICIES} == set(POLICY_CLASSES)


@pytest.mark.parametrize("policy", [*POLICIES, *BEYOND_TEXT], ids=ascii)
def test_json_says_all(policy: Policy) -> None:
    assert read_policies(json.loads(json.dumps(dump_policies([policy])))) == (policy,)


@pytest.mark.parametrize(
    "told",
    [
        None,
        7,
        "Delay(1s)",
        [],
        {},
        {"kind": "Unheard"},
        {"kind": ["Delay"], "delay": 1},
        {"kind": "Delay"},
        {"kind": "Delay", "delay": -1},
        {"kind": "Once", "ttl": 1, "key": {}},
        {"kind": "Window", "start": 1, "end": "02:00"},
    ],
)
def test_what_is_no_policy_is_left_out(told: Any) -> None:
    assert read_policies([told, {"kind": "Delay", "delay": 1_000_000}]) == (Delay(1),)


def test_an_argument_of_a_newer_version_is_left_out() -> None:
    told = {"kind": "Delay", "delay": 1_000_000, "jitter": 0.5}
    assert read_policies([told]) == (Delay(1),)


@pytest.mark.parametrize("stored", [None, 7, "Delay(1s)", {}])
def test_what_is_no_list_has_no_policies(stored: Any) -> None:
    assert read_policies(stored) == ()


def test_texts_tell_of_policies_that_are_not_known() -> None:
    """During a deployment a process lists what a newer one has told of itself."""
    told = build_description(
        queues=["q"],
        max_workers=1,
        ordered=True,
        policies=[policy for policy in POLICIES if isinstance(policy, Throttle)],
        paused=False,
        stopping=False,
    )
    newer = {**told, "rules": [{**rule, "kind": "Unheard"} for rule in told["rules"]]}
    both = [parse_subscriber(name, info, NOW, NOW) for name, info in (("a", told), ("b", newer))]
    assert [subscriber.rules == () for subscriber in both] == [False, True]
    assert both[0].policies == both[1].policies
    assert len(group_by_mode("q", both)) == 1
