"""Impossible scheduling policies are refused at the decorator, with the remedy (D3, P6, Z4, Z7,
Z10)."""

from collections.abc import Callable
from datetime import time, timedelta
from typing import Any

import pytest
from faststream import AckPolicy
from faststream import Header as FastStreamHeader
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    BlockingWait,
    Concurrency,
    Debounce,
    Delay,
    Header,
    KeepLast,
    Once,
    SetupError,
    SqlBroker,
    SqlBrokerRoute,
    SqlBrokerRouter,
    Throttle,
    Window,
)

Options = Callable[[], dict[str, Any]]


def given(*policies: Callable[[], Any], **options: Any) -> Options:
    return lambda: {"policies": [policy() for policy in policies], **options}


def many(policy: Callable[[Any], Any], name: str) -> list[tuple[Options, str]]:
    """Lengths of time that are none."""
    return [
        (given(lambda: policy(-1)), f"{name} must be longer than 0 seconds, got -1"),
        (given(lambda: policy("-5s")), f"{name} must be longer than 0 seconds, got '-5s'"),
        (given(lambda: policy(timedelta())), f"{name} must be longer than 0 seconds"),
        (given(lambda: policy(1e-9)), f"{name} must be longer than 0 seconds"),
        (
            given(lambda: policy("soon")),
            f"{name} cannot be 'soon': use seconds, a timedelta, or text like",
        ),
        (given(lambda: policy(float("nan"))), f"{name} must be a finite duration"),
        (given(lambda: policy(True)), f"{name} cannot be True of type bool"),
    ]


LENGTHS = [
    *many(Delay, "Delay"),
    *many(Debounce, "Debounce's window"),
    *many(KeepLast, "KeepLast's window"),
    (given(lambda: KeepLast(1, without_key="drop")), "must be one of 'deliver', 'dead_letter'"),  # type: ignore[arg-type]
    *many(lambda x: Debounce(1, max_wait=x), "Debounce's max_wait"),
    *many(lambda x: Throttle(1, per=x), "Throttle's per"),
    *many(Once, "Once's ttl"),
    *many(BlockingWait, "BlockingWait"),
]

VALUES: list[tuple[Options, str]] = [
    (
        given(lambda: Debounce("1h", key=False)),
        "Debounce needs a key: omit key=False, or name a header",
    ),
    (given(lambda: Debounce("1h", key="k")), "Debounce's key must be True, False or .*Header"),  # type: ignore[arg-type]
    (given(lambda: Debounce("1h", edge="middle")), "edge must be one of 'trailing', 'leading'"),  # type: ignore[arg-type]
    (
        given(lambda: Debounce("1h", max_wait="1m")),
        r"must be 3600s \(its window\) or more, got 60s: raise max_wait, or shorten the window",
    ),
    (given(lambda: Debounce("1h", edge="leading", max_wait="2h")), "immediately: omit max_wait"),
    (given(lambda: Debounce("1h", without_key="drop")), "must be one of 'deliver', 'dead_letter'"),  # type: ignore[arg-type]
    (given(lambda: Throttle(0, per="1m")), "rate must be a whole number from 1 to 1000000, got 0"),
    (given(lambda: Throttle(1.5, per="1m")), "rate must be a whole number"),  # type: ignore[arg-type]
    (given(lambda: Throttle(True, per="1m")), "rate must be a whole number"),
    (
        given(lambda: Throttle(5, per="1m", burst=6)),
        "burst must be a whole number from 1 to 5, got 6",
    ),
    (
        given(lambda: Throttle(5, per="1m", burst=0)),
        "burst must be a whole number from 1 to 5, got 0",
    ),
    (given(lambda: Throttle(1, per=1, scope="")), "cannot be the scope of a Throttle"),
    (given(lambda: Throttle(1, per=1, scope=7)), "7 cannot be the scope of a Throttle"),  # type: ignore[arg-type]
    (
        given(lambda: Throttle(1, per=1, key=True, scope="mail")),
        "Throttle's scope is one budget for several queues, which excludes key=True",
    ),
    (
        given(lambda: Throttle(1, per=1, when_exceeded="drop", scope="mail")),
        "which excludes when_exceeded='drop': remove one of the two",
    ),
    (
        given(lambda: Concurrency(1, per_key=True, scope="mail")),
        "Concurrency's scope is one budget for several queues, which excludes per_key=True",
    ),
    (
        given(
            lambda: Throttle(1, per=1, scope="mail"), lambda: Throttle(9, per="1m", scope="mail")
        ),
        "a Throttle of the scope 'mail' can be given only once",
    ),
    (given(lambda: Throttle(1_000_000, per="1ms")), "lower the rate, or remove the policy"),
    (
        given(lambda: Throttle(1, per=1, when_exceeded="queue")),
        "must be one of 'wait', 'backoff', 'drop', 'dead_l",
    ),  # type: ignore[arg-type]
    (given(lambda: Throttle(1, per=1, key="k")), "Throttle's key must be True, False or .*Header"),  # type: ignore[arg-type]
    (
        given(lambda: Concurrency(0)),
        "Concurrency's limit must be a whole number from 1 to 1000000, got 0",
    ),
    (given(lambda: Concurrency(-3)), "Concurrency's limit must be a whole number"),
    (
        given(lambda: Concurrency(1, without_key="dead_letter")),
        "without per_key=True the policy ignores keys: add per_key=True, or omit without_key",
    ),
    (
        given(lambda: Throttle(1, per=1, without_key="dead_letter")),
        "without key=True the policy ignores keys: add key=True, or omit without_key",
    ),
    (
        given(lambda: Concurrency(1, per_key=1)),
        "Concurrency's per_key must be True, False or .*Header",
    ),  # type: ignore[arg-type]
    (given(lambda: Throttle(1, per=1, key="tenant")), "key must be True, False or .*Header"),  # type: ignore[arg-type]
    (
        given(lambda: Debounce(1, key=FastStreamHeader("tenant"))),
        "which is FastStream's Header for handler arguments",
    ),
    (given(lambda: Once(1, key=False)), "Once needs a key: omit key=False"),
    (given(lambda: KeepLast(1, key=False)), "KeepLast needs a key"),
    (
        given(lambda: Once(1, key=Header(""))),
        r"Header\(''\) is not a valid header: it must not be empty",
    ),
    (
        given(lambda: Once(1, key=Header(5))),
        r"Header\(5\) is not a valid header: it must be a string",
    ),  # type: ignore[arg-type]
    (
        given(lambda: Throttle(1, per=1, key=Header("a"), scope="s")),
        "key=True",
    ),
    (given(lambda: Window("09:00", "09:00")), "so it never opens: choose different times"),
    (given(lambda: Window(time(9), "09:00")), "so it never opens"),
    (given(lambda: Window("09:00", "17:00", days=[])), "so it never opens: name at least one day"),
    (
        given(lambda: Window("09:00", "17:00", days=["friday"])),
        "must be among mon, tue, .*, got 'friday'",
    ),
    (given(lambda: Window("9", "17:00")), "start must be \"HH:MM\" .*, got '9'"),
    (given(lambda: Window("09:00", "24:30")), "end must be .*, got '24:30'"),
    (given(lambda: Window("24:00", "09:00")), 'use "00:00", the beginning of the day'),
    (
        given(lambda: Window("09:00", "17:00", tz="Mars/Olympus")),
        "tz cannot be 'Mars/Olympus': use a name of",
    ),
    (given(lambda: Window("09:00", "17:00", tz="")), "tz cannot be ''"),
    (given(lambda: Window("09:00", "17:00", tz="../etc/passwd")), "tz cannot be '../etc/passwd'"),
]

TOGETHER: list[tuple[Options, str]] = [
    (
        lambda: {"policies": Delay(1)},
        r"policies must be a list of Delay, .*: put it in brackets",
    ),
    (lambda: {"policies": "Delay"}, "policies must be a list"),
    (lambda: {"policies": None}, "policies must be a list"),
    (lambda: {"policies": [Debounce]}, "got the class Debounce: call it"),
    (lambda: {"policies": ["1h"]}, "policies must contain only Delay, Debounce, .*, got '1h'"),
    (
        given(lambda: Delay(1), lambda: Delay(2)),
        "a Delay can be given only once, .*: keep one of them",
    ),
    (
        given(lambda: Debounce(1), lambda: Debounce(2)),
        "a Debounce or KeepLast can be given only once",
    ),
    (
        given(lambda: KeepLast(1), lambda: Debounce(2)),
        "a Debounce or KeepLast can be given only once",
    ),
    (given(lambda: Once(1), lambda: KeepLast(1)), "put KeepLast.* first"),
    (given(lambda: KeepLast(1), lambda: Concurrency(2, per_key=True)), "contradicts it: remove it"),
    (given(lambda: KeepLast(1), ordered=True), "KeepLast.* delivers one of several"),
    (
        given(lambda: Throttle(1, per=1, key=Header("tenant")), ordered=True),
        "ordered=True uses the key of the publish",
    ),
    (
        given(
            lambda: Throttle(1, per=1, key=Header("tenant")), lambda: Concurrency(1, per_key=True)
        ),
        (
            r"must use one key, except for Once, got Throttle\(.*\) by Header\('tenant'\) and "
            r"Concurrency\(1, per_key=True\) by the key of the publish: give all of them the same"
        ),
    ),
    (
        given(
            lambda: Debounce(1, key=Header("a")),
            lambda: Throttle(1, per=1, key=Header("b")),
            lambda: Once(1, key=Header("c")),
        ),
        r"by Header\('a'\) and Throttle\(.*\) by Header\('b'\): give all of them",
    ),
    (
        given(lambda: Window("09:00", "10:00"), lambda: Window("11:00", "12:00")),
        "a Window can be given only once",
    ),
    (given(lambda: Once(1), lambda: Once(2)), "a Once can be given only once"),
    (
        given(lambda: BlockingWait(1), lambda: BlockingWait(2)),
        "a BlockingWait can be given only once",
    ),
    (
        given(lambda: Concurrency(1), lambda: Concurrency(2)),
        "a Concurrency of the same kind can be given only once",
    ),
    (
        given(
            lambda: Throttle(1, per=1, key=True), lambda: Throttle(1, per=1, when_exceeded="drop")
        ),
        "can be given only once",
    ),
    (
        given(lambda: Throttle(1, per=1), lambda: Debounce(1)),
        "would be spent on messages .*: put Debounce.* first",
    ),
    (given(lambda: Once(1), lambda: Debounce(1)), "put Debounce.* first"),
    (given(lambda: Concurrency(1), lambda: Delay(1)), "put Delay.* first"),
    (
        given(lambda: Debounce(1), lambda: Concurrency(2, per_key=True)),
        "is redundant or contradicts it: remove it",
    ),
    (
        given(lambda: Debounce(1), ordered=True),
        "ordered=True delivers every message of a key.*remove one of the two",
    ),
    (
        given(lambda: Concurrency(2, per_key=True), ordered=True),
        "ordered=True leases one message .*remove one of the two",
    ),
    (
        given(lambda: Throttle(1, per=1, key=True, when_exceeded="drop"), ordered=True),
        'ordered=True delivers every message of a key, but .* removes .*: use when_exceeded="wait"',
    ),
    (
        given(ordered=True, ack_policy=AckPolicy.ACK_FIRST),
        "ACK_FIRST removes a message before its handler starts: use another policy",
    ),
    *(
        (
            given(policy, ack_policy=AckPolicy.ACK_FIRST),
            "ACK_FIRST removes a message before its handler starts",
        )
        for policy in (lambda: Once(1), lambda: Concurrency(1), lambda: BlockingWait(1))
    ),
]

WRONG = [*LENGTHS, *VALUES, *TOGETHER]


async def handle(body: str) -> None:
    """Any handler."""


@pytest.fixture
def broker() -> SqlBroker:
    return SqlBroker(create_async_engine("sqlite+aiosqlite:///unused.db"))


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_the_decorator_refuses_impossible_policies(
    broker: SqlBroker, options: Options, match: str
) -> None:
    with pytest.raises(SetupError, match=match):
        broker.subscriber("q", **options())
    assert broker.subscribers == []


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_a_route_refuses_impossible_policies(options: Options, match: str) -> None:
    """Where the router is made, not when it is included or started."""
    with pytest.raises(SetupError, match=match):
        SqlBrokerRouter(handlers=[SqlBrokerRoute(handle, "q", **options())])


@pytest.mark.parametrize(
    "policies",
    [
        [Debounce("1h", max_wait="1h"), Throttle(600, per="1m")],
        [KeepLast("1h", without_key="dead_letter"), Throttle(600, per="1m")],
        [
            Window("22:00", "06:00", tz="Europe/Berlin", days=["fri"]),
            Throttle(3, per=1),
            Throttle(100, per="1h"),
        ],
        [
            Delay(1),
            Debounce(1),
            Throttle(1, per=1, key=True),
            Throttle(9, per=1),
            Concurrency(3),
            Once("1h"),
        ],
        [Concurrency(1), Concurrency(2, per_key=True), BlockingWait("1s")],
        [Concurrency(2, per_key=Header("tenant")), Once("1h")],
        [Concurrency(2, per_key=True), Once("1h", key=Header("order"))],
        [Debounce(1, key=Header("tenant")), Once("1h", key=Header("order"))],
        [],
    ],
    ids=str,
)
def test_possible_policies_are_accepted(broker: SqlBroker, policies: list[Any]) -> None:
    """D3, Z12: composed in the order given."""
    broker.subscriber("q", policies=policies)(handle)
    broker.include_router(
        SqlBrokerRouter(handlers=[SqlBrokerRoute(handle, "r", policies=policies)])
    )
    assert len(broker.subscribers) == 2


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("policy", [Once(1), Concurrency(1), BlockingWait(1)], ids=str)
async def test_the_ack_policy_of_the_broker_is_known_at_the_start(
    engine: AsyncEngine, policy: Any
) -> None:
    broker = SqlBroker(engine, logger=None, ack_policy=AckPolicy.ACK_FIRST)
    await broker.create_tables()
    broker.subscriber("q", policies=[policy])(handle)
    with pytest.raises(SetupError, match="ACK_FIRST removes a message before its handler starts"):
        await broker.start()
    await broker.stop()
