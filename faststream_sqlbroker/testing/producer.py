"""The producer of a broker under test: a publish also delivers the message.

The reply to a request is there when the first attempt has ended.
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
from faststream_sqlbroker.database.messages.handler import get_only_writer
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.shielded import ShieldedCalls
from faststream_sqlbroker.flow.tasks.requests import REPLY_ID, ReplyAddress, Requests
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store
    from faststream_sqlbroker.response import SqlBrokerPublishCommand
    from faststream_sqlbroker.testing.pump import Pump


class FakeProducer(SqlBrokerProducer):
    """Encodes, checks and writes like the real producer; then the handlers run."""

    _publisher: "FakePublisher"

    @override
    async def publish(self, cmd: "SqlBrokerPublishCommand") -> int | None:
        """Write a message, and run the first attempt, unless a transaction must end first.

        An attempt is one run of a handler. With a `connection` it runs after the caller's COMMIT.

        Raises:
            Exception: the handler's error, after its outcome was written.
        """
        message_id = await super().publish(cmd)
        self._register_record(cmd, [message_id])
        if cmd.connection is None and message_id is not None:
            await self._publisher.deliver([message_id])
        return message_id

    @override
    async def publish_batch(self, cmd: "SqlBrokerPublishCommand") -> list[int | None]:
        """Write all bodies, and run their first attempts, as `publish`."""
        ids = await super().publish_batch(cmd)
        self._register_record(cmd, ids)
        if cmd.connection is None and any(ids):
            await self._publisher.deliver(ids)
        return ids

    def _register_record(self, cmd: "SqlBrokerPublishCommand", ids: Sequence[int | None]) -> None:
        """Prepare to record the messages of a publisher as calls, once committed.

        A test asserts on the calls of a publisher. A subscriber of its queue records them, real or
        fake; this is for messages to other queues.
        """
        records = self._publisher.records
        for message_id in ids:
            # Trap: the id of a message that was rolled back may be given again, and must not keep
            # the record of the first message.
            records.pop(message_id, None)
            if message_id is not None and cmd.publisher in self._publisher.recorded_queues:
                records[message_id] = partial(self._record_call, cmd.publisher)

    async def _record_call(self, publisher: Any, message_id: int) -> None:
        """Record a published message as a call of the publisher.

        Called after the commit, with the message as it is in the outbox. A message in the queue of
        the publisher's own subscriber is skipped: that subscriber records it.
        """
        test_publisher = self._publisher
        for row in test_publisher.pump.database.list_published(
            test_publisher.table, None, message_id
        ):
            _, queue, key, priority, _, headers, payload, created_at, due_at, _ = row
            if queue == test_publisher.recorded_queues[publisher]:
                continue
            times = from_microseconds(created_at), from_microseconds(due_at)
            # The rest of a claimed message: no attempts, no lease, as at its publish.
            state = (0, 0, 0, *times, None, None, None, times[0], UUID(int=0))
            claimed_message = ClaimedMessage(
                message_id, queue, payload, headers, priority, key, *state
            )
            message = await self._parser(claimed_message)
            message.set_decoder(self._decoder)
            await publisher._recorder.record(message)  # noqa: SLF001 - FastStream's


class FakePublisher(Publisher):
    """Holds messages of a caller's transaction until the commit."""

    def __init__(self, pump: "Pump", store: "Store", *parts: Any) -> None:
        """Create a publisher; `parts` are the arguments of `Publisher`."""
        super().__init__(store, *parts)
        self.table = store.tables.config.message_table_name
        self.pump = pump
        self._negative_ids = count(1)
        self.recorded_queues: dict[Any, str] = {}
        """By publisher: the queue whose handled messages count as its calls, or "" for none.
        """
        self.records: dict[int | None, Callable[[int], Awaitable[None]]] = {}
        """Record messages of publishers, by id."""

    async def deliver(self, ids: Sequence[int | None]) -> None:
        """Run the first attempts of the messages `ids`, and raise their errors.

        In a handler's transaction nothing is run: its messages are visible only after its COMMIT,
        when the pump finds them as due.
        """
        if get_only_writer(self._store.dialect, self._store.engine) is not None:
            return
        for message_id in ids:
            if message_id is not None and message_id in self.records:
                await self.records.pop(message_id)(message_id)
        await self.pump.deliver_published(ids, self.table)

    @override
    def _get_count_connection(self, connection: Any) -> Any:
        """Return the connection that counts due messages for `max_depth`; None for a new one.

        Without an engine of its own, the test keeps the messages in a private file, which the
        caller's connection does not see.
        """
        return connection if self.pump.database.is_external else None

    @override
    async def _write(
        self, rows: Sequence[NewMessage], *, connection: Any = None
    ) -> list[int | None]:
        """Insert the rows; delay their delivery until the caller's transaction commits.

        In the engine passed to TestSqlBroker the caller's transaction itself inserts the rows. For
        a transaction of another database only ids are reserved, and the rows are inserted after its
        COMMIT: a rollback there must leave no messages here.
        """
        if connection is None or not rows:
            return await super()._write(rows, connection=None)
        async_connection: Any = connection
        if isinstance(async_connection, AsyncSession):
            async_connection = await async_connection.connection()
        sync_connection = async_connection.sync_connection
        if (
            sync_connection is None
            or sync_connection.closed
            or self.pump.database.uses_connection(sync_connection)
        ):
            ids = await self._store.insert_in(connection, rows)
            self.pump.held_publishes.hold(sync_connection, lambda: self.deliver(ids))
            return ids
        if not sync_connection.in_transaction():
            # Begin, as an INSERT would: without a transaction there would be no COMMIT to wait for.
            await async_connection.run_sync(Connection.begin)
        # The insert is rolled back, but runs all checks, whose errors belong to this publish.
        insert = partial(self._store.insert_in, rows=rows)
        ids = await self.pump.database.reserve_ids(insert, self.table)
        reserved = [(id_, row) for id_, row in zip(ids, rows, strict=True) if id_ is not None]
        if reserved:
            self.pump.held_publishes.hold(sync_connection, lambda: self._insert_reserved(reserved))
        return ids

    async def _insert_reserved(self, reserved: "Sequence[tuple[int, NewMessage]]") -> None:
        """Insert messages after the caller's COMMIT, with the ids it already got; deliver them.

        Called by `HeldPublishes`. `reserved` has each row with its id.
        """
        ids, rows = zip(*reserved, strict=True)
        database = self.pump.database
        insert = partial(self._store.insert_in, rows=rows)
        await self.deliver(await database.insert_with_ids(ids, insert, self.table))

    @override
    def _write_sync(self, rows: Sequence[NewMessage], *, connection: Any) -> list[int | None]:
        """Insert the rows of synchronous code like `_write`.

        A transaction of the test's own engine inserts them now; for another database they are
        inserted after its COMMIT. Then they get negative ids, because without an event loop no ids
        can be reserved in the test's database.
        """
        sync_connection = (
            connection if isinstance(connection, Connection) else connection.connection()
        )
        if self.pump.database.uses_connection(sync_connection):
            ids = super()._write_sync(rows, connection=connection)
            self.pump.held_publishes.hold(sync_connection, lambda: self.deliver(ids))
            return ids
        if not sync_connection.in_transaction():
            sync_connection.begin()
        self._store.refuse_too_large(rows)
        reserved = [(-next(self._negative_ids), row) for row in rows]
        self.pump.held_publishes.hold(sync_connection, lambda: self._insert_reserved(reserved))
        return [message_id for message_id, _ in reserved]


class TestRequests(Requests):
    """Sends requests without a loop for replies, as the handler runs before the reply is read."""

    __test__ = False

    _publisher: "FakePublisher"

    def __init__(self, *parts: Any) -> None:
        """Create requests; `parts` are the arguments of `Requests`."""
        super().__init__(*parts)
        self._shielded = ShieldedCalls()

    @override
    async def send(
        self, row: NewMessage, address: ReplyAddress, correlation_id: str | None, timeout: float
    ) -> ClaimedMessage:
        """Send a request as `Requests` does, but wait only for the first attempt.

        Raises:
            Exception: the handler's error, after its outcome was written.
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
                raise  # the handler's own error
            msg = f"no reply to the request to queue {row.queue!r} within {timeout} s"
            raise TimeoutError(msg) from error
        # The handler has run, so the reply is there. All requests of a process share a queue:
        # replies to others, which run at the same time, stay.
        for reply in await self._store.replies.read_replies(address.queue):
            if _is_for(reply, address, correlation_id):
                await self._store.replies.remove([reply.id])
                reply.claimed_monotonic = self._clock.monotonic()
                return reply
        raise TimeoutError(
            f"no reply to the request to queue {row.queue!r}: its first attempt sent none or did "
            "not start, and TestSqlBroker waits for no later attempt"
        )

    async def _withdraw(self, ids: Sequence[int | None]) -> None:
        """Remove a request whose caller stopped waiting, before a handler starts it.

        A real request expires by itself, but the test's time may stand still.
        """
        publisher = self._publisher
        request_ids = [id_ for id_ in ids if id_ is not None]
        await publisher.pump.database.remove_messages(publisher.table, request_ids)


def _is_for(reply: ClaimedMessage, address: ReplyAddress, correlation_id: str | None) -> bool:
    """Return True if `reply` answers the request: by its reply id, or else its correlation id.

    A replier that does not copy the header with the reply id still keeps the correlation id.
    """
    reply_id = reply.headers.get(REPLY_ID)
    if reply_id is None:
        return correlation_id == reply.headers.get("correlation_id")
    return bool(reply_id == address.id)
