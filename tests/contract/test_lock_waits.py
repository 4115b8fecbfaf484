"""A write of one message waits for no other message, even in a small table."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy import text

from faststream_sqlbroker.core.outcome import Outcome, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import settle
from tests.contract.conftest import LEASE, Bench
from tests.contract.test_settle import OUTCOMES, RULES

pytestmark = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite locks no rows. A planner that takes a table for tiny scans it, and waits for each row on
its way, unless it is told not to. A write that waits fails: its time limit ends before the lock.
"""


@asynccontextmanager
async def between_locked(bench: Bench) -> AsyncIterator[ClaimedMessage]:
    """A message of ours between two that others are about to take out of the table.

    InnoDB does not count these two any more, so the table is tiny to MySQL's planner.
    """
    await bench.put(3)
    before, row, after = await bench.claim()
    async with bench.store.engine.connect() as other:
        for one in (before, after):
            await other.execute(text(f"DELETE FROM message WHERE id = {one.id}"))
        yield row
        await other.rollback()


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
async def test_an_outcome_waits_for_no_other_message(bench: Bench, outcome: Outcome | None) -> None:
    async with between_locked(bench) as row:
        settlement = settle(row, outcome, RULES, ended_after=0.1)
        result = await bench.store.settle([settlement])
    assert (result.settled_ids, result.lost_ids) == ({row.id}, set())


async def test_a_move_with_new_headers_waits_for_no_other_message(bench: Bench) -> None:
    async with between_locked(bench) as row:
        moved = replace(
            settle(row, Relocate("other", b"new"), RULES, ended_after=0.1), headers='{"a": "b"}'
        )
        result = await bench.store.settle([moved])
    assert result.settled_ids == {row.id}


async def test_a_lease_waits_for_no_other_message(bench: Bench) -> None:
    async with between_locked(bench) as row:
        leases = [(row.id, row.lease_token)]
        assert await bench.store.renew(leases, LEASE) == {row.id}
        assert await bench.store.renew_free(leases, LEASE) == ({row.id}, set())
