"""Publishers that share a statement: each gets its own ids and its own errors."""

import asyncio
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.messages import publish_coalescer
from faststream_sqlbroker.database.messages.publish_coalescer import MAX_CONNECTION_TIME
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError, UnknownOutcomeError
from tests.clock import let_loop_pass
from tests.contract.conftest import Bench
from tests.helpers import MYSQL, Awake, eventually

NO_QUEUE: Any = None
"""A queue that no row may have."""


async def waits_for_lock(connection: AsyncConnection) -> bool:
    """Whether a session of this PostgreSQL database waits for a lock."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return bool((await connection.execute(text(waiting))).scalar_one())


class Counting:
    """Notes how many rows each INSERT has."""

    def __init__(self, store: Store) -> None:
        self._original = store.dialect.build_insert
        self.sizes = list[int]()

    def __call__(self, rows: Any) -> Any:
        self.sizes.append(len(rows))
        return self._original(rows)


async def test_concurrent_publishers_share_statements_and_get_their_own_ids(bench: Bench) -> None:
    await bench.put(1, "warm")
    counting = Counting(bench.store)

    async def publisher(first: int) -> list[tuple[int, bytes]]:
        got = []
        for n in range(first, first + 5):
            bodies = [b"%d-%d" % (n, part) for part in range(1 + n % 3)]
            ids = await bench.store.insert([NewMessage(f"q{n % 2}", body) for body in bodies])
            assert sorted(ids) == ids
            got += list(zip(ids, bodies, strict=True))
        return got

    with patch.object(bench.store.dialect, "build_insert", counting):
        answers = await asyncio.gather(*(publisher(5 * n) for n in range(20)))
    stored = {row["id"]: row["payload"] for row in await bench.rows() if row["queue"] != "warm"}
    assert stored == dict(pair for answer in answers for pair in answer)
    assert len(counting.sizes) <= 20, counting.sizes
    assert sum(counting.sizes) == len(stored)


async def test_a_refused_message_does_not_affect_other_publishers(bench: Bench) -> None:
    rows = [NewMessage("q", b"%d" % n) for n in range(10)]
    rows[4] = NewMessage(NO_QUEUE, b"refused")
    answers = await asyncio.gather(
        *(bench.store.insert([row]) for row in rows), return_exceptions=True
    )
    assert isinstance(answers[4], StoreError)
    assert not isinstance(answers[4], TransientStoreError)
    assert not [a for n, a in enumerate(answers) if n != 4 and isinstance(a, BaseException)]
    assert sorted(r["payload"] for r in await bench.rows()) == sorted(
        r.payload for r in rows if r.queue
    )


async def test_a_cancelled_publisher_does_not_affect_the_others(bench: Bench) -> None:
    tasks = [
        asyncio.create_task(bench.store.insert([NewMessage("q", b"%d" % n)])) for n in range(30)
    ]
    for turns, task in enumerate(tasks[::7]):
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    stored = {row["payload"] for row in await bench.rows()}
    for n, answer in enumerate(done):
        if isinstance(answer, asyncio.CancelledError):
            continue  # it may have been committed, as the documentation says
        assert b"%d" % n in stored, answer
    assert sum(isinstance(a, asyncio.CancelledError) for a in done) <= len(tasks[::7])
    assert await bench.put(1)


async def test_a_dedup_id_neither_waits_for_others_nor_makes_them_wait(bench: Bench) -> None:
    again = [NewMessage("q", b"%d" % n, dedup_id=f"d{n % 3}") for n in range(9)]
    plain = [NewMessage("q", b"plain") for _ in range(9)]
    both = [row for pair in zip(again, plain, strict=True) for row in pair]
    answers = await asyncio.gather(*(bench.store.insert([row]) for row in both))
    assert sum(answer[0] is None for answer in answers) == 6
    assert len(await bench.rows()) == 12


async def test_a_group_is_cut_where_it_would_grow_too_large(bench: Bench) -> None:
    counting = Counting(bench.store)
    with patch.object(bench.store.dialect, "build_insert", counting):
        many = [bench.store.insert([NewMessage("q", b"x")] * 400) for _ in range(5)]
        large = [bench.store.insert([NewMessage("q", b"x" * (3 * 1024 * 1024))]) for _ in range(2)]
        await asyncio.gather(*many, *large)
    assert len(await bench.rows()) == 2002
    assert all(size <= 1_000 for size in counting.sizes)


@pytest.mark.parametrize("database", ["postgresql", "mariadb", "mysql"], indirect=True)
async def test_publishing_on_an_unreachable_database_fails_for_each(bench: Bench) -> None:
    engine = create_async_engine(bench.store.engine.url.set(port=1), pool_timeout=1)
    store = Store(engine, bench.store.tables, statement_timeout=3.0)
    calls = [store.insert([NewMessage("q", b"1")]) for _ in range(3)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(a).__mro__.count(TransientStoreError) for a in answers] == [1, 1, 1]
    assert len({id(a) for a in answers}) == 3
    with pytest.raises(TransientStoreError):
        await store.insert([NewMessage("q", b"1")])
    await engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
class TestShortcut:
    """asyncpg's own connection is used, but never where that could be noticed."""

    async def test_the_shortcut_is_used_by_publishes_claims_and_settles(self, bench: Bench) -> None:
        await bench.put(1)
        fetch = bench.store._shortcut.fetch
        texts = []

        async def noting(driver: Any, query: Any, **options: Any) -> Any:
            texts.append(str(query.clause).split()[0])
            return await fetch(driver, query, **options)

        with patch.object(bench.store._shortcut, "fetch", noting):
            await bench.put(1)
            await bench.claim()
        assert texts == ["INSERT", "WITH", "WITH"]

    @pytest.mark.parametrize("name", ["before_cursor_execute", "commit", "do_execute"])
    async def test_listeners_of_the_engine_miss_nothing(self, bench: Bench, name: str) -> None:
        await bench.put(1)
        await asyncio.sleep(2 * MAX_CONNECTION_TIME)
        seen = []
        event.listen(
            bench.store.engine.sync_engine, name, lambda *arguments: seen.append(arguments)
        )
        await bench.put(1)
        assert seen

    async def test_echo_shows_everything(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        await bench.put(1)
        await asyncio.sleep(2 * MAX_CONNECTION_TIME)
        with caplog.at_level("INFO", "sqlalchemy.engine.Engine"):
            await bench.put(1)
        assert "INSERT" in caplog.text

    async def test_the_shortcut_is_not_used_with_another_default_isolation(
        self, bench: Bench
    ) -> None:
        database = bench.store.engine.url.database
        await bench.execute(
            f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'"
        )
        engine = create_async_engine(bench.store.engine.url)
        store = Store(engine, bench.store.tables)
        async with engine.connect() as connection:
            assert await store._shortcut.get_autocommit_driver(connection) is None
        await store.insert([NewMessage("q", b"1")])
        await engine.dispose()

    @pytest.mark.parametrize(
        "options", [{"statement_cache_size": 0}, {"prepared_statement_name_func": lambda: ""}]
    )
    async def test_the_shortcut_is_not_used_without_prepared_statements(
        self, bench: Bench, options: dict[str, Any]
    ) -> None:
        engine = create_async_engine(bench.store.engine.url, connect_args=options)
        store = Store(engine, bench.store.tables)
        await store.insert([NewMessage("q", b"1")])
        assert not store._shortcut.is_possible
        await engine.dispose()

    async def test_a_disposed_engine_leaves_no_connection_behind(self, bench: Bench) -> None:
        options = {"server_settings": {"application_name": "gone"}}
        engine = create_async_engine(bench.store.engine.url, connect_args=options)
        store = Store(engine, bench.store.tables)
        for _ in range(3):
            await store.insert([NewMessage("q", b"1")])
        await engine.dispose()

        async def none_left() -> bool:
            async with bench.store.engine.connect() as connection:
                sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'gone'"
                return (await connection.execute(text(sql))).scalar_one() == 0

        await eventually(none_left)

    async def test_a_publisher_that_is_alone_waits_no_longer_than_it_may(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LINGER", "MAX_CONNECTION_TIME"):
            monkeypatch.setattr(publish_coalescer, name, 60.0)
        engine = create_async_engine(bench.store.engine.url)
        store = Store(engine, bench.store.tables)
        for _ in range(2):  # how the engine connects is known from the first on
            await store.insert([NewMessage("q", b"1")])

        async def is_alone() -> bool:
            shared = store._inserts._coalescer
            return shared is not None and shared._idle is not None

        await eventually(is_alone)
        async with bench.store.engine.connect() as holder:
            await holder.execute(text("LOCK TABLE message IN EXCLUSIVE MODE"))
            publishing = asyncio.create_task(store.insert([NewMessage("q", b"2")]))
            await eventually(lambda: waits_for_lock(holder))
            let_loop_pass(31)
            with pytest.raises(UnknownOutcomeError, match=r"no answer within 30\.0 seconds"):
                await publishing
            await holder.rollback()
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await store.insert([NewMessage("q", b"3")])
        assert b"3" in [row["payload"] for row in await bench.rows()]
        await store.close()
        await engine.dispose()

    async def test_a_close_lends_no_connection_on_which_a_publisher_sends(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("LINGER", "MAX_CONNECTION_TIME"):
            monkeypatch.setattr(publish_coalescer, name, 60.0)
        engine = create_async_engine(bench.store.engine.url, pool_size=1, max_overflow=0)
        store = Store(engine, bench.store.tables)
        for _ in range(2):
            await store.insert([NewMessage("q", b"1")])
        shared = store._inserts._coalescer
        assert shared is not None

        async def is_alone() -> bool:
            return shared._idle is not None

        async def ask() -> Any:
            async with engine.connect() as connection:
                return (await connection.execute(text("SELECT 1"))).scalar_one()

        await eventually(is_alone)
        async with bench.store.engine.connect() as holder:
            await holder.execute(text("LOCK TABLE message IN EXCLUSIVE MODE"))
            publishing = asyncio.create_task(store.insert([NewMessage("q", b"2")]))
            await asyncio.sleep(0)
            assert shared._idle is None
            closing = asyncio.create_task(store.close())
            asking = asyncio.create_task(ask())
            for _ in range(50):
                await asyncio.sleep(0)
            assert not closing.done()
            assert not asking.done()
            await holder.rollback()
        assert len(await publishing) == 1
        await closing
        assert await asking == 1
        await engine.dispose()

    async def test_a_refused_statement_in_the_callers_transaction_raises(
        self, bench: Bench
    ) -> None:
        async with bench.store.engine.connect() as connection:
            await bench.store.insert_in(connection, [NewMessage("q", b"1")])
            with pytest.raises(StoreError, match="null value"):
                await bench.store.insert_in(connection, [NewMessage(NO_QUEUE, b"2")])
            await connection.rollback()
        assert await bench.rows() == []

    async def test_publishes_gathered_on_one_connection_are_written_one_after_the_other(
        self, bench: Bench
    ) -> None:
        async with bench.store.engine.begin() as connection:
            await bench.store.insert_in(connection, [NewMessage("q", b"0")])
            await asyncio.gather(
                *(
                    bench.store.insert_in(connection, [NewMessage("q", b"%d" % n)])
                    for n in range(1, 6)
                )
            )
        assert len(await bench.rows()) == 6

    async def test_a_publish_waits_for_a_statement_of_another_task(self, bench: Bench) -> None:
        async with bench.store.engine.begin() as connection:
            await bench.store.insert_in(connection, [NewMessage("q", b"0")])
            await asyncio.gather(
                connection.execute(text("SELECT pg_sleep(0.05)")),
                bench.store.insert_in(connection, [NewMessage("q", b"1")]),
            )
        assert len(await bench.rows()) == 2


async def test_a_publish_is_bounded_however_many_are_before_it(bench: Bench, database: str) -> None:
    """Another session keeps the table, or the database, locked."""
    if database == "sqlite":
        lock = "BEGIN IMMEDIATE"
        url = bench.store.engine.url
    elif database in MYSQL:
        lock = "LOCK TABLES message READ"
        url = bench.store.engine.url
    else:
        lock = "LOCK TABLE message IN EXCLUSIVE MODE"
        url = bench.store.engine.url
    engine = create_async_engine(url)
    store = Store(
        engine, bench.store.tables, statement_timeout=1.0, pgbouncer=database == "pgbouncer"
    )
    async with bench.store.engine.connect() as holder:
        await holder.execute(text(lock))
        calls = [store.insert([NewMessage("q", b"1")] * 900) for _ in range(4)]
        async with Awake() as awake:
            answers = await asyncio.gather(*calls, return_exceptions=True)
        if database in MYSQL:
            await holder.execute(text("UNLOCK TABLES"))
        await holder.rollback()
    assert all(isinstance(answer, TransientStoreError) for answer in answers), answers
    assert awake.seconds < 10.0
    await store.close()
    await engine.dispose()


async def test_no_publisher_waits_for_ever_when_the_shared_task_is_cancelled(bench: Bench) -> None:
    await bench.put(1, "warm")
    for turns in range(12):
        tasks = [
            asyncio.create_task(bench.store.insert([NewMessage("q", b"%d" % n)])) for n in range(3)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        shared = bench.store._inserts._coalescer
        assert shared is not None
        if shared._pump is not None:
            shared._pump.cancel()
        _, waiting = await asyncio.wait(tasks, timeout=60)
        assert not waiting, turns
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await bench.put(1)


def test_another_event_loop_publishes_where_the_first_was_left_in_the_middle(
    bench_url: tuple[Any, Any],
) -> None:
    url, tables = bench_url
    engine = create_async_engine(url, poolclass=NullPool)
    store = Store(engine, tables)
    for _ in range(3):
        loop = asyncio.new_event_loop()
        for _ in range(2):
            assert len(loop.run_until_complete(store.insert([NewMessage("q", b"1")]))) == 1
        loop.close()  # without cancelling what still runs


@pytest.fixture
def bench_url(bench: Bench, database: str) -> tuple[Any, Any]:
    """Where the tables are."""
    return bench.store.engine.url, bench.store.tables
