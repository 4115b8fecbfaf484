"""Numbers that change by themselves: one look for all viewers, none without them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from faststream_sqlbroker import SqlBroker, StoreError
from faststream_sqlbroker.core.overview import QueueOverview
from faststream_sqlbroker.http.dashboard import live as module
from faststream_sqlbroker.http.dashboard.live import LiveResponse, LiveUpdates
from faststream_sqlbroker.http.dashboard.pages import compute_totals
from faststream_sqlbroker.http.responses import Problem
from tests.helpers import eventually
from tests.http.conftest import on_sqlite

VIEWERS = 20


class Reads:
    """Answers each look when the test says so."""

    def __init__(self, broker: SqlBroker) -> None:
        self.count = 0
        self.fails = False
        self._broker = broker

    async def __call__(self) -> list[QueueOverview]:
        self.count += 1
        if self.fails:
            raise StoreError("away")
        return await self._broker.admin.queues()


@pytest.fixture
def reads(broker: SqlBroker) -> Reads:
    return Reads(broker)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[None]":
    """What lets the poller look again."""
    queue: asyncio.Queue[None] = asyncio.Queue()

    class Turns:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, _seconds: float) -> None:
            await queue.get()

    monkeypatch.setattr(module, "asyncio", Turns())
    return queue


async def rested(live: LiveUpdates, turns: "asyncio.Queue[None]") -> None:
    """Wait until nothing looks: without viewers a poller ends at its next turn."""
    turns.put_nowait(None)
    poller = live._poller
    assert poller is not None
    await asyncio.wait_for(poller, 60)


async def event(stream: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        found = await anext(stream)
    assert found.startswith(b"data: ")
    assert found.endswith(b"\n\n")
    told: dict[str, Any] = json.loads(found[len(b"data: ") :])
    return told


@on_sqlite
async def test_twenty_viewers_share_one_look(
    broker: SqlBroker,
    reads: Reads,
    turns: "asyncio.Queue[None]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long this machine takes for it.
    monkeypatch.setattr(module, "monotonic", lambda: 1000.0)
    await broker.publish({}, "a")
    await broker.publish({}, "b")
    live = LiveUpdates(reads, compute_totals)
    streams = [live.stream() for _ in range(VIEWERS)]
    first = await asyncio.gather(*(event(stream) for stream in streams))
    assert reads.count == 1
    assert live.viewer_count == VIEWERS
    assert all(told["rows"].keys() == {"a", "b"} for told in first)
    await broker.publish({}, "b")
    waiting = [asyncio.ensure_future(event(stream)) for stream in streams]
    turns.put_nowait(None)
    second = await asyncio.gather(*waiting)
    assert reads.count == 2
    # Only what has changed is sent again.
    assert second[0]["rows"]["b"]["ready"] == "2"
    assert second[0]["totals"]["ready"] == "3"
    assert second == [second[0]] * VIEWERS
    assert list(live.history["b"]) == [1, 2]
    for stream in streams[1:]:
        await stream.aclose()
    turns.put_nowait(None)
    await event(streams[0])
    assert reads.count == 3
    await streams[0].aclose()
    # Nothing looks when the last viewer has gone.
    await rested(live, turns)
    assert (reads.count, live.viewer_count) == (3, 0)
    again = live.stream()
    assert (await event(again))["rows"].keys() == {"a", "b"}
    # A page that asks again keeps its line; one that was opened much later begins a new one.
    assert list(live.history["b"]) == [1, 2, 2, 2]
    await again.aclose()
    await rested(live, turns)
    monkeypatch.setattr(module, "monotonic", lambda: 1011.0)
    again = live.stream()
    await event(again)
    assert list(live.history["b"]) == [2]
    await again.aclose()
    await rested(live, turns)


@on_sqlite
async def test_a_database_that_is_away_is_told_and_looked_at_again(
    broker: SqlBroker, reads: Reads, turns: "asyncio.Queue[None]"
) -> None:
    reads.fails = True
    live = LiveUpdates(reads, compute_totals)
    stream = live.stream()
    assert (await event(stream))["problem"] == "the database query failed"
    reads.fails = False
    turns.put_nowait(None)
    assert (await event(stream))["problem"] is None
    await stream.aclose()
    await rested(live, turns)


@on_sqlite
async def test_a_hundred_viewers_at_most(
    reads: Reads, turns: "asyncio.Queue[None]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_VIEWERS", 2)
    live = LiveUpdates(reads, compute_totals)
    streams = [live.stream(), live.stream()]
    for stream in streams:
        live.check()
        await event(stream)
    with pytest.raises(Problem) as caught:
        live.check()
    assert caught.value.status == 503
    # One that was let in together with them.
    assert [each async for each in live.stream()] == []
    assert live.viewer_count == 2
    await streams[0].aclose()
    live.check()
    await streams[1].aclose()
    await rested(live, turns)


@on_sqlite
async def test_a_stream_ends_with_its_browser(reads: Reads, turns: "asyncio.Queue[None]") -> None:
    live = LiveUpdates(reads, compute_totals)
    gone = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    response = asyncio.create_task(LiveResponse(live.stream())({"type": "http"}, receive, send))
    await eventually(lambda: len(sent) > 2, timeout=60)
    assert dict(sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert live.viewer_count == 1
    gone.set()
    await asyncio.wait_for(response, 60)
    assert live.viewer_count == 0
    await rested(live, turns)
