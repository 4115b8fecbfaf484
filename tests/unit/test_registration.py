"""One subscriber's registration, without a database: its token and its open queues."""

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest

from faststream_sqlbroker.core.rows import ReadyPair, ReadyPairs
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    HOLDER_BYTES,
    Explanation,
    Reason,
    format_error,
    format_timestamp,
    parse_subscriber,
)
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.ready import ReadyTracker
from faststream_sqlbroker.flow.fleet import registration as module
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.subscriber.options import make_settings
from tests.unit.test_inflight import row

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def member(*queues: str, paused: bool = False) -> tuple[Registration, list[Any]]:
    """A member, and what was open each time that changed."""
    changes: list[Any] = []
    made = Registration(
        make_settings(queues or "q", {}),
        paused=paused,
        on_change=lambda: changes.append(made.open_queues),
    )
    return made, changes


def test_a_token_names_its_subscriber_and_is_never_the_same() -> None:
    ours = member()[0]
    others = member()[0]
    tokens = [ours.create_token() for _ in range(1_000)]
    assert len({token.bytes[HOLDER_BYTES:] for token in tokens}) == 1_000
    assert all(isinstance(token, UUID) for token in tokens)
    seen = parse_subscriber(ours.name, ours.describe(), NOW, NOW)
    assert all(seen.holds(token) for token in tokens)
    assert not any(seen.holds(token) for token in (others.create_token(), uuid4(), None))


async def test_nothing_is_open_before_it_is_known_what_is_paused() -> None:
    ours, changes = member("a", "b")
    ours.start(pauses_known=False)
    assert ours.open_queues == ()
    ours.update_paused(frozenset({"a", "else"}))
    assert ours.open_queues == ("b",)
    ours.update_paused(frozenset({"a"}))
    assert changes == [(), ("b",)], "told only of changes"
    ours.pause(True)
    ours.update_paused(frozenset())
    assert ours.open_queues == ()
    ours.pause(False)
    assert ours.open_queues == ("a", "b")
    ours.mark_stopping()
    ours.update_paused(frozenset({"b"}))
    assert ours.open_queues == ("a", "b"), "one that stops is left alone"


async def test_a_subscriber_opens_by_itself_if_the_pauses_stay_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT", 0.01)
    ours, changes = member("a")
    ours.start(pauses_known=False)
    while not ours.open_queues:
        await asyncio.sleep(0.005)
    assert changes == [(), ("a",)]
    ours.start(pauses_known=False)
    ours.mark_stopping()
    await asyncio.sleep(0.03)
    assert ours.open_queues == (), "not after its end"


def test_waiting_rows_of_a_closed_queue_are_given_back_and_the_others_keep_their_order() -> None:
    held = Inflight()
    rows = [row(n) for n in range(6)]
    for n, each in enumerate(rows):
        each.queue = "ab"[n % 2]
    held.add(rows)
    rows[1].lease_lost = True
    held.waiting.put_nowait(None)
    held.release_other_queues(("a",))
    assert [each and each.id for each in held.waiting.items] == [0, 2, 4, None]
    assert [s.id for s in held.queued] == [3, 5]
    assert all(s.uncharge and not s.attempted for s in held.queued)
    held.release_other_queues(("a", "c"))
    assert held.waiting.qsize() == 4


class Slow:
    """A store whose looks wait, are slow, and find what they are told."""

    def __init__(self, *pairs: ReadyPair) -> None:
        self.pairs = pairs
        self.may_answer = asyncio.Event()
        self.asked: list[Any] = []

    async def find_ready_pairs(self, queues: Any) -> ReadyPairs:
        self.asked.append(tuple(queues))
        await self.may_answer.wait()
        found = ReadyPairs(pair for pair in self.pairs if pair.queue in queues)
        found.duration = 1.0
        found.at = NOW
        return found


@pytest.mark.parametrize("reopen", [False, True])
async def test_a_queue_closed_during_a_scan_is_not_claimed_and_a_reopened_one_is_scanned_anew(
    reopen: bool,
) -> None:
    store: Any = Slow(ReadyPair("a", 5, -1.0, due_at=NOW), ReadyPair("b", 0, -1.0, due_at=NOW))
    ready = ReadyTracker(store, ("a", "b"))
    look = asyncio.create_task(ready.scan())
    while not store.asked:
        await asyncio.sleep(0)
    ready.set_queues(("b",))
    if reopen:
        ready.set_queues(("a", "b"))
    store.may_answer.set()
    await look
    assert {pair.queue for pair in ready.list_due()} == ({"a", "b"} if reopen else {"b"})
    assert {pair.queue for pair in ready.list_known()} == ({"a", "b"} if reopen else {"b"})
    assert all(pair.since is None for pair in ready.list_known()), (
        "nothing that was due before is left out"
    )
    await ready.scan()
    assert all(
        pair.since == NOW - timedelta(seconds=1)
        for pair in ready.list_known()
        if pair.priority == 0
    )
    ready.set_queues(())
    assert ready.list_due() == ready.list_known() == []
    ready.set_queues(("a",))
    assert [(pair.queue, pair.priority, pair.since) for pair in ready.list_known()] == [
        ("a", 0, None)
    ]


def test_an_explanation_reads_as_text() -> None:
    reasons = (
        Reason("paused", "Ann has paused it"),
        Reason("delayed", "it is not due before then"),
    )
    explanation = Explanation(7, MessageState.PENDING, "q", reasons)
    assert str(explanation) == (
        "message 7 of queue 'q' is PENDING:\n- paused: Ann has paused it\n"
        "- delayed: it is not due before then"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59, "in 59 s"),
        (-90, "90 s ago"),
        (600, "in 10 min"),
        (-10_800, "3 h ago"),
        (864_000, "in 10 days"),
    ],
)
def test_moments_say_how_far_they_are(seconds: int, text: str) -> None:
    assert format_timestamp(NOW + timedelta(seconds=seconds), NOW).endswith(f" UTC ({text})")


def test_errors_are_repeated_in_one_short_line() -> None:
    assert format_error(None) == format_error(" \n") == ""
    assert format_error("ValueError: no\ntrace") == "; last error: ValueError: no"
    assert len(format_error("x" * 10_000)) < 250
