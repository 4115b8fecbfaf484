"""broker.admin.explain names the policy that keeps a message from its handler."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    Concurrency,
    Debounce,
    Explanation,
    KeepLast,
    Once,
    Reason,
    SqlBroker,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.policies import Policy
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("scheduling policies, explained by `broker.admin.explain`")


class Scene:
    """A running subscriber with policies, and a broker elsewhere that is asked."""

    def __init__(self, broker: SqlBroker, other: SqlBroker, look: Look) -> None:
        self.broker = broker
        self.other = other
        self.look = look
        self.go = asyncio.Event()
        self.started: list[Any] = []

    async def start(self, *policies: Policy, **options: Any) -> None:
        """Start a subscriber whose handlers wait for `go`; it has told of itself."""

        @self.broker.subscriber("q", policies=list(policies), **{**QUICK, **options})
        async def handle(body: Any) -> None:
            self.started.append(body)
            await self.go.wait()

        await self.broker.start()
        await eventually(lambda: self.other.admin.subscribers("q"))

    async def reason(self, message_id: int | None, code: str) -> Reason:
        """Wait until `code` is among the reasons."""
        assert message_id is not None

        async def found() -> Reason | None:
            explanation: Explanation = await self.other.admin.explain(message_id)
            return next((r for r in explanation.reasons if r.code == code), None)

        return await eventually(found)

    async def running(self, count: int) -> None:
        """Wait until so many handlers run."""
        await eventually(lambda: len(self.started) == count)


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


async def test_a_message_outside_its_window(scene: Scene) -> None:
    now = await scene.broker._store.server.read_now()
    start = f"{(now.hour + 2) % 24:02}:00"
    end = f"{(now.hour + 3) % 24:02}:00"
    await scene.start(Window(start, end))
    reason = await scene.reason(await scene.broker.publish(1, "q"), "outside_window")
    assert reason.until is not None
    assert f"{reason.until:%H:%M}" == start


async def test_a_message_of_a_burst_that_goes_on(scene: Scene) -> None:
    await scene.start(Debounce("1h"))
    first = await scene.broker.publish(1, "q", key="a")
    reason = await scene.reason(first, "in_burst")
    assert reason.until is not None
    second = await scene.broker.publish(2, "q", key="a")
    await scene.reason(second, "in_burst")
    reason = await scene.reason(first, "in_burst")
    assert reason.message_id == second
    assert reason.until is not None
    assert f"message {second} of its key is delivered in its place" in reason.text


async def test_a_message_that_is_the_newest_of_its_window(scene: Scene) -> None:
    await scene.start(KeepLast("1h"))
    scene.go.set()
    await scene.broker.publish(1, "q", key="a")
    await scene.running(1)
    second = await scene.broker.publish(2, "q", key="a")
    reason = await scene.reason(second, "in_burst")
    assert reason.until is not None
    third = await scene.broker.publish(3, "q", key="a")
    await scene.reason(third, "in_burst")
    assert (await scene.reason(second, "in_burst")).message_id == third


async def test_a_key_whose_message_is_handled_is_not_in_a_new_window(scene: Scene) -> None:
    await scene.start(KeepLast("50ms"), max_workers=2)
    first = await scene.broker.publish(1, "q", key="a")
    await scene.running(1)
    reason = await scene.reason(await scene.broker.publish(2, "q", key="a"), "key_held")
    assert reason.message_id == first


async def test_a_key_whose_message_is_handled(scene: Scene) -> None:
    await scene.start(Debounce("50ms"), max_workers=2)
    first = await scene.broker.publish(1, "q", key="a")
    await scene.running(1)
    reason = await scene.reason(await scene.broker.publish(2, "q", key="a"), "key_held")
    [subscriber] = await scene.other.admin.subscribers("q")
    assert (reason.message_id, reason.worker) == (first, subscriber.worker)


@pytest.mark.parametrize("key", [False, True])
async def test_a_message_without_a_free_slot(scene: Scene, key: bool) -> None:
    await scene.start(Throttle(1, per="1h", key=key), max_workers=2)
    ids = [await scene.broker.publish(n, "q", key="a") for n in range(2)]
    await scene.running(1)
    reason = await scene.reason(ids[1], "throttled")
    assert reason.until is not None


@pytest.mark.parametrize(("per_key", "code"), [(False, "concurrency"), (True, "key_held")])
async def test_a_message_beyond_the_concurrency(scene: Scene, per_key: bool, code: str) -> None:
    await scene.start(Concurrency(1, per_key=per_key), max_workers=3)
    ids = [await scene.broker.publish(n, "q", key="a") for n in range(2)]
    await scene.running(1)
    reason = await scene.reason(ids[1], code)
    [subscriber] = await scene.other.admin.subscribers("q")
    assert (reason.message_id, reason.worker) == (ids[0], subscriber.worker)


async def test_each_limit_of_a_scope_is_counted_up_to_itself(scene: Scene) -> None:
    """The processes of a rolling deployment have different limits."""
    lower, higher = Concurrency(1, scope="mail"), Concurrency(2, scope="mail")
    await scene.start(higher, max_workers=2)
    for number in range(2):
        await scene.broker.publish(number, "q")
    await scene.running(2)
    second = SqlBroker(scene.broker.engine, logger=None, presence_interval=2.0)

    @second.subscriber("q", policies=[lower], **QUICK)
    async def handle(_body: Any) -> None: ...

    await second.start()

    async def have_both() -> bool:
        return len(await scene.other.admin.subscribers("q")) == 2

    await eventually(have_both)
    message_id = await scene.broker.publish(2, "q")
    assert message_id is not None
    reasons = (await scene.other.admin.explain(message_id)).reasons
    await second.stop()
    concurrency = [reason.policy for reason in reasons if reason.code == "concurrency"]
    assert concurrency == [str(lower), str(higher)]


async def test_a_message_whose_key_was_claimed(scene: Scene) -> None:
    await scene.start(Once("1h"), Throttle(1, per="1h"))
    first = await scene.broker.publish(1, "q", key="a")
    await scene.running(1)
    reason = await scene.reason(await scene.broker.publish(2, "q", key="a"), "duplicate")
    assert reason.message_id == first


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (Throttle(1, per="1h", scope="mail"), "throttled"),
        (Concurrency(1, scope="mail"), "concurrency"),
    ],
    ids=str,
)
async def test_a_message_that_another_queue_keeps_waiting(
    scene: Scene, policy: Policy, code: str
) -> None:
    await scene.start(policy)
    await scene.broker.publish(1, "q")
    await scene.running(1)
    second = SqlBroker(scene.broker.engine, logger=None, presence_interval=2.0)

    @second.subscriber("r", policies=[policy], **QUICK)
    async def handle(_body: Any) -> None: ...

    await second.start()
    await eventually(lambda: scene.other.admin.subscribers("r"))
    reason = await scene.reason(await scene.broker.publish(2, "r"), code)
    assert reason.policy == str(policy)
    [waits] = await scene.other.admin.policies("r")
    assert [(wait.code, wait.count) for wait in waits.waits] == [(code, 1)]
    await second.stop()
