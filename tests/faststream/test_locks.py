"""broker.lock: exclusive, fenced, renewed, released; a lost lock raises."""

import asyncio
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker import (
    Lock,
    LockLostError,
    LockNotAcquiredError,
    SetupError,
    SqlBroker,
    TransientStoreError,
    UnknownOutcomeError,
)
from faststream_sqlbroker.database.locks import LockStore
from faststream_sqlbroker.schema.types import clock
from tests.clock import VirtualTime
from tests.faststream.conftest import Heard, Look
from tests.helpers import eventually
from tests.proxy import COMMIT, proxied

pytestmark = pytest.mark.capability("locks by key with a fencing number")

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
"""SQLite has no connection that could break."""


async def expire(look: Look) -> None:
    """Let every lease run out, by the database's clock."""
    table = look.tables.policy_state
    async with look.engine.begin() as connection:
        await connection.execute(update(table).values(lease_expires_at=clock()))


async def counter(look: Look, key: str) -> int:
    table = look.tables.policy_state
    async with look.engine.connect() as connection:
        where = (table.c.scope == "lock") & (table.c.key == key)
        value: int = (await connection.execute(select(table.c.counter).where(where))).scalar_one()
        return value


async def test_one_holder_at_a_time_and_a_greater_fence_each_time(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    """Z5: across brokers of the same database, each a process of its own as far as they know."""
    others = [SqlBroker(engine, logger=None) for _ in range(3)]
    inside = 0
    fences = list[int]()

    async def work(of: SqlBroker) -> None:
        nonlocal inside
        for _ in range(10):
            async with of.lock("k") as lock:
                inside += 1
                assert inside == 1
                fences.append(lock.fence)
                await asyncio.sleep(0)
                assert lock.is_held
                inside -= 1
            assert not lock.is_held

    await asyncio.gather(*(work(of) for of in (broker, *others)))
    assert fences == list(range(1, 41)), "in the order of acquisition, none twice, none left out"


async def test_keys_are_apart_and_compared_byte_by_byte(broker: SqlBroker) -> None:
    async with AsyncExitStack() as stack:
        for key in ("a", "A", "ä", "x" * 255, "ordered", "'; DROP TABLE message; --"):
            lock = await stack.enter_async_context(broker.lock(key, wait=0))
            assert (lock.key, lock.fence) == (key, 1)


async def test_an_acquire_without_a_wait_raises_if_the_lock_is_held(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    other = SqlBroker(engine, logger=None)
    async with broker.lock("k"):
        with pytest.raises(LockNotAcquiredError, match="'k' was not acquired: it is held"):
            async with other.lock("k", wait=0):
                pass
        began = monotonic()
        async with asyncio.timeout(60):
            with pytest.raises(LockNotAcquiredError, match=r"within 0\.2 seconds"):
                async with other.lock("k", wait="200ms"):
                    pass
        assert monotonic() - began >= 0.2
        with pytest.raises(LockNotAcquiredError):  # not reentrant
            async with broker.lock("k", wait=0):
                pass
    async with other.lock("k", wait=0) as lock:
        assert lock.fence == 2


async def test_a_waiter_of_the_same_process_is_woken_in_turn(broker: SqlBroker) -> None:
    """Only the first of them asks the database."""
    order: list[int] = []
    tries = 0
    acquire = LockStore.acquire

    async def counted(self: LockStore, *arguments: Any) -> int | None:
        nonlocal tries
        tries += 1
        return await acquire(self, *arguments)

    async def wait_for(number: int) -> None:
        async with broker.lock("k"):
            order.append(number)

    def waiting() -> int:
        return sum(place.waiting for place in broker._locks._queues.values())

    # A waiter that is left to its pause tries again after a minute.
    pauses = patch.multiple(
        "faststream_sqlbroker.flow.tasks.locks", FIRST_PAUSE=100.0, LAST_PAUSE=100.0
    )
    with pauses, patch.object(LockStore, "acquire", counted):
        async with broker.lock("k"):
            tasks = [asyncio.create_task(wait_for(n)) for n in range(20)]
            await eventually(lambda: tries == 2 and waiting() == 20)
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
    assert order == list(range(20))
    assert tries <= 1 + 20 * 2, "each before the lock was free, and when it was"
    assert broker._locks._queues == {}


async def test_waiting_in_turn_ends_at_its_time(broker: SqlBroker) -> None:
    async with broker.lock("k"):

        async def wait_for(seconds: float | None) -> None:
            async with broker.lock("k", wait=seconds):
                pass

        first = asyncio.create_task(wait_for(None))
        await eventually(lambda: broker._locks._queues)
        with pytest.raises(LockNotAcquiredError):
            await wait_for(0.1)
        assert not first.done()
    await asyncio.wait_for(first, 60)


async def test_a_lease_that_ran_out_is_taken_over_and_its_holder_changes_nothing(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """Z5: fenced extend and release."""
    other = SqlBroker(engine, logger=None)
    with pytest.raises(LockLostError, match="lost before its block ended"):
        async with broker.lock("k", lease="1h") as lock:
            await expire(look)
            async with other.lock("k", wait=0) as theirs:
                assert theirs.fence == lock.fence + 1
                assert lock.is_held, (
                    "by this process's clock it still runs: only the database knows"
                )
                [before] = await broker.admin.locks()
                with pytest.raises(LockLostError, match="is lost"):
                    await lock.extend("1h")
                assert not lock.is_held
                with pytest.raises(LockLostError):
                    lock.check()
                assert await broker.admin.locks() == [before]
                theirs.check()
                await theirs.extend()
    assert await counter(look, "k") == 2


async def test_a_lost_lock_raises_at_the_end_of_the_block(broker: SqlBroker, look: Look) -> None:
    with pytest.raises(LockLostError, match="may have run without the lock"):
        async with broker.lock("k"):
            assert await broker.admin.release_lock("k")


async def test_the_blocks_own_error_is_not_masked(broker: SqlBroker, heard: Heard) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with broker.lock("k"):
            await broker.admin.release_lock("k")
            raise ZeroDivisionError
    assert "was lost before its block ended" in caught.value.__notes__[0]
    assert heard.texts("was lost before its block ended")
    async with broker.lock("k", wait=0) as lock:
        assert lock.fence == 3, "the forced release has counted, too"


async def test_an_expired_lease_that_was_not_taken_over_was_exclusive(
    broker: SqlBroker, look: Look
) -> None:
    """The row still has its token: no one else can have been there."""
    async with broker.lock("k", lease="1h") as lock:
        await expire(look)
        assert await broker.admin.locks() == []
        await lock.extend()
        assert [held.fence for held in await broker.admin.locks()] == [1]
    async with broker.lock("k"):
        await expire(look)


async def test_a_long_block_is_renewed_and_a_short_one_is_not(
    broker: SqlBroker, engine: AsyncEngine
) -> None:
    renewals = 0
    extend = LockStore.extend

    async def counted(self: LockStore, *arguments: Any) -> bool:
        nonlocal renewals
        mine = await extend(self, *arguments)
        renewals += 1
        return mine

    other = SqlBroker(engine, logger=None)
    with patch.object(LockStore, "extend", counted):
        async with broker.lock("short"):
            pass
        assert renewals == 0
        broker._clock.use(time := VirtualTime())
        async with broker.lock("long", lease="1h") as lock:
            [before] = await broker.admin.locks()
            await time.advance(1_199.0)
            assert renewals == 0
            await time.advance(2.0)
            await eventually(lambda: renewals == 1)
            [after] = await broker.admin.locks()
            assert after.held_until > before.held_until
            with pytest.raises(LockNotAcquiredError):
                async with other.lock("long", wait=0):
                    pass
            lock.check()
        async with broker.lock("shorter") as lock:
            await lock.extend("30m")
            for renewed in range(renewals + 1, renewals + 3):
                await time.advance(601.0)
                await eventually(lambda renewed=renewed: renewals == renewed)
            lock.check()


async def test_a_renewal_that_fails_is_repeated_until_the_lease_is_over(
    broker: SqlBroker, heard: Heard
) -> None:
    down = True
    extend = LockStore.extend

    async def failing(self: LockStore, *arguments: Any) -> bool:
        if down:
            raise TransientStoreError("away")
        return await extend(self, *arguments)

    with patch.object(LockStore, "extend", failing):
        async with broker.lock("k", lease="600ms") as lock:
            await eventually(lambda: not lock.is_held)
            with pytest.raises(LockLostError, match="has expired, and another"):
                lock.check()
            with pytest.raises(TransientStoreError):
                await lock.extend("1h")
            await eventually(lambda: heard.texts(", trying again soon: away"))
            down = False
            await eventually(lambda: lock.is_held)


async def test_a_failed_release_raises_only_if_the_block_was_unprotected(
    broker: SqlBroker, heard: Heard
) -> None:
    async def failing(self: LockStore, *_: Any) -> bool:
        raise TransientStoreError("away")

    with patch.object(LockStore, "release", failing), patch.object(LockStore, "extend", failing):
        async with broker.lock("k"):
            pass
        assert heard.texts("is not confirmed")
        with pytest.raises(LockLostError):
            async with broker.lock("late", lease=0.2) as lock:
                await eventually(lambda: not lock.is_held)


async def test_a_stalled_event_loop_loses_the_lease_and_knows_it(broker: SqlBroker) -> None:
    """By the monotonic clock, before anything else can run."""
    import time

    async with broker.lock("k", lease="200ms") as lock:
        time.sleep(0.3)
        assert not lock.is_held


async def test_a_cancelled_block_gives_back(broker: SqlBroker) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with broker.lock("k"):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with broker.lock("k", wait=0) as lock:
        assert lock.fence == 2


@pytest.mark.parametrize("ticks", range(8))
async def test_a_cancelled_acquire_leaves_nothing_locked(broker: SqlBroker, ticks: int) -> None:
    """At every moment, that between the answer to the COMMIT and the block included."""
    acquire = LockStore.acquire
    tries = 0

    async def slowly(self: LockStore, *arguments: Any) -> int | None:
        nonlocal tries
        tries += 1
        fence = await acquire(self, *arguments)
        for _ in range(4):
            await asyncio.sleep(0)
        return fence

    async def work() -> None:
        async with broker.lock("k"):
            await asyncio.Event().wait()

    with patch.object(LockStore, "acquire", slowly):
        task = asyncio.create_task(work())
        for _ in range(ticks):
            await asyncio.sleep(0)
        if ticks > 5:
            await eventually(lambda: tries == 1)
            for _ in range(ticks):
                await asyncio.sleep(0.002)
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await eventually(lambda: not broker._shielded._tasks)
    assert await broker.admin.locks() == []


@on_servers
async def test_an_unanswered_commit_is_resolved_by_the_same_token(
    look: Look, database_url: str
) -> None:
    """Z5: it was committed; the repeat gets the same fence, and nothing is locked for ever."""
    async with proxied(database_url) as (proxy, url):
        engine = create_async_engine(url)
        broker = SqlBroker(engine, logger=None)
        await broker.create_tables()
        async with broker.lock("k", wait=0) as lock:
            assert lock.fence == 1
        proxy.swallow_answer_to = COMMIT
        async with broker.lock("k", wait=0, lease="1h") as lock:
            assert proxy.swallowed == 1
            assert lock.fence == 2, "not one for each try"
            proxy.swallow_answer_to = COMMIT
            await _extend_unknown(lock)
        proxy.swallow_answer_to = COMMIT
        async with broker.lock("k", wait=0) as lock:
            assert lock.fence == 3
            proxy.swallow_answer_to = COMMIT
        assert proxy.swallowed == 4, "the release, too"
        assert await broker.admin.locks() == []
        await broker.stop()
        await engine.dispose()
    assert await counter(look, "k") == 3


async def _extend_unknown(lock: Lock) -> None:
    with pytest.raises(UnknownOutcomeError):
        await lock.extend("1m")
    assert lock._held_until - monotonic() <= 60, "it may be the shorter one"
    lock.check()
    await lock.extend("30s")


async def test_an_acquire_that_stays_unknown_is_given_back(broker: SqlBroker) -> None:
    acquire = LockStore.acquire

    async def unanswered(self: LockStore, *arguments: Any) -> int | None:
        await acquire(self, *arguments)
        raise UnknownOutcomeError("lost")

    with patch.object(LockStore, "acquire", unanswered), pytest.raises(UnknownOutcomeError):
        async with broker.lock("k"):
            pytest.fail("not acquired")
    async with broker.lock("k", wait=0) as lock:
        assert lock.fence == 2


async def test_a_database_that_goes_away_is_waited_for_but_not_at_the_first_try(
    broker: SqlBroker, engine: AsyncEngine, heard: Heard
) -> None:
    other = SqlBroker(engine, logger=None)
    acquire = LockStore.acquire
    down = True

    async def failing(self: LockStore, *arguments: Any) -> int | None:
        if down:
            raise TransientStoreError("away")
        return await acquire(self, *arguments)

    async def wait_for() -> int:
        async with broker.lock("k") as lock:
            return lock.fence

    async with other.lock("k"):
        down = False
        task = asyncio.create_task(wait_for())
        await eventually(lambda: broker._locks._queues)
        with patch.object(LockStore, "acquire", failing):
            down = True
            await eventually(lambda: heard.texts("could not acquire lock 'k', trying again: away"))
            down = False
    assert await asyncio.wait_for(task, 60) == 2
    down = True
    with patch.object(LockStore, "acquire", failing), pytest.raises(TransientStoreError):
        await wait_for()


async def test_operators_list_holders_and_release_locks(broker: SqlBroker, look: Look) -> None:
    assert await broker.admin.locks() == []
    assert not await broker.admin.release_lock("never")
    async with broker.lock("b", lease="1h"), broker.lock("a"):
        first, second = await broker.admin.locks()
        assert (first.key, first.fence, second.key, second.fence) == ("a", 1, "b", 1)
        assert ":" in first.worker
        assert 3500 < (second.held_until - second.acquired_at).total_seconds() <= 3600
        assert [held.key for held in await broker.admin.locks(limit=1)] == ["a"]
    assert await broker.admin.locks() == []
    assert not await broker.admin.release_lock("a")
    assert await broker.admin.audit() == []
    with pytest.raises(ValueError, match="limit must be 1 or more, got 0"):
        await broker.admin.locks(limit=0)
    with pytest.raises(ValueError, match="cannot be the key of a lock"):
        await broker.admin.release_lock("")
    with pytest.raises(SetupError, match="by must be"):
        await broker.admin.release_lock("a", by=5)  # type: ignore[arg-type]


async def test_the_audit_names_who_has_released_a_lock(broker: SqlBroker) -> None:
    with pytest.raises(LockLostError):
        async with broker.lock("k"):
            assert await broker.admin.release_lock("k", by="ola")
    [action] = await broker.admin.audit()
    assert (action.action, action.by, action.arguments) == ("release_lock", "ola", {"key": "k"})
    assert (action.state, action.done) == ("ended", 1)


async def test_a_locks_row_is_not_on_the_list_of_unknown_outcomes(
    broker: SqlBroker, look: Look
) -> None:
    async with broker.lock("1"):
        await expire(look)
        assert await broker.admin.unknown() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"key": ""}, "must not be empty"),
        ({"key": "x" * 256}, "at most 255"),
        ({"key": 5}, "must be a string"),
        ({"key": "k", "lease": 0}, "lease must be longer than 0 seconds, got 0"),
        ({"key": "k", "lease": "soon"}, "lease cannot be 'soon'"),
        ({"key": "k", "wait": -1}, "wait must be 0 or more seconds, or None"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_wrong_arguments_are_named_at_once(
    broker: SqlBroker, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        broker.lock(**arguments)


async def test_a_lock_that_has_ended_raises(broker: SqlBroker) -> None:
    async with broker.lock("k") as lock:
        pass
    with pytest.raises(LockLostError, match="has ended and released it; acquire the lock again"):
        await lock.extend()


async def test_a_fence_guards_a_row_of_the_users_own(
    broker: SqlBroker, engine: AsyncEngine, look: Look
) -> None:
    """A table that compares fences refuses what a late holder writes."""
    async with engine.begin() as connection:
        await connection.execute(
            text("CREATE TABLE guarded (fence INTEGER NOT NULL, body VARCHAR(20))")
        )
        await connection.execute(text("INSERT INTO guarded VALUES (0, '')"))

    async def write(fence: int, body: str) -> int:
        async with engine.begin() as connection:
            statement = text("UPDATE guarded SET fence = :fence, body = :body WHERE fence < :fence")
            return int(
                (await connection.execute(statement, {"fence": fence, "body": body})).rowcount
            )

    with pytest.raises(LockLostError):
        async with broker.lock("k") as late:
            await broker.admin.release_lock("k")
            async with broker.lock("k") as lock:
                assert await write(lock.fence, "new") == 1
                assert await write(late.fence, "late") == 0


async def test_a_token_is_of_one_acquisition(broker: SqlBroker, look: Look) -> None:
    """Released, the same token takes the lock anew, with a new fence."""
    locks = broker._store.locks
    token = UUID(int=7)
    assert await locks.acquire("k", token, 600) == 1
    assert await locks.acquire("k", token, 600) == 1
    assert await locks.acquire("k", UUID(int=8), 600) is None
    assert await locks.release("k", token)
    assert not await locks.release("k", token)
    assert await locks.acquire("k", token, 600) == 2
