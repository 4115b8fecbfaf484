"""Messages that arrive during a claim."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from faststream_sqlbroker.core.policies import Debounce
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.database.policies.request import PolicyClaimRequest, ScanPosition
from faststream_sqlbroker.database.policies.rows import PolicyRows
from tests.flow.conftest import Rig
from tests.helpers import eventually
from tests.plans.conftest import SYNC_DRIVERS

WINDOW = 1.0


# In SQLite no other session writes during a claim.
@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
@pytest.mark.parametrize("priority", [0, 1])
async def test_a_message_that_arrives_while_its_burst_ends_takes_part(
    rig: Rig, database: str, database_url: str, monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    """Z7: committed before the burst's end, but after a claim has looked for arrivals, and before
    it has chosen."""
    other = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS[database]))
    put_at = 0.0
    key = ""
    in_time = False
    ids: list[int] = []
    choose: Any = PolicyRows.list_due

    def late(*given: Any, **options: Any) -> Any:
        nonlocal in_time
        if not ids:
            with other.begin() as connection:
                columns = f"queue, payload, priority, {rig.quoted('key')}"
                insert = f"INSERT INTO message ({columns}) VALUES ('q', 'x', {priority}, '{key}')"
                connection.execute(text(insert))
                ids.append(connection.execute(text("SELECT max(id) FROM message")).scalar_one())
            if in_time := time.monotonic() - put_at < WINDOW:
                time.sleep(max(0.0, put_at + WINDOW + 0.1 - time.monotonic()))
        return choose(*given, **options)

    async def claim() -> list[ClaimedMessage]:
        wanted = PolicyClaimRequest(["q"], 10, 60.0, uuid4(), [Debounce(WINDOW)])
        return (await rig.store.policies.claim(wanted, ScanPosition()))[0].rows

    monkeypatch.setattr(PolicyRows, "list_due", late)
    first = 0
    early: list[ClaimedMessage] = []

    async def arrived_in_time() -> bool:  # a busy machine may be too slow to tell
        nonlocal key, put_at, first, early
        await rig.execute("DELETE FROM message")
        ids.clear()
        key = uuid4().hex
        put_at = time.monotonic()
        [first] = await rig.put(1, key=key)
        await asyncio.sleep(WINDOW / 2)
        early = await claim()
        return in_time

    await eventually(arrived_in_time)
    assert early == []
    rows = await eventually(claim, step=0.1)
    assert [row.id for row in rows] == ids
    gone = {row["id"]: (row["reason"], row["related_id"]) for row in await rig.rows(archive=True)}
    assert gone[first] == ("superseded", ids[0])
    other.dispose()
