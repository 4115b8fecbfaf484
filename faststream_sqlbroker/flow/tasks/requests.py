"""Requests: publish a message and wait for the reply.

A process has one queue for the replies to all its requests. While a request waits, one loop reads
the queue, hands each reply to its request, and deletes it. A reply that no request waits for any
more is deleted, too: at once if it is read here, else by a heartbeat after its expiry
(`database.parts.replies`).
"""

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.checks import REPLY_QUEUES
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.database.connections import LoopSemaphore
from faststream_sqlbroker.database.constants import MAX_REPLIES
from faststream_sqlbroker.database.messages.handler import refuse_in_handler
from faststream_sqlbroker.exceptions import (
    BrokerStoppedError,
    PublishError,
    StoreError,
)
from faststream_sqlbroker.flow.fleet.rights import Rights
from faststream_sqlbroker.flow.loop import Log, Loop
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

REPLY_ID = "reply_id"
"""Header of a request and of its reply: the request's id in the process."""
REPLY_WITHIN = "reply_within"
"""Header of a request: seconds from its publishing after which no reply is wanted."""

POLL = 0.01
"""Seconds between two polls for replies where no wake-up comes from other processes."""
LISTENING_POLL = 0.25
"""Seconds between two polls where wake-ups come: one may be lost."""
MAX_TIMEOUT = 86_400.0
"""Maximum seconds that a request waits."""
MIN_EXPIRY = 0.001
"""Seconds; a request cannot expire at once."""
QUEUE_GRACE = 600.0
"""Seconds for which the reply queue stays registered after the last possible reply."""
LEAVE_TIMEOUT = 2.0
"""Maximum seconds that a stop waits to clear the queue; remaining replies expire."""


def parse_request_timeout(timeout: Duration | None) -> float:
    """Return the timeout of a request in seconds; None means `MAX_TIMEOUT`, the upper limit.

    Raises:
        SetupError: it is not a valid duration, or negative.
    """
    if timeout is None:
        return MAX_TIMEOUT
    return min(parse_non_negative("timeout", timeout), MAX_TIMEOUT)


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """The address for the reply to a request, sent in the headers."""

    queue: str
    id: str


@dataclass(slots=True, eq=False)
class _PendingRequest:
    correlation_id: str | None
    reply: "asyncio.Future[ClaimedMessage]"


class Requests:
    """The requests of a broker in this process."""

    def __init__(
        self, store: "Store", publisher: Publisher, wakeups: Wakeups, rights: Rights, log: Log
    ) -> None:
        """Start nothing, and name no queue, before the first request."""
        self._store = store
        self._publisher = publisher
        self._wakeups = wakeups
        self._rights = rights
        self._log = log
        self._clock = wakeups.clock
        self._ids = count(1)
        self._queue = ""
        self._process = 0
        """The process that has named the queue: after a fork the child needs a queue of its own."""
        self._pending: dict[str, _PendingRequest] = {}
        self._loop: Loop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._has_hint = False
        """True if a reply may have come since the last poll."""
        self._poll_at = inf
        """Time of the next poll without a hint (monotonic seconds)."""
        self._registered_until = float("-inf")
        self._register_lock = LoopSemaphore()
        self._has_unanswered = False
        """True if a reply may come that no request waits for."""

    def create_address(self) -> ReplyAddress:
        """Create an address for the reply to a new request: this process's queue and an id.

        All requests of a process share a queue, named at the first request. After a fork the child
        names its own, so that it does not read the parent's replies.
        """
        if self._process != os.getpid():
            self._process = os.getpid()
            self._forget_queue()
        if not self._queue:
            host = socket.gethostname()[:100]
            self._queue = f"{REPLY_QUEUES}{host}.{self._process}.{uuid4().hex}"
        return ReplyAddress(self._queue, str(next(self._ids)))

    async def send(
        self, row: NewMessage, address: ReplyAddress, correlation_id: str | None, timeout: float
    ) -> ClaimedMessage:
        """Publish `row` in a separate transaction, and wait for the reply.

        Separate, because the request must be committed to be handled. A cancelled caller stops
        waiting; its reply is deleted when it comes.

        Args:
            row: The request; its headers name `address`.
            address: Created by `create_address`, for this request only.
            correlation_id: The request's. It identifies a reply without a `reply_id`.
            timeout: Seconds, publishing included.

        Raises:
            TimeoutError: no reply came in time.
            NotSupportedError: it is called in a transaction that keeps the request from being
                written.
            RightsError: the database user may not read or delete replies.
            PublishError: the message was not stored.
            StoreError: the database refused or could not be reached; nothing was written.
            BrokerStoppedError: the broker was stopped.
        """
        self._refuse_own_transaction()
        self._start(address.queue)
        reply: asyncio.Future[ClaimedMessage] = asyncio.get_running_loop().create_future()
        self._pending[address.id] = _PendingRequest(correlation_id, reply)
        answered = False
        try:
            async with self._clock.timeout(timeout):
                await self._register_queue(address.queue, timeout)
                # A dropped request would never be answered.
                [message_id] = await self._publisher.publish([row], droppable=False, at_once=True)
                if message_id is None:
                    raise PublishError(_NOT_STORED)
                self._poll_within(self._poll_interval)
                reply_row = await reply
                answered = True
                return reply_row
        except TimeoutError as error:
            msg = f"no reply to the request to queue {row.queue!r} within {timeout} s"
            raise TimeoutError(msg) from error
        finally:
            self._pending.pop(address.id, None)
            self._has_unanswered |= not answered

    def _refuse_own_transaction(self) -> None:
        """Refuse a request in a handler whose open transaction would block the publish (SQLite)."""
        refuse_in_handler(self._store.dialect, self._store.engine, "request")

    def _start(self, queue: str) -> None:
        """Start the loop that reads replies from `queue`, unless already running.

        Hints of other processes make it poll as soon as a reply may have come.
        """
        running = asyncio.get_running_loop()
        if self._event_loop is not running:
            self._store.refuse_other_loop()
            # Requests of another event loop have ended with it.
            self._event_loop = running
            self._pending.clear()
            self._loop = None
        if self._loop is None:
            self._loop = Loop("replies", self.tick, self._log, self._clock)
            self._loop.start(self._wakeups.outages)
            self._wakeups.register([queue], self._hint, listen=True)

    def _hint(self, _queues: frozenset[str]) -> None:
        self._has_hint = True
        self._wake()

    @property
    def _poll_interval(self) -> float:
        return LISTENING_POLL if self._wakeups.is_listening else POLL

    def _poll_within(self, seconds: float) -> None:
        """Poll for replies in `seconds`, unless the next poll is earlier."""
        poll_at = self._clock.monotonic() + seconds
        if poll_at < self._poll_at:
            self._poll_at = poll_at
            self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    async def _register_queue(self, queue: str, timeout: float) -> None:
        """Register `queue` for as long as a reply to a current request may arrive.

        Heartbeats delete expired replies in registered queues, and all replies in a queue once its
        registration has expired. The registration lasts longer than asked for (QUEUE_GRACE), so
        that few requests need to renew it.
        """
        if self._registered_until >= self._clock.monotonic() + timeout + QUEUE_GRACE / 2:
            return
        async with self._register_lock:
            now = self._clock.monotonic()
            if self._registered_until < now + timeout + QUEUE_GRACE / 2:
                await self._rights.check(frozenset({Activity.REQUEST}))
                await self._store.replies.register_queue(queue, timeout + QUEUE_GRACE)
                self._registered_until = now + timeout + QUEUE_GRACE

    async def tick(self) -> float | None:
        """Hand over the replies; return the seconds until the next poll, or None without requests.

        Replies that no request waits for any more are deleted with the others.

        Raises:
            StoreError: the replies are still there; call again.
        """
        wait = self._poll_at - self._clock.monotonic()
        if not self._has_hint and (wait > 0 or not self._pending):
            return self._schedule_poll(wait)
        self._has_hint = False
        replies = await self._store.replies.read_replies(self._queue)
        for row in replies:
            self._hand_over(row)
        if replies:
            # Let the waiting callers continue before the replies are deleted.
            await asyncio.sleep(0)
            await self._store.replies.remove([row.id for row in replies])
        if len(replies) >= MAX_REPLIES:
            self._has_hint = True
            return 0.0
        return self._schedule_poll(self._poll_interval)

    def _schedule_poll(self, seconds: float) -> float | None:
        """Schedule a poll after `seconds`, and return `seconds` as the loop's pause.

        Return None, to sleep until `wake`, if no request waits, or none is published yet (`seconds`
        is infinite).
        """
        if not self._pending or seconds == inf:
            self._poll_at = inf
            return None
        self._poll_at = self._clock.monotonic() + seconds
        return seconds

    def _hand_over(self, row: ClaimedMessage) -> None:
        """Give the reply `row` to the waiting request; drop a reply that no request waits for.

        The request is found by the header `reply_id`, or by the correlation id if the replier sets
        no such header.
        """
        headers = row.headers
        reply_id = headers.get(REPLY_ID)
        pending = self._pending.get(reply_id) if isinstance(reply_id, str) else None
        if pending is None and reply_id is None:
            correlation_id = headers.get("correlation_id")
            pending = next(
                (
                    candidate
                    for candidate in self._pending.values()
                    if candidate.correlation_id == correlation_id and not candidate.reply.done()
                ),
                None,
            )
        if pending is not None and not pending.reply.done():
            row.claimed_monotonic = self._clock.monotonic()
            pending.reply.set_result(row)

    async def stop(self) -> None:
        """End the waiting requests with an error, and delete the remaining replies.

        If late replies may come, the queue stays registered: heartbeats of other processes then
        delete these.
        """
        loop, self._loop = self._loop, None
        if loop is None or self._event_loop is not asyncio.get_running_loop():
            return
        self._wakeups.unregister(self._hint)
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(BrokerStoppedError(_STOPPED))
                self._has_unanswered = True
        await loop.stop(LEAVE_TIMEOUT)
        # A heartbeat removes late replies, because the queue stays registered for a while.
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT):
                await self._store.replies.clear_queue(
                    self._queue, unregister=not self._has_unanswered
                )
        self._forget_queue()

    def _forget_queue(self) -> None:
        """Forget the reply queue, so that the next request names a new queue."""
        self._queue = ""
        self._registered_until = float("-inf")
        self._has_unanswered = False


_NOT_STORED = (
    "a message with this dedup_id already exists in the queue, so the request was not stored and "
    "will get no reply: omit dedup_id"
)
_STOPPED = "the broker was stopped while the request waited for its reply"
