"""Wake-ups bring a look forward; nothing depends on them."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.wakeup import COALESCE_INTERVAL, SECOND_HINT, Wakeups
from tests.clock import VirtualTime
from tests.flow.conftest import Rig
from tests.helpers import eventually

SLEEPY = {"min_fetch_interval": 600, "max_fetch_interval": 600}
"""Without a wake-up the next look comes ten minutes later."""
MESSAGE = NewMessage("q", b"hello")

postgresql_only = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@pytest.fixture
async def sleeper(rig: Rig) -> Rig:
    """The rig with a consumer that has just looked and found nothing."""
    consumer = rig.consumer(**SLEEPY)
    await consumer.start()
    if rig.store.can_listen:
        await eventually(lambda: rig.wakeups.is_listening)
    await _has_looked(rig)
    return rig


async def _has_looked(rig: Rig) -> None:
    fetcher = rig.consumers[0]._fetcher
    looked = time.monotonic()
    fetcher.on_hint()
    rig.consumers[0]._fetch_loop.wake()
    await eventually(lambda: time.monotonic() - fetcher.ready.age > looked)


@pytest.mark.capability("wake-up within a process")
async def test_a_publish_wakes_its_own_process(sleeper: Rig) -> None:
    await sleeper.publisher.publish([MESSAGE])
    await eventually(lambda: sleeper.handled)


async def test_a_commit_of_the_callers_transaction_wakes(sleeper: Rig) -> None:
    """The hint is sent after the commit, not before."""
    async with sleeper.store.engine.begin() as connection:
        await sleeper.publisher.publish([MESSAGE], connection=connection)
        await asyncio.sleep(0.05)
        assert sleeper.handled == []
    await eventually(lambda: sleeper.handled)


async def test_a_commit_of_the_callers_session_wakes(sleeper: Rig) -> None:
    async with AsyncSession(sleeper.store.engine) as session, session.begin():
        await sleeper.publisher.publish([MESSAGE], connection=session)
    await eventually(lambda: sleeper.handled)


async def test_a_rollback_wakes_for_nothing(sleeper: Rig) -> None:
    with pytest.raises(KeyError):
        async with sleeper.store.engine.begin() as connection:
            await sleeper.publisher.publish([MESSAGE], connection=connection)
            raise KeyError
    await eventually(lambda: not sleeper.wakeups._watched_transactions)
    assert sleeper.handled == []


async def test_a_transaction_is_watched_once_however_often_it_publishes(sleeper: Rig) -> None:
    """Each entry is checked every 10 ms: one for each publish would make 20 000 quadratic."""
    publish = sleeper.publisher.publish
    hints = list[str]()
    for queue in ("a", "b"):
        sleeper.wakeups.register([queue], lambda _, queue=queue: hints.append(queue), listen=False)
    async with sleeper.store.engine.begin() as connection:
        for n in range(50):
            await publish([NewMessage("ab"[n % 2], b"x")], connection=connection)
            assert len(sleeper.wakeups._watched_transactions) == 1
        with pytest.raises(KeyError):
            async with connection.begin_nested():
                await publish([NewMessage("rolled back", b"x")], connection=connection)
                raise KeyError
        async with connection.begin_nested():
            await publish([MESSAGE], connection=connection)
        assert len(sleeper.wakeups._watched_transactions) == 1, "a savepoint ends nothing"
        assert hints == sleeper.handled == []
    await eventually(lambda: set(hints) == {"a", "b"} and sleeper.handled)
    await eventually(lambda: not sleeper.wakeups._watched_transactions)


async def test_a_session_is_watched_once_for_each_of_its_transactions(sleeper: Rig) -> None:
    async with AsyncSession(sleeper.store.engine) as session:
        for handled in (50, 100):
            for _ in range(50):
                await sleeper.publisher.publish([MESSAGE], connection=session)
            assert len(sleeper.wakeups._watched_transactions) == 1
            await session.commit()
            await eventually(lambda handled=handled: len(sleeper.handled) == handled)
            await eventually(lambda: not sleeper.wakeups._watched_transactions)


async def test_a_transaction_that_was_dropped_without_an_end_hints_too(sleeper: Rig) -> None:
    """Its commit may have gone past us; the next one in its place in memory is another."""

    class Transaction:
        is_active = True

    hints = list[None]()
    sleeper.wakeups.register(["q"], lambda _: hints.append(None), listen=False)
    transaction = Transaction()
    for _ in range(3):
        sleeper.wakeups.notify_after(transaction, ["q"])
    del transaction
    again = Transaction()
    sleeper.wakeups.notify_after(again, ["other"])
    assert len(sleeper.wakeups._watched_transactions) == 2
    await eventually(lambda: hints)
    assert list(sleeper.wakeups._watched_transactions.values()) == [{"other"}]


async def test_synchronous_publishes_are_not_watched(rig: Rig) -> None:
    async with rig.store.engine.begin() as connection:
        await connection.run_sync(lambda c: rig.publisher.publish_sync([MESSAGE], connection=c))
        assert not rig.wakeups._watched_transactions


async def test_the_second_hint_comes_a_moment_later(sleeper: Rig) -> None:
    """A transaction turns inactive before its COMMIT is done: the first hint may be too early."""
    hints: list[float] = []
    sleeper.wakeups.register(["q"], lambda _: hints.append(time.monotonic()), listen=False)
    async with sleeper.store.engine.begin() as connection:
        await sleeper.publisher.publish([MESSAGE], connection=connection)
    # PostgreSQL brings our own notifications back, which are hints too.
    await eventually(lambda: hints and hints[-1] - hints[0] >= SECOND_HINT * 0.9)


async def test_no_hint_follows_the_stop(rig: Rig) -> None:
    time = VirtualTime()
    rig.wakeups.clock.use(time)
    async with rig.store.engine.begin() as connection:
        await rig.publisher.publish([MESSAGE], connection=connection)
    await time.advance(COALESCE_INTERVAL)
    assert rig.wakeups._timers
    await rig.wakeups.stop()
    await time.advance(3 * SECOND_HINT)
    assert rig.wakeups._sender is None


@postgresql_only
async def test_a_pool_of_one_polls(rig: Rig) -> None:
    """Listening would take the only connection for good."""
    engine = create_async_engine(rig.store.engine.url, pool_size=1, max_overflow=0)
    alone = Rig(Store(engine, rig.store.tables))
    assert not alone.store.can_listen
    consumer = alone.consumer(max_fetch_interval=0.05)
    await rig.put()
    await consumer.start()
    await eventually(lambda: alone.handled)
    await consumer.stop()
    await alone.wakeups.stop()
    await engine.dispose()


async def test_poll_means_that_nothing_is_listened_to(rig: Rig) -> None:
    await rig.consumer(wakeup="poll").start()
    assert rig.wakeups._listener is None


@pytest.fixture
async def elsewhere(rig: Rig) -> AsyncIterator[Publisher]:
    """A publisher that shares nothing with the rig but the database."""
    if not rig.store.can_listen:
        pytest.skip("only asyncpg can listen")
    engine = create_async_engine(rig.store.engine.url)
    store = Store(engine, rig.store.tables)
    wakeups = Wakeups(store, rig.log)
    yield Publisher(store, wakeups)
    await wakeups.stop()
    await engine.dispose()


@pytest.mark.capability("wake-up between processes (the others poll)")
@postgresql_only
async def test_a_publish_in_another_process_wakes(sleeper: Rig, elsewhere: Publisher) -> None:
    """F11: LISTEN and NOTIFY."""
    await elsewhere.publish([MESSAGE])
    await eventually(lambda: sleeper.handled)


@postgresql_only
@pytest.mark.parametrize("interval", [0.05, 600.0])
async def test_the_listener_comes_back_after_its_connection_was_ended(
    interval: float, sleeper: Rig, elsewhere: Publisher
) -> None:
    """At once, not at the next check."""
    with_pause = "faststream_sqlbroker.flow.wakeup.CHECK_INTERVAL"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_pause, interval)
        await sleeper.wakeups.stop()
        consumer = sleeper.consumers[0]
        sleeper.wakeups.register(["q"], consumer._on_hint, listen=True)
        await eventually(lambda: sleeper.wakeups.is_listening)
        # Everybody but us: the pooled connections of the broker are found broken and replaced.
        await sleeper.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await eventually(lambda: sleeper.logged("listener for wake-ups"))
        await eventually(lambda: sleeper.wakeups.is_listening)
    await _has_looked(sleeper)
    await elsewhere.publish([MESSAGE])
    await eventually(lambda: sleeper.handled)


@postgresql_only
async def test_a_burst_is_notified_together(rig: Rig, elsewhere: Publisher) -> None:
    """NOTIFY serialises commits: hints are sent off the write path and coalesced."""
    sent: list[list[str]] = []
    store = elsewhere._store
    original = store.notify

    async def counted(channel: str, queues: list[str]) -> None:
        sent.append(list(queues))
        await original(channel, queues)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "notify", counted)
        for _ in range(20):
            elsewhere._wakeups.notify_published(["a"])
            elsewhere._wakeups.notify_published(["b"])
        await eventually(lambda: not elsewhere._wakeups._pending_queues and sent)
    assert sent == [["a", "b"]]
