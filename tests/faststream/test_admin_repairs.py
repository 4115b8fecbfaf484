"""broker.admin: cancel, retry_now, postpone, move, edit, next to running subscribers."""

import asyncio
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.admin import Repair
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_an_operator_mends_what_waits(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    handled = asyncio.Queue[str]()

    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None:
        await handled.put(body)

    await broker.start()
    admin = SqlBroker(engine, logger=None).admin  # of another process
    waits = {"delay": 600.0}
    soon = await broker.publish("soon", "q", **waits)
    moved = await broker.publish("moved", "misspelt")
    edited = await broker.publish("edited", "q", **waits)
    gone = await broker.publish("gone", "q", **waits)
    later = await broker.publish("later", "q", **waits)
    assert (await admin.retry_now(str(soon))).done
    assert await asyncio.wait_for(handled.get(), 60) == "soon"
    assert (await admin.move(moved or 0, "q")).done
    assert await asyncio.wait_for(handled.get(), 60) == "moved"
    assert (await admin.edit(edited or 0, due=0, key="k", priority=5)).done
    assert await asyncio.wait_for(handled.get(), 60) == "edited"
    assert (await admin.cancel(gone or 0, reason="no such address", by="Ann")).done
    assert (await admin.postpone(later or 0, "2h")).done

    async def ended() -> bool:
        return len(await look.rows(archive=True)) == 4

    await eventually(ended)
    rows = {row["id"]: row for row in await look.rows(archive=True)}
    assert rows[gone]["last_error"] == "cancelled by Ann: no such address"
    assert rows[gone]["state"] == "DISCARDED"
    assert (rows[edited]["key"], rows[edited]["priority"]) == ("k", 5)
    [explained] = (await admin.explain(gone or 0)).reasons
    assert "cancelled" in explained.text
    assert str(await admin.cancel(gone or 0)) == (
        f"message {gone}: not changed: it is in the archive as DISCARDED: "
        f"`redrive {gone} --state DISCARDED` returns it to its queue"
    )
    assert handled.empty()


async def test_a_running_handler_is_not_disturbed(broker: SqlBroker, look: Look) -> None:
    began = asyncio.Event()
    end = asyncio.Event()

    @broker.subscriber("q", **QUICK)
    async def handle(_body: str) -> None:
        began.set()
        await end.wait()

    message_id = await broker.publish("x", "q") or 0
    await broker.start()
    await asyncio.wait_for(began.wait(), 60)
    found = [
        await broker.admin.postpone(message_id, 60),
        await broker.admin.retry_now(message_id),
        await broker.admin.move(message_id, "other"),
    ]
    assert found == [Repair(message_id, "running", "q")] * 3
    assert str(found[0]).endswith(
        f"not changed: a subscriber has leased it: `cancel {message_id}` requests its end"
    )
    end.set()
    [row] = await look.archived()
    assert (row["state"], row["queue"]) == ("COMPLETED", "q")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("action", "given", "said"),
    [
        ("cancel", {"message_id": "x"}, "message_id must be a 64-bit integer"),
        ("cancel", {"message_id": 1, "by": 7}, "by must be text"),
        ("retry_now", {"message_id": 1.5}, "message_id must be a 64-bit integer"),
        ("postpone", {"message_id": 1, "until": -1}, "until must be"),
        ("postpone", {"message_id": 1, "until": datetime(2026, 1, 1)}, "until needs a time zone"),
        ("postpone", {"message_id": 1, "until": 4e9}, "0 to 100 years"),
        (
            "edit",
            {"message_id": 1, "due": datetime(9999, 12, 31, tzinfo=timezone.utc)},
            "due must be in a year",
        ),
        ("move", {"message_id": 1, "queue": ""}, "cannot be the name of a queue"),
        ("edit", {"message_id": 1}, "edit needs priority, key or due"),
        ("edit", {"message_id": 1, "priority": 101}, "from -100 to 100, got 101"),
        ("edit", {"message_id": 1, "priority": True}, "from -100 to 100, got True"),
        ("edit", {"message_id": 1, "key": ""}, "cannot be a key"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    broker: SqlBroker, action: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        await getattr(broker.admin, action)(**given)
