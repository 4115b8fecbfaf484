"""The producer of a broker under test: a publish delivers, too, and the reply to a request is there
when the first attempt has ended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import UUID

from faststream.exceptions import SubscriberNotFound
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from typing_extensions import override

from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.messages.handler import only_writer
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, ReplyAddress, Requests
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.response import SqlBrokerPublishCommand
    from faststream_sqlbroker.testing.pump import Pump


class FakeProducer(SqlBrokerProducer):
    """Encodes, checks and writes as ever; then the handlers run."""

    _publisher: "FakePublisher"

    @override
    async def publish(self, cmd: "SqlBrokerPublishCommand") -> int | None:
        """Write one message, and run its first attempt, unless it waits for a transaction.

        Raises:
            Exception: what the handler has raised, after its outcome was written.
        """
        message_id = await super().publish(cmd)
        self._expect_record(cmd, [message_id])
        if cmd.connection is None and message_id is not None:
            await self._publisher.deliver([message_id])
        return message_id

    @override
    async def publish_batch(self, cmd: "SqlBrokerPublishCommand") -> list[int | None]:
        """Write all bodies, and run their first attempts, as `publish`."""
        ids = await super().publish_batch(cmd)
        self._expect_record(cmd, ids)
        if cmd.connection is None and any(ids):
            await self._publisher.deliver(ids)
        return ids

    def _expect_record(self, cmd: "SqlBrokerPublishCommand", ids: Sequence[int | None]) -> None:
        """Let the publisher's record have those of its messages that its subscriber will not get,
        once they are committed.
        """
        records = self._publisher.records
        for message_id in ids:
            # An id of a message that was rolled back may be given again.
            records.pop(message_id, None)
            if message_id is not None and cmd.publisher in self._publisher.heard:
                records[message_id] = partial(self._record, cmd.publisher)

    async def _record(self, publisher: Any, message_id: int) -> None:
        parts = self._publisher
        for row in parts.pump.database.published(parts.table, None, message_id):
            _, queue, key, priority, _, headers, payload, created, due, _ = row
            if queue == parts.heard[publisher]:
                continue
            times = from_microseconds(created), from_microseconds(due)
            # Never attempted, as it was published.
            state = (0, 0, 0, *times, None, None, None, times[0], UUID(int=0))
            claimed = ClaimedMessage(message_id, queue, payload, headers, priority, key, *state)
            message = await self._parser(claimed)
            message.set_decoder(self._decoder)
            await publisher._recorder.record(message)  # noqa: SLF001 - FastStream's


class FakePublisher(Publisher):
    """Keeps messages of a caller's transaction back until it has been committed."""

    def __init__(self, pump: "Pump", store: "Store", *parts: Any) -> None:
        """`parts` are those of `Publisher`."""
        super().__init__(store, *parts)
        self.table = store.tables.config.message_table_name
        self.pump = pump
        self._negative = count(1)
        self.heard: dict[Any, str] = {}
        """Of each publisher the queue whose messages it records as they are handled; "" for none.
        """
        self.records: dict[int | None, Callable[[int], Awaitable[None]]] = {}
        """Record messages of publishers, by id."""

    async def deliver(self, ids: Sequence[int | None]) -> None:
        """Run the first attempts of the messages `ids`, and raise what they raise; what is
        published in a handler's transaction waits for its COMMIT.
        """
        if only_writer(self._store.dialect, self._store.engine) is not None:
            return
        for message_id in ids:
            if message_id is not None and message_id in self.records:
                await self.records.pop(message_id)(message_id)
        await self.pump.published(ids, self.table)

    @override
    def _counting_on(self, connection: Any) -> Any:
        """The test's private database is counted on its own connections."""
        return connection if self.pump.database.given else None

    @override
    async def _write(
        self, rows: Sequence[NewMessage], *, connection: Any = None
    ) -> list[int | None]:
        if connection is None or not rows:
            return await super()._write(rows, connection=None)
        plain: Any = connection
        if isinstance(plain, AsyncSession):
            plain = await plain.connection()
        sync = plain.sync_connection
        if sync is None or sync.closed or self.pump.database.leads_here(sync):
            ids = await self._store.insert_in(connection, rows)
            self.pump.held.hold(sync, lambda: self.deliver(ids))
            return ids
        if not sync.in_transaction():
            # As an INSERT would: without a transaction there would be no COMMIT to wait for.
            await plain.run_sync(Connection.begin)
        # With all checks.
        insert = partial(self._store.insert_in, rows=rows)
        ids = await self.pump.database.reserve(insert, self.table)
        kept = [(i, row) for i, row in zip(ids, rows, strict=True) if i is not None]
        if kept:
            self.pump.held.hold(sync, lambda: self._insert(kept))
        return ids

    async def _insert(self, kept: "Sequence[tuple[int, NewMessage]]") -> None:
        told, rows = zip(*kept, strict=True)
        database = self.pump.database
        insert = partial(self._store.insert_in, rows=rows)
        await self.deliver(await database.insert_as(told, insert, self.table))

    @override
    def _write_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        """The ids of what is held back are negative: without an event loop none can be had from the
        database.
        """
        plain = connection if isinstance(connection, Connection) else connection.connection()
        if self.pump.database.leads_here(plain):
            ids = super()._write_sync(rows, connection=connection)
            self.pump.held.hold(plain, lambda: self.deliver(ids))
            return ids
        if not plain.in_transaction():
            plain.begin()
        self._store.refuse_too_large(rows)
        kept = [(-next(self._negative), row) for row in rows]
        self.pump.held.hold(plain, lambda: self._insert(kept))
        return [message_id for message_id, _ in kept]


class TestRequests(Requests):
    """Asks as ever; no loop looks for the reply, as the handler runs before it is read."""

    __test__ = False

    _publisher: "FakePublisher"

    def __init__(self, *parts: Any) -> None:
        """`parts` are those of `Requests`."""
        super().__init__(*parts)
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
        if not self._publisher.pump.is_consumed(row.queue):
            raise SubscriberNotFound(f"no subscriber of this test has the queue {row.queue!r}")
        limit = asyncio.timeout(timeout)
        ids: list[int | None] = []

        async def publish() -> None:
            ids.extend(await self._publisher.publish([row], at_once=True))

        try:
            async with limit:
                await self._shielded.run(publish())
                await self._publisher.deliver(ids)
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
        publisher = self._publisher
        ours = [i for i in ids if i is not None]
        await publisher.pump.database.remove(publisher.table, ours)


def _is_for(reply: ClaimedMessage, address: ReplyAddress, correlation_id: str | None) -> bool:
    reply_id = reply.headers.get(REPLY_ID)
    if reply_id is None:
        return correlation_id == reply.headers.get("correlation_id")
    return bool(reply_id == address.id)
