"""What operators see of the queues, on every database."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.overview import Count, QueueOverview
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database import overviews
from faststream_sqlbroker.database.overviews import QueueOverviews
from faststream_sqlbroker.database.parts import live_queues
from tests.contract.conftest import Bench, done
from tests.contract.test_live_subscribers import CHANNEL, announce, known

four = pytest.mark.parametrize(
    "database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True
)


async def by_name(bench: Bench) -> dict[str, QueueOverview]:
    found = await bench.store.overviews.read_overviews()
    assert [each.queue for each in found] == sorted(each.queue for each in found)
    return {each.queue: each for each in found}


async def test_without_messages_there_is_nothing_to_see(bench: Bench) -> None:
    assert await bench.store.overviews.read_overviews() == []
    [one] = await bench.store.overviews.read_overviews("q")
    assert (one.waiting, one.used, one.problem, one.out_per_minute) == (0, False, None, 0.0)


async def test_messages_are_counted_by_what_they_wait_for(bench: Bench) -> None:
    await bench.put(3, "a")
    await bench.put(2, "a", priority=-5)
    await bench.put(4, "a", delay=600.0)
    await bench.put(4, "b")
    rows = await bench.claim(3, "b")
    again = {"state": MessageState.RETRYABLE, "attempted": True}
    await bench.store.settle(
        [done(rows[0], delay=0.0, **again), done(rows[1], delay=60.0, **again)]
    )
    found = await by_name(bench)
    counts = {
        name: tuple(str(n) for n in (q.ready, q.delayed, q.in_flight, q.retrying))
        for name, q in found.items()
    }
    assert counts == {"a": ("5", "4", "0", "0"), "b": ("2", "1", "1", "2")}
    assert all(q.used for q in found.values())


async def test_what_has_failed_before_and_lost_its_leases_is_counted_while_it_runs(
    bench: Bench,
) -> None:
    await bench.put(4, "q")
    await bench.claim(2, "q")
    counts = {"attempts_count": 1, "deliveries_count": 4}
    lost = ", ".join(f"{name} = {value}" for name, value in counts.items())
    await bench.execute(f"UPDATE message SET {lost}")
    [found] = await bench.store.overviews.read_overviews("q")
    # Those that are leased have lost two, as the last delivery runs.
    assert (found.ready, found.in_flight) == (Count(2), Count(2))
    assert (found.retrying, found.suspects) == (Count(2), Count(4))
    await bench.execute("UPDATE message SET deliveries_count = 3")
    [found] = await bench.store.overviews.read_overviews("q")
    assert found.suspects == Count(2)


async def test_the_age_is_that_of_the_oldest_due_message(bench: Bench) -> None:
    await bench.put(1, "q", priority=1)
    await bench.put(1, "q")
    await bench.execute(
        f"UPDATE message SET next_attempt_at = {bench.past(100)} WHERE priority = 0"
    )
    [found] = await bench.store.overviews.read_overviews()
    assert 100.0 <= found.oldest_due_age < 160.0


async def test_rates_are_those_of_the_last_minute(bench: Bench) -> None:
    await bench.put(5, "q")
    await bench.put(1, "old")
    rows = await bench.claim(3)
    await bench.store.settle([done(row) for row in rows])
    await bench.put(1, "q")
    past = bench.past(90)
    await bench.execute(f"UPDATE message SET created_at = {past} WHERE queue = 'old'")
    await bench.execute(
        f"UPDATE message_archive SET archived_at = {past}, created_at = {past} "
        f"WHERE id = {rows[0].id}"
    )
    await bench.execute(f"UPDATE message_archive SET created_at = {past} WHERE id = {rows[1].id}")
    await bench.execute(f"UPDATE message_archive SET state = 'FAILED' WHERE id <> {rows[1].id}")
    found = await by_name(bench)
    assert (found["q"].failed_per_minute, found["old"].failed_per_minute) == (1.0, 0.0)
    # Three live messages and one archived one were created; one of the archived ended long ago.
    assert (found["q"].in_per_minute, found["q"].out_per_minute) == (4.0, 2.0)
    assert (found["old"].in_per_minute, found["old"].out_per_minute) == (0.0, 0.0)


async def test_few_that_failed_in_a_moment_are_not_rated_for_a_minute(bench: Bench) -> None:
    """The newest that are read are those of a moment: one FAILED message is no storm."""
    await bench.put(16, "q")
    rows = await bench.claim(16, "q")
    await bench.store.settle([done(row) for row in rows])
    ids = sorted(row.id for row in rows)
    fail = "UPDATE message_archive SET state = 'FAILED' WHERE id <= "
    with patch.object(overviews, "MAX_RATED", 16):
        await bench.execute(f"{fail} {ids[3]}")
        [found] = await bench.store.overviews.read_overviews("q")
        assert (found.out_per_minute or 0) > 16.0
        assert found.failed_per_minute == 4.0
        await bench.execute(f"{fail} {ids[4]}")
        [found] = await bench.store.overviews.read_overviews("q")
        assert found.failed_per_minute > 5.0


async def test_what_goes_out_is_what_the_live_subscribers_tell(bench: Bench) -> None:
    """The archive has one message of each queue; only where no subscriber tells it is asked."""
    for queue in ("summed", "older", "none"):
        await bench.put(1, queue)
        [row] = await bench.claim(1, queue)
        await bench.store.settle([done(row)])
    both = {"seconds": 30.0, "queues": {"summed": 20, "older": 20}}
    await announce(bench, known("one", queues=["summed", "older", "idle"], ended=both))
    await announce(bench, known("two", queues=["summed", "idle"], ended={}))
    await announce(bench, known("before", queues=["older"]))
    found = await by_name(bench)
    rates = {name: each.out_per_minute for name, each in found.items()}
    assert rates == {"summed": 40.0, "older": 1.0, "idle": 0.0}
    [none] = await bench.store.overviews.read_overviews("none")
    assert none.out_per_minute == 1.0


async def test_without_an_archive_and_a_word_of_the_subscribers_it_is_not_known(
    bench: Bench,
) -> None:
    await announce(bench, known("one", queues=["tells"], ended={"seconds": 60, "queues": {}}))
    await announce(bench, known("before", queues=["older"]))
    tables = replace(bench.store.dialect.tables, archive=None)
    with patch.object(bench.store.dialect, "tables", tables):
        found = await by_name(bench)
    assert {name: each.out_per_minute for name, each in found.items()} == {
        "tells": 0.0,
        "older": None,
    }


@four
async def test_rates_of_many_are_those_of_the_newest(bench: Bench) -> None:
    """Ten messages, one every second; by the four newest, as far as they are back."""
    ids = await bench.put(10, "q")
    now = await bench.store.server.read_now()
    message = bench.store.tables.message
    async with bench.store.engine.begin() as connection:
        for age, message_id in enumerate(reversed(ids)):
            of_it = message.update().where(message.c.id == message_id)
            await connection.execute(of_it.values(created_at=now - timedelta(seconds=age)))
    before = await bench.store.server.read_now()
    with patch.object(overviews, "MAX_RATED", 4):
        [found] = await bench.store.overviews.read_overviews()
    after = await bench.store.server.read_now()
    fourth = now - timedelta(seconds=3)
    quickest = 240.0 / (before - fourth).total_seconds()
    assert 240.0 / (after - fourth).total_seconds() - 1 <= found.in_per_minute <= quickest + 1
    [found] = await bench.store.overviews.read_overviews()
    assert found.in_per_minute == 10.0


async def test_who_takes_from_a_queue_and_whether_it_is_paused(bench: Bench) -> None:
    await announce(bench, known("one", "two", queues=["full", "unused"]))
    await bench.put(1, "full")
    await bench.put(1, "forgotten")
    await bench.store.live_subscribers.pause("stopped", None, {"by": "Ann"}, CHANNEL)
    found = await by_name(bench)
    assert {name: (q.live_subscribers, q.problem) for name, q in found.items()} == {
        "forgotten": (0, "no live subscriber"),
        "full": (2, None),
        "stopped": (0, None),
        "unused": (2, None),
    }
    paused = found["stopped"].paused
    assert paused is not None
    assert (paused.by, paused.since <= datetime.now(timezone.utc)) == ("Ann", True)
    assert found["full"].paused is None


async def test_names_are_read_a_page_of_subscribers_at_a_time(bench: Bench) -> None:
    for n in range(5):
        await announce(bench, known(f"worker-{n}", queues=[f"of-{n}", "shared"]))
    await bench.put(1, "full")
    await bench.put(1, "later", delay=600.0)
    await bench.store.live_subscribers.pause("stopped", None, {"by": "Ann"}, CHANNEL)
    pages: list[int] = []

    read_page = QueueOverviews._read_subscribed_queues

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = read_page(*args, **kwargs)
        pages.append(len(found[0]))
        return found

    all_names = [*(f"of-{n}" for n in range(5)), "full", "later", "shared", "stopped"]
    with (
        patch.object(overviews, "PAGE_SIZE", 2),
        patch.object(QueueOverviews, "_read_subscribed_queues", counted),
    ):
        assert await bench.store.overviews.find_names("x") == sorted(all_names)
        without = await bench.store.overviews.find_names("x", paused=False)
        assert set(all_names).difference(without) == {"stopped"}
        del pages[3:]
        assert pages == [3, 3, 2]
        # No more subscribers than that are read.
        pages.clear()
        with patch.object(overviews, "MAX_SUBSCRIBERS", 4):
            found = await bench.store.overviews.find_names("x")
        assert pages == [3, 3]
        assert "of-4" not in found
        await bench.store.live_subscribers.remove([f"worker-{n}" for n in range(4)])
        assert "of-0" not in await bench.store.overviews.find_names("x")


async def test_a_name_behind_many_others_is_found_by_its_first_half(bench: Bench) -> None:
    for name in ("a", "b", "c", "orders"):
        await bench.put(1, name)
    with patch.object(live_queues, "MAX_QUEUES", 2):
        assert await bench.store.overviews.find_names("zzzz") == ["a", "b"]
        assert await bench.store.overviews.find_names("ordres") == ["a", "b", "orders"]


async def test_a_queue_whose_messages_are_all_archived_was_used(bench: Bench) -> None:
    await announce(bench, known("one", queues=["q"]))
    await bench.put(1)
    [row] = await bench.claim(1)
    await bench.store.settle([done(row)])
    [found] = await bench.store.overviews.read_overviews()
    assert (found.waiting, found.used, found.problem) == (0, True, None)


@four
async def test_counts_are_exact_up_to_a_limit_then_an_estimate(bench: Bench, database: str) -> None:
    await bench.put(30, "q")
    await bench.put(2, "q", delay=600.0)
    if database != "sqlite":
        analyze = "ANALYZE message" if database == "postgresql" else "ANALYZE TABLE message"
        await bench.execute(analyze)
    with patch.multiple(overviews, MAX_COUNTED=5, MAX_QUEUES_TOGETHER=1):
        [found] = await bench.store.overviews.read_overviews()
        await bench.claim(8)
        [leased] = await bench.store.overviews.read_overviews()
    assert found.ready.is_exact is (database == "sqlite")
    assert found.delayed == Count(2)
    assert 6 <= found.ready.value <= 60
    assert leased.in_flight.is_exact is (database == "sqlite")
    assert 6 <= leased.in_flight.value <= 40
    assert not found.retrying.is_exact


@four
async def test_jobs_of_pull_consumers_are_counted_by_state(bench: Bench, database: str) -> None:
    """Exact up to a limit, then an estimate; dead ones up to another limit."""
    await bench.put(14, "c/many")
    rows = await bench.claim(12, "c/many")
    dead = {0: MessageState.FAILED, 1: MessageState.DISCARDED}
    await bench.store.settle(
        [done(row, state=dead.get(n, MessageState.COMPLETED)) for n, row in enumerate(rows[:11])]
    )
    await bench.put(2, "other")
    others = await bench.claim(2, "other")
    await bench.store.settle([done(row, state=MessageState.FAILED) for row in others])
    names = ["c/many", "c/none"]
    many, none = await bench.store.overviews.count_jobs(names)
    found = tuple(str(n) for n in (many.queued, many.in_flight, many.delivered, many.dead))
    assert found == ("2", "1", "9", "2")
    # It needs no subscriber once it is a pull consumer's.
    put = bench.store.tokens.set_channel
    for kind, problem in [("push", "no live subscriber"), ("pull", None)]:
        await put("c", by="Ann")
        await put("c", "many", by="Ann", kind=kind)
        assert (await by_name(bench))["c/many"].problem == problem
    assert (none.queue, none.queued, none.delivered, none.dead) == ("c/none", *[Count(0)] * 3)
    if database != "sqlite":
        analyze = "ANALYZE" if database == "postgresql" else "ANALYZE TABLE"
        await bench.execute(f"{analyze} message_archive")
    with patch.object(overviews, "MAX_COUNTED", 5):
        many, _ = await bench.store.overviews.count_jobs(names)
        assert many.dead == Count(2)
        assert many.delivered is not None
        assert many.delivered.is_exact is (database == "sqlite")
        assert 4 <= many.delivered.value <= 20
        with patch.object(overviews, "MAX_DEAD", 1):
            many, _ = await bench.store.overviews.count_jobs(names)
    assert (many.dead is not None, many.dead and many.dead.how) == (True, "about")
    assert many.delivered is not None
    assert many.delivered.how == "about"
    tables = replace(bench.store.dialect.tables, archive=None)
    with patch.object(bench.store.dialect, "tables", tables):
        [found_without] = await bench.store.overviews.count_jobs(["c/many"])
    assert (found_without.delivered, found_without.dead) == (None, None)


async def test_queues_of_another_case_are_other_queues(bench: Bench) -> None:
    await bench.put(1, "q")
    await bench.put(2, "Q")
    found = await by_name(bench)
    assert {name: str(q.ready) for name, q in found.items()} == {"Q": "2", "q": "1"}
