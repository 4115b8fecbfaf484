"""`SqlBroker`: create the components, connect them to FastStream, and start and stop them."""

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
from faststream_sqlbroker.broker.engine_factory import make_engine, make_listen_engine
from faststream_sqlbroker.broker.from_yaml import SqlBrokerConfigured
from faststream_sqlbroker.broker.logging import find_enabled_level, make_queue_logger_state
from faststream_sqlbroker.broker.pipelines import ServiceTags, check_dead_letter_loop
from faststream_sqlbroker.broker.plain_publish import PlainPublish
from faststream_sqlbroker.broker.registrator import SqlBrokerRegistrator
from faststream_sqlbroker.broker.reserving import SqlBrokerReserving
from faststream_sqlbroker.broker.serving import SqlBrokerServing
from faststream_sqlbroker.broker.start_stop import StartStop
from faststream_sqlbroker.broker.under_test import SqlBrokerUnderTest
from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.depth import MaxDepth, validate_depths
from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import SchemaError, SetupError
from faststream_sqlbroker.flow.fleet.heartbeat import INTERVAL, Heartbeat
from faststream_sqlbroker.flow.fleet.housekeeping import Housekeeping, JobRunner
from faststream_sqlbroker.flow.fleet.lookout import SharedPoller
from faststream_sqlbroker.flow.fleet.rights import Rights
from faststream_sqlbroker.flow.fleet.write_path import WritePath
from faststream_sqlbroker.flow.metrics import GuardedRecorder
from faststream_sqlbroker.flow.publish import Publisher
from faststream_sqlbroker.flow.tasks.requests import Requests
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.publisher.producer import SqlBrokerProducer
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.partitions import check_dialect
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.subscriber.option_checks import parse_optional_duration

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
    from faststream_sqlbroker.core.health import ProcessHealth, ProcessInfo
    from faststream_sqlbroker.core.retention import Retention
    from faststream_sqlbroker.flow.consumer import QueueConsumer
    from faststream_sqlbroker.flow.debug_log import DebugLog
    from faststream_sqlbroker.flow.fleet.sampling import Sampler
    from faststream_sqlbroker.flow.publish_limits import PublishLimits
    from faststream_sqlbroker.flow.tasks.archive_upkeep import PartitionLoop, RetentionLoop

# Modules that few processes use, such as `admin`, are imported on use: they would take a third of
# the time of each start.


class SqlBroker(
    SqlBrokerRegistrator,
    SqlBrokerReserving,
    SqlBrokerServing,
    SqlBrokerConfigured,
    SqlBrokerUnderTest,
):
    """A FastStream message broker in a relational database.

    Messages are rows of a table in PostgreSQL, MySQL, MariaDB or SQLite.
    """

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
        """Create a broker, without connecting to the database yet.

        Durations are seconds, a timedelta or text like "1.5m".

        Args:
            engine: An AsyncEngine, or a database URL. The broker disposes only of an engine that it
                created from a URL.
            schema: Names of the tables.
            validate_schema_on_start: Compare the tables with the required schema in `start`.
            statement_timeout: Maximum duration of each of the broker's transactions, including the
                wait for a connection; greater than 0.
            max_connections: Maximum number of connections for claiming, writing outcomes and
                maintenance together; default half of the engine's pool. Publishing takes one more
                connection, LISTEN another.
            pgbouncer: The engine connects to a PgBouncer in transaction mode: the broker then uses
                no named statements, and LISTEN only through `listen_url`.
            listen_url: A URL for LISTEN that bypasses PgBouncer and connects directly to the same
                database, with asyncpg.
            graceful_timeout: Time that `stop` waits for running handlers, 0 or more; None waits
                without limit.
            presence_interval: Time between two heartbeats of this process's subscribers in the
                database, 100 ms or more. Within this time they learn of paused queues. A process
                counts as dead after four intervals without a heartbeat.
            max_payload: Maximum size in bytes of a body that this process publishes, including
                answers; None leaves the limit to the database.
            max_depth: Maximum number of due messages in a queue, by the queue's full name. Beyond
                it, publishes of this process to the queue wait, raise or are dropped; a number is
                short for a `MaxDepth` with that limit.
            retention: Time that finished messages stay in the archive; one process of the fleet
                removes older messages. None keeps all messages, and the log reports at the start
                how fast the archive grows.
            metrics: Recorder of the broker's own metrics, such as `SqlBrokerPrometheusMetrics`;
                None disables them.
            health_port: Serve /health/live, /health/ready and /metrics without authentication on
                this port while the broker runs: a number (on all addresses), or "host:port". Each
                process needs its own port: with "8081-8084" the broker takes the first free port of
                the range, with 0 any free port; the log names it. Requires the extra `http`.
            debug_header: Name of a header, such as "X-Debug", by which a message requests that each
                of its steps is logged with a timestamp, at any log level; at most 60 messages per
                minute and process. None disables this.
            ack_policy: Default ack policy of all subscribers.
            decoder: Default decoder of bodies.
            parser: Default parser of rows.
            codec: Encodes and decodes bodies; cannot be combined with a decoder.
            dependencies: Dependencies of every handler.
            middlewares: Middlewares of every handler and publish.
            routers: Routers to include.
            security: User, password and TLS of the connections that the broker opens from a URL
                (including `listen_url`), and the server's security in AsyncAPI documents. An
                AsyncEngine keeps its own.
            specification_url: Address in AsyncAPI documents; default the engine's host, port and
                database, without user, password and other parameters.
            protocol: Protocol in AsyncAPI documents; default the database's name.
            protocol_version: Version of the protocol in AsyncAPI documents.
            description: Description of the server in AsyncAPI documents.
            tags: Tags of the server in AsyncAPI documents.
            logger: A logger; None disables logging.
            log_level: Level of FastStream's own log lines.
            apply_types: Validate and convert handler arguments by their annotations.
            serializer: FastDepends' serializer.
            provider: FastDepends' provider.
            context: FastStream's context.
            id_generator: Creates the correlation id of a message that is published without one,
                such as `faststream.message.gen_cor_id` for a random UUID. By default no id is
                stored, because storing one would add a fifth to the CPU time of a publish; handlers
                then see a UUID derived from the message's id and random bits of the database.
            underlying_driver_annotations: Classes that handlers must not be annotated with, each
                with the annotation to use instead, or with a faststream.UnderlyingDriverAnnotation
                that names its import. They are added to the broker's defaults: AsyncConnection,
                AsyncSession and the broker's own classes.

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
        check_dialect(self.engine.dialect.name, schema)
        store = Store(
            self.engine,
            build_tables(schema),
            statement_timeout=parse_positive("statement_timeout", statement_timeout),
            max_connections=max_connections,
            pgbouncer=pgbouncer,
            listen_engine=self._listen_engine,
            clock=clock,
        )
        self._recorder = None if metrics is None else GuardedRecorder(metrics, self._log_of_loops)
        self._max_payload = max_payload
        self._max_depth = validate_depths(max_depth)
        if max_payload is not None:
            validate_integer("max_payload", max_payload, other=" of bytes, or None")
        self._retention = retention
        if retention is not None:
            from faststream_sqlbroker.core.retention import (  # noqa: PLC0415
                NO_ARCHIVE,
                validate_retention,
            )

            validate_retention(retention)
            if store.tables.archive is None:
                raise SetupError(NO_ARCHIVE)
        self._debug: "DebugLog | None" = None
        if debug_header is not None:
            from faststream_sqlbroker.flow.debug_log import DebugLog, validate_debug_header  # noqa: PLC0415

            self._debug = DebugLog(validate_debug_header(debug_header), self._log_debug, clock)
        self._create_probes(health_port, metrics)
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
                fd_config=_build_di_config(apply_types, serializer, provider, context),
                broker_dependencies=dependencies,
                graceful_timeout=parse_optional_duration("graceful_timeout", graceful_timeout),
                ack_policy=ack_policy,
                id_generator=gen_cor_id if id_generator is EMPTY else partial(id_generator),
                underlying_driver_annotations=underlying_driver_annotations or {},
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                url=_build_urls(specification_url, self.engine),
                protocol=protocol or self._store.dialect_name,
                protocol_version=protocol_version,
                description=description,
                security=security,
                tags=ServiceTags(tags, lambda: self.pipelines),
            ),
            routers=routers,
        )

    def _work_on(self, store: Store, clock: Clock) -> None:
        """Create the components that use `store` and `clock`; nothing runs before `start`.

        A test calls it again, to replace all components by those of its own database and time.
        """
        self._clock = clock
        self._store = store
        if self._debug is not None:
            store.policies.set_decision_listener(self._debug.log_decisions)
        self._wakeups = Wakeups(store, self._log_of_loops, clock)
        self._build_application_services(store, self._wakeups, self._log_of_loops, self._recorder)
        self._heartbeat = Heartbeat(
            self._store,
            self._log_of_loops,
            self._presence_interval,
            outages=self._wakeups.outages,
            clock=self._clock,
        )
        # Called when another process has announced a change, not only of a pause.
        self._wakeups.on_pauses = self._on_state_changed
        self._lookout = SharedPoller(
            store, clock, self._heartbeat, has_notifications=lambda: self._wakeups.is_listening
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
        """Create the limits of publishes, such as that of a body's size; None without limits."""
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

    def _on_state_changed(self) -> None:
        """Wake the loops after a change of the shared state.

        Another process may have paused a queue, changed a schedule or started a job.
        """
        self._heartbeat.wake()
        self._scheduler.wake()
        self._jobs.run_due()

    def _make_sampler(self) -> "Sampler | None":
        """Create the sampler, which measures gauges such as queue depths; None without metrics."""
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
            self._iter_running_consumers,
            self._count_findings,
            self._write_path.check,
        )

    async def _count_findings(self) -> dict[tuple[str, ...], float]:
        """Count the findings of `admin.findings()`, problems for an operator, as gauge values.

        The keys are the values of the labels kind, level and queue. Return an empty dict if the
        database user lacks the right to search for them.
        """
        # Check first: a refused statement would count as a right that the subscribers lack.
        access = await self._store.access.find_missing_rights(frozenset({Activity.OPERATE}))
        if access.missing:
            return {}
        # One series always exists, so that alerts can check whether any process reports findings.
        return {("no subscriber", "error", ""): 0, **(await self.admin.findings()).counts}

    def _iter_running_consumers(self) -> "Iterator[tuple[tuple[str, ...], QueueConsumer]]":
        """Yield the queues and the running loops of each started subscriber."""
        for subscriber in self.subscribers:
            consumer: QueueConsumer | None = getattr(subscriber, "consumer", None)
            if consumer is not None:
                yield subscriber.queues, consumer

    @property
    def admin(self) -> "Admin":
        """Operations for operators, such as pausing a queue; available before `start`, too."""
        from faststream_sqlbroker.admin import Admin  # noqa: PLC0415
        from faststream_sqlbroker.admin.operations import ProcessHooks  # noqa: PLC0415

        hooks = ProcessHooks(
            channel=self._wakeups.channel,
            on_paused=self._heartbeat.apply_paused,
            on_cancel_requested=self._heartbeat.notify_cancel,
            pause_semaphore=self._heartbeat.change_lock,
            pipelines=getattr(self, "pipelines", ()),
            on_due=self._wakeups.notify_published,
            on_rescheduled=self._scheduler.wake,
            publish=self._publish_audited,
            get_process=self._get_process_health,
            get_process_info=self._get_process_info,
            find_write_problem=self._write_path.check,
        )
        return Admin(self._store, hooks)

    @property
    def archive(self) -> "Archive":
        """Access to archived messages as Arrow record batches; available before `start`, too."""
        from faststream_sqlbroker.archive_reader import Archive  # noqa: PLC0415 - imports the readers

        return Archive(self._store)

    def _get_process_info(self) -> "ProcessInfo":
        """Describe the process for `admin`: LISTEN, publishers of other brokers, running or not.

        LISTEN is PostgreSQL's wake-up of waiting subscribers. `listening` is None if the process
        waits for no wake-ups.
        """
        from faststream_sqlbroker.core.health import ProcessInfo  # noqa: PLC0415

        relays: dict[str, bool] = {}
        for subscriber in self.subscribers:
            # Relays are publishers of other brokers, to which handlers' answers go.
            relays |= getattr(subscriber, "relays", {})
        awaited = self._store.can_listen and self._wakeups.registered_queues
        return ProcessInfo(
            listening=self._wakeups.is_listening if awaited else None,
            relays=relays,
            is_running=self.running,
        )

    def _get_process_health(self) -> "ProcessHealth":
        """Return the needed rights and the health of the running subscribers, for HTTP checks."""
        from faststream_sqlbroker.core.health import ProcessHealth  # noqa: PLC0415

        running = tuple(consumer.health for _, consumer in self._iter_running_consumers())
        return ProcessHealth(self._activities, running)

    # -- start and stop ------------------------------------------------------------------------

    @override
    async def _connect(self) -> AsyncEngine:
        """Prepare the components for use; the engine itself connects at the first statement.

        FastStream's `connect` calls it once, before the first publish, reservation or lock, or at
        the start of the broker.
        """
        config: Any = self.config
        serializer = config.fd_config._serializer  # noqa: SLF001
        config.producer.connect(serializer, config.broker_codec, lambda: config.context)
        self._plain.check_broker(self)
        self._serving_ended = False
        self._write_path.open()
        return self.engine

    @override
    async def start(self) -> None:
        """Check the database, the tables and the rights on the tables, then start the subscribers.

        Calls of `start` and `stop` take turns, and the last call wins: if `stop` is called in the
        meantime, the broker is stopped when this method returns.

        Raises:
            RightsError: the database user lacks rights that this process needs; the text names each
                right with its GRANT.
            SchemaError: the tables differ from the required schema; the text names every difference
                and how to remove it. Or a subscriber has max_fetch_interval=None without triggers.
            SetupError: a setting of the server does not work with the broker, two schedules have
                the same name, dead letters would circulate forever, or a subscriber has the queue
                of a pull consumer.
            StoreError: the database cannot be reached.
        """
        async with self._start_stop.wait_to_start() as is_wanted:
            if is_wanted():
                await self._start_all()
                if not is_wanted():
                    await self._stop_all()

    async def _start_all(self) -> None:
        """Run all checks, then start: maintenance, probes, subscribers, schedules and metrics.

        The checks come first, so an invalid setting fails the start before anything runs.
        """
        check_dead_letter_loop(self.subscribers)
        await self.connect()
        await self._rights.check(self._activities)
        await self._store.server.setup()
        if self._validate_schema:
            await self._check_schema()
        await self._check_trigger()
        await self._check_pull_queues()
        from faststream_sqlbroker.broker.startup_warnings import iter_startup_warnings  # noqa: PLC0415

        for level, text in iter_startup_warnings(self._store, self.subscribers):
            self._log_of_loops(level, text)
        self._scheduler.set_schedules(self.schedules)
        if self.subscribers:
            self._jobs.start()
        await self._start_with_probes(super().start)
        self._scheduler.start()
        if self._sampler is not None:
            self._sampler.start(self._wakeups.outages)
        await self._start_archive_upkeep()

    async def _start_archive_upkeep(self) -> None:
        """Start the maintenance of the archive, or log the growth of an archive without retention.

        Maintenance creates missing partitions and removes old messages.
        """
        if self._adds_partitions and self._partitions is not None:
            self._partitions.start(self._wakeups.outages)
        if self._pruning is not None:
            self._pruning.start(self._wakeups.outages)
        elif self.subscribers:
            from faststream_sqlbroker.broker.startup_warnings import format_archive_growth  # noqa: PLC0415

            if growth := await format_archive_growth(self._store):
                self._log_of_loops(logging.INFO, growth)

    @property
    def _adds_partitions(self) -> bool:
        """True if this process creates missing partitions.

        A process that only publishes does not.
        """
        return self._has_partitions and bool(self.subscribers or self._retention)

    @property
    def _has_partitions(self) -> bool:
        return self._store.tables.config.archive_partitions is not None

    @property
    def _activities(self) -> Activities:
        """The kinds of database access that this broker's declarations need.

        At the start, the user's rights are checked for these.
        """
        activities = {Activity.SCHEDULE} if self.schedules else set()
        for subscriber in self.subscribers:
            activities |= getattr(subscriber, "activities", set())
        if self.publishers or self.schedules:
            activities.add(Activity.PUBLISH)
        if self._max_depth:
            activities.add(Activity.COUNT)
        if self._retention is not None:
            activities |= {Activity.PRUNE, Activity.LOCK}
        if self._adds_partitions:
            activities.add(Activity.LOCK)
        return frozenset(activities)

    async def _check_schema(self) -> None:
        """Refuse to start on tables that differ from the required schema."""
        differences = await self._store.server.find_differences()
        if differences:
            from faststream_sqlbroker.schema.validate import format_advice  # noqa: PLC0415

            msg = (
                f"{format_advice(differences)}\nTo start without this check, set "
                "validate_schema_on_start=False"
            )
            # `faststream run` prints a long traceback before the text; the log shows the text
            # first.
            self._log_of_loops(logging.CRITICAL, msg.splitlines()[0])
            raise SchemaError(msg)

    async def _check_trigger(self) -> None:
        """Refuse a subscriber with max_fetch_interval=None if the table has no notify trigger.

        Such a subscriber never polls. Without the trigger it would miss messages that other
        programs insert.
        """
        subscribers: list[Any] = self.subscribers
        is_notify_only = any(subscriber.config.settings.notify_only for subscriber in subscribers)
        if (
            is_notify_only
            and self._store.can_listen
            and not await self._store.server.has_notify_trigger()
        ):
            raise SchemaError(
                "a subscriber has max_fetch_interval=None, but the table "
                f"{self._store.tables.message.name!r} has no triggers that announce messages: "
                "create them with SqlBrokerSchemaConfig(notify_trigger=True) and "
                "broker.create_tables(), or with migrations rendered from that schema; or set a "
                "max_fetch_interval, such as 10"
            )

    @override
    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop claiming, wait for running handlers, and write their outcomes.

        Handlers get up to `graceful_timeout` to end.

        The broker can be started again. An engine that the caller passed is not disposed of. A
        running `start` is awaited first, for up to `graceful_timeout`, unless it has called this
        method itself, in a hook or a handler.

        Raises:
            SetupError: the broker belongs to another event loop, which is still open.
        """
        self._store.refuse_other_loop()
        async with self._start_stop.wait_to_stop(self.config.graceful_timeout):
            await self._stop_all(exc_type, exc_val, exc_tb)

    async def _stop_all(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop everything that `_start_all` started, and close the connections.

        The arguments describe the exception that ended the broker's context manager, if any.
        """
        # Handlers end first, because they use everything else; connections are closed last.
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
        await self._stop_serving()
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
        """Return True if the database accepts writes within `timeout` and every running loop works.

        A sign of life of the last 8 seconds is sufficient proof; otherwise the broker makes a small
        write that leaves nothing behind and that simultaneous calls share. The result is also False
        while a table is missing, and from the first statement that was refused for a missing right
        until the right is granted.

        Args:
            timeout: Seconds, a timedelta or text like "3s"; None uses `statement_timeout`.

        Raises:
            SetupError: `timeout` is not a valid duration, or the broker belongs to another event
                loop, which is still open.
        """
        limit = parse_optional_duration("timeout", timeout)
        started_at = self._clock.monotonic()
        is_reachable = await self._store.access.ping(limit, self._rights.activities)
        remaining = None if limit is None else limit - (self._clock.monotonic() - started_at)
        # Check this even if the ping or a loop fails, because the reason may be that nothing can be
        # written.
        loops = (self._scheduler, self._rights, *self.subscribers)
        is_writable = await self._write_path.check_within(remaining) is None
        return (
            is_reachable and is_writable and all(getattr(loop, "healthy", True) for loop in loops)
        )

    async def create_tables(self) -> None:
        """Create missing tables; for development and tests.

        Raises:
            SchemaError: a table of that name exists and does not belong to the broker.
        """
        await self._store.server.create_tables()

    def _log_debug(self, text: str, message_id: int | None, queue: str) -> None:
        """Log a step of a message with the debug header, at a level that the logger writes.

        The user has requested these lines for single messages, so no log level may hide them.
        """
        self._setup_logger()
        logger = self.config.logger
        extra = {"queue": queue, "message_id": "" if message_id is None else str(message_id)}
        logger.log(text, find_enabled_level(getattr(logger.logger, "logger", None)), extra=extra)

    def _log_of_loops(
        self, level: int, text: str, *, exc_info: BaseException | None = None, **_: Any
    ) -> None:
        """Log for components that belong to no subscriber, with empty queue and message columns."""
        # `connect` sets the logger up, but `admin` works without `connect`.
        self._setup_logger()
        self.config.logger.log(
            text, level, extra={"queue": "", "message_id": ""}, exc_info=exc_info
        )


def _build_urls(urls: str | Iterable[str] | None, engine: AsyncEngine) -> list[str]:
    """Return the server's addresses for AsyncAPI documents.

    The documents are public, so queries are left out: they may hold secrets.
    """
    if urls is None:
        url = engine.url
        public_url = URL.create(url.drivername, host=url.host, port=url.port, database=url.database)
        return [public_url.render_as_string()]
    return [urls] if isinstance(urls, str) else list(urls)


def _build_di_config(
    apply_types: bool, serializer: Any, provider: Any, context: Any
) -> FastDependsConfig:
    """Build FastStream's configuration of FastDepends, which builds the arguments of handlers."""
    return FastDependsConfig(
        use_fastdepends=apply_types,
        serializer=serializer,
        provider=provider or dependency_provider,
        context=context or ContextRepo(),
    )
