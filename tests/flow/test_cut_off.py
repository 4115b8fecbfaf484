"""Workers cancelled at the end of `graceful_timeout`, right before or after their handler."""

import asyncio
from typing import Any

import pytest

from faststream_sqlbroker.core.outcome import Ack, Nack
from faststream_sqlbroker.core.policies import Once
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.exceptions import TransientStoreError
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver import policy_starts
from tests.flow.conftest import Rig
from tests.helpers import eventually

QUICK: dict[str, Any] = {
    "max_fetch_interval": 0.05,
    "flush_interval": 0.01,
    "release_stuck_interval": 60,
}
ONCE: dict[str, Any] = {**QUICK, "policies": [Once("1h")]}


class Held:
    """A call of the store that is under way when its worker is cancelled."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.may_end = asyncio.Event()

    async def wait(self) -> None:
        """Hold the call."""
        self.reached.set()
        await self.may_end.wait()

    async def stop(self, rig: Rig, consumer: QueueConsumer) -> None:
        """Stop `consumer`, which cancels its worker; the call ends afterwards."""
        await self.reached.wait()
        stop = asyncio.create_task(consumer.stop(0.05))
        await eventually(lambda: rig.logged("they are cancelled"))
        await asyncio.sleep(0)  # the cancellation arrives
        self.may_end.set()
        await stop


async def states(rig: Rig) -> list[tuple[str, int, int]]:
    return [(r["state"], r["deliveries_count"], r["attempts_count"]) for r in await rig.rows()]


async def completed(rig: Rig, count: int) -> None:
    """Wait until all are archived, each as a success."""

    async def there() -> bool:
        return len(await rig.rows(archive=True)) == count

    await eventually(there)
    assert [row["state"] for row in await rig.rows(archive=True)] == ["COMPLETED"] * count


async def none_is_free(*_: Any) -> set[int]:
    """As on a database where `claim_keys` is the only way."""
    return set()


async def ack_all(rows: tuple[ClaimedMessage, ...]) -> None:
    for row in rows:
        row.record_outcome(Ack())


@pytest.mark.parametrize("asked", ["claim_free_keys", "claim_keys"])
@pytest.mark.parametrize("claimed", [True, False], ids=["claimed", "not claimed"])
async def test_a_stop_while_keys_are_claimed_gives_messages_and_keys_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, claimed: bool, asked: str
) -> None:
    """The next worker that claims them runs them."""
    claim_keys = getattr(rig.store.policies, asked)
    held = Held()

    async def slow(*args: Any) -> Any:
        verdicts = await claim_keys(*args) if claimed else None
        await held.wait()
        if verdicts is None:
            raise TransientStoreError("the database is busy")
        return verdicts

    await rig.put(1, key="a")
    await rig.put(1)
    with monkeypatch.context() as patch:
        if asked == "claim_keys":
            patch.setattr(rig.store.policies, "claim_free_keys", none_is_free)
        patch.setattr(rig.store.policies, asked, slow)
        consumer = rig.consumer(ack_all, batch=True, **ONCE)
        await consumer.start()
        await held.stop(rig, consumer)
    assert await states(rig) == [("PENDING", 0, 0)] * 2
    await rig.consumer(ack_all, batch=True, **ONCE).start()
    await completed(rig, 2)


async def test_a_stop_while_a_claim_of_keys_waits_gives_messages_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: Any) -> None:
        raise TransientStoreError("the database is busy")

    await rig.put(1, key="a")
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.policies, "claim_free_keys", none_is_free)
        patch.setattr(rig.store.policies, "claim_keys", busy)
        patch.setattr(policy_starts, "backoff", lambda *_: 3600.0)
        consumer = rig.consumer(**ONCE)
        await consumer.start()
        await eventually(lambda: rig.logged("so their handlers do not run now"))
        await consumer.stop(0.05)
    assert await states(rig) == [("PENDING", 0, 0)]
    await rig.consumer(**ONCE).start()
    await completed(rig, 1)


async def test_a_stop_while_keys_are_given_back_lets_the_message_run_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_back_keys = rig.store.policies.release_keys
    held = Held()

    async def slow(*args: Any) -> None:
        await held.wait()
        await give_back_keys(*args)

    async def fail(row: ClaimedMessage) -> None:
        row.record_outcome(Nack(delay=0.0, retry_possible=True))

    await rig.put(1, key="a")
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.policies, "release_keys", slow)
        consumer = rig.consumer(fail, **ONCE)
        await consumer.start()
        await held.stop(rig, consumer)
    assert await states(rig) == [("RETRYABLE", 1, 1)]
    await rig.consumer(**ONCE).start()
    await completed(rig, 1)


@pytest.mark.parametrize("committed", [True, False])
async def test_a_stop_while_a_message_is_removed_first_gives_it_back_or_has_removed_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """ACK_FIRST: its handler has not started."""
    remove_first = rig.store.ack_first_starts.remove_first
    held = Held()

    async def slow(*args: Any) -> None:
        if committed:
            await remove_first(*args)
        await held.wait()

    await rig.put(1)
    monkeypatch.setattr(rig.store.ack_first_starts, "remove_first", slow)
    consumer = rig.consumer(ack_first=True, **QUICK)
    await consumer.start()
    await held.stop(rig, consumer)
    assert rig.handled == []
    assert await states(rig) == ([] if committed else [("PENDING", 0, 0)])
    assert bool(rig.logged("settle unknown")) == committed
    assert not rig.logged("lease lost")
