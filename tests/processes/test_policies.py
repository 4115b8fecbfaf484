"""Scheduling policies, alone and composed, with real processes of which one is killed."""

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import pytest

from tests.helpers import eventually
from tests.processes import policy_checks as checks
from tests.processes.conftest import Fleet
from tests.processes.policy_checks import SECOND, Left, micros
from tests.processes.policy_fleet import Keys, PolicyFleet, Seen

pytestmark = pytest.mark.timeout(600)

TICKS = 30
STEP = 0.1
KILL_AT = 15
OPTIONS: dict[str, Any] = {"max_workers": 4, "release_stuck_timeout": 600.0}
LOOKS = {"max_fetch_interval": 0.5, "release_stuck_interval": 0.5}
"""For one process. Of several each looks more seldom: with these intervals 20 queues in four
processes would ask for hundreds of transactions a second; on two busy cores SQLite's one writer
did 100 to 150."""
BURSTS = {0, 1, 2, 14, 15, 26}
"""Ticks: in a burst 100 ms apart, bursts more than a second."""


def alone(opens: str, closes: str, later: str) -> dict[str, dict[str, Any]]:
    """Subscribers with one policy each."""
    slow = {"seconds": 0.1}
    return {
        "delay": {"policies": [["Delay", ["500ms"], {}]]},
        "debounce": {"policies": [["Debounce", ["400ms"], {}]], **slow},
        "stream": {"policies": [["Debounce", ["400ms"], {"max_wait": "1s"}]]},
        "leading": {"policies": [["Debounce", ["600ms"], {"edge": "leading"}]], **slow},
        "throttle": {"policies": [["Throttle", [20, "1s"], {}]]},
        "bursts": {"policies": [["Throttle", [10, "1s"], {"burst": 5}]]},
        "by_key": {"policies": [["Throttle", [4, "1s"], {"key": True}]]},
        "drop": {"policies": [["Throttle", [5, "1s"], {"when_exceeded": "drop"}]]},
        "dead": {"policies": [["Throttle", [5, "1s"], {"when_exceeded": "dead_letter"}]]},
        "backoff": {"policies": [["Throttle", [20, "1s"], {"when_exceeded": "backoff"}]]},
        "window": {"policies": [["Window", [opens, closes], {}]]},
        "closed": {"policies": [["Window", [closes, later], {}]]},
        "once": {"policies": [["Once", ["1h"], {}]], "seconds": 0.3},
        "most": {"policies": [["Concurrency", [2], {}]], **slow},
        "most_by_key": {"policies": [["Concurrency", [1], {"per_key": True}]], **slow},
        "blocking": {
            "policies": [["BlockingWait", ["300ms"], {}]],
            "act": "fail_first",
            "options": {"max_workers": 1},
        },
    }


def composed(opens: str, closes: str) -> dict[str, dict[str, Any]]:
    """Subscribers with several."""
    throttle = ["Throttle", [20, "1s"], {}]
    return {
        "debounce_throttle": {"policies": [["Debounce", ["400ms"], {}], throttle], "seconds": 0.1},
        "window_throttle_ordered": {
            "policies": [["Window", [opens, closes], {}], throttle],
            "act": "retry_first",
            "seconds": 0.05,
            "options": {"ordered": True},
        },
        "once_retry": {"policies": [["Once", ["1h"], {}]], "act": "retry_first", "seconds": 0.2},
        "all": {
            "policies": [
                ["Delay", ["200ms"], {}],
                ["Debounce", ["400ms"], {}],
                throttle,
                ["Once", ["1s"], {}],
                ["Concurrency", [3], {}],
            ],
        },
    }


def in_bursts(tick: int) -> Keys:
    """Eight keys."""
    return [f"k{n}" for n in range(8)] * 2 if tick in BURSTS else []


def at(first: int, last: int, keys: Keys) -> Callable[[int], Keys]:
    """`keys` at each tick from the first to the last."""
    return lambda tick: keys if first <= tick <= last else []


def some(tick: int) -> Keys:
    """Two of fourteen keys at every second tick, each key twice or more."""
    return [f"k{tick % 14}", f"k{(tick + 1) % 14}"] if tick % 2 == 0 else []


def streams(tick: int) -> Keys:
    """Six keys, each without a pause for longer than max_wait, begun one after the other."""
    return [f"s{n}" for n in range(6) if n <= tick <= n + 14]


FEEDS: dict[str, Callable[[int], Keys]] = {
    "delay": at(0, 15, [None]),
    "debounce": in_bursts,
    "stream": streams,
    "leading": in_bursts,
    "throttle": at(0, 9, [None] * 4),
    "bursts": at(0, 0, [None] * 25),
    "by_key": at(0, 4, ["a", "b", None]),
    "drop": at(0, 9, [None] * 6),
    "dead": at(0, 9, [None] * 6),
    "backoff": at(0, 2, [None] * 4),
    "window": at(0, 9, [None]),
    "closed": at(0, 2, [None]),
    "once": some,
    "most": at(4, 15, ["a"]),
    "most_by_key": at(6, 17, ["a", "b"]),
    "blocking": at(0, 2, [None]),
    "debounce_throttle": in_bursts,
    "window_throttle_ordered": at(0, 5, ["a", "b", "c"]),
    "once_retry": some,
    "all": in_bursts,
}


@pytest.mark.parametrize(
    ("database", "processes"),
    # One process alone has no other to step in for it: what its successor does is the same code on
    # all databases.
    [*((kind, 3) for kind in ("sqlite", "postgresql", "mariadb", "mysql")), ("sqlite", 1)],
    indirect=["database"],
)
async def test_policies_hold_when_a_process_is_killed(fleet: Fleet, processes: int) -> None:
    """Z1, Z4, Z7, Z10, Z12, P1, P6: every policy alone and composed; nothing is lost, each keeps
    its promise."""
    policies = PolicyFleet(fleet)
    now = await fleet.store.server.read_now()
    opens, closes, later = (now + timedelta(seconds=s) for s in (6, 3600, 7200))
    times = [f"{moment:%H:%M:%S.%f}" for moment in (opens, closes, later)]
    subscribers = {**alone(*times), **composed(*times[:2])}
    for given in subscribers.values():
        looks = {name: seconds * processes for name, seconds in LOOKS.items()}
        given["options"] = {**OPTIONS, **looks, **given.get("options", {})}
    workers = [policies.start(subscribers) for _ in range(processes)]
    async with policies.watched() as seen:
        await fleet.live(processes)
        await policies.feed(range(KILL_AT), STEP, FEEDS)
        await eventually(lambda: all_work(policies, processes), timeout=120, step=STEP)
        await policies.feed([KILL_AT], STEP, FEEDS)
        number = count()
        await policies.kill_at_work(workers, lambda: {"once": [f"late{next(number)}"]})
        if processes == 1:
            policies.start(subscribers)
        await policies.feed(range(KILL_AT + 1, TICKS), STEP, FEEDS)
        await settled(fleet, within=240)
    await fleet.stop()
    assert await fleet.count("queue = 'closed' AND state = 'PENDING' AND deliveries_count = 0") == 3
    left = await policies.left()
    listed = {
        q: {u.message_id for u in await fleet.store.ack_first_starts.list_unknown(q, 1000)}
        for q in FEEDS
    }
    wrong = {
        queue: lines
        for queue in FEEDS
        if queue != "closed"
        and (lines := check(queue, policies, left[queue], listed[queue], seen, (opens, closes)))
    }
    assert not wrong, wrong
    assert await fleet.count("deliveries_count > 1 OR reason = 'unknown_outcome'", archive=True) > 0


async def all_work(policies: PolicyFleet, processes: int) -> bool:
    """Whether each process has started something; else there is more to start."""
    if len({start.pid for start in policies.starts()}) == processes:
        return True
    await policies.put({"delay": [None] * processes})
    return False


async def settled(fleet: Fleet, within: float) -> None:
    """Wait until nothing waits outside of the closed queue."""
    waiting = "queue <> 'closed'"

    async def done() -> bool:
        await fleet.bury()
        return await fleet.count(waiting) == 0

    try:
        await eventually(done, timeout=within, step=0.25)
    except AssertionError as error:
        columns = (
            "queue",
            "id",
            "key",
            "state",
            "policy_marks",
            "deliveries_count",
            "next_attempt_at",
            "lease_expires_at",
        )
        rows = [
            [str(row[c]) for c in columns] for row in await fleet.rows() if row["queue"] != "closed"
        ]
        msg = f"at {await fleet.store.server.read_now()} there are {len(rows)}: {rows[:20]}"
        raise AssertionError(msg) from error


ENDS = {
    "debounce": "COMPLETED DISCARDED",
    "stream": "COMPLETED DISCARDED",
    "leading": "COMPLETED DISCARDED",
    "drop": "COMPLETED DISCARDED",
    "dead": "COMPLETED FAILED",
    "once": "COMPLETED DISCARDED FAILED",
    "once_retry": "COMPLETED DISCARDED FAILED",
    "debounce_throttle": "COMPLETED DISCARDED",
    "all": "COMPLETED DISCARDED FAILED",
}


def check(
    queue: str,
    policies: PolicyFleet,
    left: Left,
    unknown: set[int],
    seen: Seen,
    window: tuple[Any, Any],
) -> list[str]:
    """The violations in the rows and records of `queue`."""
    wrong = checks.nothing_lost(left, policies.published[queue], ENDS.get(queue, "COMPLETED"))
    return wrong + CHECKS[queue](left, unknown, seen, window)


def dropped(left: Left, state: str) -> list[str]:
    """Messages without a slot are recorded; some got one, and some did not."""
    wrong = checks.throttled(left, 5, SECOND)
    ended = left.of(state)
    wrong += [f"{row['id']}: {row['reason']}" for row in ended if row["reason"] != "throttled"]
    return (
        wrong
        if ended and left.of("COMPLETED")
        else [*wrong, f"{len(ended)} of {len(left.rows)} are {state}"]
    )


def at_most(seen: Seen, queue: str, most: int, *, by_key: bool = False) -> list[str]:
    """Leases that were seen together."""
    return [
        f"{n} leases of {q}, {key}"
        for (q, key), n in seen.most.items()
        if q == queue and (key is not None) is by_key and n > most
    ]


def in_order(left: Left, seen: Seen, window: tuple[Any, Any]) -> list[str]:
    opens, closes = map(micros, window)
    wrong = (
        checks.in_window(left, opens, closes)
        + checks.throttled(left, 20, SECOND)
        + checks.ordered(left)
    )
    return wrong + at_most(seen, "window_throttle_ordered", 1, by_key=True)


Check = Callable[[Left, set[int], Seen, tuple[Any, Any]], list[str]]
CHECKS: dict[str, Check] = {
    "delay": lambda left, *_: checks.delayed(left, SECOND // 2),
    "debounce": lambda left, *_: checks.debounced(left, 400_000),
    "stream": lambda left, *_: checks.debounced(left, 400_000, SECOND),
    "leading": lambda left, *_: checks.debounced(left, 600_000, leading=True),
    "throttle": lambda left, *_: checks.throttled(left, 20, SECOND),
    "bursts": lambda left, *_: checks.throttled(left, 10, SECOND),
    "by_key": lambda left, *_: checks.throttled(_keyed(left), 4, SECOND, by_key=True),
    "drop": lambda left, *_: dropped(left, "DISCARDED"),
    "dead": lambda left, *_: dropped(left, "FAILED"),
    "backoff": lambda left, *_: checks.throttled(left, 20, SECOND),
    "window": lambda left, _, __, window: checks.in_window(left, *map(micros, window)),
    "once": lambda left, unknown, *_: checks.once(left, unknown),
    "most": lambda _, __, seen, ___: at_most(seen, "most", 2),
    "most_by_key": lambda _, __, seen, ___: at_most(seen, "most_by_key", 1, by_key=True),
    "blocking": lambda left, *_: checks.rested(left, 0.3),
    "debounce_throttle": lambda left, *_: (
        checks.debounced(left, 400_000) + checks.throttled(left, 20, SECOND)
    ),
    "window_throttle_ordered": lambda left, _, seen, window: in_order(left, seen, window),
    "once_retry": lambda left, unknown, *_: checks.once(left, unknown),
    "all": lambda left, _, seen, __: checks.throttled(left, 20, SECOND) + at_most(seen, "all", 3),
}


def _keyed(left: Left) -> Left:
    return Left(left.rows, [s for s in left.starts if s.key is not None], [])
