"""broker.admin.policies: how many messages wait for which policy, and until when."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    Concurrency,
    Debounce,
    Delay,
    KeepLast,
    Once,
    PoliciedQueue,
    PolicyWait,
    SqlBroker,
    Throttle,
    Window,
)
from faststream_sqlbroker.core import policy_waits
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.core.status import Reason
from faststream_sqlbroker.database.explain import explanations
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`broker.admin.policies`: how many messages wait for what")


class Scene:
    """A running subscriber with policies, and a broker elsewhere that is asked."""

    def __init__(self, broker: SqlBroker, other: SqlBroker, look: Look) -> None:
        self.broker = broker
        self.other = other
        self.look = look
        self.go = asyncio.Event()
        self.started: list[Any] = []

    async def start(self, *policies: Policy, queue: str = "q", **options: Any) -> None:
        """Start a subscriber whose handlers wait for `go`."""

        @self.broker.subscriber(queue, policies=list(policies), **{**QUICK, **options})
        async def handle(body: Any) -> None:
            self.started.append(body)
            await self.go.wait()

        await self.broker.start()
        await eventually(lambda: self.other.admin.subscribers(queue))

    async def publish(self, count: int, key: str | None = "a", **options: Any) -> None:
        """Publish so many messages."""
        for number in range(count):
            await self.broker.publish(number, "q", key=key, **options)

    async def waits(self, *expected: tuple[str, int]) -> PoliciedQueue:
        """Wait until these are the codes and counts, and `explain` says so of each message."""

        async def found() -> PoliciedQueue | None:
            [queue] = await self.other.admin.policies("q")
            counted = Counter({wait.code: wait.count for wait in queue.waits})
            waiting = [r["id"] for r in await self.look.rows() if r["state"] != "PROCESSING"]
            reasons = [await self.first_reason(message_id) for message_id in waiting]
            # What stands by for another message counts nowhere: that one does.
            waits = [r for r in reasons if r and not (r.code == "in_burst" and r.message_id)]
            explained = Counter(reason.code for reason in waits)
            return queue if counted == explained == Counter(dict(expected)) else None

        return await eventually(found)

    async def first_reason(self, message_id: int) -> Reason | None:
        """The first of a policy's that `explain` lists."""
        explanation = await self.other.admin.explain(message_id)
        return next((r for r in explanation.reasons if r.policy is not None), None)


@pytest.fixture
async def scene(
    engine: AsyncEngine, database_url: str, logger: Any, look: Look
) -> AsyncIterator[Scene]:
    broker = SqlBroker(engine, logger=logger, graceful_timeout=1.0, presence_interval=2.0)
    await broker.create_tables()
    other = create_async_engine(database_url)
    scene = Scene(broker, SqlBroker(other, logger=None), look)
    yield scene
    scene.go.set()
    await broker.stop()
    await other.dispose()


def only(queue: PoliciedQueue) -> PolicyWait:
    """The one thing that is waited for."""
    [wait] = queue.waits
    return wait


async def test_messages_that_are_delayed(scene: Scene) -> None:
    await scene.start(Delay("1h"))
    await scene.publish(3)
    await scene.publish(2, delay="2h")  # not by the policy, so far
    wait = only(await scene.waits(("delayed", 3)))
    assert (wait.policy, wait.capped) == ("Delay(3600s)", False)
    assert wait.until is not None
    assert wait.until_last is not None
    assert wait.until <= wait.until_last


async def test_a_burst_of_each_key(scene: Scene) -> None:
    await scene.start(Debounce("1h"))
    for key in ("a", "b", "c"):
        await scene.publish(2, key=key)
    queue = await scene.waits(("in_burst", 3))
    assert (queue.queue, queue.ways, queue.subscribers) == ("q", ("Debounce(3600s)",), 1)
    until = only(queue).until
    assert until is not None
    assert timedelta(minutes=50) < until - queue.at <= timedelta(hours=1)


async def test_the_keys_of_keep_last_are_read_together(scene: Scene) -> None:
    """A queue may have a thousand keys, and a statement for each would take long."""
    statements: list[str] = []

    @event.listens_for(scene.other.engine.sync_engine, "before_cursor_execute")
    def record(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    await scene.start(KeepLast("1h"))
    scene.go.set()
    counts = []
    for keys, waiting in (("ab", 2), ("cdefgh", 8)):
        for key in keys:
            await scene.publish(2, key=key)  # the first is delivered, the second waits
        await scene.waits(("in_burst", waiting))
        statements.clear()
        await scene.other.admin.policies("q")
        counts.append(len(statements))
    assert counts[0] == counts[1]


async def test_messages_behind_one_of_their_key(scene: Scene) -> None:
    await scene.start(Debounce("50ms"), max_workers=2)
    await scene.publish(1)
    await eventually(lambda: len(scene.started) == 1)
    await scene.publish(1)
    await scene.publish(1, key="b", delay="1h")
    wait = only(await scene.waits(("key_held", 1)))
    assert wait.until is None


async def test_messages_without_a_free_slot(scene: Scene) -> None:
    await scene.start(Throttle(1, per="1h"), max_workers=2)
    await scene.publish(5)
    await eventually(lambda: len(scene.started) == 1)
    queue = await scene.waits(("throttled", 4))
    assert (queue.due, queue.due_capped) == (4, False)
    wait = only(queue)
    assert wait.until is not None
    assert wait.until_last == wait.until + timedelta(hours=3)


async def test_messages_whose_slots_are_their_keys(scene: Scene) -> None:
    await scene.start(Throttle(1, per="1h", key=True), max_workers=9)
    for key in ("a", "b", None):
        await scene.publish(3, key=key)
    await eventually(lambda: len(scene.started) == 5)  # one a key, and those without
    wait = only(await scene.waits(("throttled", 4)))
    assert wait.policy == "Throttle(1, per=3600s, key=True)"


@pytest.mark.parametrize(("per_key", "code"), [(False, "concurrency"), (True, "key_held")])
async def test_messages_beyond_the_concurrency(scene: Scene, per_key: bool, code: str) -> None:
    await scene.start(Concurrency(1, per_key=per_key), max_workers=3)
    await scene.publish(4)
    await eventually(lambda: len(scene.started) == 1)
    await scene.waits((code, 3))


async def test_the_first_of_several_policies_counts(scene: Scene) -> None:
    now = await scene.broker._store.server.read_now()
    closed = Window(f"{(now.hour + 2) % 24:02}:00", f"{(now.hour + 3) % 24:02}:00")
    await scene.start(closed, Throttle(1, per="1h"))
    await scene.publish(3)
    wait = only(await scene.waits(("outside_window", 3)))
    assert wait.policy == str(closed)
    assert wait.until is not None


async def test_duplicates(scene: Scene) -> None:
    await scene.start(Once("1h"), max_workers=1)
    await scene.publish(1)
    await eventually(lambda: len(scene.started) == 1)
    await scene.publish(1)
    await scene.publish(1, key="b")
    await scene.waits(("duplicate", 1))


async def test_messages_behind_an_earlier_one(scene: Scene) -> None:
    await scene.start(ordered=True, max_workers=3)
    await scene.publish(4)
    await scene.publish(1, expires_in="1ms")
    await eventually(lambda: len(scene.started) == 1)
    queue = await scene.waits(("behind_earlier_message", 3))
    assert (queue.ways, only(queue).policy) == (("ordered=True",), "ordered=True")


async def test_a_message_that_only_waits_for_a_worker_is_not_counted(scene: Scene) -> None:
    await scene.start(Concurrency(5), max_workers=1)
    await scene.publish(2)
    await eventually(lambda: len(scene.started) == 1)
    [queue] = await scene.other.admin.policies()
    assert queue.waits == ()


async def test_more_than_a_thousand_are_said_to_be_at_least_so_many(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (policy_waits, explanations):
        monkeypatch.setattr(module, "MAX_SCANNED", 20)
    await scene.start(Delay("1h"))
    await scene.publish(30, priority=2)
    await scene.publish(5, priority=1)

    async def counted() -> PoliciedQueue | None:
        [queue] = await scene.other.admin.policies()
        # Twenty that are not capped are the first ones of a conversion under way.
        return queue if any(wait.capped for wait in queue.waits) else None

    queue = await eventually(counted)
    assert [(w.code, w.count, w.capped) for w in queue.waits] == [("delayed", 20, True)]


async def test_what_stands_by_takes_no_place_among_those(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (policy_waits, explanations):
        monkeypatch.setattr(module, "MAX_SCANNED", 2)
    await scene.start(Debounce("1h"))
    for priority in (2, 1):
        for _ in range(4):
            await scene.publish(1, key=str(priority), priority=priority)
    wait = only(await scene.waits(("in_burst", 2)))
    assert not wait.capped


async def test_due_messages_are_counted_up_to_a_thousand(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (policy_waits, explanations):
        monkeypatch.setattr(module, "MAX_SCANNED", 20)
    await scene.start(Throttle(1, per="1h"))
    await scene.publish(21)
    await eventually(lambda: len(scene.started) == 1)
    [queue] = await scene.other.admin.policies()
    assert (queue.due, queue.due_capped, only(queue).count, only(queue).capped) == (
        *(20, False),
        *(20, False),
    )
    await scene.publish(1)
    [queue] = await scene.other.admin.policies()
    assert (queue.due, queue.due_capped, only(queue).count, only(queue).capped) == (
        *(20, True),
        *(20, True),
    )


async def test_queues_come_in_pages_and_plain_ones_not(scene: Scene) -> None:
    for name in ("c", "a", "b"):
        await scene.start(Concurrency(3), queue=name)
    await scene.start(queue="plain")
    admin = scene.other.admin
    assert [queue.queue for queue in await admin.policies()] == ["a", "b", "c"]
    assert [queue.queue for queue in await admin.policies(limit=2)] == ["a", "b"]
    assert [queue.queue for queue in await admin.policies(after="b", limit=2)] == ["c"]
    assert await admin.policies("plain") == []
    assert await admin.policies("unheard of") == []
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        await admin.policies(limit=0)


async def test_subscribers_that_differ_are_shown(scene: Scene, engine: AsyncEngine) -> None:
    await scene.start(Concurrency(3))
    second = SqlBroker(engine, logger=None, presence_interval=2.0)

    @second.subscriber("q", **QUICK)
    async def handle(_body: Any) -> None: ...

    await second.start()
    await eventually(lambda: _has_subscribers(scene, 2))
    [queue] = await scene.other.admin.policies("q")
    assert queue.ways == ("Concurrency(3)", "plain")
    await second.stop()


async def _has_subscribers(scene: Scene, count: int) -> bool:
    return len(await scene.other.admin.subscribers("q")) == count


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_row_with_impossible_values_is_passed_over(
    scene: Scene, engine: AsyncEngine
) -> None:
    """SQLite keeps whatever another program writes; the next claim deals with it."""
    await scene.start(Throttle(1, per="1h"))
    await scene.publish(3)
    await eventually(lambda: len(scene.started) == 1)
    async with engine.begin() as connection:
        await connection.execute(
            text("UPDATE message SET attempts_count = 'x' WHERE state = 'PENDING' AND id = 3")
        )

    [queue] = await scene.other.admin.policies("q")
    assert [wait.count for wait in queue.waits] == [1]
