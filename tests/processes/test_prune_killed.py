"""A process that is killed while it prunes: only what is old goes, and the next one goes on."""

from datetime import timedelta

import pytest
from sqlalchemy import insert, select

from faststream_sqlbroker.schema.types import clock
from tests.helpers import eventually
from tests.processes.conftest import Fleet
from tests.processes.pruner import BATCH

pytestmark = pytest.mark.capability("retention: old messages leave the archive, `sqlbroker prune`")
OLD = range(1, 121)
YOUNG = range(201, 221)
FAILED = range(301, 321)
"""As old, but of a state that is not to be pruned."""


async def fill(fleet: Fleet) -> None:
    archive = fleet.store.tables.archive
    assert archive is not None
    async with fleet.store.engine.begin() as connection:
        now = (await connection.execute(select(clock()))).scalar_one()
        for ids, age, state in (
            (OLD, timedelta(days=3), "COMPLETED"),
            (YOUNG, timedelta(hours=1), "COMPLETED"),
            (FAILED, timedelta(days=3), "FAILED"),
        ):
            times = dict.fromkeys(("created_at", "next_attempt_at", "archived_at"), now - age)
            rows = [{"id": i, "queue": "q", "payload": b"x", "state": state, **times} for i in ids]
            await connection.execute(insert(archive), rows)


async def left(fleet: Fleet) -> list[int]:
    return sorted(row["id"] for row in await fleet.rows(archive=True))


async def test_only_what_is_old_goes_and_the_next_process_goes_on(fleet: Fleet) -> None:
    await fill(fleet)
    kept = [*YOUNG, *FAILED]
    process = fleet.run("pruner")

    async def has_removed() -> bool:
        return await fleet.count("id <= 120", archive=True) < len(OLD)

    await eventually(has_removed, timeout=60)
    process.kill()
    process.wait()
    # A step that was cut off has removed nothing; the server may still be ending it.
    before = await fleet.count("id <= 120", archive=True)
    assert (await left(fleet))[-len(kept) :] == kept
    assert before % BATCH == 0
    assert before < len(OLD)
    fleet.run("pruner")

    async def all_old_are_gone() -> bool:
        return await left(fleet) == kept

    await eventually(all_old_are_gone, timeout=60)
