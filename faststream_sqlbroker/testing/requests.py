"""Requests of a broker under test: the reply is there when the first attempt has ended."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faststream.exceptions import SubscriberNotFound
from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, ReplyAddress, Requests

if TYPE_CHECKING:
    from faststream_sqlbroker.testing.producer import FakePublisher
    from faststream_sqlbroker.testing.pump import Pump


class TestRequests(Requests):
    """Asks as ever; no loop looks for the reply, as the handler runs before it is read."""

    __test__ = False

    def __init__(self, publisher: "FakePublisher", pump: "Pump", **parts: Any) -> None:
        """`parts` are those of `Requests`."""
        super().__init__(publisher=publisher, **parts)
        self._table = publisher.table
        self._pump = pump
        self._shielded = ShieldedCalls()

    @override
    async def ask(
        self, row: NewMessage, address: ReplyAddress, correlation_id: str | None, timeout: float
    ) -> ClaimedMessage:
        """As `Requests.ask`; a later attempt than the first one is not waited for.

        Raises:
            Exception: what the handler has raised, after its outcome was written.
            SubscriberNotFound: no subscriber under test has the queue; nothing is written.
            TimeoutError: the first attempt has not ended within `timeout` seconds of real time, or
                it has sent no reply.
        """
        self._refuse_own_transaction()
        if not self._pump.is_consumed(row.queue):
            raise SubscriberNotFound(f"no subscriber of this test has the queue {row.queue!r}")
        limit = asyncio.timeout(timeout)
        ids: list[int | None] = []

        async def publish() -> None:
            ids.extend(await self._publisher.publish([row]))

        try:
            async with limit:
                await self._shielded.run(publish())
                await self._pump.published(ids, self._table)
        except asyncio.CancelledError:
            await self._withdraw(ids)
            raise
        except TimeoutError as error:
            if limit.expired():
                await self._withdraw(ids)
            if not limit.expired():
                raise  # the handler's own
            msg = f"no reply to the request to queue {row.queue!r} within {timeout} s"
            raise TimeoutError(msg) from error
        # Those of other requests, which run at the same time, stay for them.
        for reply in await self._store.replies.read(address.queue):
            if _is_for(reply, address, correlation_id):
                await self._store.replies.remove([reply.id])
                reply.claimed_monotonic = self._clock.monotonic()
                return reply
        raise TimeoutError(
            f"no reply to the request to queue {row.queue!r}: its first attempt has sent none, or "
            "has not begun; under TestSqlBroker no later one is waited for"
        )

    async def _withdraw(self, ids: Sequence[int | None]) -> None:
        """Remove a request that is over: in the time of the test it would not expire."""
        await self._pump.database.remove(self._table, [i for i in ids if i is not None])


def _is_for(reply: ClaimedMessage, address: ReplyAddress, correlation_id: str | None) -> bool:
    reply_id = reply.headers.get(REPLY_ID)
    if reply_id is None:
        return correlation_id == reply.headers.get("correlation_id")
    return bool(reply_id == address.id)
