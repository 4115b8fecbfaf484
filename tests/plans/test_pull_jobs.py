"""W2, W4: a pull client's requests read only the rows that they show or change, with any cached
plan and without ANALYZE."""

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from tests.http.pulling import QUEUE, Pulling
from tests.plans.test_direct_claim import CROWD, WARM, one_connection, read_by_scans

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
