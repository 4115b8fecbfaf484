"""A deployment without a policy that the one before had."""

import logging

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import Concurrency, Debounce, Delay, SqlBroker
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.database.policies import policy_holds
from faststream_sqlbroker.flow.fleet import housekeeping
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually


@pytest.mark.parametrize(
    ("policy", "after"),
    [(Delay("1h"), []), (Debounce("1h"), [Concurrency(5)])],
    ids=["plain", "with-another-policy"],
)
async def test_what_waited_is_handled(
    broker: SqlBroker,
    engine: AsyncEngine,
    logger: logging.Logger,
    heard: Heard,
    look: Look,
    policy: Policy,
    after: list[Policy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a process that knows nothing of the policy; the log says it."""
    monkeypatch.setattr(housekeeping, "REMOVED_START_INTERVAL", 0.2)
    monkeypatch.setattr(housekeeping, "CLOCK_INTERVAL", 0.2)
    monkeypatch.setattr(policy_holds, "NOTE_VALIDITY", 0)

    @broker.subscriber("q", policies=[policy], **QUICK)
    async def before(body: str) -> None:
        raise AssertionError

    await broker.start()
    await broker.publish("x", "q", key="a")

    async def is_put_off() -> bool:
        return all(row["policy_marks"] for row in await look.rows())

    await eventually(is_put_off)
    await broker.stop()

    second = SqlBroker(engine, logger=logger, graceful_timeout=60.0, presence_interval=0.2)
    handled: list[str] = []

    @second.subscriber("q", policies=after, **QUICK)
    async def handle(body: str) -> None:
        handled.append(body)

    await second.start()
    try:
        await look.archived(1)
    finally:
        await second.stop()
    assert handled == ["x"]
    [told] = heard.texts("waited for policies which no live subscriber has any more")
    assert told.startswith("freed 1 messages of queue 'q'")
