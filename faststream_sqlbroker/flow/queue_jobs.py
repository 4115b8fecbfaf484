"""Messages of any queue for clients over HTTP, which know a message by its id and its lease."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from uuid import UUID

from faststream_sqlbroker.core.channels import Registered
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.outcome import Outcome, Release
from faststream_sqlbroker.core.queue_api import QueueRole, Queues
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.database.messages.direct_claim import Replaced
from faststream_sqlbroker.exceptions import StoreError, UnknownOutcomeError
from faststream_sqlbroker.flow.configured import BY_CONFIGURATION, Configured
from faststream_sqlbroker.flow.direct_claim import DirectClaimer, DirectClaimRequest
from faststream_sqlbroker.flow.long_polls import LongPolls
from faststream_sqlbroker.flow.loop import Log
from faststream_sqlbroker.flow.metrics import DirectMetrics
from faststream_sqlbroker.flow.wakeup import Wakeups

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MOST_BYTES = 8 * 1024 * 1024
"""Bytes of the bodies of one answer; the first may be larger."""


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A message that a client has leased, as it names it."""

    queue: str
    id: int
    token: UUID


class QueueJobs:
    """Leases, extends and settles messages for one broker.

    Raises (from every operation):
        StoreError: the database refused or could not be reached.
    """

    def __init__(
        self,
        store: "Store",
        wakeups: Wakeups,
        claimer: DirectClaimer,
        write: Callable[[Sequence[NewMessage]], Awaitable[list[int | None]]],
        options: Queues,
        *,
        rules: SettleRules,
        most_deliveries: float,
        log: Log,
        recorder: Recorder | None,
        looks: bool = True,
    ) -> None:
        """Publish by `write`, claim by `claimer`; `looks` as of `LongPolls`."""
        self.store = store
        self._wakeups = wakeups
        self._claimer = claimer
        self._write = write
        self._options = options
        self._rules = rules
        self._most_deliveries = most_deliveries
        self._metrics = DirectMetrics(recorder)
        self._configured = Configured(self._configure, wakeups.clock)
        self.polls = LongPolls(store, wakeups, log, looks=looks)

    def start(self) -> None:
        """Let requests wait again after `stop`."""
        self.polls.begin()

    async def begin(self) -> None:
        """Make the tokens that the configuration names; without effect the second time."""
        await self._configured.begin()

    async def _configure(self) -> None:
        for queue, tokens in self._options.queues.items():
            given: dict[QueueRole, str | None] = {
                "publish": tokens.publish,
                "consume": tokens.consume,
            }
            for role, token in given.items():
                if token is not None:
                    await self.put_token(queue, role, by=BY_CONFIGURATION, token=token)

    # Tokens.

    async def put_token(
        self,
        queue: str,
        role: QueueRole,
        *,
        by: str,
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered:
        """Make the token of the queue that allows `role`, or another one."""
        return await self.store.queue_tokens.put(queue, role, by=by, token=token, rotate=rotate)

    async def find_token(self, queue: str, role: QueueRole) -> Registered | None:
        """That token; None: there is none."""
        return await self.store.queue_tokens.find(queue, role)

    # Messages.

    async def publish(self, rows: Sequence[NewMessage]) -> list[int | None]:
        """Publish `rows` together; their ids, None for one whose dedup_id its queue has."""
        ids = await self._write(rows)
        self._metrics.published(rows, ids)
        for row in rows:
            if row.delay:
                self.polls.due(row.queue, row.delay)
        return ids

    async def reserve(
        self, queue: str, *, limit: int, lease: float, wait: float
    ) -> list[ClaimedMessage]:
        """Lease up to `limit` due messages for `lease` seconds; wait for the first of them.

        A cancelled call leases nothing. While it waits it holds no connection.
        """
        wanted = DirectClaimRequest(
            queues=(queue,),
            lease=lease,
            rules=self._rules,
            most_deliveries=self._most_deliveries,
            remove=False,
            limit=limit,
        )
        wait = min(wait, self._options.wait)
        if wait <= 0:
            rows, _ = await self._take_now(wanted)
            return await self._of_size(queue, rows)
        # The caller's time, which goes on also where a test lets that of the broker stand still.
        deadline = self._wakeups.clock.callers.monotonic() + wait
        # Before the first claim, so that nothing is missed between it and the wait.
        place = self.polls.enter(queue)
        # One that is cut off during its claim leaves to the next one what it was called for.
        found = True
        try:
            while True:
                rows, again = await self._take_now(wanted)
                if rows:
                    break
                found = False
                if again is not None:
                    self.polls.due(queue, again)
                if not await self.polls.is_called(place, deadline):
                    return []
                found = True
        except StoreError:
            # The others need not fail, too: the next look calls them.
            found = False
            raise
        finally:
            self.polls.leave(place, found=found)
        return await self._of_size(queue, rows)

    async def _take_now(
        self, wanted: DirectClaimRequest
    ) -> tuple[list[ClaimedMessage], float | None]:
        """`take_now`, again while there was only what must not be taken, or no answer."""
        while True:
            rows, again = await self._claimer.take_now(wanted)
            if rows or again != 0:
                return rows, again

    async def _of_size(self, queue: str, rows: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """The first of `rows`, as many as an answer may have; the others are given back."""
        size = 0
        for number, row in enumerate(rows):
            size += len(row.payload)
            if number and size > MOST_BYTES:
                # The first ones are shown in any case: those that stay leased come back later.
                with suppress(StoreError):
                    await self.give_back(queue, rows[number:])
                return rows[:number]
        return rows

    async def give_back(self, queue: str, rows: Sequence[ClaimedMessage]) -> None:
        """Leave `rows` as they were before their claim: no one has seen them."""
        ends = [settle(row, Release(), self._rules, ended_after=0.0) for row in rows]
        result = await self.store.settle(ends)
        for end in ends:
            if end.id in result.settled:
                self._metrics.settled(end, queue)
        self._wakeups.published([queue])

    async def extend(self, message: LeasedMessage, lease: float) -> datetime | None:
        """Let the lease end `lease` seconds from now, never sooner than it does; its end by the
        database's clock. None: it is another's.
        """
        found: datetime | None = await self.store.takes.extend_held(
            message.queue, message.id, message.token, lease
        )
        return found

    async def settle(
        self,
        message: LeasedMessage,
        outcome: Outcome,
        *,
        replaced: Callable[[ClaimedMessage], Replaced] | None = None,
        error: str | None = None,
    ) -> Settlement | None:
        """Write what the message has ended in; None: the lease is another's, nothing is written.

        `replaced` makes its new body; `error` is stored in `last_error`.

        Raises:
            UnknownOutcomeError: it may have been written, or the lease may be gone.
        """

        def decide(row: ClaimedMessage, age: float) -> Settlement:
            found = settle(row, outcome, self._rules, ended_after=age)
            # Of a message that an operator has cancelled, it is told who and why.
            if error is not None and row.cancelled is None:
                found.error = error
            return found

        async def write() -> Settlement | None:
            found: Settlement | None = await self.store.takes.settle_held(
                message.queue, message.id, message.token, decide, replaced
            )
            return found

        try:
            written = await write()
        except UnknownOutcomeError as failure:
            # Fenced by the lease: written twice is written once.
            written = await write()
            if written is None:
                self._metrics.lost(message.queue, unknown=True)
                msg = f"what became of message {message.id} is not known: {failure}"
                raise UnknownOutcomeError(msg) from failure
        if written is None:
            self._metrics.lost(message.queue, unknown=False)
            return None
        self._metrics.settled(written, message.queue)
        if not written.leaves:
            # No other process is told of what is due later: its next look finds it.
            if written.delay:
                self.polls.due(message.queue, written.delay)
            else:
                self._wakeups.published([message.queue])
        return written

    async def stop(self) -> None:
        """Answer the requests that wait, and end the loop."""
        await self.polls.stop()
