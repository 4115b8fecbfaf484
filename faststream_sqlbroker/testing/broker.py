"""`TestSqlBroker` runs a broker's handlers in a unit test, without the broker's database."""

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import override

from faststream_sqlbroker.adapter.testing import CallRecorder, EnterType, TestBroker
from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.broker.pipelines import check_dead_letter_loop
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.publisher import sync_producer
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing.clock import StandingClock, VirtualClock
from faststream_sqlbroker.testing.consumer import SteppedConsumer
from faststream_sqlbroker.testing.database import TestDatabase
from faststream_sqlbroker.testing.producer import FakeProducer, FakePublisher, TestRequests
from faststream_sqlbroker.testing.pump import BrokerMember, Pump
from faststream_sqlbroker.testing.reports import attach_waiting_report
from faststream_sqlbroker.testing.store import StoreClock, TestStore

if TYPE_CHECKING:
    from faststream_sqlbroker.publisher.usecase import QueuePublisher
    from faststream_sqlbroker.subscriber.usecase import QueueSubscriber

_SHARED_PARTS = (
    "store",
    "wakeups",
    "heartbeat",
    "lookout",
    "housekeeping",
    "rights",
    "direct_claimer",
)
"""Parts of a broker that its configuration has, too."""
_CONFIG_HOOKS = ("producer", "make_consumer", "note_failure")
"""Other attributes of the configuration that a test replaces."""
_RECORDER_ATTRIBUTES = ("_recorder", "is_test", "future", "_fake_handler")
"""Attributes of handlers and publishers that belong to a test."""


class TestSqlBroker(TestBroker[SqlBroker, EnterType], broker=SqlBroker):
    """Runs the handlers of brokers in the test's own event loop, without the brokers' databases.

    A private temporary SQLite file takes the database's place: options, policies, acknowledgements,
    retries and dead letters are the real ones. `publish` runs the handlers: when it returns, the
    first attempt has ended and its outcome is written, and it raises the handler's error, if any.
    Later attempts, and delayed messages, wait until the test advances its `VirtualClock`.
    """

    __test__ = False

    @overload
    def __init__(
        self: "TestSqlBroker[SqlBroker]",
        broker: SqlBroker,
        /,
        *,
        with_real: bool = False,
        connect_only: bool | None = None,
        engine: AsyncEngine | None = None,
        clock: VirtualClock | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: "TestSqlBroker[tuple[SqlBroker, ...]]",
        *brokers: SqlBroker,
        with_real: bool = False,
        connect_only: bool | None = None,
        engine: AsyncEngine | None = None,
        clock: VirtualClock | None = None,
    ) -> None: ...

    def __init__(
        self,
        *brokers: SqlBroker,
        with_real: bool = False,
        connect_only: bool | None = None,
        engine: AsyncEngine | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        """Prepare the test, which `async with` starts.

        Args:
            brokers: One or several; several see each other's messages.
            with_real: Use the brokers' own databases and loops; only the mocks and call assertions
                of handlers and publishers are added.
            connect_only: Do not start the brokers, because an application does. Default: True if
                `TestApp` is used in the same `async with` statement.
            engine: An AsyncEngine of a SQLite file with the handlers' own tables, which
                `transactional=True` needs: messages and those tables are committed together.
                The broker's tables are created in it.
            clock: The time of the broker and of its database. Without it time stands still: only
                waits of the test itself (`get_one`, `pop`, `reserve`, `lock`) end, after real time.

        Raises:
            SetupError: `with_real` together with `engine` or `clock`, `clock` is no VirtualClock,
                or `engine` is not one of a SQLite file.
        """
        if with_real and (engine is not None or clock is not None):
            raise SetupError(
                "with_real=True uses the broker's own database and its clock: omit engine= and "
                "clock="
            )
        if clock is not None and not isinstance(clock, VirtualClock):
            raise SetupError(f"clock must be a VirtualClock, got {clock!r}")
        super().__init__(*brokers, with_real=with_real, connect_only=connect_only)
        self._engine = engine
        self._virtual_clock = clock
        self._recorded_queues: dict[Any, str] = {}

    @asynccontextmanager
    @override
    async def _create_ctx(self) -> AsyncGenerator[list[SqlBroker], None]:
        """Move the brokers to a SQLite database of the test, and back afterwards.

        The pump claims and runs the handlers in place of the brokers' loops. With `with_real=True`
        only the call records, for assertions, are separate; everything else stays real.
        """
        if self.with_real:
            with ExitStack() as stack:
                for broker in self.brokers:
                    stack.enter_context(_isolate_records(broker))
                async with super()._create_ctx() as brokers:
                    yield brokers
            return
        _check_event_loop()
        clock = StandingClock() if self._virtual_clock is None else self._virtual_clock
        database = TestDatabase(clock, self._engine)
        try:
            configs = {
                broker: _convert_to_sqlite(broker._store.tables.config)  # noqa: SLF001
                for broker in self.brokers
            }
            for config in configs.values():
                database.create_tables(config)
            tables = list(dict.fromkeys(config.message_table_name for config in configs.values()))
            self._pump = pump = Pump(clock, database, tables)
            clock.add_pump(pump)
            with ExitStack() as stack:
                stack.enter_context(_block_sync_producers())
                for broker in self.brokers:
                    stack.enter_context(_isolate_records(broker))
                    stack.enter_context(self._move_broker(broker, configs[broker], pump))
                async with super()._create_ctx() as brokers:
                    try:
                        yield brokers
                    finally:
                        await pump.close()
                        clock.remove_pump(pump)
                for broker in self.brokers:
                    await broker._store.close()  # noqa: SLF001 - the test's
        finally:
            await database.close()

    @contextmanager
    def _move_broker(
        self, broker: Any, config: SqlBrokerSchemaConfig, pump: Pump
    ) -> Iterator[None]:
        """Let `broker` work on the test's database and clock inside the block.

        Its parts are built anew around the test's store, as at its own creation. The attributes
        that this replaces get their old values after the block.
        """
        shared = broker.config.broker_config
        with ExitStack() as stack:
            stack.enter_context(
                _restore_attributes([broker], (*vars(broker), "_locks", "_under_test"))
            )
            stack.enter_context(_restore_attributes([shared], (*_SHARED_PARTS, *_CONFIG_HOOKS)))
            stack.enter_context(_restore_attributes(broker.subscribers, ("_consumer",)))
            clock = StoreClock(pump.clock)
            store = TestStore(pump.database.engine, build_tables(config), clock=clock)
            broker.engine = store.engine
            broker._work_on(store, clock)  # noqa: SLF001 - the composition root
            # Time stands still: the pump says when a message may be there.
            broker._direct_claimer.polls = False  # noqa: SLF001
            store.send_heartbeat = broker._heartbeat.tick  # noqa: SLF001
            broker._under_test = pump  # noqa: SLF001
            for name in _SHARED_PARTS:
                setattr(shared, name, getattr(broker, f"_{name}"))
            shared.make_consumer = partial(
                SteppedConsumer, pump, time_passes=self._virtual_clock is not None
            )
            shared.note_failure = pump.record_failure
            for subscriber in broker.subscribers:
                subscriber._consumer = None  # noqa: SLF001
                _set_seed(subscriber, pump.clock.seed)
            yield

    @contextmanager
    @override
    def _patch_producer(self, broker: Any) -> Generator[None, None, None]:
        """Replace the producer and the requests inside the block; `_move_broker` restores both.

        With these, a publish also runs the handlers, and a request gets its reply without a loop.
        """
        store = broker._store  # noqa: SLF001
        wakeups = broker._wakeups  # noqa: SLF001
        limits = broker._publish_limits(store, broker._clock)  # noqa: SLF001
        publisher = FakePublisher(self._pump, store, wakeups, limits)
        publisher.recorded_queues = self._recorded_queues
        broker._requests = TestRequests(  # noqa: SLF001
            store,
            publisher,
            wakeups,
            broker._rights,  # noqa: SLF001
            broker._log_of_loops,  # noqa: SLF001
        )
        broker.config.broker_config.producer = FakeProducer(
            publisher,
            broker._requests,  # noqa: SLF001
            parser=broker._parser,  # noqa: SLF001
            decoder=broker._decoder,  # noqa: SLF001
        )
        yield

    @override
    async def _fake_connect(self, broker: Any, *args: Any, **kwargs: Any) -> Any:
        _connect_producer(broker)
        return broker.engine

    @override
    def _fake_start(self, broker: Any, *args: Any, **kwargs: Any) -> None:
        """Register the broker's schedules and subscribers with the pump instead of starting loops.

        The pump claims and delivers step by step in place of their loops. Called again at each
        start of the broker, so only what is new is added.
        """
        super()._fake_start(broker, *args, **kwargs)
        pump: Any = broker._under_test  # noqa: SLF001
        # With the real database there is no pump to describe what waits: use an empty text.
        describe = "".__str__ if pump is None else pump.describe_waiting
        for recorder in _list_recorders(broker):
            attach_waiting_report(recorder, describe)
        if self.with_real:
            return
        _connect_producer(broker)
        check_dead_letter_loop(broker.subscribers)
        self._check_transactions(broker)
        planned_schedulers = {member.scheduler for member in pump.members}
        if broker._scheduler not in planned_schedulers:  # noqa: SLF001
            broker._scheduler.set_schedules(broker.schedules)  # noqa: SLF001
            pump.members.append(
                BrokerMember(
                    broker._store.tables.config.message_table_name,  # noqa: SLF001
                    broker._scheduler,  # noqa: SLF001
                    broker._wakeups,  # noqa: SLF001
                    broker._heartbeat.refresh,  # noqa: SLF001
                    fires_at=0 if broker.schedules else None,
                )
            )
        for subscriber in broker.subscribers:
            if subscriber._consumer is None:  # noqa: SLF001
                consumer = subscriber.attach()
                if isinstance(consumer, SteppedConsumer):
                    consumer.start_claims()

    def _check_transactions(self, broker: Any) -> None:
        """Refuse transactional=True without a database that also holds the application's tables."""
        if self._engine is not None:
            return
        for subscriber in broker.subscribers:
            if subscriber.config.settings.transactional:
                queues = ", ".join(map(repr, subscriber.queues))
                raise SetupError(
                    f"the subscriber of {queues} has transactional=True: its messages and the "
                    "application's tables are committed together, so one database must hold both. "
                    "Give TestSqlBroker(broker, engine=create_async_engine("
                    '"sqlite+aiosqlite:///test.db")) a SQLite file with those tables'
                )

    @override
    def create_publisher_fake_subscriber(
        self, broker: SqlBroker, publisher: "QueuePublisher"
    ) -> tuple[Any, bool]:
        """Return the subscriber whose calls count as the publisher's, and True if that one is real.

        FastStream calls this so that a test can assert on a publisher. Without a real subscriber of
        its queue, a fake subscribes. If the queue is not known, or is only forwarded, the fake gets
        a name that no message has, and the producer records the calls.
        """
        subscribers = [
            cast("QueueSubscriber", subscriber)
            for tested_broker in self.brokers
            for subscriber in tested_broker.subscribers
        ]
        queue = self._recorded_queues[publisher] = publisher.queue
        # The last subscriber takes the messages: see `Pump`.
        for subscriber in reversed(subscribers):
            if queue in subscriber.queues and subscriber.forward_to is None:
                return subscriber, True
        consumed = {queue for subscriber in subscribers for queue in subscriber.queues}
        if not queue or queue in consumed:
            # Each call names a queue, or messages are forwarded: there is no queue to subscribe to.
            queue = f"sqlbroker-test-{id(publisher)}"
            self._recorded_queues[publisher] = ""
        batch = publisher.config.batch
        return (
            broker.subscriber(queue, batch=batch, persistent=False, include_in_schema=False),
            False,
        )


def _convert_to_sqlite(config: SqlBrokerSchemaConfig) -> SqlBrokerSchemaConfig:
    """Return a configuration of the same tables for SQLite.

    SQLite has neither schemas nor partitions.
    """
    return replace(config, schema=None, archive_partitions=None)


def _check_event_loop() -> None:
    """Raise SetupError outside asyncio, for example under trio."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise SetupError(
            "TestSqlBroker needs asyncio, as SQLAlchemy's asyncio engines do: with pytest's anyio "
            'plugin, make the fixture anyio_backend return "asyncio"'
        ) from None


@contextmanager
def _block_sync_producers() -> Iterator[None]:
    """Make SqlProducers refuse: messages written elsewhere would reach no handler of the test."""
    sync_producer.tests.count += 1
    try:
        yield
    finally:
        sync_producer.tests.count -= 1


def _connect_producer(broker: Any) -> None:
    """Give the producer the broker's current serializer, codec and context.

    The real producer gets these when the broker connects, which a test skips.
    """
    config = broker.config
    config.producer.connect(
        config.fd_config._serializer,  # noqa: SLF001
        config.broker_codec,
        lambda: config.context,
    )


def _set_seed(subscriber: Any, seed: int) -> None:
    """Make the jitter of a subscriber's retries the same in each run of the test.

    An application's own strategy may have no generator.
    """
    strategy = subscriber.config.settings.retry_strategy
    if (generator := getattr(strategy, "_random", None)) is not None:
        generator.seed(seed)


def _list_recorders(broker: Any) -> list[CallRecorder]:
    handlers = [call.handler for subscriber in broker.subscribers for call in subscriber.calls]
    return [endpoint._recorder for endpoint in (*handlers, *broker.publishers)]  # noqa: SLF001


@contextmanager
def _restore_attributes(owners: Iterable[Any], names: Iterable[str]) -> Iterator[None]:
    """Restore the current attributes `names` of `owners` after the block, which replaces them.

    An attribute that an owner does not have now is left alone.
    """
    saved = [
        (owner, name, getattr(owner, name))
        for owner in owners
        for name in names
        if hasattr(owner, name)
    ]
    try:
        yield
    finally:
        for attribute in saved:
            setattr(*attribute)


@contextmanager
def _isolate_records(broker: Any) -> Iterator[None]:
    """Give handlers and publishers separate call records inside the block.

    A call record keeps the calls of a handler for the test's assertions. If the test runs inside of
    another, whose `is_test` is set already, the outer test keeps its calls.
    """
    handlers = [call.handler for subscriber in broker.subscribers for call in subscriber.calls]
    under_test = [endpoint for endpoint in (*handlers, *broker.publishers) if endpoint.is_test]
    with _restore_attributes(under_test, _RECORDER_ATTRIBUTES):
        for endpoint in under_test:
            previous = endpoint._recorder  # noqa: SLF001
            endpoint._recorder = CallRecorder(previous.name, previous._outer_config)  # noqa: SLF001
            if hasattr(endpoint, "_fake_handler"):
                endpoint._fake_handler = False  # noqa: SLF001
        yield
