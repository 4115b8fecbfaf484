"""W2, W4: a pull client's requests read only the rows that they show or change, with any cached
plan and without ANALYZE; and each takes two round trips."""

from itertools import pairwise
from unittest.mock import patch

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from tests.http.pulling import QUEUE, Pulling
from tests.plans.test_direct_claim import CROWD, WARM, one_connection, read_by_scans
from tests.proxy import proxied

__all__ = ["one_connection"]

pytestmark = [
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
    pytest.mark.capability("plans of hot statements tested against 200 000 other rows"),
]


async def use(pulling: Pulling) -> None:
    """Look, take, look again and end, with and without the lease."""
    for sent in (True, False):
        job = (await pulling.queued("?limit=1"))[0]
        lease = await pulling.start(job["ID"])
        end = await pulling.post(job["ID"], "DELIVERED", lease=lease if sent else None)
        assert end.status_code == 202


async def test_w2_w4_requests_are_bounded_without_analyze(one_connection: AsyncEngine) -> None:
    """The connection has planned every statement for a table of a few rows; then 40 000 come."""
    pulling = Pulling(SqlBroker(one_connection))
    async with pulling.http:
        for _ in range(WARM):
            for _ in range(2):
                await pulling.broadcast()
            await use(pulling)
            assert await pulling.queued() == []
        async with one_connection.begin() as connection:
            for priority, due in ((0, "now()"), (1, "now() + interval '1 hour'")):
                await connection.execute(
                    text(
                        "INSERT INTO message (queue, payload, priority, next_attempt_at) "
                        f"SELECT '{QUEUE}', 'x', {priority}, {due} "
                        f"FROM generate_series(1, {CROWD})"
                    )
                )
        for _ in range(3):
            await use(pulling)
        assert await read_by_scans(one_connection) < CROWD


async def test_w2_w4_a_request_takes_two_round_trips(engine: AsyncEngine) -> None:
    """One looks up the tokens, one does what is asked for."""
    await SqlBroker(engine).create_tables()
    # Its wake-ups are not counted.
    producer = Pulling(SqlBroker(engine))
    async with proxied(engine.url) as (proxy, url):
        far = create_async_engine(url, pool_size=1, max_overflow=0)
        pulling = Pulling(SqlBroker(far))
        # The loop for leases that have ended takes round trips, too, now and then.
        with patch.object(PullJobs, "start"):
            # The first job prepares the statements.
            for _ in range(2):
                await producer.broadcast()
                costs = [proxy.round_trips]
                [job] = await pulling.queued()
                costs.append(proxy.round_trips)
                lease = await pulling.start(job["ID"])
                costs.append(proxy.round_trips)
                end = await pulling.post(job["ID"], "DELIVERED", lease=lease)
                assert end.status_code == 202
                costs.append(proxy.round_trips)
        await producer.http.aclose()
        await pulling.http.aclose()
        await far.dispose()
    assert [after - before for before, after in pairwise(costs)] == [2, 2, 2]
