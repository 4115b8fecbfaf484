"""Keys that a header has: every policy does with them what it does with the keys of publishes, on
every database."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Header,
    KeepLast,
    Policy,
    Throttle,
)
from faststream_sqlbroker.core.policies.header import Key
from faststream_sqlbroker.database.parts import ordered
from faststream_sqlbroker.database.policies import claims, intake, rows
from tests.policies.conftest import Worlds
from tests.policies.world import World, outcome

pytestmark = pytest.mark.capability("keys by a header: `key=Header(...)` of policies")

SECOND = 1_000_000
TENANT = Header("tenant")
STEPS = 60
OF_KEYS: dict[str, Callable[[Key], list[Policy]]] = {
    "debounce": lambda key: [Debounce("1s", key=key)],
    "leading": lambda key: [Debounce("2s", edge="leading", key=key)],
    "keep_last": lambda key: [KeepLast("1s", key=key)],
    "throttle": lambda key: [Throttle(2, "3s", key=key)],
    "drop": lambda key: [Throttle(2, "3s", key=key, when_exceeded="drop")],
    "dead_letter": lambda key: [Throttle(1, "3s", key=key, without_key="dead_letter")],
    "concurrency": lambda key: [Concurrency(2, per_key=key)],
    "debounce_throttle": lambda key: [Debounce("1s", key=key), Throttle(1, "2s", key=key)],
}


def headers_of(key: str | None) -> str | None:
    """What a producer that knows nothing of keys has written."""
    return None if key is None else json.dumps({"tenant": key, "other": 1})


def story(world: World, policies: list[Policy], seed: int, *, by_header: bool) -> list[Any]:
    """What each claim of a random story leased or discarded, by the order of publishes."""
    chance = Random(seed)
    world.begin(policies)
    numbers: dict[int, int] = {}
    leased: list[Any] = []
    told: list[Any] = []
    for _ in range(STEPS):
        what = chance.random()
        if what < 0.4:
            key = chance.choice(["a", "b", "c", None])
            fields = {"priority": chance.choice([0, 0, 5]), "delay": chance.choice([0, 0, SECOND])}
            count = chance.choice([1, 1, 4])
            # By a header the key of the publish says nothing.
            noise = chance.choice(["a", "b", None])
            ids = (
                world.put_many(count, noise, headers=headers_of(key), **fields)
                if by_header
                else world.put_many(count, key, **fields)
            )
            numbers |= {message: n for n, message in enumerate(ids, len(numbers))}
        elif what < 0.6:
            world.advance(chance.choice([SECOND // 10, SECOND, 2 * SECOND]))
        elif what < 0.75 and leased:
            row = leased.pop(chance.randrange(len(leased)))
            how = chance.choice(["ack", "ack", "nack"])
            world.settle(row, row.outcome or outcome(how, 0))
        else:
            claim = world.claim(chance.randrange(3), chance.choice([1, 3, 20]))
            leased += claim.rows
            told.append([(numbers[row.id], row.outcome is None) for row in claim.rows])
    gone = world.archived()
    told.append(sorted((numbers[i], row["state"], row["reason"]) for i, row in gone.items()))
    return told


@pytest.mark.parametrize("looked_at", [100, 2])
def test_policies_do_the_same_with_keys_of_headers(
    world: World, worlds: Worlds, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with keys of publishes on SQLite, which is in the same process. With `looked_at` 2 claims
    go by the index of keys."""
    plain = worlds("sqlite")
    monkeypatch.setattr(ordered, "MIN_WINDOW", looked_at)
    monkeypatch.setattr(claims, "MIN_SCAN", looked_at)
    for seed, (name, policies) in enumerate(OF_KEYS.items()):
        expected = story(plain, policies(True), seed, by_header=False)
        assert any(expected[:-1]), name
        assert story(world, policies(TENANT), seed, by_header=True) == expected, name


def test_the_key_of_the_publish_stays(world: World) -> None:
    """For handlers, for the archive and for the next queue."""
    world.begin([Concurrency(1, per_key=TENANT)])
    first = world.put("mine", headers=headers_of("a"))
    second = world.put("other", headers=headers_of("a"))
    [row] = world.claim(0, 20).rows
    assert (row.id, row.key, row.policy_key) == (first, "mine", "a")
    assert world.claim(1, 20).rows == []
    world.settle(row, outcome("ack", 0))
    archived = world.archived()[first]
    assert (archived["key"], archived["policy_key"]) == ("mine", "a")
    [row] = world.claim(1, 20).rows
    assert (row.id, row.key, row.policy_key) == (second, "other", "a")


def test_a_backlog_is_read_before_bursts_are_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Z7: with more messages than one look reads, no key loses its newest one."""
    for module in (rows, intake):
        monkeypatch.setattr(module, "SCAN_SIZE", 5)
    world.begin([Debounce("1s", key=TENANT)])
    ids = [world.put(None, headers=headers_of(f"k{n % 3}")) for n in range(22)]
    world.advance(5 * SECOND)
    found = []
    for _ in range(30):
        found += [row.id for row in world.claim(0, 20).rows]
        world.advance(SECOND)
    assert sorted(found) == ids[-3:]
    assert len(world.archived()) == 19


def test_a_message_without_the_header_has_no_key(world: World) -> None:
    """Also if it was published with one, or its header is no text."""
    world.begin([Throttle(1, "1h", key=TENANT, without_key="dead_letter")])
    values = [None, '{"other": "a"}', '{"tenant": ["a"]}', '{"tenant": ""}', '["tenant"]']
    without = [world.put("key", headers=headers) for headers in values]
    of_number = world.put("key", headers='{"tenant": 5}')
    rows = world.claim(0, 20).rows
    assert [row.id for row in rows if row.outcome is not None] == without
    assert [(row.id, row.policy_key) for row in rows if row.outcome is None] == [(of_number, "5")]
