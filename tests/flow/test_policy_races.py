"""What comes while a claim is at it."""

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from faststream_sqlbroker.core.policies import Debounce
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.dialects.policy_rows import PolicyRows
from faststream_sqlbroker.dialects.policy_wanted import Memory, Wanted
from tests.flow.conftest import Rig
from tests.helpers import eventually
from tests.plans.conftest import SYNC_DRIVERS

WINDOW = 2.0


# In SQLite nobody writes while a claim is at it.
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("priority", [0, 1])
async def test_what_comes_within_a_burst_while_it_ends_takes_part(
    rig: Rig, database: str, database_url: str, monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    """Z7: committed before the burst's end, but after a claim has looked for arrivals, and before it has chosen."""
    other = create_engine(make_url(database_url).set(drivername=SYNC_DRIVERS[database]))
    [first] = await rig.put(1, key="a")
    put_at = time.monotonic()
    ids: list[int] = []
    choose: Any = PolicyRows.due

    def late(*given: Any, **options: Any) -> Any:
        if not ids:
            with other.begin() as connection:
                key = rig.quoted("key")
                insert = f"INSERT INTO message (queue, payload, priority, {key}) VALUES ('q', 'x', {priority}, 'a')"
                connection.execute(text(insert))
                ids.append(connection.execute(text("SELECT max(id) FROM message")).scalar_one())
            assert time.monotonic() - put_at < WINDOW, "the machine is too slow to tell"
            time.sleep(put_at + WINDOW + 0.1 - time.monotonic())
        return choose(*given, **options)

    async def claim() -> list[ClaimedMessage]:
        wanted = Wanted(["q"], 10, 60.0, uuid4(), [Debounce(WINDOW)])
        return (await rig.store.policies.claim(wanted, Memory()))[0].rows

    monkeypatch.setattr(PolicyRows, "due", late)
    await asyncio.sleep(WINDOW / 2)
    assert await claim() == []
    rows = await eventually(claim, timeout=3 * WINDOW, step=0.1)
    assert [row.id for row in rows] == ids
    [gone] = await rig.rows(archive=True)
    assert (gone["id"], gone["reason"]) == (first, f"superseded by {ids[0]}")
    other.dispose()
