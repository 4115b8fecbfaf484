"""KeepLast on real databases, against what it promises: what goes, when, what is superseded."""

from collections import defaultdict
from typing import ClassVar

import pytest
from hypothesis import strategies as st

from faststream_sqlbroker.core.policies import Delay, KeepLast
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.key_heads import (
    MAX_BURST_RECHECK,
    MAX_BURST_WAIT,
    MIN_BURST_RECHECK,
)
from faststream_sqlbroker.database.policies.request import PolicyClaim
from tests.policies.machine import UNIT, Machine, Message, check_model
from tests.policies.world import World, outcome

SECOND = 1_000_000
EXAMPLES = {"sqlite": 20, "postgresql": 8, "mariadb": 8, "mysql": 8}

keep_last = st.integers(1, 4).map(lambda window: KeepLast(window * UNIT / 1e6))
delay = st.integers(1, 3).map(lambda n: Delay(n * UNIT / 1e6))


class Key:
    """What is known of one key."""

    def __init__(self) -> None:
        self.waiting: dict[int, int] = {}
        """When each message that takes part and was never claimed has come."""
        self.claimed_at = -SECOND * 1_000
        self.settled_at = self.busy_since = 0


class KeepLastMachine(Machine):
    """After each claim: one message of a key at a time and in a window; only older ones are
    superseded; the newest waits no longer than it must."""

    policies: ClassVar = st.one_of(st.tuples(keep_last), st.tuples(delay, keep_last))
    late: ClassVar = st.sampled_from([0, 0, 0, UNIT, 3 * UNIT])
    expires: ClassVar = st.sampled_from([None, None, None, None, UNIT, 5 * UNIT])
    ahead: ClassVar = st.sampled_from([0, 0, 0, UNIT])

    def start(self) -> None:
        self.policy = next(p for p in self.given if isinstance(p, KeepLast))
        self.delay = sum(p.delay for p in self.given if isinstance(p, Delay))
        self.of: dict[str, Key] = defaultdict(Key)
        self.unseen: list[Message] = []
        self.keys: dict[int, str | None] = {}
        self.started = set[int]()
        self.lost: dict[str, bool] = defaultdict(bool)
        """Whether a message of the key has expired."""
        self.old = set[int]()
        """What had taken part before the last claim."""

    def published(self, message: Message) -> None:
        message.due += self.delay
        self.keys[message.id] = message.key
        self.unseen.append(message)

    def take_part(self) -> None:
        come = [m for m in self.unseen if m.due <= self.now]
        self.unseen = [m for m in self.unseen if m.due > self.now]
        for message in come:
            if message.key is not None:
                arrived = max(message.due, min(message.created, self.now))
                self.of[message.key].waiting[message.id] = arrived

    def check(self, claim: PolicyClaim, limit: int) -> None:
        self.take_part()
        self.gone = self.archived()
        superseded = {i for i, row in self.gone.items() if row["reason"] == "superseded"}
        for message_id in set(self.gone) - superseded:
            assert self.gone[message_id]["reason"] == "expired"
            assert self.live[message_id].expired(self.now)
            self.lost[str(self.live[message_id].key)] = True
            self.leave(message_id)
        before = {
            key: {i: at for i, at in of.waiting.items() if not self.live[i].expired(self.now)}
            for key, of in self.of.items()
        }
        started = {row.id for row in claim.rows}
        for message_id in superseded:
            self.is_replaced(message_id, started)
        for row in claim.rows:
            self.goes(row, before)
        self.old = set(self.live)
        if len(claim.rows) < limit:
            self.no_message_is_late({row.id for row in claim.rows})

    def leave(self, message_id: int) -> None:
        message = self.live.pop(message_id)
        assert message.lease is None
        assert message.key is not None
        self.of[message.key].waiting.pop(message_id, None)

    def is_replaced(self, message_id: int, started: set[int]) -> None:
        """Only by a newer message of its key that starts now, or that had started when this one,
        which is older, was committed late."""
        message = self.live[message_id]
        assert message.key is not None
        by = self.gone[message_id]["related_id"]
        assert self.keys[by] == message.key
        assert message.delivered or by > message_id
        late = message_id not in self.old and by in self.started
        assert by in started or late, "nothing has started in its place"
        self.leave(message_id)

    def goes(self, row: ClaimedMessage, before: dict[str, dict[int, int]]) -> None:
        message = self.live[row.id]
        if message.key is None:
            return
        key = self.of[message.key]
        others = (m for m in self.live.values() if m.key == message.key and m is not message)
        assert not any(m.lease for m in others), "two of a key at a time"
        if message.delivered:
            assert not before[message.key], "a retry goes though a newer message waits"
        else:
            assert self.now >= key.claimed_at + self.policy.window, "two in a window"
            waiting = before[message.key]
            first = min(waiting, key=lambda i: (waiting[i], i))
            assert row.id == max(waiting) or (
                row.id == first and self.now < waiting[first] + self.policy.window
            )
            del key.waiting[row.id]
        if self.now > key.settled_at + MAX_BURST_RECHECK:
            key.busy_since = self.now
        key.claimed_at = self.now
        self.started.add(row.id)

    def no_message_is_late(self, claimed: set[int]) -> None:
        for message in self.live.values():
            free = message.lease is None and message.id not in claimed and not message.suspect
            if message.key is None and free:
                assert message.due > self.now
        for name, key in self.of.items():
            of_key = [m for m in self.live.values() if m.key == name]
            if any(m.lease or m.id in claimed for m in of_key) or not key.waiting:
                continue
            if self.lost[name] or any(self.live[i].expired(self.now) for i in key.waiting):
                continue  # what takes its place is found a little later
            newest = max(key.waiting)
            # What waits for a running message is looked at again after as long as that has run.
            ran = key.settled_at - key.busy_since
            pause = min(max(MIN_BURST_RECHECK, ran), MAX_BURST_RECHECK)
            earliest = max(
                key.waiting[newest], key.claimed_at + self.policy.window, key.settled_at + pause
            )
            first = min(key.waiting.values())
            assert self.now < max(earliest, first + self.policy.window), "the newest waits too long"

    def ended(self, message: Message, how: str) -> None:
        if message.key is not None:
            self.of[message.key].settled_at = self.now
        if how in {"ack", "reject", "expired"}:
            self.seen.add(message.id)

    def teardown(self) -> None:
        """In the end every published message is delivered or superseded, and none twice."""
        if self.checking or not hasattr(self, "policy"):
            return
        for _ in range(60):
            if all(message.suspect for message in self.live.values()):
                return
            for message in self.leased:
                self.end(message, "expired" if message.expired(message.acquired) else "ack")
            self.world.advance(5 * UNIT)
            self.claim_by(0, 20)
        pytest.fail(f"these are left: {self.live}")


def test_each_key_has_its_newest_message_once_in_a_window(database: str, database_url: str) -> None:
    """While deliveries fail, wait, crash and come back."""
    check_model(KeepLastMachine, database_url, examples=EXAMPLES[database])


def ids(claim: PolicyClaim) -> list[int]:
    return [row.id for row in claim.rows]


def reasons(world: World) -> dict[int, tuple[str, int]]:
    return {i: (row["reason"], row["related_id"]) for i, row in world.archived().items()}


def test_the_first_goes_at_once_and_then_the_newest_of_each_window(world: World) -> None:
    """And what a newer message does with one that runs, and with one that waits for a retry."""
    the_first_and_the_newest_go(world)
    a_running_message_delays_the_next(world)
    a_waiting_retry_is_superseded(world)
    a_backlog_delivers_only_its_newest(world)


def the_first_and_the_newest_go(world: World) -> None:
    world.begin([KeepLast("10s")])
    first, second, third = (world.put("a") for _ in range(3))
    other = world.put("b")
    [one, of_other] = world.claim(0, 20).rows
    assert [one.id, of_other.id] == [first, other]
    world.settle(one, outcome("ack", 0))
    world.advance(9 * SECOND)
    fourth = world.put("a")
    assert ids(world.claim(0, 20)) == []
    world.advance(SECOND)
    assert not {second, third} & set(reasons(world))
    assert ids(world.claim(0, 20)) == [fourth]
    assert {second, third} <= set(reasons(world))


def a_running_message_delays_the_next(world: World) -> None:
    world.begin([KeepLast("1s")])
    first = world.put("a")
    [row] = world.claim(0, 20).rows
    newest = world.put("a")
    for _ in range(5):
        world.advance(SECOND)
        assert ids(world.claim(1, 20)) == []
    world.settle(row, outcome("ack", 0))
    world.advance(MAX_BURST_WAIT)
    assert ids(world.claim(1, 20)) == [newest]
    assert row.id == first


def a_waiting_retry_is_superseded(world: World) -> None:
    world.begin([KeepLast("1s")])
    first = world.put("a")
    [row] = world.claim(0, 20).rows
    world.settle(row, outcome("nack", 60 * SECOND))
    world.advance(2 * SECOND)
    assert ids(world.claim(0, 20)) == []
    newer = world.put("a")
    assert ids(world.claim(0, 20)) == [newer]
    assert reasons(world) == {first: ("superseded", newer)}


def a_backlog_delivers_only_its_newest(world: World) -> None:
    """No worker was free for a whole window."""
    world.begin([KeepLast("1s")])
    *older, newest = [world.put("a", ago=n * SECOND) for n in (30, 20, 10, 2)]
    assert ids(world.claim(0, 20)) == [newest]
    assert set(reasons(world)) == set(older)
