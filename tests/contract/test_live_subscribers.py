"""Live subscribers and pauses, as every database stores them."""

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import event, select

from faststream_sqlbroker.core.policies import Delay, Header, Throttle
from faststream_sqlbroker.core.status import build_description, build_worker_name
from faststream_sqlbroker.database.parts.live_subscribers import (
    MAX_SUBSCRIBERS,
    PAUSED,
    RETENTION_SECONDS,
    SUBSCRIBER,
)
from faststream_sqlbroker.subscriber.options import make_settings
from tests.contract.conftest import Bench
from tests.helpers import eventually

CHANNEL = "sqlbroker_message"
LONG = 600.0


def known(
    *names: str, queues: Any = "q", options: Any = None, **fields: Any
) -> dict[str, dict[str, Any]]:
    settings = make_settings(queues, options or {})
    says = build_description(
        queues=settings.queues,
        max_workers=settings.max_workers,
        ordered=settings.ordered,
        policies=settings.policies,
        paused=False,
        stopping=False,
    )
    return {name: {**says, **fields} for name in names}


async def announce(
    bench: Bench, says: dict[str, Any], lease: float = LONG, **options: Any
) -> frozenset[str]:
    options = {"changed": set(says), "clean": False, **options}
    orders = await bench.store.live_subscribers.write_heartbeat(
        says, options["changed"], lease, clean=options["clean"]
    )
    return orders.paused


async def state(bench: Bench) -> list[Any]:
    table = bench.store.tables.policy_state
    ours = select(table).where(table.c.scope.in_((SUBSCRIBER, PAUSED)))
    async with bench.store.engine.connect() as connection:
        return list(await connection.execute(ours.order_by(table.c.scope, table.c.key)))


async def test_a_registered_subscriber_is_listed_until_it_leaves(bench: Bench) -> None:
    says = known(
        build_worker_name("host:1", bytes(8)),
        build_worker_name("host:2", b"12345678"),
        ordered=True,
    )
    await announce(bench, says)
    found = await bench.store.live_subscribers.list_subscribers()
    assert {s.worker for s in found} == set(says)
    assert {(s.queues, s.max_workers, s.ordered, s.paused, s.stopping) for s in found} == {
        (("q",), 1, True, False, False)
    }
    await bench.store.live_subscribers.remove(["host:1:0000000000000000", "nobody"])
    assert [s.worker for s in await bench.store.live_subscribers.list_subscribers()] == [
        "host:2:3132333435363738"
    ]


async def test_policies_come_back_as_they_were(bench: Bench) -> None:
    """Also what their texts round off."""
    policies = [
        Delay(1234567.891),
        Throttle(7, "1m", key=Header("it's"), without_key="dead_letter"),
    ]
    await announce(bench, known("w", options={"policies": policies}))
    [found] = await bench.store.live_subscribers.list_subscribers()
    assert found.rules == tuple(policies)
    assert found.policies == tuple(map(str, policies))


async def test_a_heartbeat_lengthens_the_lease_and_returns_only_what_is_new(bench: Bench) -> None:
    says = known("w")
    await announce(bench, says)
    [first] = await bench.store.live_subscribers.list_subscribers()
    says["w"]["paused"] = True
    await announce(bench, says, lease=10 * LONG, changed=set())
    [second] = await bench.store.live_subscribers.list_subscribers()
    assert second.since == first.since
    assert second.lease_expires_at > first.lease_expires_at + timedelta(seconds=8 * LONG)
    assert not second.paused
    await announce(bench, says)
    [third] = await bench.store.live_subscribers.list_subscribers()
    assert (third.since, third.paused) == (first.since, True)


async def test_an_expired_lease_ends_a_registration_by_the_databases_clock(bench: Bench) -> None:
    await announce(bench, known("dead"), lease=0.2)
    await announce(bench, known("alive"))

    async def ended() -> bool:
        return [s.worker for s in await bench.store.live_subscribers.list_subscribers()] == [
            "alive"
        ]

    await eventually(ended)
    assert [row.key for row in await state(bench)] == ["alive", "dead"]


async def end_pauses(bench: Bench) -> None:
    """Let every pause be over."""
    over = f"UPDATE message_policy_state SET expires_at = {bench.past(3600)} WHERE scope = 'paused'"
    await bench.execute(over)


async def test_only_long_expired_registrations_are_removed(bench: Bench) -> None:
    await announce(bench, known("dead"), lease=-RETENTION_SECONDS - 1.0)
    await announce(bench, known("lately"), lease=-1.0)
    await bench.store.live_subscribers.pause("over", None, {"by": "me"}, CHANNEL)
    await end_pauses(bench)
    await bench.store.live_subscribers.pause("lasting", None, {"by": "me"}, CHANNEL)
    await announce(bench, known("alive"), clean=True)
    assert [row.key for row in await state(bench)] == ["lasting", "alive", "lately"]


async def test_a_removed_registration_comes_back_complete(bench: Bench) -> None:
    says = known("w", queues=["a", "b"])
    await announce(bench, says)
    await bench.store.live_subscribers.remove(["w"])
    await announce(bench, says, changed=set())
    [found] = await bench.store.live_subscribers.list_subscribers()
    assert found.queues == ("a", "b")


async def test_a_registration_of_another_version_does_no_harm(bench: Bench) -> None:
    await announce(bench, {"w": {"queues": None, "new": [1]}, "v": {}})
    assert {
        (s.worker, s.queues, s.max_workers)
        for s in await bench.store.live_subscribers.list_subscribers()
    } == {
        ("w", (), 1),
        ("v", (), 1),
    }


async def test_a_pause_lasts_until_it_is_resumed(bench: Bench) -> None:
    """P5."""
    fleet = bench.store.live_subscribers
    assert await fleet.pause("a", None, {"by": "Ann", "reason": "why"}, CHANNEL) == {"a"}
    assert await fleet.pause("b", LONG, {"by": "Bob", "reason": None}, CHANNEL) == {"a", "b"}
    a, b = await fleet.list_paused()
    assert (a.queue, a.until, a.by, a.reason) == ("a", None, "Ann", "why")
    assert b.until is not None
    assert abs(b.until - b.since - timedelta(seconds=LONG)) < timedelta(seconds=5)
    assert await announce(bench, known("w")) == {"a", "b"}
    assert await fleet.resume("a", CHANNEL) == (True, {"b"})
    assert await fleet.resume("a", CHANNEL) == (False, {"b"})
    assert [p.queue for p in await fleet.list_paused()] == ["b"]


async def test_pausing_again_keeps_the_beginning_and_takes_the_new_end(bench: Bench) -> None:
    fleet = bench.store.live_subscribers
    await fleet.pause("a", None, {"by": "Ann"}, CHANNEL)
    [first] = await fleet.list_paused()
    end = first.since + timedelta(days=1)
    await fleet.pause("a", end, {"by": "Bob"}, CHANNEL)
    assert [(p.since, p.until, p.by) for p in await fleet.list_paused()] == [
        (first.since, end, "Bob")
    ]
    await fleet.pause("a", None, {"by": "Bob"}, CHANNEL)
    assert [(p.since, p.until) for p in await fleet.list_paused()] == [(first.since, None)]


async def test_a_pause_ends_by_the_databases_clock(bench: Bench) -> None:
    fleet = bench.store.live_subscribers
    await fleet.pause("a", 0.3, {"by": "me"}, CHANNEL)

    async def over() -> bool:
        return not await fleet.list_paused()

    await eventually(over)
    assert await announce(bench, known("w")) == frozenset()
    assert await fleet.resume("a", CHANNEL) == (False, frozenset())
    assert await fleet.pause("a", None, {"by": "me"}, CHANNEL) == {"a"}
    await bench.execute(f"UPDATE message_policy_state SET created_at = {bench.past(7200)}")
    [before] = await fleet.list_paused()
    await end_pauses(bench)
    assert await fleet.pause("a", None, {"by": "me"}, CHANNEL) == {"a"}
    [row] = await fleet.list_paused()
    assert row.since > before.since, "a pause that was over is not the beginning of the next one"


async def test_an_end_that_is_over_pauses_nothing(bench: Bench) -> None:
    fleet = bench.store.live_subscribers
    assert await fleet.pause("a", None, {"by": "me"}, CHANNEL) == {"a"}
    for end in (datetime(2020, 1, 1, tzinfo=timezone.utc), await bench.store.server.read_now()):
        assert await fleet.pause("a", end, {"by": "me"}, CHANNEL) is None
    assert [(each.queue, each.until) for each in await fleet.list_paused()] == [("a", None)]
    assert [job.action for job in await bench.store.jobs.list_jobs(None, 10)] == ["pause"]


async def test_names_are_compared_exactly(bench: Bench) -> None:
    await bench.store.live_subscribers.pause("Mail", None, {"by": "me"}, CHANNEL)
    assert await announce(bench, known("w")) == {"Mail"}
    assert await bench.store.live_subscribers.resume("mail", CHANNEL) == (False, {"Mail"})


async def test_a_heartbeat_of_many_subscribers_takes_few_statements(bench: Bench) -> None:
    """However many subscribers a process has: what is new, what is not, what is paused."""
    says = known(*(f"w{n}" for n in range(50)))
    await announce(bench, says)
    seen: list[str] = []

    @event.listens_for(bench.store.engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    await announce(bench, says, changed={"w7"})
    of_table = [s for s in seen if "message_policy_state" in s]
    assert len(of_table) == 3, seen
    assert MAX_SUBSCRIBERS >= 10_000
    assert len(await bench.store.live_subscribers.list_subscribers()) == 50
