"""Numbers that change while a page is open: one poller a process, however many look."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from time import monotonic
from typing import Any

from starlette.responses import StreamingResponse

from faststream_sqlbroker.core.overview import QueueOverview
from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.rendering import (
    count_text,
    length_text,
    rate_text,
    spark_points,
    status_text,
)
from faststream_sqlbroker.http.dashboard.shared import PERIOD, REST
from faststream_sqlbroker.http.mounting import Send

KEPT = 60
"""Looks that a sparkline shows."""
REMEMBERED = 10.0
"""Seconds without a look after which a sparkline begins anew. Shorter ones are the rule: a single
viewer's stream ends and begins again."""
MOST_VIEWERS = 100
"""Of a process; more are refused."""
LONGEST = 20.0
"""Seconds of a stream; then the browser asks again, and its user is authenticated again. A server
that stops may wait for all answers, so a stream must end."""
AGAIN = b"retry: 500\n\n"
"""Milliseconds after which a browser asks again."""
Row = Mapping[str, str]


class Live:
    """Looks while at least one viewer is there, and tells all of them the same."""

    def __init__(
        self,
        read: Callable[[], Awaitable[list[QueueOverview]]],
        totals: Callable[[list[QueueOverview]], Mapping[str, Any]],
    ) -> None:
        """`read` asks the database; `totals` sums up."""
        self._read = read
        self._totals = totals
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._looks = 0
        self._looked = float("-inf")
        self._pause = PERIOD
        self._rows: dict[str, Row] = {}
        self._changed = b""
        self._problem: str | None = None
        self._sums: Row = {}
        self.history: dict[str, deque[int]] = {}
        """The ready messages of each queue at the last looks."""

    @property
    def viewers(self) -> int:
        """How many look now."""
        return self._viewers

    def check(self) -> None:
        """Refuse one more viewer.

        Raises:
            Problem: there are too many (503).
        """
        if self._viewers >= MOST_VIEWERS:
            text = f"{MOST_VIEWERS} pages are live already: this one does not change by itself"
            raise Problem(503, text, {"Retry-After": "60"})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer: first all that is known, then what has changed."""
        if self._viewers >= MOST_VIEWERS:
            return  # Others that were let in at the same moment are here before it.
        self._viewers += 1
        try:
            if self._poller is None or self._poller.done():
                # What was seen before it rested is old.
                self._rows = {}
                if monotonic() - self._looked > max(REMEMBERED, PERIOD + self._pause):
                    self.history = {}
                self._changed = b""
                self._poller = asyncio.create_task(self._poll())
            seen = self._looks
            if self._changed:
                yield self._event(self._rows)
            while True:
                if self._looks == seen:
                    await self._news.wait()
                # A slow viewer that has missed a look gets all rows.
                event = self._changed if self._looks == seen + 1 else self._event(self._rows)
                seen = self._looks
                yield event
        finally:
            self._viewers -= 1

    async def _poll(self) -> None:
        # It is not cancelled: that would cost a connection in the middle of a statement.
        while self._viewers:
            begun = monotonic()
            await self._look()
            # All that wait now wake up; the next look has an event of its own.
            news, self._news = self._news, asyncio.Event()
            news.set()
            self._looked = monotonic()
            self._pause = max(PERIOD, REST * (self._looked - begun))
            await asyncio.sleep(self._pause)

    async def _look(self) -> None:
        before = self._rows
        try:
            found = await self._read()
        except SqlBrokerError:
            self._problem = "the database does not answer"
        else:
            self._problem = None
            self._remember(found)
            self._rows = {each.queue: self._row(each) for each in found}
            self._sums = sums_of(self._totals(found))
        self._looks += 1
        self._changed = self._event(
            {name: row for name, row in self._rows.items() if before.get(name) != row}
        )

    def _remember(self, found: Sequence[QueueOverview]) -> None:
        self.history = {
            each.queue: self.history.get(each.queue) or deque(maxlen=KEPT) for each in found
        }
        for each in found:
            self.history[each.queue].append(each.ready.value)

    def _row(self, each: QueueOverview) -> Row:
        return row_of(each) | {"points": spark_points(tuple(self.history[each.queue]))}

    def _event(self, rows: Mapping[str, Row]) -> bytes:
        # The number of all queues, too: a page that has fewer or more says so.
        told = {"rows": rows, "queues": len(self._rows), "totals": self._sums}
        text = json.dumps(told | {"problem": self._problem})
        return f"data: {text}\n\n".encode()


def row_of(queue: QueueOverview) -> dict[str, str]:
    """The cells of a queue, as pages show them."""
    return {
        "ready": count_text(queue.ready),
        "delayed": count_text(queue.delayed),
        "in_flight": count_text(queue.in_flight),
        "retrying": count_text(queue.retrying),
        "age": length_text(queue.oldest_due_age),
        "in": rate_text(queue.in_per_minute),
        "out": rate_text(queue.out_per_minute),
        "subscribers": str(queue.live_subscribers),
        "status": status_text(queue),
    }


def sums_of(totals: Mapping[str, Any]) -> dict[str, str]:
    """Totals, as the overview shows them."""
    counts = {name: f"{totals[name]:,}" for name in ("ready", "in_flight", "delayed")}
    rates = {name: rate_text(totals[name]) for name in ("in", "out")}
    return counts | rates | {"oldest": length_text(totals["oldest"])}


class LiveResponse(StreamingResponse):
    """Sends events until the browser has gone, or for 20 seconds."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send the events; the stream ends with this call, however it ends."""
        events: Any = self.body_iterator
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": AGAIN, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST), aclosing(events):
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
