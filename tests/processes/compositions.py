"""Random compositions of policies for a fleet, and what each of them promises.

A composition is known by its seed. What is checked comes from the archive, from the workers'
records and from looks at the leases while they work.
"""

import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from faststream_sqlbroker import SetupError, SqlBroker
from tests.processes import policy_checks as checks
from tests.processes.policy_checks import SECOND, Left
from tests.processes.policy_fleet import Seen
from tests.processes.policy_worker import policy

LEASE = 60.0
"""Seconds. A test ends the leases of the processes that it has killed."""
FIRST_SEED = 1000
MOST_DRAWS = 1000
"""Most of what is drawn contradicts itself, and is refused by the decorator."""
KEYS = ("a", "b", "c", "d", "e")
SCOPE = "shared"
Written = list[Any]
"""A policy as the worker reads it: name, arguments, options."""
Options = Mapping[str, Any]

THROTTLES: Sequence[tuple[list[Any], dict[str, Any]]] = (
    ([20, "1s"], {}),
    ([10, "500ms"], {"burst": 5}),
    ([15, "2s"], {"burst": 4}),
    ([6, "1s"], {"key": True}),
    ([10, "1s"], {"when_exceeded": "drop"}),
    ([4, "1s"], {"when_exceeded": "dead_letter", "key": True}),
    ([12, "1s"], {"when_exceeded": "backoff"}),
    ([25, "1s"], {"scope": SCOPE}),
)
CHOICES: Mapping[str, Sequence[tuple[list[Any], dict[str, Any]]]] = {
    "Delay": [(["300ms"], {}), (["1s"], {})],
    "Window": [(["00:00:00", "23:59:59"], {})],
    "Debounce": [
        (["400ms"], {}),
        (["500ms"], {"max_wait": "1s"}),
        (["400ms"], {"edge": "leading"}),
    ],
    "KeepLast": [(["300ms"], {}), (["1s"], {})],
    "Throttle": THROTTLES,
    "Concurrency": [([2], {}), ([4], {}), ([1], {"per_key": True}), ([3], {"scope": SCOPE})],
    "Once": [(["1h"], {})],
}
"""In the order in which a subscriber has them."""
ENDS = {
    "Debounce": {("DISCARDED", "superseded")},
    "KeepLast": {("DISCARDED", "superseded")},
    "Once": {("DISCARDED", "duplicate"), ("FAILED", "unknown_outcome"), ("FAILED", "failed_once")},
    "drop": {("DISCARDED", "throttled")},
    "dead_letter": {("FAILED", "throttled")},
}
"""How messages may end other than well."""


@dataclass
class Subscriber:
    """One queue's policies and options, drawn at random."""

    policies: list[Written]
    options: dict[str, Any]
    act: str
    seconds: float

    def given(self) -> dict[str, Any]:
        """As the worker reads it."""
        fields = ("policies", "options", "act", "seconds")
        return {name: getattr(self, name) for name in fields}

    def of(self, name: str) -> Iterator[tuple[list[Any], Options]]:
        """Its policies of that name: arguments and options."""
        for kind, arguments, options in self.policies:
            if kind == name:
                yield arguments, options

    @property
    def ends(self) -> set[tuple[str, str | None]]:
        """How its messages may end."""
        found: set[tuple[str, str | None]] = {("COMPLETED", None)}
        for kind, _, options in self.policies:
            found |= ENDS.get(kind, set()) | ENDS.get(str(options.get("when_exceeded")), set())
        return found


@dataclass
class Composition:
    """What a fleet runs."""

    seed: int
    subscribers: dict[str, Subscriber] = field(default_factory=dict)

    @classmethod
    def drawn(cls, seed: int, queues: int = 4) -> "Composition":
        """Of so many queues, such as a broker accepts."""
        chance = random.Random(seed)
        # It is never connected: nothing but the checks of a subscriber's options is used.
        broker = SqlBroker("sqlite+aiosqlite:///never-opened.db", logger=None)
        return cls(seed, {f"q{n}": _accepted(broker, chance) for n in range(queues)})

    def given(self) -> dict[str, Any]:
        """As the worker reads it."""
        return {queue: each.given() for queue, each in self.subscribers.items()}

    def __str__(self) -> str:
        lines = [f"seed {self.seed}"]
        for queue, each in self.subscribers.items():
            lines.append(f"{queue}: {each.policies} {each.options} {each.act} {each.seconds}")
        return "\n".join(lines)


def seed_of(number: int) -> int:
    """Of the `number`th composition, from that of the environment on."""
    return int(os.environ.get("SQLBROKER_COMPOSITION", FIRST_SEED)) + number


def _accepted(broker: SqlBroker, chance: random.Random) -> Subscriber:
    refused: Exception | None = None
    for _ in range(MOST_DRAWS):
        drawn = _drawn(chance)
        try:
            broker.subscriber(
                "q", policies=[policy(*one) for one in drawn.policies], **drawn.options
            )
        except SetupError as error:
            refused = error
            continue
        return drawn
    raise AssertionError(f"none of {MOST_DRAWS} compositions is accepted, the last: {refused}")


def _drawn(chance: random.Random) -> Subscriber:
    kinds = [kind for kind in CHOICES if chance.random() < 0.35]
    policies: list[Written] = []
    for kind in kinds:
        policies.append([kind, *chance.choice(CHOICES[kind])])
    options: dict[str, Any] = {
        "max_workers": chance.choice([1, 2, 5, 8]),
        "ordered": chance.random() < 0.3,
        "release_stuck_timeout": LEASE,
        "release_stuck_interval": 0.5,
        "max_fetch_interval": 0.25,
    }
    act = chance.choice(["", "", "retry_first"])
    return Subscriber(policies, options, act, chance.choice([0.0, 0.02, 0.1]))


def wrongs(
    composition: Composition,
    left: Mapping[str, Left],
    published: Mapping[str, Sequence[int]],
    seen: Seen,
    killed: Iterable[int],
) -> list[str]:
    """What is not as it was promised, one line each."""
    found: list[str] = []
    for queue, each in composition.subscribers.items():
        of_queue = [
            *_lost(each, left[queue], published[queue]),
            *_over_rate(each, left[queue]),
            *_over_limit(queue, each, seen),
            *_out_of_order(queue, each, left[queue], seen),
            *_twice(each, left[queue]),
            *_early(each, left[queue]),
            *_not_the_newest(each, left[queue]),
            *_repeated(left[queue], set(killed)),
        ]
        found += [f"{queue}: {line}" for line in of_queue]
    return found + _scopes(composition, left, seen)


def _lost(each: Subscriber, left: Left, published: Sequence[int]) -> Iterator[str]:
    ids = [row["id"] for row in left.rows]
    if sorted(ids) != sorted(published):
        yield f"published {len(published)}, archived {len(ids)}"
    started = {start.id for start in left.starts}
    for row in left.rows:
        if (row["state"], row["reason"]) not in each.ends:
            yield f"{row['id']} is {row['state']}: {row['reason']} {row['last_error']}"
        if row["state"] == "COMPLETED" and row["id"] not in started:
            yield f"{row['id']} is COMPLETED and was never started"


def _over_rate(each: Subscriber, left: Left) -> Iterator[str]:
    for (rate, per), options in each.of("Throttle"):
        slots: dict[str | None, list[int]] = {}
        for start in left.starts:
            key = start.key if options.get("key") else None
            if options.get("key") and key is None:
                continue
            if start.slot is None:
                yield f"{start.id} was started without a slot"
                continue
            slots.setdefault(key, []).append(start.slot)
            if start.at < start.slot - 1:
                yield f"{start.id} was started {start.slot - start.at} µs before its slot"
        for key, taken in slots.items():
            yield from (f"{key}: {line}" for line in checks.over_rate(taken, rate, _micros(per)))


def _micros(duration: str) -> int:
    if duration.endswith("ms"):
        return int(duration.removesuffix("ms")) * 1000
    return int(duration.removesuffix("s")) * SECOND


def _over_limit(queue: str, each: Subscriber, seen: Seen) -> Iterator[str]:
    for (limit,), options in each.of("Concurrency"):
        if options.get("scope"):
            continue
        for (of, key), most in seen.most.items():
            if of == queue and (key is not None) is bool(options.get("per_key")) and most > limit:
                yield f"{most} leases of {key}, where {limit} are allowed"


def _out_of_order(queue: str, each: Subscriber, left: Left, seen: Seen) -> Iterator[str]:
    if not each.options["ordered"]:
        return
    yield from checks.ordered(left)
    for (of, key), most in seen.most.items():
        if of == queue and key is not None and most > 1:
            yield f"{most} messages of {key} were leased at once"


def _twice(each: Subscriber, left: Left) -> Iterator[str]:
    if not any(each.of("Once")):
        return
    for key, rows in left.by_key.items():
        runs = [start for start in left.starts if start.key == key]
        asked = sum(start.key == key for start in left.again)
        if len(runs) > 1 + asked:
            yield f"{key} ran {len(runs)} times, asked for {asked}"
        if sum(row["state"] == "COMPLETED" for row in rows) > 1:
            yield f"{key} was completed twice"


def _early(each: Subscriber, left: Left) -> Iterator[str]:
    for (delay,), _ in each.of("Delay"):
        yield from checks.delayed(left, _micros(delay))


def _not_the_newest(each: Subscriber, left: Left) -> Iterator[str]:
    """The last message of each key is not superseded, and what others were superseded by has been
    claimed."""
    trailing = [*each.of("KeepLast"), *each.of("Debounce")]
    if not trailing:
        return
    leading = any(options.get("edge") == "leading" for _, options in trailing)
    by_id = {row["id"]: row for row in left.rows}
    for key, rows in left.by_key.items():
        if not leading and rows[-1]["reason"] == "superseded":
            yield f"{key}: its newest message {rows[-1]['id']} is superseded"
        for row in rows:
            if row["reason"] != "superseded":
                continue
            other = by_id.get(row["related_id"])
            if (
                other is None
                or other["deliveries_count"] == 0
                or (other["id"] < row["id"]) is not leading
            ):
                yield f"{row['id']} is superseded by {row['related_id']}"


def _repeated(left: Left, killed: set[int]) -> Iterator[str]:
    """An attempt starts again only when its process was killed, or stood still for a lease."""
    last: dict[tuple[int, int], Any] = {}
    for start in left.starts:
        before = last.get((start.id, start.attempt))
        last[start.id, start.attempt] = start
        if before is None or before.pid in killed:
            continue
        if start.acquired - before.acquired < LEASE * SECOND:
            yield f"attempt {start.attempt} of {start.id} was started again by {start.pid}"
    deliveries = {row["id"]: row["deliveries_count"] for row in left.rows}
    for message in {start.id for start in left.starts}:
        count = sum(start.id == message for start in left.starts)
        if count > deliveries.get(message, 0):
            yield f"{message}: {count} starts, {deliveries.get(message)} deliveries"


def _scopes(composition: Composition, left: Mapping[str, Left], seen: Seen) -> list[str]:
    """The budgets that several queues share."""
    slots: list[int] = []
    rates: list[tuple[int, int]] = []
    limits: list[tuple[str, int]] = []
    for queue, each in composition.subscribers.items():
        for (rate, per), options in each.of("Throttle"):
            if options.get("scope"):
                rates.append((rate, _micros(per)))
                slots += [s.slot for s in left[queue].starts if s.slot is not None]
        for (limit,), options in each.of("Concurrency"):
            if options.get("scope"):
                limits.append((queue, limit))
    found = [f"scope: {line}" for rate in rates[:1] for line in checks.over_rate(slots, *rate)]
    queues = tuple(queue for queue, _ in limits)
    most = seen.together.get(queues, 0)
    if limits and most > limits[0][1]:
        found.append(f"scope: {most} leases of {queues}, where {limits[0][1]} are allowed")
    return found
