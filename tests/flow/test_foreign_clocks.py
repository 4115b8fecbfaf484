"""Rows of other programs, which write the time of their own clock as created_at: it may be ahead of
the database's."""

from datetime import timedelta
from typing import Any

import pytest

from faststream_sqlbroker.core.policies import (
    Concurrency,
    Debounce,
    Delay,
    Once,
    Policy,
    Throttle,
    Window,
)
from faststream_sqlbroker.core.routing import DESTINATION
from faststream_sqlbroker.flow.deliver.forward import ForwardHandler
from faststream_sqlbroker.subscriber.options import make_settings
from tests.flow.conftest import Rig
from tests.helpers import eventually

HOUR = 3600
YEAR = 365 * 86_400
FAR = 7_900 * 365 * 86_400
AHEAD = (HOUR, YEAR, FAR)
QUICK: Any = {"max_fetch_interval": 0.05, "flush_interval": 0.01, "wakeup": "poll"}

POLICIES: list[list[Policy]] = [
    [Debounce("300ms")],
    [Debounce("300ms", max_wait="300ms")],
    [Debounce("300ms", edge="leading")],
    [Delay("100ms"), Debounce("300ms")],
    [Window("00:00", "24:00"), Debounce("300ms"), Throttle(50, per="1s", key=True)],
    [Delay("100ms")],
    [Throttle(50, per="1s", key=True)],
    [Throttle(50, per="1s", burst=50, when_exceeded="drop")],
    [Concurrency(1, per_key=True)],
    [Once("1h")],
]


async def foreign(rig: Rig, ahead: int, key: str, headers: str | None = None) -> None:
    """Insert as a producer whose clock is so many seconds ahead."""
    columns = f"queue, payload, headers, {rig.quoted('key')}, created_at"
    values = (
        f"'q', :payload, {'CAST(:headers AS jsonb)' if is_postgresql(rig) else ':headers'}, :key"
    )
    await rig.execute(
        f"INSERT INTO message ({columns}) VALUES ({values}, {rig.past(-ahead)})",
        payload=b"1",
        key=key,
        headers=headers,
    )


def is_postgresql(rig: Rig) -> bool:
    return rig.store.dialect_name == "postgresql"


async def ended(rig: Rig, count: int) -> list[dict[str, Any]]:
    """Wait until `count` messages are archived and none is left."""

    async def done() -> list[dict[str, Any]]:
        rows = await rig.rows(archive=True)
        return rows if len(rows) == count and not await rig.rows() else []

    return await eventually(done)


async def test_a_burst_with_a_time_ahead_ends_like_any_other(rig: Rig) -> None:
    """It had stopped every claim of the queue, or kept its key silent until that time."""
    await rig.consumer(policies=[Debounce("500ms")], **QUICK).start()
    newest = {}
    for ahead in AHEAD:
        await foreign(rig, ahead, f"bob {ahead}")
        await rig.put(1, key=f"eve {ahead}")
        await foreign(rig, ahead, f"only {ahead}")
        [newest[ahead]] = await rig.put(1, key=f"bob {ahead}")
    await ended(rig, 4 * len(AHEAD))
    for ahead in AHEAD:
        handled = [row for row in rig.handled if row.key and row.key.endswith(f" {ahead}")]
        assert {row.key for row in handled} == {
            f"{name} {ahead}" for name in ("bob", "eve", "only")
        }
        assert newest[ahead] in [row.id for row in handled], "the newest is delivered"
    assert rig.logged("failed") == []


@pytest.mark.parametrize("policies", POLICIES, ids=lambda policies: "-".join(map(str, policies)))
async def test_no_policy_waits_for_a_time_ahead(rig: Rig, policies: list[Policy]) -> None:
    """Alone, before and after messages of the same key, at the start and while the queue is
    consumed."""
    for ahead in AHEAD:
        await foreign(rig, ahead, f"first {ahead}")
        await rig.put(1, key=f"both {ahead}")
        await foreign(rig, ahead, f"both {ahead}")
    await rig.consumer(policies=policies, max_workers=4, **QUICK).start()
    await eventually(lambda: rig.handled)
    for ahead in AHEAD:
        await foreign(rig, ahead, f"later {ahead}")
        await foreign(rig, ahead, f"mixed {ahead}")
        await rig.put(1, key=f"mixed {ahead}")
    await ended(rig, 6 * len(AHEAD))
    names = ("first", "both", "later", "mixed")
    for ahead in AHEAD:
        handled = {row.key for row in rig.handled if row.key and row.key.endswith(f" {ahead}")}
        assert handled == {f"{name} {ahead}" for name in names}


async def test_order_is_that_of_ids(rig: Rig) -> None:
    consumer = rig.consumer(ordered=True, max_workers=4, **QUICK)
    for _ in range(3):
        await foreign(rig, YEAR, "a")
        await rig.put(1, key="a")
    await consumer.start()
    await ended(rig, 6)
    ids = [row.id for row in rig.handled]
    assert ids == sorted(ids)


async def test_a_length_of_time_in_a_header_counts_from_now_at_the_latest(rig: Rig) -> None:
    """`publish_after` as a duration counts from created_at, which is not to come."""
    await foreign(rig, YEAR, "a", headers='{"destination": "out", "publish_after": "1h"}')
    forward = ForwardHandler(
        make_settings("q", {"forward_to": DESTINATION}), rig.log, lambda *_: None
    )
    await rig.consumer(forward, batch=True, **QUICK).start()

    async def moved() -> dict[str, Any] | None:
        row = await rig.one()
        return row if row["queue"] == "out" else None

    row = await eventually(moved)
    assert row is not None
    left = row["next_attempt_at"] - await rig.store.server.read_now()
    assert timedelta(minutes=55) < left <= timedelta(hours=1, seconds=1)
