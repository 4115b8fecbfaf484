"""`TestSqlBroker`: a broker's handlers in a unit test, without its database."""

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
from faststream_sqlbroker.broker.pipelines import refuse_endless_dead_letters
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.publisher import sync_producer
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.testing.clock import StandingClock, VirtualClock
from faststream_sqlbroker.testing.consumer import SteppedConsumer
from faststream_sqlbroker.testing.database import TestDatabase
from faststream_sqlbroker.testing.producer import FakeProducer, FakePublisher, TestRequests
from faststream_sqlbroker.testing.pump import Member, Pump
from faststream_sqlbroker.testing.reports import name_what_waits
from faststream_sqlbroker.testing.store import StoreClock, TestStore

if TYPE_CHECKING:
    from faststream_sqlbroker.publisher.usecase import QueuePublisher
    from faststream_sqlbroker.subscriber.usecase import QueueSubscriber

_SHARED = ("store", "wakeups", "heartbeat", "lookout", "housekeeping", "rights", "direct_claimer")
"""Parts of a broker that its configuration has, too."""
_HOOKS = ("producer", "make_consumer", "note_failure")
"""What else a test has of its own there."""
_RECORDED = ("_recorder", "is_test", "future", "_fake_handler")
"""What handlers and publishers know of a test."""


class TestSqlBroker(TestBroker[SqlBroker, EnterType], broker=SqlBroker):
    """Runs the handlers of brokers in the test's own event loop, without their database.

    A private temporary SQLite file takes the database's place: options, policies, acknowledgements,
    retries and dead letters are the real ones. `publish` runs the handlers: when it returns, the
    first attempt has ended and its outcome is written; what the handler has raised is raised then.
    Later attempts, and what is delayed, wait until the test moves its `VirtualClock`.
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
        """Prepare; `async with` begins the test.

        Args:
            brokers: One or several; several see each other's messages.
            with_real: Use the brokers' own databases and loops; only the mocks and call assertions
                of handlers and publishers are added.
            connect_only: Do not start the brokers: an application does it. Default: whether
                `TestApp` is used in the same `async with` statement.
            engine: An AsyncEngine of a SQLite file with the handlers' own tables, which
                `transactional=True` needs: messages and those tables are committed together.
                The broker's tables are made in it.
            clock: The time of the broker and of its database. Without it time stands still: only
                what the test itself waits for (`get_one`, `pop`, `reserve`, `lock`) ends, in real
                time.

        Raises:
            SetupError: `with_real` together with `engine` or `clock`, `clock` is no VirtualClock,
                or `engine` is not one of a SQLite file.
        """
        if with_real and (engine is not None or clock is not None):
            raise SetupError(
                "with_real=True uses the broker's own database and its clock: leave out engine= "
                "and clock="
            )
        if clock is not None and not isinstance(clock, VirtualClock):
            raise SetupError(f"clock must be a VirtualClock, got {clock!r}")
        super().__init__(*brokers, with_real=with_real, connect_only=connect_only)
        self._engine = engine
        self._virtual_clock = clock
        self._heard: dict[Any, str] = {}

    @asynccontextmanager
    @override
    async def _create_ctx(self) -> AsyncGenerator[list[SqlBroker], None]:
        if self.with_real:
            with ExitStack() as stack:
                for broker in self.brokers:
                    stack.enter_context(_own_records(broker))
                async with super()._create_ctx() as brokers:
                    yield brokers
            return
        _refuse_other_event_loops()
        clock = StandingClock() if self._virtual_clock is None else self._virtual_clock
        database = TestDatabase(clock, self._engine)
        try:
            configs = {
                broker: _on_sqlite(broker._store.tables.config)  # noqa: SLF001
                for broker in self.brokers
            }
            for config in configs.values():
                database.add(config)
            tables = list(dict.fromkeys(c.message_table_name for c in configs.values()))
            self._pump = pump = Pump(clock, database, tables)
            clock.join(pump)
            with ExitStack() as stack:
                stack.enter_context(_no_real_database())
                for broker in self.brokers:
                    stack.enter_context(_own_records(broker))
                    stack.enter_context(self._moved(broker, configs[broker], pump))
                async with super()._create_ctx() as brokers:
                    try:
                        yield brokers
                    finally:
                        await pump.close()
                        clock.leave(pump)
                for broker in self.brokers:
                    await broker._store.close()  # noqa: SLF001 - the test's
        finally:
            await database.close()

    @contextmanager
    def _moved(self, broker: Any, config: SqlBrokerSchemaConfig, pump: Pump) -> Iterator[None]:
        """Let `broker` work on the test's database inside of the block."""
        shared = broker.config.broker_config
        with ExitStack() as stack:
            stack.enter_context(_kept([broker], (*vars(broker), "_locks", "_under_test")))
            stack.enter_context(_kept([shared], (*_SHARED, *_HOOKS)))
            stack.enter_context(_kept(broker.subscribers, ("_consumer",)))
            clock = StoreClock(pump.clock)
            store = TestStore(pump.database.engine, build_tables(config), clock=clock)
            broker.engine = store.engine
            broker._work_on(store, clock)  # noqa: SLF001 - the composition root
            broker._direct_claimer.polls = False  # noqa: SLF001
            store.sign = broker._heartbeat.tick  # noqa: SLF001
            broker._under_test = pump  # noqa: SLF001
            for name in _SHARED:
                setattr(shared, name, getattr(broker, f"_{name}"))
            shared.make_consumer = partial(
                SteppedConsumer, pump, time_passes=self._virtual_clock is not None
            )
            shared.note_failure = pump.note_failure
            for subscriber in broker.subscribers:
                subscriber._consumer = None  # noqa: SLF001
                _seed(subscriber, pump.clock.seed)
            yield

    @contextmanager
    @override
    def _patch_producer(self, broker: Any) -> Generator[None, None, None]:
        """`_moved` puts the broker's own back."""
        store = broker._store  # noqa: SLF001
        wakeups = broker._wakeups  # noqa: SLF001
        limits = broker._publish_limits(store, broker._clock)  # noqa: SLF001
        publisher = FakePublisher(self._pump, store, wakeups, limits)
        publisher.heard = self._heard
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
        super()._fake_start(broker, *args, **kwargs)
        pump: Any = broker._under_test  # noqa: SLF001
        describe = "".__str__ if pump is None else pump.what_waits
        for recorder in _recorders(broker):
            name_what_waits(recorder, describe)
        if self.with_real:
            return
        _connect_producer(broker)
        refuse_endless_dead_letters(broker.subscribers)
        self._refuse_transactions(broker)
        known = {member.scheduler for member in pump.members}
        if broker._scheduler not in known:  # noqa: SLF001
            broker._scheduler.plan(broker.schedules)  # noqa: SLF001
            pump.members.append(
                Member(
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
                    consumer.begin()

    def _refuse_transactions(self, broker: Any) -> None:
        if self._engine is not None:
            return
        for subscriber in broker.subscribers:
            if subscriber.config.settings.transactional:
                queues = ", ".join(map(repr, subscriber.queues))
                raise SetupError(
                    f"the subscriber of {queues} has transactional=True: its messages and the "
                    "application's tables are committed together, which two databases cannot do. "
                    "Give TestSqlBroker(broker, engine=create_async_engine("
                    '"sqlite+aiosqlite:///test.db")) a SQLite file with those tables'
                )

    @override
    def create_publisher_fake_subscriber(
        self, broker: SqlBroker, publisher: "QueuePublisher"
    ) -> tuple[Any, bool]:
        """The subscriber whose calls are the publisher's: a real one, or one made for the test."""
        subscribers = [cast("QueueSubscriber", s) for b in self.brokers for s in b.subscribers]
        queue = self._heard[publisher] = publisher.queue
        # The last one takes the messages: see `Pump`.
        for subscriber in reversed(subscribers):
            if queue in subscriber.queues and subscriber.forward_to is None:
                return subscriber, True
        taken = {queue for subscriber in subscribers for queue in subscriber.queues}
        if not queue or queue in taken:
            # Each call names a queue, or messages are moved on: there is nothing to listen to.
            queue = f"sqlbroker-test-{id(publisher)}"
            self._heard[publisher] = ""
        batch = publisher.config.batch
        return (
            broker.subscriber(queue, batch=batch, persistent=False, include_in_schema=False),
            False,
        )


def _on_sqlite(config: SqlBrokerSchemaConfig) -> SqlBrokerSchemaConfig:
    """The same tables as SQLite can have them."""
    return replace(config, schema=None, archive_partitions=None)


def _refuse_other_event_loops() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise SetupError(
            "TestSqlBroker needs asyncio, as SQLAlchemy's asyncio engines do: with pytest's anyio "
            'plugin let the fixture anyio_backend return "asyncio"'
        ) from None


@contextmanager
def _no_real_database() -> Iterator[None]:
    """Let a SqlProducer refuse: what it wrote elsewhere would reach no handler of the test."""
    sync_producer.tests.count += 1
    try:
        yield
    finally:
        sync_producer.tests.count -= 1


def _connect_producer(broker: Any) -> None:
    config = broker.config
    config.producer.connect(
        config.fd_config._serializer,  # noqa: SLF001
        config.broker_codec,
        lambda: config.context,
    )


def _seed(subscriber: Any, seed: int) -> None:
    strategy = subscriber.config.settings.retry_strategy
    if (chance := getattr(strategy, "_random", None)) is not None:
        chance.seed(seed)


def _recorders(broker: Any) -> list[CallRecorder]:
    handlers = [call.handler for subscriber in broker.subscribers for call in subscriber.calls]
    return [endpoint._recorder for endpoint in (*handlers, *broker.publishers)]  # noqa: SLF001


@contextmanager
def _kept(owners: Iterable[Any], names: Iterable[str]) -> Iterator[None]:
    """Give `owners` back what they have under `names` now."""
    kept = [(e, n, getattr(e, n)) for e in owners for n in names if hasattr(e, n)]
    try:
        yield
    finally:
        for each in kept:
            setattr(*each)


@contextmanager
def _own_records(broker: Any) -> Iterator[None]:
    """Give handlers and publishers records of their own inside of the block: an outer test keeps
    its calls.
    """
    handlers = [call.handler for subscriber in broker.subscribers for call in subscriber.calls]
    under_test = [e for e in (*handlers, *broker.publishers) if e.is_test]
    with _kept(under_test, _RECORDED):
        for endpoint in under_test:
            old = endpoint._recorder  # noqa: SLF001
            endpoint._recorder = CallRecorder(old.name, old._outer_config)  # noqa: SLF001
            if hasattr(endpoint, "_fake_handler"):
                endpoint._fake_handler = False  # noqa: SLF001
        yield
