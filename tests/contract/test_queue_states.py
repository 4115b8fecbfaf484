"""What waits in each queue, as metrics tell it, on every database."""

from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.checks import REPLY_QUEUES
from faststream_sqlbroker.core.metrics import QueueState
from faststream_sqlbroker.database import queue_states
from faststream_sqlbroker.database.parts import live_queues
from tests.contract.conftest import Bench, done
from tests.contract.test_live_subscribers import announce, known


async def by_name(bench: Bench) -> dict[str, QueueState]:
    states = await bench.store.queue_states.read_all()
    assert [s.queue for s in states] == sorted(s.queue for s in states)
    return {s.queue: s for s in states}


async def test_an_empty_table_has_no_queues(bench: Bench) -> None:
    assert await bench.store.queue_states.read_all() == []


async def test_what_is_due_what_is_not_and_what_is_leased_are_counted_apart(bench: Bench) -> None:
    await bench.put(3, "a")
    await bench.put(2, "a", priority=-5)
    await bench.put(4, "a", delay=600.0)
    await bench.put(1, "a", delay=600.0, priority=7)
    await bench.put(2, "b", delay=600.0)
    await bench.put(2, "c")
    [_, _] = await bench.claim(10, "c")
    found = await by_name(bench)
    assert {name: (s.ready, s.delayed, s.in_flight) for name, s in found.items()} == {
        "a": (5, 5, 0),
        "b": (0, 2, 0),
        "c": (0, 0, 2),
    }
    assert found["b"].oldest_due_age == found["c"].oldest_due_age == 0.0
    assert 0.0 <= found["a"].oldest_due_age < 60.0


async def test_the_age_is_that_of_the_oldest_of_all_priorities(bench: Bench) -> None:
    await bench.put(1, "q", priority=1)
    await bench.put(1, "q", priority=0)
    await bench.put(1, "q", priority=-1, delay=600.0)
    sql = "UPDATE message SET next_attempt_at = {} WHERE priority = {}"
    await bench.execute(sql.format(bench.past(100), 0))
    await bench.execute(sql.format(bench.past(10), 1))
    [state] = await bench.store.queue_states.read_all()
    assert 100.0 <= state.oldest_due_age < 160.0
    assert (state.ready, state.delayed) == (2, 1)


async def test_what_is_settled_is_not_counted(bench: Bench) -> None:
    await bench.put(2, "q")
    [row] = await bench.claim(1)
    await bench.store.settle([done(row)])
    [state] = await bench.store.queue_states.read_all()
    assert (state.ready, state.in_flight) == (1, 0)


async def test_a_queue_with_a_subscriber_and_no_message_is_told(bench: Bench) -> None:
    await announce(bench, known("one", "two", queues=["empty", "full"]))
    await announce(bench, known("three", queues="full"))
    await bench.put(1, "full")
    await bench.put(1, "forgotten")
    found = await by_name(bench)
    assert {name: (s.ready, s.live_subscribers) for name, s in found.items()} == {
        "empty": (0, 2),
        "forgotten": (1, 0),
        "full": (1, 3),
    }


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True)
async def test_counting_ends_at_a_limit(bench: Bench) -> None:
    await bench.put(4, "q", priority=1)
    await bench.put(4, "q", priority=0)
    await bench.put(7, "q", delay=600.0)
    with patch.object(queue_states, "MAX_COUNTED", 5):
        [state] = await bench.store.queue_states.read_all()
    assert (state.ready, state.delayed) == (5, 5)
    await bench.claim(7)
    with patch.object(queue_states, "MAX_COUNTED", 6):
        [state] = await bench.store.queue_states.read_all()
    assert (state.ready, state.in_flight) == (1, 6)


@pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True)
async def test_so_many_queues_are_looked_at_and_no_more(bench: Bench) -> None:
    for n in range(7):
        await bench.put(1, f"q{n}")
    with patch.object(queue_states, "MAX_QUEUES_TOGETHER", 2):
        assert [s.queue for s in await bench.store.queue_states.read_all()] == [
            f"q{n}" for n in range(7)
        ]
    with patch.object(live_queues, "MAX_QUEUES", 3):
        assert [s.queue for s in await bench.store.queue_states.read_all()] == ["q0", "q1", "q2"]


async def test_queues_of_replies_are_left_out(bench: Bench) -> None:
    await bench.put(1, "q")
    await bench.put(1, f"{REPLY_QUEUES}host.17.abc")
    assert list(await by_name(bench)) == ["q"]
