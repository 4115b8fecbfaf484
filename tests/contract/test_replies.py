"""Replies to requests: read without a lease, deleted, and removed when their process has ended."""

from typing import Any

import pytest
from sqlalchemy import select

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.constants import MAX_REPLIES
from faststream_sqlbroker.database.parts.replies import SCOPE
from tests.contract.conftest import Bench

MINE, THEIRS = "sqlbroker.replies.mine", "sqlbroker.replies.theirs"
CLEANED = 60.0


async def noted(bench: Bench) -> list[str]:
    table = bench.store.tables.policy_state
    async with bench.store.engine.connect() as connection:
        found = await connection.execute(
            select(table.c.key).where(table.c.scope == SCOPE).order_by(table.c.key)
        )
        return list(found.scalars())


async def clean(bench: Bench) -> None:
    await bench.store.live_subscribers.write_heartbeat({}, set(), CLEANED, clean=True)


async def queues(bench: Bench) -> list[str]:
    return [row["queue"] for row in await bench.rows()]


async def test_replies_are_read_and_stay_until_they_are_removed(bench: Bench) -> None:
    reply = NewMessage(MINE, b"\x00body", '{"reply_id": "1"}', expires_in=60.0)
    [first] = await bench.store.insert([reply])
    await bench.store.insert([NewMessage(MINE, b"later", delay=60.0), NewMessage(THEIRS, b"x")])
    for _ in range(2):
        [row] = await bench.store.replies.read_replies(MINE)
        assert (row.id, row.queue, row.payload) == (first, MINE, b"\x00body")
        assert row.headers == {"reply_id": "1"}
        assert row.created_at <= row.acquired_at
        assert row.expires_at is not None
    await bench.store.replies.remove([row.id])
    assert await bench.store.replies.read_replies(MINE) == []
    assert await queues(bench) == [MINE, THEIRS]
    assert await bench.rows(archive=True) == []


async def test_more_replies_than_one_look_reads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = MAX_REPLIES + 3
    await bench.store.insert([NewMessage(MINE, b"x") for _ in range(count)])
    rows = await bench.store.replies.read_replies(MINE)
    assert len(rows) == MAX_REPLIES
    await bench.store.replies.clear_queue(MINE, unregister=True)
    assert await bench.rows() == []


async def test_expired_replies_of_noted_queues_are_removed(bench: Bench) -> None:
    await bench.store.replies.register_queue(MINE, 600.0)
    await bench.store.insert(
        [
            NewMessage(MINE, b"expired", expires_in=60.0),
            NewMessage(MINE, b"live", expires_in=60.0),
            NewMessage(MINE, b"for ever"),
            NewMessage("q", b"not ours", expires_in=60.0),
        ]
    )
    past = bench.past(1)
    await bench.execute(
        f"UPDATE message SET expires_at = {past} WHERE expires_at IS NOT NULL AND id IN "
        "(SELECT id FROM (SELECT min(id) AS id FROM message GROUP BY queue) first)"
    )
    await clean(bench)
    assert [row["payload"] for row in await bench.rows()] == [b"live", b"for ever", b"not ours"]
    assert await noted(bench) == [MINE]


async def test_all_goes_from_a_queue_that_is_no_longer_used(bench: Bench) -> None:
    await bench.store.replies.register_queue(MINE, 600.0)
    await bench.store.replies.register_queue(THEIRS, 600.0)
    await bench.store.insert([NewMessage(MINE, b"x"), NewMessage(THEIRS, b"y")])
    over: Any = bench.past(1)
    await bench.execute(
        f"UPDATE message_policy_state SET expires_at = {over} "
        f"WHERE {bench.quoted('key')} = '{THEIRS}'"
    )
    await clean(bench)
    assert await queues(bench) == [MINE]
    assert await noted(bench) == [MINE]


async def test_a_queue_that_is_noted_again_is_used_for_longer(bench: Bench) -> None:
    await bench.store.replies.register_queue(MINE, 0.0)
    await bench.store.replies.register_queue(MINE, 600.0)
    await bench.store.insert([NewMessage(MINE, b"x")])
    await clean(bench)
    assert await queues(bench) == [MINE]
    await bench.store.replies.clear_queue(MINE, unregister=False)
    assert (await queues(bench), await noted(bench)) == ([], [MINE])
    await bench.store.replies.clear_queue(MINE, unregister=True)
    assert await noted(bench) == []
