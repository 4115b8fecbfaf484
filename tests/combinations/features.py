"""The features that meet, as axes; the first value of each is the usual one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker import (
    BlockingWait,
    Concurrency,
    ConstantRetryStrategy,
    Debounce,
    Delay,
    ExponentialBackoffWithJitterRetryStrategy,
    Header,
    KeepLast,
    NoRetryStrategy,
    Once,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies import Policy

ATTEMPTS = 3
POLICIES: dict[str, Policy | None] = {
    "no policy": None,
    "Delay": Delay("50ms"),
    "Debounce": Debounce("50ms"),
    "KeepLast": KeepLast("50ms"),
    "Throttle": Throttle(100, per="1s"),
    "Throttle by key": Throttle(100, per="1s", key=True),
    "Window": Window("00:00", "24:00"),
    "Concurrency": Concurrency(5),
    "Concurrency by key": Concurrency(2, per_key=True),
    "Once": Once("1h"),
    "Once by header": Once("1h", key=Header("order")),
    "BlockingWait": BlockingWait("10ms"),
}
SECOND = tuple("then " + name for name in POLICIES)
"""The same as a second policy of the same subscriber."""
MODES: dict[str, dict[str, Any]] = {
    "plain handler": {},
    "synchronous handler": {},
    "batch": {"batch": True},
    "transactional": {"transactional": True},
    "transactional, publishes": {"transactional": True},
    "ordered": {"ordered": True},
    "ACK_FIRST": {"ack_policy": AckPolicy.ACK_FIRST},
    "REJECT_ON_ERROR": {"ack_policy": AckPolicy.REJECT_ON_ERROR},
    "forward_to": {"forward_to": "next"},
}
QUICK_RETRIES = ConstantRetryStrategy(delay_seconds=0.05, max_attempts=ATTEMPTS)
RETRIES: dict[str, dict[str, Any]] = {
    "default retries": {},
    "constant retries": {"retry_strategy": QUICK_RETRIES},
    "jittered retries": {
        "retry_strategy": ExponentialBackoffWithJitterRetryStrategy(
            initial_delay_seconds=0.01, max_delay_seconds=0.1, max_attempts=ATTEMPTS
        )
    },
    "NoRetryStrategy": {"retry_strategy": NoRetryStrategy()},
    "no retries": {"retry_strategy": None},
}
SCHEDULED: dict[str, dict[str, Any]] = {
    "schedule": {},
    "scheduled function with tz and missed": {"tz": "Europe/Berlin", "missed": "all"},
    "schedule with delay and headers": {"delay": "50ms", "headers": {"a": "b"}},
    "schedule with expires_in and priority": {"expires_in": "1h", "priority": 7},
}
"""Ways to publish by a schedule, with its options."""
AXES: dict[str, tuple[str, ...]] = {
    "policy": tuple(POLICIES),
    "second": SECOND,
    "mode": tuple(MODES),
    "middleware": ("no middleware", "own middleware", "Prometheus", "OpenTelemetry"),
    "retry": tuple(RETRIES),
    "answer": (
        "no answer",
        "stacked publisher",
        "publisher of batches",
        "reply_to",
        "SqlBrokerResponse",
        "with_ack",
        "relay to Kafka",
    ),
    "publish": (
        "publish",
        "publish_batch",
        "own publisher",
        "own publisher's batch",
        "publish_sync",
        "SqlProducer",
        *SCHEDULED,
        "delay",
        "priority",
        "dedup_id",
        "expires_in",
        "lookup",
    ),
    "transaction": ("its own transaction", "connection=", "session="),
    "dead_letters": ("archive", "dead_letter_queue", "no archive"),
    "application": ("FastStream", "FastAPI"),
    "broker": ("database", "TestSqlBroker"),
}
"""The first value of each is the usual one, which goes together with all."""
AXIS_OF = {value: number for number, given in enumerate(AXES.values()) for value in given}
Pair = tuple[str, str]
"""In the order of their axes."""


@dataclass(frozen=True)
class Case:
    """A value of each axis."""

    policy: str
    second: str
    mode: str
    middleware: str
    retry: str
    answer: str
    publish: str
    transaction: str
    dead_letters: str
    application: str
    broker: str

    def policies(self) -> list[Policy]:
        """Those of its subscriber, in order."""
        names = (self.policy, self.second.removeprefix("then "))
        return [each for name in names if (each := POLICIES[name])]

    def headers(self, key: str) -> dict[str, Any]:
        """The option `headers` of a publish whose key is `key`, if a policy needs one."""
        by_header = any(isinstance(getattr(p, "key", None), Header) for p in self.policies())
        return {"headers": {"order": key}} if by_header else {}

    def attempts(self) -> int:
        """How often the handler runs for a message that fails each time."""
        once = {"ACK_FIRST", "REJECT_ON_ERROR"}
        claimed_once = self.mode != "forward_to" and any(
            isinstance(policy, Once) for policy in self.policies()
        )
        if self.mode in once or claimed_once or self.retry in {"NoRetryStrategy", "no retries"}:
            return 1
        return 10 if (self.retry, self.broker) == ("default retries", "TestSqlBroker") else ATTEMPTS

    def answers(self) -> int:
        """How many the message that succeeds has."""
        return {"no answer": 0, "publisher of batches": 2}.get(self.answer, 1)

    def values(self) -> tuple[str, ...]:
        """Those that are not usual."""
        given = [getattr(self, axis) for axis in AXES]
        return tuple(v for v, usual in zip(given, AXES.values(), strict=True) if v != usual[0])

    def __str__(self) -> str:
        return ", ".join(self.values())


USUAL = Case(**{axis: values[0] for axis, values in AXES.items()})


def pairs() -> Iterator[Pair]:
    """Every two values of two axes that are not usual, but for those that say nothing new."""
    for one, other in combinations(AXES.items(), 2):
        for value in one[1][1:]:
            for with_it in other[1][1:]:
                if with_it != f"then {value}" and not _says_nothing_new(
                    {one[0], other[0]}, {value, with_it}
                ):
                    yield value, with_it


_OF_DELIVERY = {"policy", "mode", "dead_letters", "broker"}
"""Axes that the options of schedules are tried with; the others have the plain schedule."""
_NEW_WAYS = {"own publisher", "own publisher's batch", "publish_sync", *SCHEDULED} - {"schedule"}


def _says_nothing_new(axes: set[str], values: set[str]) -> bool:
    if "second" in axes and (
        not axes.isdisjoint({"transaction", "application"}) or not _NEW_WAYS.isdisjoint(values)
    ):
        return True  # the first policy has it
    options = SCHEDULED.keys() - {"schedule"}
    return not options.isdisjoint(values) and axes.isdisjoint(_OF_DELIVERY)


def case_of(*values: str) -> Case:
    """The usual one but for `values`."""
    names = tuple(AXES)
    return replace(USUAL, **{names[AXIS_OF[value]]: value for value in values})
