"""A message that is too large is refused before it is sent; a large batch takes several
statements."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker.core.rows import NewMessage, Unit
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.messages import inserts
from faststream_sqlbroker.database.parts import sizes
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import (
    MessageTooLargeError,
    PublishError,
    StoreError,
    TransientStoreError,
)
from tests.contract.conftest import Bench, done

on_mysql = pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)


def limit(bench: Bench) -> int:
    """In bytes."""
    known = bench.store.dialect.known_size_limit
    assert known is not None
    return known.max_bytes


def too_large(bench: Bench) -> NewMessage:
    """Its body is never read, so that it takes no memory."""
    return NewMessage("q", bytes(limit(bench)))


async def test_a_message_that_is_too_large_is_refused(bench: Bench, database: str) -> None:
    """The error says how large it is, what the limit is, and what to do."""
    big = too_large(bench)
    expected = (
        r"max_allowed_packet is \d+; send less" if database in {"mariadb", "mysql"} else "send less"
    )
    with pytest.raises(MessageTooLargeError, match=expected) as caught:
        await bench.store.insert([NewMessage("q", b"small"), big])
    assert isinstance(caught.value, PublishError | StoreError)
    assert not isinstance(caught.value, TransientStoreError)
    assert str(len(big.payload)) in str(caught.value)
    assert str(limit(bench)) in str(caught.value)
    assert await bench.rows() == []


async def test_publishers_at_the_same_time_are_not_refused_with_it(bench: Bench) -> None:
    store = Store(bench.store.engine, bench.store.tables)  # it knows no limit yet
    rows = [NewMessage("q", b"%d" % n) for n in range(10)]
    rows[5] = too_large(bench)
    results = await asyncio.gather(*(store.insert([row]) for row in rows), return_exceptions=True)
    assert [type(result) for n, result in enumerate(results) if n != 5] == [list] * 9
    assert isinstance(results[5], MessageTooLargeError)
    assert len(await bench.rows()) == 9


async def test_the_callers_transaction_goes_on(bench: Bench) -> None:
    store = Store(bench.store.engine, bench.store.tables)
    async with bench.store.engine.begin() as connection:
        await store.insert_in(connection, [NewMessage("q", b"before")])
        with pytest.raises(MessageTooLargeError):
            await store.insert_in(connection, [too_large(bench)])
        await store.insert_in(connection, [NewMessage("q", b"after")])
    assert [bytes(row["payload"]) for row in await bench.rows()] == [b"before", b"after"]


async def test_an_answer_that_is_too_large_is_refused_for_good(bench: Bench) -> None:
    """Not a passing error, so that the flush does not send it again and again; the message stays as
    it was."""
    await bench.put()
    [row] = await bench.claim()
    with pytest.raises(StoreError) as caught:
        await bench.store.settle([done(row, unit=Unit([too_large(bench)]))])
    assert not isinstance(caught.value, TransientStoreError)
    assert (await bench.one())["state"] == "PROCESSING"
    assert (await bench.store.settle([done(row)])).settled_ids == {row.id}


@on_mysql
async def test_each_connection_is_asked_once(bench: Bench) -> None:
    engine = create_async_engine(bench.store.engine.url, pool_size=1, max_overflow=0)
    store = Store(engine, bench.store.tables)
    asked = list[str]()

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "max_allowed_packet" in statement:
            asked.append(statement)

    for _ in range(3):
        await store.insert([NewMessage("q", b"")])
    assert len(asked) == 1
    await engine.dispose()
    await store.insert([NewMessage("q", b"")])
    assert len(asked) == 2
    await engine.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_too_much_for_one_statement_is_sent_in_several(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one transaction, ids in the order of the rows."""
    monkeypatch.setattr(sizes, "MAX_STATEMENT_BYTES", 25)
    monkeypatch.setattr(inserts, "MAX_STATEMENT_BYTES", 25)
    rows = [NewMessage("q", b"%09d" % n) for n in range(7)]
    rows[3].dedup_id = rows[5].dedup_id = "same"
    ids = await bench.store.insert(rows)
    assert ids[5] is None
    assert [i for i in ids if i is not None] == [row["id"] for row in await bench.rows()]
    async with bench.store.engine.begin() as connection:
        assert len(set(await bench.store.insert_in(connection, rows[:3]))) == 3
    claimed = await bench.claim(20)
    moved = [
        done(row, state=MessageState.PENDING, archive=False, queue="q2", payload=b"%09d" % -row.id)
        for row in claimed
    ]
    assert (await bench.store.settle(moved)).settled_ids == {row.id for row in claimed}
    assert [bytes(row["payload"]) for row in await bench.rows()] == [
        b"%09d" % -row.id for row in claimed
    ]
