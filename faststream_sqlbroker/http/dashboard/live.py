"""Live numbers of open pages: one poller per process, for any number of viewers."""

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
from faststream_sqlbroker.http.dashboard.rendering import (
    compute_spark_points,
    format_count,
    format_length,
    format_rate,
    format_status,
)
from faststream_sqlbroker.http.dashboard.shared import PERIOD, REST
from faststream_sqlbroker.http.mounting import Send
from faststream_sqlbroker.http.responses import Problem

MAX_HISTORY = 60
"""Points of a sparkline, one per poll."""
HISTORY_TIMEOUT = 10.0
"""Seconds without a poll after which sparklines start again. Shorter gaps are normal: the stream
of a single viewer ends and starts again.
"""
MAX_VIEWERS = 100
"""Viewers per process; more are refused."""
MAX_STREAM_SECONDS = 20.0
"""Seconds of a stream; then the browser reconnects, and its user is authenticated again. A server
that stops may wait for all responses, so a stream must end.
"""
RETRY_EVENT = b"retry: 500\n\n"
"""Sets the milliseconds after which a browser reconnects."""
Row = Mapping[str, str]


class LiveUpdates:
    """Polls the queues while there are viewers, and sends every viewer the same events."""

    def __init__(
        self,
        read: Callable[[], Awaitable[list[QueueOverview]]],
        totals: Callable[[list[QueueOverview]], Mapping[str, Any]],
    ) -> None:
        """Poll with `read`, and sum up with `totals`."""
        self._read = read
        self._compute_totals = totals
        self._viewers = 0
        self._poller: asyncio.Task[None] | None = None
        self._updated = asyncio.Event()
        self._polls = 0
        self._polled_at = float("-inf")
        self._pause = PERIOD
        self._rows: dict[str, Row] = {}
        self._changes = b""
        self._error: str | None = None
        self._formatted_totals: Row = {}
        self.history: dict[str, deque[int]] = {}
        """Ready messages of each queue at the last polls."""

    @property
    def viewer_count(self) -> int:
        """Number of current viewers."""
        return self._viewers

    def check(self) -> None:
        """Refuse a viewer when there are too many.

        Raises:
            Problem: there are too many viewers (503).
        """
        if self._viewers >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} pages already have live updates: reload this page to update it"
            raise Problem(503, text, {"Retry-After": "60"})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield events for a viewer: first all rows, then the changed rows of each poll.

        A viewer is an open page. The first viewer starts the poller, which all viewers share.
        """
        if self._viewers >= MAX_VIEWERS:
            return  # Viewers that passed `check` at the same time were faster.
        self._viewers += 1
        try:
            if self._poller is None or self._poller.done():
                # Rows from before the pause are old.
                self._rows = {}
                if monotonic() - self._polled_at > max(HISTORY_TIMEOUT, PERIOD + self._pause):
                    self.history = {}
                self._changes = b""
                self._poller = asyncio.create_task(self._run_poller())
            last_poll = self._polls
            if self._changes:
                yield self._build_event(self._rows)
            while True:
                if self._polls == last_poll:
                    await self._updated.wait()
                # A slow viewer that has missed a poll gets all rows.
                event = (
                    self._changes if self._polls == last_poll + 1 else self._build_event(self._rows)
                )
                last_poll = self._polls
                yield event
        finally:
            self._viewers -= 1

    async def _run_poller(self) -> None:
        """Poll the queues and wake the viewers, until the last viewer has left.

        It ends by itself and is never cancelled: a cancel during a statement would cost the
        connection. The next viewer starts a new poller.
        """
        while self._viewers:
            started_at = monotonic()
            await self._poll()
            # Wake all current waiters; the next poll has a new event.
            updated, self._updated = self._updated, asyncio.Event()
            updated.set()
            self._polled_at = monotonic()
            self._pause = max(PERIOD, REST * (self._polled_at - started_at))
            await asyncio.sleep(self._pause)

    async def _poll(self) -> None:
        """Read the queues, and build the event that viewers get who saw the previous poll.

        That event has only the changed rows. After an error the old rows stay, and the event has
        the problem.
        """
        previous_rows = self._rows
        try:
            overviews = await self._read()
        except SqlBrokerError:
            self._error = "the database query failed"
        else:
            self._error = None
            self._update_history(overviews)
            self._rows = {overview.queue: self._build_row(overview) for overview in overviews}
            self._formatted_totals = format_totals(self._compute_totals(overviews))
        self._polls += 1
        self._changes = self._build_event(
            {name: row for name, row in self._rows.items() if previous_rows.get(name) != row}
        )

    def _update_history(self, overviews: Sequence[QueueOverview]) -> None:
        """Add a point to the sparkline of each queue, and drop the history of removed queues.

        A sparkline is a small chart of the ready messages at the last polls.
        """
        self.history = {
            overview.queue: self.history.get(overview.queue) or deque(maxlen=MAX_HISTORY)
            for overview in overviews
        }
        for overview in overviews:
            self.history[overview.queue].append(overview.ready.value)

    def _build_row(self, overview: QueueOverview) -> Row:
        return format_row(overview) | {
            "points": compute_spark_points(tuple(self.history[overview.queue]))
        }

    def _build_event(self, rows: Mapping[str, Row]) -> bytes:
        """Return a server-sent event with `rows`: all queues, or only the changed queues.

        A page reloads itself when the number of queues differs.
        """
        # With the number of all queues, so that a page notices new and removed queues.
        data = {"rows": rows, "queues": len(self._rows), "totals": self._formatted_totals}
        text = json.dumps(data | {"problem": self._error})
        return f"data: {text}\n\n".encode()


def format_row(queue: QueueOverview) -> dict[str, str]:
    """Return the formatted cells of a queue by the `data-cell` names of the templates."""
    return {
        "ready": format_count(queue.ready),
        "delayed": format_count(queue.delayed),
        "in_flight": format_count(queue.in_flight),
        "retrying": format_count(queue.retrying),
        "age": format_length(queue.oldest_due_age),
        "in": format_rate(queue.in_per_minute),
        "out": format_rate(queue.out_per_minute),
        "subscribers": str(queue.live_subscribers),
        "status": format_status(queue),
    }


def format_totals(totals: Mapping[str, Any]) -> dict[str, str]:
    """Return the totals of the overview by the `data-total` names of the template."""
    counts = {name: f"{totals[name]:,}" for name in ("ready", "in_flight", "delayed")}
    rates = {name: format_rate(totals[name]) for name in ("in", "out")}
    return counts | rates | {"oldest": format_length(totals["oldest"])}


class LiveResponse(StreamingResponse):
    """A stream of events that ends with the connection, or after 20 seconds."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        """Send the events; the stream always ends with this call.

        The browser then connects again, and is authenticated again.
        """
        events: Any = self.body_iterator
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": RETRY_EVENT, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_STREAM_SECONDS), aclosing(events):
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
