"""Lists of messages: pages without a gap or a double, and no more rows read than are allowed."""

import json
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest.mock import patch

import pytest

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import Filters, InvalidCursorError, MessagePage, StoredMessage
from faststream_sqlbroker.database import stored_messages
from faststream_sqlbroker.database.parts import message_walks
from tests.contract.conftest import Bench, done
from tests.contract.test_live_subscribers import announce, known

four = pytest.mark.parametrize(
    "database", ["sqlite", "postgresql", "mariadb", "mysql"], indirect=True
)


async def page(
    bench: Bench, limit: int = 100, after: str | None = None, **filters: Any
) -> MessagePage:
    return await bench.store.messages.read_page(Filters(**filters), limit, after, with_hidden=False)


async def all_pages(bench: Bench, limit: int, **filters: Any) -> list[MessagePage]:
    pages = [await page(bench, limit, **filters)]
    while pages[-1].after is not None:
        assert len(pages) < 100
        pages.append(await page(bench, limit, pages[-1].after, **filters))
    return pages


async def ids(bench: Bench, limit: int = 100, **filters: Any) -> list[int]:
    pages = await all_pages(bench, limit, **filters)
    assert all(len(p.messages) == limit for p in pages[:-1] if p.scanned_until is None)
    return [message.id for p in pages for message in p.messages]


async def archive(bench: Bench, count: int, queue: str = "q", **fields: Any) -> list[int]:
    """Archive `count` messages in one transaction, so that all have the same time."""
    await bench.put(count, queue)
    rows = await bench.claim(count, queue)
    await bench.store.settle([done(row, **fields) for row in rows])
    return [row.id for row in rows]


@pytest.fixture(params=[1, 2, 3, 100])
def limit(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


async def test_nothing_is_an_empty_page(bench: Bench) -> None:
    for filters in ({}, {"queue": "q"}, {"queue": "q", "key": "k"}, {"archived": True}):
        assert await page(bench, **filters) == MessagePage((), None, None)


async def test_all_live_messages_are_listed_from_the_newest(bench: Bench, limit: int) -> None:
    first = await bench.put(3, "a")
    second = await bench.put(4, "b", delay=60.0)
    assert await ids(bench, limit) == sorted(first + second, reverse=True)


async def test_a_queue_is_listed_as_it_is_claimed(bench: Bench, limit: int) -> None:
    low = await bench.put(2, "q", priority=-3)
    usual = await bench.put(3, "q")
    later = await bench.put(2, "q", delay=60.0)
    high = await bench.put(2, "q", priority=9)
    await bench.put(2, "other")
    leased = [row.id for row in await bench.claim(1)]
    rest = [each for each in high if each not in leased]
    assert await ids(bench, limit, queue="q") == [*leased, *rest, *usual, *later, *low]
    assert await ids(bench, limit, queue="q", state=MessageState.PROCESSING) == leased
    waiting = await ids(bench, limit, queue="q", state=MessageState.PENDING)
    assert waiting == [*rest, *usual, *later, *low]
    assert await ids(bench, limit, state=MessageState.PROCESSING) == leased


async def test_a_page_goes_on_where_messages_have_gone(bench: Bench) -> None:
    """A priority whose messages are all gone does not end the list or begin it again."""
    await bench.put(2, "q", priority=5)
    usual = await bench.put(2, "q")
    first = await page(bench, 1, queue="q")
    await bench.execute("DELETE FROM message WHERE priority = 5")
    rest = await page(bench, 10, first.after, queue="q")
    assert [message.id for message in rest.messages] == usual


async def test_the_messages_of_a_key_are_listed_by_id(bench: Bench, limit: int) -> None:
    first = await bench.put(2, "q", key="k", delay=60.0)
    await bench.put(2, "q", key="K")
    await bench.put(2, "q")
    second = await bench.put(1, "q", key="k", priority=9)
    await bench.put(1, "other", key="k")
    assert await ids(bench, limit, queue="q", key="k") == [*first, *second]
    assert len(await ids(bench, limit, key="k")) == 4


async def test_the_archive_is_listed_from_the_last_archived(bench: Bench, limit: int) -> None:
    first = await archive(bench, 3, "a")
    second = await archive(bench, 2, "b")
    third = await archive(bench, 2, "a", state=MessageState.FAILED, reason="rejected")
    order = [*sorted(third, reverse=True), *sorted(second, reverse=True)]
    order += sorted(first, reverse=True)
    assert await ids(bench, limit, archived=True) == order
    of_a = [each for each in order if each not in second]
    assert await ids(bench, limit, archived=True, queue="a") == of_a
    failed = {"archived": True, "state": MessageState.FAILED}
    assert await ids(bench, limit, **failed) == sorted(third, reverse=True)
    assert await ids(bench, limit, archived=True, reason="rejected") == sorted(third, reverse=True)
    assert await ids(bench, limit) == []


async def test_times_are_by_the_databases_clock(bench: Bench) -> None:
    old = await archive(bench, 2)
    await bench.execute(f"UPDATE message_archive SET archived_at = {bench.past(600)}")
    new = await archive(bench, 1)
    waiting = await bench.put(2)
    [live, _] = waiting
    await bench.execute(f"UPDATE message SET created_at = {bench.past(600)} WHERE id = {live}")
    assert await ids(bench, archived=True, since=300.0) == new
    assert await ids(bench, archived=True, until=300.0) == sorted(old, reverse=True)
    assert await ids(bench, since=300.0) == waiting[1:]
    assert await ids(bench, until=300.0, queue="q") == [live]
    moment = await bench.store.server.read_now() - timedelta(seconds=300)
    assert await ids(bench, archived=True, since=moment, queue="q") == new
    assert await ids(bench, archived=True, since=moment, until=moment) == []
    first = datetime.min.replace(tzinfo=timezone.utc)  # not 2001
    await bench.execute(f"UPDATE message_archive SET archived_at = {bench.past(86_400 * 365 * 30)}")
    assert len(await ids(bench, archived=True, since=first)) == 3
    assert await ids(bench, archived=True, until=first) == []


async def test_errors_and_headers_are_searched(bench: Bench) -> None:
    percent = await archive(
        bench, 1, state=MessageState.FAILED, error="ValueError: 100% of a_b\nFile x"
    )
    await archive(bench, 1, state=MessageState.FAILED, error="KeyError: 100 of aXb")
    assert await ids(bench, archived=True, error="100% of a_b") == percent
    assert await ids(bench, archived=True, error="100%") == percent
    assert len(await ids(bench, archived=True, error="Error")) == 2
    mine = await bench.put(2, headers='{"tenant": "Zoë \\"7\\"", "n": 1}')
    await bench.put(1, headers='{"tenant": "other"}')
    await bench.put(1)
    tenant = {"tenant": 'Zoë "7"'}
    assert await ids(bench, headers=tenant) == mine[::-1]
    assert await ids(bench, headers=tenant, queue="q") == mine
    assert await ids(bench, headers={**tenant, "none": "x"}) == []


async def test_letters_and_spaces_at_the_end_count(bench: Bench) -> None:
    small = await archive(bench, 1, state=MessageState.FAILED, error="timeout: a")
    large = await archive(bench, 1, state=MessageState.FAILED, error="Timeout: a")
    assert await ids(bench, archived=True, error="timeout") == small
    assert await ids(bench, archived=True, error="Timeout") == large
    for value in ("a", "a ", "A"):
        mine = await bench.put(1, headers=json.dumps({"tenant": value}))
        assert await ids(bench, headers={"tenant": value}) == mine


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5"), (-(2**53) - 1, "-9007199254740993"), (1.5, "1.5"), (True, "true"), (False, "false")],
)
async def test_a_header_that_is_no_text_is_found_as_json_writes_it(
    bench: Bench, value: object, text: str
) -> None:
    mine = await bench.put(1, headers=json.dumps({"n": value}))
    await bench.put(1, headers='{"n": null}')
    assert await ids(bench, headers={"n": text}) == mine
    assert await ids(bench, headers={"n": "null"}) == []


@pytest.mark.parametrize("name", ['say "hi"', "C:\\temp", "$.a[0]", "it's", "%s", "", "Zoë"])
async def test_the_name_of_a_header_may_have_any_characters(bench: Bench, name: str) -> None:
    mine = await bench.put(1, headers=json.dumps({name: "x", "other": "y"}, ensure_ascii=False))
    await bench.put(1, headers=json.dumps({"other": "x"}))
    assert await ids(bench, headers={name: "x"}) == mine
    assert await ids(bench, headers={name: "y"}) == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_headers_that_are_no_json_match_nothing(bench: Bench) -> None:
    [message_id] = await bench.put(1)
    await bench.execute("UPDATE message SET headers = 'no json'")
    assert await ids(bench, headers={"a": "b"}) == []
    assert await ids(bench) == [message_id]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_row_of_another_program_does_not_hide_the_others(bench: Bench) -> None:
    [bad, good] = await bench.put(2)
    await bench.execute(
        "UPDATE message SET headers = 'no json', payload = 'text', created_at = 'noon', "
        f"next_attempt_at = x'00', expires_at = 9e300, last_attempt_at = -1e17 WHERE id = {bad}"
    )
    for filters in ({}, {"queue": "q"}, {"since": 600.0}):
        found = await bench.store.messages.read_page(Filters(**filters), 5, None, with_hidden=True)
        assert {m.id for m in found.messages} >= {good}
    first = await bench.store.messages.read_page(Filters(queue="q"), 1, None, with_hidden=True)
    assert len(first.messages) == 1
    one = await bench.store.messages.read_message(bad, with_hidden=True)
    assert one is not None
    assert (one.headers, one.body) == ({"value": "no json"}, b"text")
    assert (one.expires_at, one.last_attempt_at) == (None, None)
    now = await bench.store.server.read_now()
    assert abs((one.created_at - now).total_seconds()) < 600
    assert one.next_attempt_at == one.created_at


@pytest.mark.parametrize("step", [1, 3, 10, 4_000])
async def test_a_page_looks_at_so_many_messages_and_says_so(bench: Bench, step: int) -> None:
    wanted = await bench.put(2, "q", key="k")
    await bench.put(23, "q")
    await bench.put(20, "q", priority=1)
    with (
        patch.object(stored_messages, "MAX_SCANNED", 10),
        patch.object(message_walks, "STEP_SIZE", step),
    ):
        for filters in ({"key": "k"}, {"since": 600.0, "key": "k"}):
            pages = await all_pages(bench, 5, **filters)
            assert [m.id for p in pages for m in p.messages] == wanted[::-1]
            assert len(pages) in {5, 6}
            assert all(p.scanned_until is not None for p in pages[:-1])
            assert all(p.after is not None for p in pages[:-1])
        # By the queue: two priorities, of which one page may see parts.
        pages = await all_pages(bench, 5, queue="q", error="none")
        assert [m for p in pages for m in p.messages] == []
        assert len(pages) in {5, 6}
    [whole] = await all_pages(bench, 5, key="k")
    assert (len(whole.messages), whole.scanned_until) == (2, None)


async def test_a_page_that_is_full_goes_on_at_its_last_match(bench: Bench) -> None:
    for n in range(12):
        await bench.put(1, "q", key="even" if n % 2 == 0 else "odd")
    with (
        patch.object(stored_messages, "MAX_SCANNED", 5),
        patch.object(message_walks, "STEP_SIZE", 2),
    ):
        found = [m.key for p in await all_pages(bench, 1, key="odd") for m in p.messages]
    assert found == ["odd"] * 6


async def test_one_message_is_found_live_and_archived(bench: Bench) -> None:
    await announce(bench, known("host:1:0000000000000000", queues=["q"]))
    [live] = await bench.put(1, headers='{"a": "b"}', key="k")
    [ended] = await archive(bench, 1, "other", error="ValueError: no")
    found = await bench.store.messages.read_message(live, with_hidden=True)
    assert isinstance(found, StoredMessage)
    assert (found.body, found.headers, found.key, found.worker) == (0, {"a": "b"}, "k", None)
    assert found.created_at.tzinfo is not None
    shown = await bench.store.messages.read_message(ended, with_hidden=False)
    assert shown is not None
    assert (shown.state, shown.last_error) == (MessageState.COMPLETED, "ValueError: no")
    assert (shown.body, shown.headers) == (None, None)
    assert shown.archived_at is not None
    assert await bench.store.messages.read_message(10**9, with_hidden=False) is None


@four
@pytest.mark.parametrize("after", ["", "no cursor", "W10=", "WyJyZWFkeSB4IiwgMSwgMl0=", "NQ=="])
async def test_a_cursor_of_something_else_is_refused(bench: Bench, after: str) -> None:
    with pytest.raises(InvalidCursorError):
        await page(bench, 1, after, queue="q")
