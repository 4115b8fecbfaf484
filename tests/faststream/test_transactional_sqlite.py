"""On SQLite a transactional handler is the only writer: what would wait for it is refused."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from faststream_sqlbroker import NotSupportedError, Retention, SqlBroker
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = [
    pytest.mark.capability("`transactional=True`"),
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]
OPTIONS: Any = {**QUICK, "transactional": True, "retry_strategy": None}
Call = Callable[[SqlBroker], Awaitable[object]]


async def lock(broker: SqlBroker) -> None:
    async with broker.lock("k", wait=0):
        pass


REFUSED: dict[str, Call] = {
    "lock": lock,
    "pop": lambda b: b.pop("other"),
    "reserve": lambda b: b.reserve("other"),
    "request": lambda b: b.request(1, "other"),
    "cancel": lambda b: b.admin.cancel(1),
    "retry_now": lambda b: b.admin.retry_now(1),
    "postpone": lambda b: b.admin.postpone(1, "1h"),
    "move": lambda b: b.admin.move(1, "other"),
    "edit": lambda b: b.admin.edit(1, priority=1),
    "publish by admin": lambda b: b.admin.publish(1, "other"),
    "pause": lambda b: b.admin.pause("other"),
    "resume": lambda b: b.admin.resume("other"),
    "release_lock": lambda b: b.admin.release_lock("k"),
    "set_info": lambda b: b.admin.set_info("l", "i"),
    "bulk_cancel": lambda b: b.admin.bulk_cancel(queue="other", dry_run=False),
    "stop_job": lambda b: b.admin.stop_job("0" * 20),
    "prune": lambda b: b.admin.prune(Retention(completed="30d")),
    "run_schedule": lambda b: b.admin.run_schedule("s"),
    "forget_schedule": lambda b: b.admin.forget_schedule("s"),
    "forget_unknown": lambda b: b.admin.forget_unknown(1),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_what_writes_by_itself_is_refused_at_once(
    broker: SqlBroker, look: Look, call: Call
) -> None:
    """The error says why; the handler goes on and commits."""
    errors: list[str] = []

    @broker.subscriber("q", **OPTIONS)
    async def handle() -> None:
        with pytest.raises(NotSupportedError, match="blocks all other writers") as caught:
            await call(broker)
        errors.append(str(caught.value))

    await broker.start()
    await broker.publish("x", "q")
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"
    [error] = errors
    assert "remove transactional=True, or publish" in error


async def test_a_reservation_from_before_is_refused_and_stays(
    broker: SqlBroker, look: Look
) -> None:
    """It can be ended after the handler."""
    refused: list[str] = []
    await broker.publish("x", "other")
    reservation = await broker.reserve("other", wait=0)
    assert reservation is not None

    @broker.subscriber("q", **OPTIONS)
    async def handle() -> None:
        for end in (reservation.commit, reservation.rollback, reservation.extend):
            with pytest.raises(NotSupportedError, match="blocks all other writers"):
                await end()
            refused.append(end.__name__)

    await broker.start()
    await broker.publish("x", "q")
    await eventually(lambda: look.rows(archive=True))
    assert refused == ["commit", "rollback", "extend"]
    await reservation.commit()
    assert len(await look.archived(2)) == 2
