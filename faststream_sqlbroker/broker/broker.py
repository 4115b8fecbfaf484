"""`SqlBroker`: makes the parts, connects them to FastStream, and starts and stops them."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fast_depends import dependency_provider
from faststream import ContextRepo
from faststream.message import gen_cor_id
from faststream.specification.schema import BrokerSpec
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine
from typing_extensions import override

from faststream_sqlbroker.adapter.broker import FastDependsConfig
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.broker.config import SqlBrokerConfig
from faststream_sqlbroker.broker.configured import SqlBrokerConfigured
from faststream_sqlbroker.broker.engine import make_engine, make_listen_engine
from faststream_sqlbroker.broker.logging import make_queue_logger_state, passing_level
from faststream_sqlbroker.broker.pipelines import ServiceTags, refuse_endless_dead_letters
from faststream_sqlbroker.broker.plain_publish import PlainPublish
from faststream_sqlbroker.broker.registrator import SqlBrokerRegistrator
from faststream_sqlbroker.broker.reserving import SqlBrokerReserving
from faststream_sqlbroker.broker.serving import SqlBrokerServing
from faststream_sqlbroker.broker.start_stop import StartStop
from faststream_sqlbroker.broker.under_test import SqlBrokerUnderTest
from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.checks import whole_number
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.depth import MaxDepth, checked_depths
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import SchemaError, SetupError
from faststream_sqlbroker.flow.fleet.heartbeat import INTERVAL, Heartbeat
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping, JobRunner
from faststream_sqlbroker.flow.fleet.lookout import Lookout
from faststream_sqlbroker.flow.fleet.rights import Rights
from faststream_sqlbroker.flow.fleet.write_path import WritePath
from faststream_sqlbroker.flow.metrics import GuardedRecorder
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.tasks.requests import Requests
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.partitions import need_postgresql
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.subscriber.checks import time_or_none

if TYPE_CHECKING:
    from fast_depends import Provider
    from fast_depends.dependencies import Dependant
    from fast_depends.library.serializer import SerializerProto
    from faststream import AckPolicy
    from faststream.security import BaseSecurity
    from faststream.specification.schema.extra import Tag, TagDict

    from faststream_sqlbroker.adapter.broker import Registrator, UnderlyingDriverAnnotations
    from faststream_sqlbroker.adapter.messages import CodecProto
    from faststream_sqlbroker.adapter.values import (
        BrokerMiddleware,
        CustomCallable,
        IdGenerator,
        LoggerProto,
    )
    from faststream_sqlbroker.admin import Admin
    from faststream_sqlbroker.archive_reader import Archive
    from faststream_sqlbroker.core.health import ProcessHealth, Surroundings
    from faststream_sqlbroker.core.retention import Retention
    from faststream_sqlbroker.flow.consumer import Consumer
    from faststream_sqlbroker.flow.debug_log import DebugLog
    from faststream_sqlbroker.flow.fleet.sampling import Sampler
    from faststream_sqlbroker.flow.publish_limits import PublishLimits
    from faststream_sqlbroker.flow.tasks.archive_upkeep import PartitionLoop, RetentionLoop

# What few processes use, such as `admin`, is imported where it is made: it would be a third of the
# time of each start.


class SqlBroker(
    SqlBrokerRegistrator,
    SqlBrokerReserving,
    SqlBrokerServing,
    SqlBrokerConfigured,
    SqlBrokerUnderTest,
):
    """A message broker that lives in a relational database."""

    def __init__(
        self,
        engine: AsyncEngine | URL | str,
        *,
        schema: SqlBrokerSchemaConfig | None = None,
        validate_schema_on_start: bool = True,
        statement_timeout: Duration = 30.0,
        max_connections: int | None = None,
        pgbouncer: bool = False,
        listen_url: URL | str | None = None,
        graceful_timeout: Duration | None = 15.0,
        presence_interval: Duration = INTERVAL,
        max_payload: int | None = None,
        max_depth: "Mapping[str, MaxDepth | int] | None" = None,
        retention: "Retention | None" = None,
        metrics: Recorder | None = None,
        health_port: int | str | None = None,
        debug_header: str | None = None,
        ack_policy: "AckPolicy" = EMPTY,
        decoder: "CustomCallable | None" = None,
        parser: "CustomCallable | None" = None,
        codec: "CodecProto | None" = None,
        dependencies: "Sequence[Dependant]" = (),
        middlewares: "Sequence[BrokerMiddleware[Any, Any]]" = (),
        routers: "Iterable[Registrator[Any, Any]]" = (),
        security: "BaseSecurity | None" = None,
        specification_url: str | Iterable[str] | None = None,
        protocol: str | None = None,
        protocol_version: str | None = "auto",
        description: str | None = None,
        tags: "Iterable[Tag | TagDict]" = (),
        logger: "LoggerProto | None" = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: "SerializerProto | None" = EMPTY,
        provider: "Provider | None" = None,
        context: ContextRepo | None = None,
        id_generator: "IdGenerator" = EMPTY,
        underlying_driver_annotations: "UnderlyingDriverAnnotations | None" = None,
    ) -> None:
        """Make a broker; it does not connect to the database yet.

        Durations are seconds, a timedelta or text like "1.5m".

        Args:
            engine: An AsyncEngine, or a database URL. The broker disposes only of an engine that it
                made from a URL.
            schema: Names of the tables.
            validate_schema_on_start: `start` compares the tables with those that are needed.
            statement_timeout: Longest time of each of the broker's transactions, including the
                wait for a connection; longer than 0.
            max_connections: Most connections for claiming, writing outcomes and maintenance
                together; default half of the engine's pool. Publishing takes one more, LISTEN
                another.
            pgbouncer: The engine leads to a PgBouncer in transaction mode: the broker uses no named
                statements, and LISTEN only through `listen_url`.
            listen_url: A URL for LISTEN that bypasses PgBouncer: straight to the same database,
                with asyncpg.
            graceful_timeout: How long `stop` waits for running handlers, 0 or more; None without
                limit.
            presence_interval: Time between two heartbeats of this process's subscribers in the
                database, 100 ms or more. Within it they learn of paused queues. A process counts as
                dead after four intervals without a heartbeat.
            max_payload: Most bytes of a body that this process publishes, answers included; None
                leaves it to the database.
            max_depth: How many due messages a queue may have before this process's publishes to it
                wait, raise or are dropped, by the queue's full name; a number is a `MaxDepth` of
                it.
            retention: How long finished messages stay in the archive; one process of the fleet
                removes the older ones. None keeps all, and the start says how fast they grow.
            metrics: Where the broker's own metrics go, such as `SqlBrokerPrometheusMetrics`; None:
                they are not taken.
            health_port: Serve /health/live, /health/ready and /metrics without authentication on
                this port while the broker runs: a number (of all addresses), or "host:port". Each
                process needs a port of its own: with "8081-8084" it takes the first that is free,
                with 0 any; the log says which. It needs the extra `http`.
            debug_header: The name of a header, such as "X-Debug", with which a message asks that
                each of its steps is logged, with its time, whatever the level of the logger is; at
                most 60 messages a minute of a process. None: no message can ask for it.
            ack_policy: Default policy of all subscribers.
            decoder: Default decoder of bodies.
            parser: Default parser of rows.
            codec: Encodes and decodes bodies; give it or a decoder, not both.
            dependencies: Dependencies of every handler.
            middlewares: Middlewares of every handler and publish.
            routers: Routers to include.
            security: User, password and TLS of the connections that the broker makes from a URL
                (`listen_url` too), and the server's security in AsyncAPI documents. An AsyncEngine
                keeps its own.
            specification_url: Address in AsyncAPI documents; default the engine's host, port and
                database, without user, password and other parameters.
            protocol: Protocol in AsyncAPI documents; default the database's name.
            protocol_version: Version of the protocol in AsyncAPI documents.
            description: Description of the server in AsyncAPI documents.
            tags: Tags of the server in AsyncAPI documents.
            logger: A logger; None logs nothing.
            log_level: Level of FastStream's own log lines.
            apply_types: Handlers' arguments are validated and converted by their annotations.
            serializer: FastDepends' serializer.
            provider: FastDepends' provider.
            context: FastStream's context.
            id_generator: Makes the correlation id of a message that is published without one;
                `faststream.message.gen_cor_id` makes a random UUID. By default none is stored,
                which would take a fifth more CPU of a publish, and handlers see a UUID that is made
                of the message's id and of random bits of the database.
            underlying_driver_annotations: Classes that handlers must not be annotated with, each
                with the annotation to use instead, or with a faststream.UnderlyingDriverAnnotation
                that names its import. They are added to those of the broker: AsyncConnection,
                AsyncSession and its own classes.

        Raises:
            SetupError: the engine cannot be used (synchronous, of another database, in-memory
                SQLite, with a StaticPool), `security` does not fit the URL, a duration or a limit
                is not valid, or presence_interval is less than 100 ms.
            MissingExtraError: `health_port` needs the extra `http`.
        """
        self.engine, self._owns_engine = make_engine(engine, pgbouncer=pgbouncer, security=security)
        self._listen_engine = make_listen_engine(listen_url, security=security)
        self._validate_schema = validate_schema_on_start
        self._presence_interval = presence_interval
        self._plain = PlainPublish()
        self._start_stop = StartStop()
        clock = Clock()
        schema = schema or SqlBrokerSchemaConfig()
        need_postgresql(self.engine.dialect.name, schema)
        store = Store(
            self.engine,
            build_tables(schema),
            statement_timeout=positive_seconds("statement_timeout", statement_timeout),
            max_connections=max_connections,
            pgbouncer=pgbouncer,
            listen_engine=self._listen_engine,
            clock=clock,
        )
        self._recorder = None if metrics is None else GuardedRecorder(metrics, self._log_of_loops)
        self._max_payload = max_payload
        self._max_depth = checked_depths(max_depth)
        if max_payload is not None:
            whole_number("max_payload", max_payload, other=" of bytes, or None")
        self._retention = retention
        if retention is not None:
            from faststream_sqlbroker.core.retention import (  # noqa: PLC0415
                NO_ARCHIVE,
                checked_retention,
            )

            checked_retention(retention)
            if store.tables.archive is None:
                raise SetupError(NO_ARCHIVE)
        self._debug: "DebugLog | None" = None
        if debug_header is not None:
            from faststream_sqlbroker.flow.debug_log import DebugLog, checked_header  # noqa: PLC0415

            self._debug = DebugLog(checked_header(debug_header), self._tell_debug, clock)
        self._serve_probes(health_port, metrics)
        self._work_on(store, clock)
        self._sampler = self._make_sampler()
        publisher = Publisher(store, self._wakeups, self._publish_limits(store, clock), self._debug)
        self._requests = Requests(store, publisher, self._wakeups, self._rights, self._log_of_loops)
        super().__init__(
            config=SqlBrokerConfig(
                store=self._store,
                wakeups=self._wakeups,
                heartbeat=self._heartbeat,
                lookout=self._lookout,
                housekeeping=self._housekeeping,
                rights=self._rights,
                recorder=self._recorder,
                debug=self._debug,
                direct_claimer=self._direct_claimer,
                producer=SqlBrokerProducer(
                    publisher, self._requests, parser=parser, decoder=decoder
                ),
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_queue_logger_state(logger=logger, log_level=log_level),
                fd_config=_injection(apply_types, serializer, provider, context),
                broker_dependencies=dependencies,
                graceful_timeout=time_or_none("graceful_timeout", graceful_timeout),
                ack_policy=ack_policy,
                id_generator=gen_cor_id if id_generator is EMPTY else partial(id_generator),
                underlying_driver_annotations=underlying_driver_annotations or {},
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                url=_urls(specification_url, self.engine),
                protocol=protocol or self._store.dialect_name,
                protocol_version=protocol_version,
                description=description,
                security=security,
                tags=ServiceTags(tags, lambda: self.pipelines),
            ),
            routers=routers,
        )

    def _work_on(self, store: Store, clock: Clock) -> None:
        """Make the parts that work on `store` and live by `clock`."""
        self._clock = clock
        self._store = store
        if self._debug is not None:
            store.policies.tell_decisions(self._debug.decided)
        self._wakeups = Wakeups(store, self._log_of_loops, clock)
        self._serve_application(store, self._wakeups, self._log_of_loops, self._recorder)
        self._heartbeat = Heartbeat(
            self._store,
            self._log_of_loops,
            self._presence_interval,
            outages=self._wakeups.outages,
            clock=self._clock,
        )
        self._wakeups.on_pauses = self._state_changed
        self._lookout = Lookout(
            store, clock, self._heartbeat, is_told=lambda: self._wakeups.listening
        )
        self._jobs = JobRunner(store, self._log_of_loops, clock)
        self._housekeeping = Housekeeping(store, self._log_of_loops, clock, self._jobs)
        self._rights = Rights(self._store, self._log_of_loops, self._wakeups.outages, self._clock)
        log = self._log_of_loops
        self._write_path = WritePath(store, self._heartbeat, self._wakeups.outages, log, clock)
        self._partitions: "PartitionLoop | None" = None
        if self._has_partitions:
            from faststream_sqlbroker.flow.tasks.archive_upkeep import PartitionLoop  # noqa: PLC0415

            self._partitions = PartitionLoop(store, self._log_of_loops, clock)
        self._pruning: "RetentionLoop | None" = None
        if self._retention is not None:
            from faststream_sqlbroker.flow.tasks.archive_upkeep import RetentionLoop  # noqa: PLC0415

            self._pruning = RetentionLoop(store, self._retention, self._log_of_loops, clock)

    def _publish_limits(self, store: Store, clock: Clock) -> "PublishLimits | None":
        """What publishes are held to; None if nothing."""
        if self._max_payload is None and not self._max_depth:
            return None
        from faststream_sqlbroker.flow.publish_limits import PublishLimits  # noqa: PLC0415

        return PublishLimits(
            store,
            self._max_depth,
            self._max_payload,
            log=self._log_of_loops,
            clock=clock,
            recorder=self._recorder,
        )

    def _state_changed(self) -> None:
        """Another process may have paused a queue, redefined a schedule, or begun a job."""
        self._heartbeat.wake()
        self._scheduler.wake()
        self._jobs.look()

    def _make_sampler(self) -> "Sampler | None":
        """What reads gauges; None if no metrics are asked for."""
        recorder = self._recorder
        if recorder is None:
            return None
        from faststream_sqlbroker.flow.fleet.sampling import Sampler  # noqa: PLC0415

        log = self._log_of_loops
        return Sampler(
            self._store,
            recorder,
            log,
            self._clock,
            self._running_consumers,
            self._count_findings,
            self._write_path.look,
        )

    async def _count_findings(self) -> dict[tuple[str, ...], float]:
        """What an operator has to look at; nothing if this process may not read it."""
        # A refused statement would count as a right that its subscribers lack.
        access = await self._store.access.find_lacks(frozenset({Activity.OPERATE}))
        if access.lacks:
            return {}
        # One series is always there, so that alerts can ask whether any process tells findings.
        return {("no subscriber", "error", ""): 0, **(await self.admin.findings()).counts}

    def _running_consumers(self) -> "Iterator[tuple[tuple[str, ...], Consumer]]":
        for subscriber in self.subscribers:
            consumer: Consumer | None = getattr(subscriber, "consumer", None)
            if consumer is not None:
                yield subscriber.queues, consumer

    @property
    def admin(self) -> "Admin":
        """Operations for operators, such as pausing a queue; they work before `start`, too."""
        from faststream_sqlbroker.admin import Admin  # noqa: PLC0415

        return Admin(
            self._store,
            channel=self._wakeups.channel,
            heard=self._heartbeat.heard,
            asked=self._heartbeat.asked,
            turn=self._heartbeat.turn,
            pipelines=getattr(self, "pipelines", ()),
            woken=self._wakeups.published,
            rescheduled=self._scheduler.wake,
            publish=self._publish_noted,
            process=self._process_health,
            surroundings=self._surroundings,
            write_problem=self._write_path.look,
        )

    @property
    def archive(self) -> "Archive":
        """Reads what was archived, as Arrow's record batches; it works before `start`, too."""
        from faststream_sqlbroker.archive_reader import Archive  # noqa: PLC0415 - knows the readers

        return Archive(self._store)

    def _surroundings(self) -> "Surroundings":
        from faststream_sqlbroker.core.health import Surroundings  # noqa: PLC0415

        relays: dict[str, bool] = {}
        for each in self.subscribers:
            relays |= getattr(each, "relays", {})
        awaited = self._store.can_listen and self._wakeups.awaited
        return Surroundings(
            listening=self._wakeups.listening if awaited else None,
            relays=relays,
            is_running=self.running,
        )

    def _process_health(self) -> "ProcessHealth":
        from faststream_sqlbroker.core.health import ProcessHealth  # noqa: PLC0415

        running = tuple(consumer.health for _, consumer in self._running_consumers())
        return ProcessHealth(self._activities, running)

    # -- start and stop ------------------------------------------------------------------------

    @override
    async def _connect(self) -> AsyncEngine:
        config: Any = self.config
        serializer = config.fd_config._serializer  # noqa: SLF001
        config.producer.connect(serializer, config.broker_codec, lambda: config.context)
        self._plain.look(self)
        self._serving_ended = False
        self._write_path.open()
        return self.engine

    @override
    async def start(self) -> None:
        """Check the database, its tables and the rights on them, then start the subscribers.

        Calls of `start` and `stop` take turns, and the last one wins: if `stop` is called in the
        meantime, the broker is stopped when this returns.

        Raises:
            RightsError: the database user lacks rights that this process needs; the text names each
                with its GRANT.
            SchemaError: the tables differ from those needed; the text names every difference and
                how to remove it. Or a subscriber has max_fetch_interval=None without triggers.
            SetupError: a setting of the server does not work with the broker, two schedules have
                the same name, dead letters would go in a circle for ever, or a subscriber has the
                queue of a pull consumer.
            StoreError: the database cannot be reached.
        """
        async with self._start_stop.starting() as is_wanted:
            if is_wanted():
                await self._start_all()
                if not is_wanted():
                    await self._stop_all()

    async def _start_all(self) -> None:
        refuse_endless_dead_letters(self.subscribers)
        await self.connect()
        await self._rights.check(self._activities)
        await self._store.server.setup()
        if self._validate_schema:
            await self._check_schema()
        await self._check_trigger()
        await self._refuse_pull_queues()
        from faststream_sqlbroker.broker.startup_warnings import startup_warnings  # noqa: PLC0415

        for level, text in startup_warnings(self._store, self.subscribers):
            self._log_of_loops(level, text)
        self._scheduler.plan(self.schedules)
        if self.subscribers:
            self._jobs.start()
        await self._with_probes(super().start)
        self._scheduler.start()
        if self._sampler is not None:
            self._sampler.start(self._wakeups.outages)
        await self._start_archive()

    async def _start_archive(self) -> None:
        """Start what keeps the archive in shape, or tell that nothing does."""
        if self._adds_partitions and self._partitions is not None:
            self._partitions.start(self._wakeups.outages)
        if self._pruning is not None:
            self._pruning.start(self._wakeups.outages)
        elif self.subscribers:
            from faststream_sqlbroker.broker.startup_warnings import growth_line  # noqa: PLC0415

            if growth := await growth_line(self._store):
                self._log_of_loops(logging.INFO, growth)

    @property
    def _adds_partitions(self) -> bool:
        """Whether this process looks for missing partitions: one that only publishes does not."""
        return self._has_partitions and bool(self.subscribers or self._retention)

    @property
    def _has_partitions(self) -> bool:
        return self._store.tables.config.archive_partitions is not None

    @property
    def _activities(self) -> Activities:
        """What the declared subscribers, publishers and schedules do in the database."""
        found = {Activity.SCHEDULE} if self.schedules else set()
        for subscriber in self.subscribers:
            found |= getattr(subscriber, "activities", set())
        if self.publishers or self.schedules:
            found.add(Activity.PUBLISH)
        if self._max_depth:
            found.add(Activity.COUNT)
        if self._retention is not None:
            found |= {Activity.PRUNE, Activity.LOCK}
        if self._adds_partitions:
            found.add(Activity.LOCK)
        return frozenset(found)

    async def _check_schema(self) -> None:
        problems = await self._store.server.differences()
        if problems:
            from faststream_sqlbroker.schema.validate import advice  # noqa: PLC0415

            msg = f"{advice(problems)}\nvalidate_schema_on_start=False starts all the same"
            # `faststream run` prints a long traceback before the text; the log shows it at once.
            self._log_of_loops(logging.CRITICAL, msg.splitlines()[0])
            raise SchemaError(msg)

    async def _check_trigger(self) -> None:
        subscribers: list[Any] = self.subscribers
        told_only = any(each.config.settings.told_only for each in subscribers)
        if (
            told_only
            and self._store.can_listen
            and not await self._store.server.has_notify_trigger()
        ):
            raise SchemaError(
                "a subscriber has max_fetch_interval=None, but the table "
                f"{self._store.tables.message.name!r} has no triggers that tell it of messages: "
                "create them with SqlBrokerSchemaConfig(notify_trigger=True) and "
                "broker.create_tables(), or the migrations rendered with it; or give a "
                "max_fetch_interval such as 10"
            )

    @override
    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop claiming, wait up to `graceful_timeout` for running handlers, write their outcomes.

        The broker can be started again. An engine that the caller passed is not disposed of. A
        `start` that runs is waited for first, for up to `graceful_timeout`, unless it has called
        this, by a hook or a handler.

        Raises:
            SetupError: it belongs to another event loop, which is still open.
        """
        self._store.refuse_other_loop()
        async with self._start_stop.stopping(self.config.graceful_timeout):
            await self._stop_all(exc_type, exc_val, exc_tb)

    async def _stop_all(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        # The scheduler stops at the same time as the subscribers, so that both together take one
        # graceful_timeout, not two.
        scheduler = asyncio.create_task(self._scheduler.stop(self.config.graceful_timeout))
        try:
            await super().stop(exc_type, exc_val, exc_tb)
        finally:
            await scheduler
        if self._sampler is not None:
            await self._sampler.stop()
        await self._jobs.stop()
        if self._partitions is not None:
            await self._partitions.stop()
        if self._pruning is not None:
            await self._pruning.stop()
        await self._end_serving()
        await self._requests.stop()
        await self._shielded.close()
        await self._wakeups.stop()
        await self._rights.stop()
        await self._write_path.stop()
        await self._store.close()
        if self._owns_engine:
            await self.engine.dispose()
        if self._listen_engine is not None:
            await self._listen_engine.dispose()
        self._connection = None

    @override
    async def ping(self, timeout: Duration | None = 3.0) -> bool:
        """Whether the database takes writes within `timeout` and every running loop works.

        A sign of life of the last 8 seconds proves that, else a small write does of which nothing
        is left, and which calls at the same time share. It is False, too, while a table is missing,
        and from the first statement that was refused for a missing right until that right is given.

        Args:
            timeout: Seconds, a timedelta or text like "3s"; None is `statement_timeout`.

        Raises:
            SetupError: `timeout` is not a valid duration, or the broker belongs to another event
                loop, which is still open.
        """
        limit = time_or_none("timeout", timeout)
        began = self._clock.monotonic()
        answers = await self._store.access.ping(limit, self._rights.activities)
        remaining = None if limit is None else limit - (self._clock.monotonic() - began)
        # Also if that or a loop fails: the reason may be that nothing can be written.
        loops = (self._scheduler, self._rights, *self.subscribers)
        fine = await self._write_path.look_within(remaining) is None
        return answers and fine and all(getattr(loop, "healthy", True) for loop in loops)

    async def create_tables(self) -> None:
        """Create the tables that are missing; for development and tests.

        Raises:
            SchemaError: a table of that name exists and is not the broker's.
        """
        await self._store.server.create_tables()

    def _tell_debug(self, text: str, message_id: int | None, queue: str) -> None:
        self._setup_logger()
        logger = self.config.logger
        extra = {"queue": queue, "message_id": "" if message_id is None else str(message_id)}
        logger.log(text, passing_level(getattr(logger.logger, "logger", None)), extra=extra)

    def _log_of_loops(
        self, level: int, text: str, *, exc_info: BaseException | None = None, **_: Any
    ) -> None:
        # `connect` sets the logger up, but `admin` works without `connect`.
        self._setup_logger()
        self.config.logger.log(
            text, level, extra={"queue": "", "message_id": ""}, exc_info=exc_info
        )


def _urls(given: str | Iterable[str] | None, engine: AsyncEngine) -> list[str]:
    """The server's addresses in AsyncAPI documents, which are public: a query may hold secrets."""
    if given is None:
        own = engine.url
        shown = URL.create(own.drivername, host=own.host, port=own.port, database=own.database)
        return [shown.render_as_string()]
    return [given] if isinstance(given, str) else list(given)


def _injection(
    apply_types: bool, serializer: Any, provider: Any, context: Any
) -> FastDependsConfig:
    return FastDependsConfig(
        use_fastdepends=apply_types,
        serializer=serializer,
        provider=provider or dependency_provider,
        context=context or ContextRepo(),
    )
