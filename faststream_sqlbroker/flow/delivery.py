"""A delivery that is more than one plain message: a batch, a transaction, a time limit, ACK_FIRST, policies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from faststream_sqlbroker.core.outcome import Abandon, Nack
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.flow.ack_first import FirstAcks
from faststream_sqlbroker.flow.chain import ACK_FIRST, ENDED, Post
from faststream_sqlbroker.flow.inflight import Inflight
from faststream_sqlbroker.flow.loop import Log, cancelled
from faststream_sqlbroker.flow.parts import take_again
from faststream_sqlbroker.flow.policies import PolicyStarts
from faststream_sqlbroker.flow.settlements import Settlements
from faststream_sqlbroker.flow.transactional import TransactionalDeliveries

Handle = Callable[[Any], Awaitable[Any]]
Rows = list[ClaimedMessage]


class Deliveries:
    """Runs the handler of one subscriber and queues what its deliveries ended in."""

    def __init__(
        self,
        inflight: Inflight,
        settings: Any,
        handle: Handle,
        settlements: Settlements,
        log: Log,
        *,
        transactional: TransactionalDeliveries | None,
        first: FirstAcks | None,
        policies: PolicyStarts | None,
        raise_or_log: Callable[[Rows, BaseException], None],
    ) -> None:
        """`raise_or_log` is told of what a part of a delivery has raised, and raises it if the worker is to end."""
        self._inflight, self._settings, self._handle = inflight, settings, handle
        self._settlements, self._log, self._raise_or_log = settlements, log, raise_or_log
        self._transactional, self._first, self._policies = transactional, first, policies

    async def deliver(self, rows: Rows, post: Post) -> None:
        """Run the handler on `rows`, which may start, and queue their settlements."""
        if self._first is not None:
            rows = await self._first.remove(rows)
            if not rows:
                return
            for row in rows:
                row.no_chain = ACK_FIRST
        if self._policies is not None:
            rows = await self._policies.claim_keys(rows)
            if not rows:
                return
        parts = await self._deliver_part(rows, post)
        try:
            while parts:
                part = parts.pop(0)
                try:
                    parts[:0] = await self._deliver_part(part, post)
                except BaseException as error:  # noqa: BLE001 - raised again, or logged
                    self._raise_or_log(part, error)
        finally:
            self._not_started(parts)

    async def _deliver_part(self, rows: Rows, post: Post) -> list[Rows]:
        """The parts in which the handler is to get `rows` again, if it could not start."""
        parts: list[Rows] = []
        self._inflight.running += 1
        try:
            rows = await self._run(rows, post)
            rows, parts = take_again(rows, ack_first=self._first is not None)
            if self._policies is not None and rows:
                await self._policies.ended(rows)
        except BaseException as error:
            self.cut_off(rows, error)
            self._not_started(parts)
            if self._policies is not None:
                self._policies.spend(rows)
            raise
        finally:
            self._inflight.running -= 1
            if self._first is not None:
                self._first.end(rows)
            else:
                self._inflight.finish_all(self._settlements(rows))
        return parts

    def cut_off(self, rows: Rows, error: BaseException) -> None:
        """The handler of `rows` has not come to its end, because of `error`."""
        # A cancellation that nobody sent us was raised by the handler, which awaited what somebody cancelled. After
        # anything else what the handler did is unknown, so the delivery is no attempt.
        own = isinstance(error, asyncio.CancelledError) and not cancelled()
        for row in rows:
            row.settle_as(Nack(error=error) if own else Abandon())
        if self._first is not None and not own:
            self._first.cut_off(rows)

    def _not_started(self, parts: list[Rows]) -> None:
        for part in parts:
            if self._first is not None:
                self._first.cut_off(part)
            else:
                self._inflight.give_back(part)

    async def _run(self, rows: Rows, post: Post) -> Rows:
        """Run the handler; the rows whose outcome is not written yet."""

        async def run(rows: Rows) -> None:
            post.delivery = rows
            try:
                await self._call_handler(rows)
            finally:
                # Before anything is committed: what comes later would be dropped in silence.
                for row in rows:
                    row.no_chain = ENDED

        if self._transactional is not None:
            return await self._transactional.deliver(rows, run, self._settlements)
        await run(rows)
        return rows

    async def _call_handler(self, rows: Rows) -> None:
        raw = tuple(rows) if self._settings.batch else rows[0]
        timeout = self._settings.handler_timeout
        if timeout is None:
            await self._handle(raw)
            return
        try:
            async with asyncio.timeout(timeout):
                await self._handle(raw)
        except TimeoutError as error:
            self._log(
                logging.ERROR,
                f"the handler of message {rows[0].id} was cancelled after handler_timeout={timeout} seconds",
                message_id=rows[0].id,
            )
            for row in rows:
                row.settle_as(Nack(error=error))
