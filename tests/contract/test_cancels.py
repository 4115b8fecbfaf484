"""A request to cancel a leased message means that lease only, and is honoured when it runs out."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.rows import HeartbeatData
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import HOLDER_BYTES, parse_subscriber
from faststream_sqlbroker.database.messages import single_claim
from faststream_sqlbroker.database.parts import cancel_requests
from faststream_sqlbroker.flow.deliver.leases import StuckReleaser
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from tests.contract.conftest import Bench, done
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`broker.admin.cancel` of a running message")


async def asked(bench: Bench) -> list[CancelRequest]:
    """What a heartbeat reads."""
    orders = await bench.store.live_subscribers.write_heartbeat({}, set(), 60.0, clean=False)
    return list(orders.cancels)


async def cancel(bench: Bench, message_id: int) -> str:
    """The verdict; MySQL and MariaDB may hold a lock for a moment after the transaction's end."""

    async def verdict() -> str:
        repair = await bench.store.repairs.cancel(message_id, "cancelled by Ann: why", "Ann")
        return "" if repair.verdict == "busy" else repair.verdict

    return await eventually(verdict)


async def test_holders_read_the_request_with_their_signs_of_life(bench: Bench) -> None:
    [message_id, _] = await bench.put(2)
    [row, _] = await bench.claim(2)
    told: list[CancelRequest] = []
    await bench.store.repairs.cancel(message_id, "cancelled by Ann", on_requested=told.append)
    expected = CancelRequest(message_id, row.lease_token, "cancelled by Ann")
    assert told == await asked(bench) == [expected]
    sign = HeartbeatData({}, frozenset(), 60.0)
    around = await bench.store.poll_all(["q"], ["q"], sign)
    assert around.requests is not None
    assert around.requests.cancels == (expected,)
    assert (await bench.store.poll_all(["q"], ["q"])).requests is None


async def test_an_expired_lease_honours_the_request(bench: Bench) -> None:
    [message_id, other] = await bench.put(2)
    [row, _] = await bench.claim(2)
    assert await cancel(bench, message_id) == "requested"
    end = bench.store.end_cancelled
    assert await end(["q"], archive=True) == 0  # the leases last
    await bench.expire()
    assert await end(["other"], archive=True) == 0
    assert await end(["q"], archive=True) == 1
    assert await end(["q"], archive=True) == 0
    assert await bench.store.release_stuck(["q"], 10) == 1
    ended = await bench.one(archive=True)
    assert (ended["id"], ended["state"], ended["reason"]) == (message_id, "DISCARDED", "cancelled")
    assert ended["last_error"] == "cancelled by Ann: why"
    assert [r["id"] for r in await bench.rows()] == [other]
    assert (await bench.store.settle([done(row)])).lost_ids == {message_id}


def end_lease(bench: Bench, message_id: int) -> str:
    """SQL by which the lease of the message ends now."""
    return f"UPDATE message SET lease_expires_at = {bench.past(0)} WHERE id = {message_id}"


def quiet(*_: Any, **__: Any) -> None:
    """A log that is not read."""


def cancelled(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows if row["reason"] == "cancelled"]


async def test_a_lease_that_ends_while_cancels_are_looked_for_is_not_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, message_id = await bench.put(2)
    await bench.claim(2)
    assert await cancel(bench, message_id) == "requested"
    await bench.execute(end_lease(bench, other))
    end = bench.store.end_cancelled

    async def looked(queues: Sequence[str], *, archive: bool) -> int:
        count = await end(queues, archive=archive)
        await bench.execute(end_lease(bench, message_id))
        return count

    monkeypatch.setattr(bench.store, "end_cancelled", looked)
    releaser = StuckReleaser(
        bench.store,
        ["q"],
        quiet,
        interval=60.0,
        on_released=lambda: None,
        poller=SharedPoller(bench.store, Clock()),
        housekeeping=Housekeeping(bench.store, quiet, Clock()),
    )
    await releaser.tick()
    assert [(row["id"], row["state"]) for row in await bench.rows()] == [
        (other, "PENDING"),
        (message_id, "PROCESSING"),
    ]
    monkeypatch.setattr(bench.store, "end_cancelled", end)
    await releaser.tick()
    assert cancelled(await bench.rows(archive=True)) == [message_id]


async def test_a_direct_claim_gives_nothing_back_that_ends_while_it_looks_for_cancels(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    [message_id] = await bench.put(1)
    await bench.claim(1)
    assert await cancel(bench, message_id) == "requested"
    end = cancel_requests.discard_expired

    def looked(connection: Connection, *given: Any, **options: Any) -> int:
        count = end(connection, *given, **options)
        connection.execute(text(end_lease(bench, message_id)))
        return count

    async def taken() -> list[Any]:
        claim = await bench.store.direct_claims.claim(
            ["q"], 60.0, uuid4(), lambda _row: (None, True), release=True
        )
        return list(claim.rows)

    monkeypatch.setattr(single_claim, "discard_expired", looked)
    assert await taken() == []
    monkeypatch.setattr(single_claim, "discard_expired", end)
    assert await taken() == []
    assert cancelled(await bench.rows(archive=True)) == [message_id]


async def test_without_an_archive_for_rejects_nothing_is_kept(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    await bench.claim(1)
    await cancel(bench, message_id)
    await bench.expire()
    assert await bench.store.end_cancelled(["q"], archive=False) == 1
    assert await bench.rows() == await bench.rows(archive=True) == []


async def test_a_lease_that_is_over_is_ended_at_once(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    await bench.store.settle([done(row, state=MessageState.RETRYABLE, error="ValueError: no")])
    await bench.claim(1)
    await bench.expire()
    assert await cancel(bench, message_id) == "done"
    ended = await bench.one(archive=True)
    assert ended["last_error"] == "cancelled by Ann: why\nValueError: no"
    assert await bench.rows() == []
    assert await asked(bench) == []


async def test_the_request_means_no_later_delivery(bench: Bench) -> None:
    """The handler has failed before it learnt of the request: the message is tried again."""
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    await cancel(bench, message_id)
    again = done(row, state=MessageState.RETRYABLE, delay=0.0)
    assert (await bench.store.settle([again])).settled_ids == {message_id}
    [row] = await bench.claim(1)
    await bench.expire()
    assert await bench.store.end_cancelled(["q"], archive=True) == 0
    assert await bench.store.release_stuck(["q"], 10) == 1
    [row] = await bench.claim(1)
    await cancel(bench, message_id)
    [request] = await asked(bench)  # in place of the first one
    assert request.lease_token == row.lease_token


async def test_a_settle_before_the_end_of_the_lease_wins(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    await cancel(bench, message_id)
    assert (await bench.store.settle([done(row)])).settled_ids == {message_id}
    assert await bench.store.end_cancelled(["q"], archive=True) == 0
    assert (await bench.one(archive=True))["state"] == "COMPLETED"


async def test_requests_are_forgotten_once_their_leases_are_over(bench: Bench) -> None:
    [first, second] = await bench.put(2)
    [row, _] = await bench.claim(2)
    await cancel(bench, first)
    await cancel(bench, second)
    await bench.store.settle([done(row)])
    await bench.store.live_subscribers.write_heartbeat({}, set(), 60.0, clean=True)
    assert [each.message_id for each in await asked(bench)] == [second]


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql", "pgbouncer"], indirect=True)
async def test_a_message_that_a_transaction_has_locked_is_asked_for(bench: Bench) -> None:
    """As by a handler with transactional=True. SQLite has one writer: there the request waits."""
    [message_id] = await bench.put(1)
    [row] = await bench.claim(1)
    async with bench.store.transaction() as transaction:
        assert await transaction.lock([(row.id, row.lease_token)], 60.0)
        assert await cancel(bench, message_id) == "requested"
    assert [each.message_id for each in await asked(bench)] == [message_id]


async def test_a_direct_claim_discards_instead_of_giving_back(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    await bench.claim(1)
    await cancel(bench, message_id)
    await bench.expire()
    take = bench.store.direct_claims.claim
    taken = await take(["q"], 60.0, uuid4(), lambda _row: (None, True), release=True)
    assert not taken.rows
    assert (await bench.one(archive=True))["reason"] == "cancelled"


async def test_the_audit_says_what_was_asked(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    await bench.claim(1)
    await cancel(bench, message_id)
    [job] = await bench.store.jobs.list_jobs(None, 10)
    assert (job.action, job.by, job.expected, job.done) == ("cancel", "Ann", 1, 0)
    assert job.arguments == {"message_id": message_id, "requested": True}


async def test_a_release_honours_the_request(bench: Bench) -> None:
    """The holder is dead: its messages come again, but for the one that was cancelled."""
    ids = await bench.put(3)
    rows = await bench.claim(3)
    holder = rows[0].lease_token.bytes[:HOLDER_BYTES].hex()
    now = await bench.store.server.read_now()
    subscriber = parse_subscriber(f"host:1:{holder}", {"queues": ["q"]}, now, now)
    await cancel(bench, ids[1])
    assert await bench.store.live_subscribers.release(subscriber, 10) == 3
    ended = await bench.one(archive=True)
    assert (ended["id"], ended["state"], ended["reason"]) == (ids[1], "DISCARDED", "cancelled")
    assert ended["last_error"] == "cancelled by Ann: why"
    assert [(r["id"], r["state"]) for r in await bench.rows()] == [
        (ids[0], "PENDING"),
        (ids[2], "PENDING"),
    ]


async def test_all_requests_are_read_and_honoured_however_many(bench: Bench) -> None:
    """More than a thousand, and none of the later ones hides an earlier one."""
    count = 1_100
    ids = await bench.put(count)
    rows = await bench.claim(count)
    wanted = {row.id: row.lease_token for row in rows}

    def ask_all(connection: Connection) -> None:
        for row in rows:
            request = CancelRequest(row.id, row.lease_token, "cancelled")
            cancel_requests.save_request(
                connection, bench.store.dialect.tables.policy_state, request
            )

    async with bench.store.engine.begin() as connection:
        await connection.run_sync(ask_all)
    assert {each.message_id: each.lease_token for each in await asked(bench)} == wanted
    around = await bench.store.poll_all(["q"], ["q"], HeartbeatData({}, frozenset(), 60.0))
    assert around.requests is not None
    assert {each.message_id for each in around.requests.cancels} == set(ids)
    await bench.expire()
    assert await bench.store.end_cancelled(["q"], archive=False) == count
    assert await bench.rows() == []
