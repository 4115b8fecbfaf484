"""broker.admin.queues: what is in the queues, and which names do not fit together."""

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.admin import QueueOverview
from tests.faststream.conftest import QUICK, Make
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`broker.admin.queues`: what waits, rates, misspelt names")


async def test_a_slip_in_a_name_is_found_on_both_sides(
    engine: AsyncEngine, broker: SqlBroker
) -> None:
    @broker.subscriber("ordres", **QUICK)
    async def handle(_body: str) -> None: ...

    @broker.subscriber("mail", **QUICK)
    async def send(_body: str) -> None: ...

    await broker.start()
    await broker.publish_batch("a", "b", queue="orders")
    await broker.publish("later", "mail", delay=600)
    admin = SqlBroker(engine, logger=None).admin  # of another process

    async def all_listed() -> dict[str, QueueOverview] | None:
        found = {each.queue: each for each in await admin.queues()}
        return found if found["mail"].live_subscribers and "ordres" in found else None

    found = await eventually(all_listed)
    assert {name: each.problem for name, each in found.items()} == {
        "mail": None,
        "orders": "no live subscriber; did you mean 'ordres'?",
        "ordres": "it has never had a message; did you mean 'orders'?",
    }
    assert found["orders"].ready.value == 2
    assert found["mail"].delayed.value == 1
    [one] = await admin.queues("orders")
    assert one == found["orders"] or one.oldest_due_age > found["orders"].oldest_due_age


async def test_one_queue_is_shown_also_if_it_has_nothing(broker: SqlBroker) -> None:
    [one] = await broker.admin.queues("none")
    assert (one.queue, one.waiting, one.problem) == ("none", 0, None)
    with pytest.raises(SetupError, match="cannot be the name of a queue"):
        await broker.admin.queues("")


async def test_what_goes_out_is_told_without_an_archived_message(make: Make) -> None:
    """The subscribers tell it with their signs of life, so nothing needs to be kept."""
    broker = make(presence_interval=0.1)

    @broker.subscriber("quick", retain_in_archive_on_ack=False, **QUICK)
    async def handle(_body: str) -> None: ...

    await broker.create_tables()
    await broker.start()
    await broker.publish_batch("a", "b", "c", queue="quick")

    async def told() -> float | None:
        [one] = await broker.admin.queues("quick")
        return one.out_per_minute

    rate = await eventually(told)
    # Three of at least five seconds; the first sign of life may have had one of them.
    assert rate is not None
    assert 0.0 < rate <= 36.0
