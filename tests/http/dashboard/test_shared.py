"""What pages share, so that each costs a few statements however many rows and viewers there are."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http.dashboard import shared
from faststream_sqlbroker.http.dashboard.shared import QueryCache, SharedQuery
from tests.http.conftest import as_user, on_sqlite
from tests.http.dashboard.conftest import PAGES, fill, post

MOST_STATEMENTS = 3
"""Of a page whose numbers are shared: what it reads besides them."""


@pytest.fixture
def long_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are shared for longer than a machine stands still."""
    monkeypatch.setattr(shared, "PERIOD", 600.0)


@contextmanager
def counted(engine: AsyncEngine) -> Iterator[list[str]]:
    """The statements that are sent inside."""
    found: list[str] = []

    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    yield found
    event.remove(engine.sync_engine, "before_cursor_execute", note)


class Reads:
    """A question whose answers are numbers, each of which waits until it may come."""

    def __init__(self) -> None:
        self.count = 0
        self.may_end = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self) -> int:
        self.count += 1
        number = self.count
        self.begun.set()
        await self.may_end.wait()
        return number


@pytest.mark.usefixtures("long_shared")
async def test_who_asks_together_or_soon_after_shares_one_answer() -> None:
    reads = Reads()
    answer = SharedQuery(reads)
    asked = [asyncio.create_task(answer.get()) for _ in range(5)]
    await reads.begun.wait()
    reads.may_end.set()
    assert await asyncio.gather(*asked) == [1] * 5
    assert await answer.get() == 1
    assert await answer.refresh() == 2
    assert await answer.get() == 2
    answer.invalidate()
    assert await answer.get() == 3


@pytest.mark.usefixtures("long_shared")
async def test_what_changed_while_it_was_read_is_asked_again() -> None:
    reads = Reads()
    answer = SharedQuery(reads)
    first = asyncio.create_task(answer.get())
    await reads.begun.wait()
    answer.invalidate()
    reads.may_end.set()
    assert await first == 1
    assert await answer.get() == 2


async def test_what_failed_is_asked_again() -> None:
    failures = [ValueError("gone")]

    async def read() -> str:
        if failures:
            raise failures.pop()
        return "there"

    answer = SharedQuery(read)
    with pytest.raises(ValueError, match="gone"):
        await answer.get()
    assert await answer.get() == "there"


@on_sqlite
@pytest.mark.usefixtures("long_shared")
async def test_the_second_page_sends_a_few_statements_only(
    broker: SqlBroker, engine: AsyncEngine, web: httpx.AsyncClient
) -> None:
    await fill(broker, "orders")
    await broker.stop()
    await broker.connect()
    await web.get("/", auth=as_user("vic"))
    for path in ("/", "/ui/queues", "/ui/channels"):
        with counted(engine) as statements:
            assert (await web.get(path, auth=as_user("ola"))).status_code == 200
        assert len(statements) <= MOST_STATEMENTS, (path, statements)


@on_sqlite
@pytest.mark.usefixtures("long_shared")
async def test_open_pages_that_refresh_share_one_look(
    broker: SqlBroker, engine: AsyncEngine, web: httpx.AsyncClient
) -> None:
    ids = await fill(broker, "orders")
    await broker.stop()
    await broker.connect()
    again = {"X-Refreshed": "1"}
    for path in (*PAGES, "/ui/queue?name=orders", f"/ui/messages/{ids['failed']}"):
        if path.startswith("/ui/verify"):
            continue
        await web.get(path, auth=as_user("ola"))
        with counted(engine) as statements:
            for _ in range(3):
                answer = await web.get(path, auth=as_user("ola"), headers=again)
                assert answer.status_code == 200
        assert not statements, (path, statements)
    await post(web, "/ui/pause", as_user("ola"), queue="late")
    found = await web.get("/ui/audit", auth=as_user("ola"), headers=again)
    assert "late" in found.text


async def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_CACHED", 2)
    monkeypatch.setattr(shared, "PERIOD", 600.0)
    answers: QueryCache[int] = QueryCache()
    reads = Reads()
    reads.may_end.set()
    assert [await answers.get(name, reads) for name in "abab"] == [1, 2, 1, 2]
    assert [await answers.get(name, reads) for name in "cba"] == [3, 2, 4]
    assert await answers.get("a", reads, refresh=True) == 5
    answers.clear()
    assert await answers.get("a", reads) == 6
    monkeypatch.setattr(shared, "PERIOD", 0.0)
    monkeypatch.setattr(shared, "REST", 0.0)
    answers.clear()
    for name in "abc":
        await answers.get(name, reads)
    # What is old does not stay in memory.
    assert list(answers._queries) == ["c"]


@on_sqlite
@pytest.mark.usefixtures("long_shared")
async def test_what_an_operator_has_done_is_on_the_next_page(
    broker: SqlBroker, web: httpx.AsyncClient
) -> None:
    await broker.publish("x", "orders")
    assert "paused by" not in (await web.get("/", auth=as_user("ola"))).text
    await post(web, "/ui/pause", as_user("ola"), queue="orders")
    assert "paused by" in (await web.get("/", auth=as_user("vic"))).text
