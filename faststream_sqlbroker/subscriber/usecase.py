"""A subscriber: FastStream's pipeline between the loops of `flow`."""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, overload

from faststream import AckPolicy
from faststream.exceptions import SkipMessage, StopConsume
from typing_extensions import Unpack, override

from faststream_sqlbroker.adapter.endpoints import SubscriberUsecase
from faststream_sqlbroker.batch_start import wrap_to_mark_start
from faststream_sqlbroker.call_assertions import SqlHandlerCallWrapper
from faststream_sqlbroker.control_exceptions import ControlException, apply_unacknowledged
from faststream_sqlbroker.core.access import Activities
from faststream_sqlbroker.core.outcome import Nack, Reject
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.rows import ClaimedMessage, format_row_ids
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.exceptions import NotSupportedError, SetupError
from faststream_sqlbroker.flow.consumer import QueueConsumer
from faststream_sqlbroker.flow.deliver.delivery import Handle
from faststream_sqlbroker.flow.deliver.forward import ForwardHandler
from faststream_sqlbroker.flow.fleet.rights import get_activities
from faststream_sqlbroker.flow.loop import is_task_cancelled
from faststream_sqlbroker.handler_calls import (
    adapt_handler,
    check_not_generator,
    ensure_name,
    is_synchronous,
)
from faststream_sqlbroker.publisher.usecase import ReplyPublisher
from faststream_sqlbroker.subscriber.batches import Batches
from faststream_sqlbroker.subscriber.config import (
    QueueSubscriberConfig,
    QueueSubscriberSpecification,
)
from faststream_sqlbroker.subscriber.invalid_body import settle_invalid
from faststream_sqlbroker.subscriber.option_checks import check_ack_timing
from faststream_sqlbroker.subscriber.options import SubscriberSettings, replace_settings
from faststream_sqlbroker.subscriber.pipeline.acknowledging import SkipMiddleware
from faststream_sqlbroker.subscriber.pipeline.choice import HandlerPipeline
from faststream_sqlbroker.subscriber.pulling import (
    PulledMessage,
    Pulling,
    check_no_handlers,
    check_options,
)
from faststream_sqlbroker.subscriber.relay import ForwardHeaders, find_relays
from faststream_sqlbroker.subscriber.running_calls import RunningCalls
from faststream_sqlbroker.subscriber.transactions import TRANSACTION, check_transaction

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant
    from faststream.message import StreamMessage

    from faststream_sqlbroker.adapter.endpoints import CallsCollection, PublisherProto
    from faststream_sqlbroker.adapter.values import (
        AsyncCallable,
        BrokerMiddleware,
        CustomCallable,
        P_HandlerParams,
        T_HandlerReturn,
    )


class HandlerOptions(TypedDict, total=False):
    """Options of a handler of a subscriber with several handlers."""

    filter: Any
    """A function that takes a message and returns True if this handler should receive it."""
    parser: "CustomCallable | None"
    """Replaces the subscriber's parser."""
    decoder: "CustomCallable | None"
    """Replaces the subscriber's decoder."""
    dependencies: "Sequence[Dependant]"
    """Dependencies of this handler."""


class QueueSubscriber(SubscriberUsecase[Any]):
    """A subscriber, returned by `broker.subscriber(queues)`.

    It can be started and stopped any number of times.
    """

    _call_wrapper_class = SqlHandlerCallWrapper
    number: int
    """Position in the order in which subscribers and publishers were declared."""

    def __init__(
        self,
        config: QueueSubscriberConfig,
        specification: QueueSubscriberSpecification,
        calls: "CallsCollection[Any]",
    ) -> None:
        """Store the settings of `config`; nothing runs before `start`."""
        super().__init__(config, specification, calls)  # type: ignore[arg-type] # as for publishers
        self.config = config
        self._consumer: QueueConsumer | None = None
        self._pulling: Pulling | None = None
        self._is_paused = False
        self._pipeline: HandlerPipeline | None = None
        names = config.settings.forward_headers
        self._forward_headers = ForwardHeaders(None if names is True else names) if names else None
        self._batches = Batches(calls, self._log_of_loops) if config.settings.batch else None
        self._call_decorators = (self._adapt_handler,)
        if self._batches is not None:
            self._call_decorators = (wrap_to_mark_start, self._adapt_handler)

    @overload
    def __call__(
        self, func: "Callable[P_HandlerParams, T_HandlerReturn]", **options: Unpack[HandlerOptions]
    ) -> "SqlHandlerCallWrapper[P_HandlerParams, T_HandlerReturn]": ...

    @overload
    def __call__(
        self, func: None = None, **options: Unpack[HandlerOptions]
    ) -> """Callable[
        [Callable[P_HandlerParams, T_HandlerReturn]],
        SqlHandlerCallWrapper[P_HandlerParams, T_HandlerReturn],
    ]""": ...

    @override
    def __call__(self, func: Any = None, **options: Unpack[HandlerOptions]) -> Any:
        """Subscribe the handler `func`; see `HandlerOptions`.

        Raises:
            SetupError: `func` is a generator or async generator function.
        """
        if func is None:
            return partial(self.__call__, **options)
        check_not_generator(func)
        return super().__call__(ensure_name(func), **options)

    def _adapt_handler(self, handler: "Callable[..., Any]") -> "Callable[..., Any]":
        """Convert the handler to a coroutine function whose result is awaited if necessary.

        FastStream calls it once for each declared handler. A synchronous handler then runs in a
        thread, so it does not block the event loop.
        """
        dependencies: Any = self._outer_config.fd_config
        # FastDepends then refuses a result that does not fit the handler's annotation.
        is_checked = dependencies.use_fastdepends and not dependencies.get_dependent
        return adapt_handler(handler, validates_result=is_checked)

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues, with the routers' prefix."""
        return tuple(f"{self._outer_config.prefix}{queue}" for queue in self.config.settings.queues)

    @property
    def dead_letter_queue(self) -> str | None:
        """The queue of dead letters, with the routers' prefix."""
        queue = self.config.settings.dead_letter_queue
        return None if queue is None else f"{self._outer_config.prefix}{queue}"

    @property
    def forward_to(self) -> str | Destination | None:
        """The queue to which messages are moved instead of a handler, with the routers' prefix."""
        target = self.config.settings.forward_to
        return f"{self._outer_config.prefix}{target}" if isinstance(target, str) else target

    @property
    @override
    def _broker_middlewares(self) -> "Sequence[BrokerMiddleware[Any]]":
        # Only FastStream's own pipeline reads this property; the compiled pipeline acks skipped
        # messages itself.
        return (SkipMiddleware, *self.middlewares)

    @property
    def middlewares(self) -> "Sequence[BrokerMiddleware[Any]]":
        """The user's middlewares, then the middlewares of the subscriber's options."""
        middlewares = super()._broker_middlewares
        option_middlewares = tuple(
            middleware
            for middleware in (self._forward_headers, self._batches)
            if middleware is not None
        )
        return (*middlewares, *option_middlewares) if option_middlewares else middlewares

    @override
    def _get_parser_and_decoder(
        self, *args: Any, **options: Any
    ) -> "tuple[AsyncCallable, AsyncCallable]":
        """Return FastStream's parser and decoder.

        A custom parser of batches is wrapped to record that its errors come from a message of the
        batch, which is then delivered again in parts.
        """
        parser, decoder = super()._get_parser_and_decoder(*args, **options)
        if self._batches is not None and parser is not self._parser:
            parser = self._batches.wrap_parser(parser)
        return parser, decoder

    @property
    def relays(self) -> dict[str, bool]:
        """Publishers of other brokers that receive answers, with True if the publisher is ready."""
        return find_relays(call.handler for call in self.calls)

    @property
    def healthy(self) -> bool:
        """True unless a running loop has failed; also true before the start and after the stop."""
        return not self.running or self._consumer is None or self._consumer.healthy

    @property
    def consumer(self) -> QueueConsumer | None:
        """The running loops and their messages."""
        return self._consumer

    @property
    def paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._is_paused

    def pause(self) -> None:
        """Stop claiming messages here until `resume`; other processes and subscribers continue.

        Running handlers finish; messages that wait for a worker are released without counting a
        delivery. The pause applies to this object, across `stop` and `start`, but not to the next
        process; for that see `broker.admin.pause`. No effect on a paused subscriber.
        """
        self._set_paused(True)

    def resume(self) -> None:
        """Claim messages again. A queue paused by `broker.admin.pause` stays paused."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        """Pause or resume all claims of this subscriber.

        The consumer claims for the handler, `_pulling` for `get_one` and `async for`.
        """
        self._is_paused = paused
        if self._consumer is not None:
            self._consumer.pause(paused)
        if self._pulling is not None:
            self._pulling.pause(paused)

    @override
    async def start(self) -> None:
        """Start the loops, if there is a handler or forward_to.

        Raises:
            SetupError: the routers' prefix makes a queue's name invalid, handler_timeout is set for
                a synchronous handler, the broker's ack_policy does not fit transactional, ordered
                or dead_letter_queue, or forward_to=DESTINATION has no archive for messages without
                a destination.
            RightsError: the database user lacks rights that the subscriber needs.
            NotSupportedError: wakeup="listen" on a database or driver without this feature.
        """
        consumer = self._consumer
        if consumer is not None and (consumer.is_stopping or consumer.is_orphaned):
            # A handler requested the stop, or the event loop ended without a stop.
            await self.stop()
        if self.running and self._consumer is not None:
            return
        await self._outer_config.rights.check(self.activities)  # type: ignore[attr-defined]
        await self.prepare()
        if self.calls or self.forward_to is not None:
            self._consumer = self._make_consumer()
        self._post_start()
        if self._consumer is not None:
            if self._deletes_failed:
                self._log_of_loops(logging.WARNING, _DELETION_WARNING)
            await self._consumer.start()

    @property
    def _deletes_failed(self) -> bool:
        """True if messages that fail here are deleted, although the user did not request this.

        They are deleted without an archive table and without a dead-letter queue. The user requests
        it by retain_in_archive_on_reject=False.
        """
        settings = self.config.settings
        store = self._outer_config.store  # type: ignore[attr-defined]
        can_fail = settings.forward_to is not None or self.ack_policy is not AckPolicy.ACK_FIRST
        is_kept = store.dialect.has_archive or settings.dead_letter_queue is not None
        return can_fail and not is_kept and settings.retain_in_archive_on_reject

    @property
    def activities(self) -> Activities:
        """The kinds of database access that the loops need, such as claiming and archiving.

        `start` checks the database user's rights for them.
        """
        if not self.calls and self.forward_to is None:
            return frozenset()
        archive: bool = self._outer_config.store.dialect.has_archive  # type: ignore[attr-defined]
        acks_first = self.ack_policy is AckPolicy.ACK_FIRST and self.forward_to is None
        return get_activities(self.config.settings, ack_first=acks_first, archive=archive)

    def _make_consumer(self) -> QueueConsumer:
        """Create the loops that claim messages, run the handler or the forward, and settle.

        They do not run yet. A test sets `make_consumer`, to create its own kind of loops.
        """
        outer: Any = self._outer_config
        settings = self._make_settings()
        ack_first = self.ack_policy is AckPolicy.ACK_FIRST
        handle: Handle
        if settings.forward_to is None:
            handle = self._make_pipeline().run
            if self._batches is not None:
                handle = self._batches.wrap_handler(handle)
        else:
            # Messages are moved in batches. A default policy of the broker applies only to
            # handlers.
            handle = ForwardHandler(
                settings,
                self._log_of_loops,
                outer.heartbeat.destinations.record,
                outer.wakeups.clock,
            )
            settings, ack_first = replace_settings(settings, batch=True), False
        consumer: QueueConsumer = (outer.make_consumer or QueueConsumer)(
            store=outer.store,
            wakeups=outer.wakeups,
            settings=settings,
            handle=handle,
            log=self._log_of_loops,
            ack_first=ack_first,
            cancellable=not any(map(is_synchronous, self._handlers)),
            handlers=[_get_name(handler) for handler in self._handlers] or ["forward_to"],
            encode=outer.producer.encode,
            heartbeat=outer.heartbeat,
            lookout=outer.lookout,
            housekeeping=outer.housekeeping,
            rights=outer.rights,
            paused=self._is_paused,
            recorder=outer.recorder,
            debug=outer.debug,
        )
        return consumer

    def _make_pipeline(self) -> HandlerPipeline:
        """Compile the pipeline that runs the handler, and log which kind was selected."""
        self._pipeline = HandlerPipeline(self, REPLACED_METHODS)
        self._log_of_loops(logging.DEBUG, self._pipeline.describe())
        return self._pipeline

    def attach(self) -> QueueConsumer | None:
        """Create the loops without a start, for tests, after the checks of `start`.

        Return None without a handler and without forward_to.
        """
        self.lock = RunningCalls()
        if self.calls or self.forward_to is not None:
            self._consumer = self._make_consumer()
        return self._consumer

    async def prepare(self) -> None:
        """Run FastStream's preparations for a subscriber's first message."""
        await super().start()
        self.lock = RunningCalls()

    @property
    def _handlers(self) -> "list[Callable[..., Any]]":
        return [call.handler._original_call for call in self.calls]  # noqa: SLF001 - FastStream's

    def _make_settings(self) -> SubscriberSettings:
        """Return the settings with the routers' prefix, after the checks that need the broker.

        Handlers, the default ack policy, the prefix and the database are known only at the start.
        """
        settings = self.config.settings
        if settings.forward_to is None:
            # The default of a broker or router is known only now.
            check_ack_timing(settings, self.ack_policy)
        if settings.handler_timeout is not None and (
            blocking := [h for h in self._handlers if is_synchronous(h)]
        ):
            msg = (
                f"handler_timeout cannot end the synchronous handler {_get_name(blocking[0])!r}, "
                "which runs in a thread: make the handler async, or omit handler_timeout"
            )
            raise SetupError(msg)
        store: Any = self._outer_config.store  # type: ignore[attr-defined]
        if not store.can_listen:
            _check_wakeups(settings, store)
        check_transaction(self._handlers, store, transactional=settings.transactional)
        keeps_failed = store.dialect.has_archive or settings.dead_letter_queue is not None
        if isinstance(settings.forward_to, Destination) and not keeps_failed:
            raise SetupError(_NO_ARCHIVE)
        if not self._outer_config.prefix:
            return settings
        return replace_settings(
            settings,
            queues=self.queues,
            forward_to=self.forward_to,
            dead_letter_queue=self.dead_letter_queue,
        )

    @override
    async def stop(self) -> None:
        """Release waiting messages, let handlers end, and write all outcomes.

        Handlers get up to `graceful_timeout` to end.
        """
        consumer = self._consumer
        if consumer is not None:
            await consumer.stop(self._outer_config.graceful_timeout)
        pulling, self._pulling = self._pulling, None
        if pulling is not None:
            await pulling.stop()
        self._clear_consumer(consumer)

    def _clear_consumer(self, consumer: QueueConsumer | None) -> None:
        """Mark the subscriber as stopped, unless a restart has already replaced `consumer`.

        A stop that a handler requested may end after the next start.
        """
        if self._consumer is consumer:
            self._consumer = None
            self.running = False

    @override
    async def consume(self, msg: Any) -> Any:
        """Run FastStream's pipeline on a row or a batch; the outcome is on the row afterwards.

        A handler with transactional=True finds its transaction in FastStream's context.
        """
        transaction = current_transaction.get()
        try:
            if transaction is None:
                return await self.process_message(msg)
            with self._outer_config.context.scope(TRANSACTION, transaction):
                return await self.process_message(msg)
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - handle_error decides
            await self.handle_error(msg, error)
        return None

    async def handle_error(self, msg: Any, error: BaseException) -> None:
        """Settle `msg`, a row or a batch, after `error`, which the pipeline raised.

        Called while the error is being handled. CriticalLogMiddleware has already logged it.
        """
        # The task was cancelled, or its event loop has ended: nothing can be settled here.
        if isinstance(error, GeneratorExit) and is_task_cancelled():
            raise error
        if isinstance(error, ControlException):
            # Without FastStream's acknowledgement (MANUAL) the exception was not applied yet.
            # ACK_FIRST cannot apply it.
            await apply_unacknowledged(msg, error, self._log_of_loops)
            return
        if isinstance(error, SkipMessage):
            return  # the pipeline has recorded the outcome
        self._report_failure(msg, error)
        if isinstance(error, StopConsume | SystemExit):
            # This handler is to be the last. SystemExit ends the application, too.
            self._request_stop()
            if isinstance(error, SystemExit) and (app := self._outer_config.context.get("app")):
                app.exit()
        elif isinstance(error, Exception):
            settle_invalid(msg, error, retry=self.config.settings.retry_invalid_body)
        # Any other error is the GeneratorExit of a generator that the handler closed: an ordinary
        # failure.
        _add_error(msg, error)

    def _report_failure(self, msg: Any, error: BaseException) -> None:
        self._outer_config.note_failure(msg, error)  # type: ignore[attr-defined] # SqlBrokerConfig

    def _request_stop(self) -> None:
        """Stop in the background after a handler raised StopConsume or SystemExit.

        Awaiting the stop here would wait for the handler that requested it.
        """
        consumer = self._consumer
        if consumer is not None:
            task = consumer.request_stop(self._outer_config.graceful_timeout)
            task.add_done_callback(lambda _task: self._clear_consumer(consumer))

    @override
    def _make_response_publisher(self, message: "StreamMessage[Any]") -> "Sequence[PublisherProto]":
        outer: Any = self._outer_config
        return (ReplyPublisher(outer.producer, message, outer.wakeups.clock),)

    @override
    async def get_one(self, *, timeout: Duration | None = 5.0) -> PulledMessage | None:
        """Return the first due message, leased to the caller, who settles it.

        The lease is renewed until the message is settled or dropped, for ten leases at most; a
        message that is not settled is delivered again. The queues may have handlers elsewhere. A
        stop ends the wait.

        Args:
            timeout: Maximum wait: seconds, a timedelta or text like "5s"; 0 checks once, None waits
                without limit.

        Returns:
            The message; None if none was due in time. `ack`, `nack`, `reject` and the other methods
            write the outcome immediately.

        Raises:
            HasHandlerError: the subscriber has a handler; also an AssertionError.
            NotSupportedError: the subscriber has an option that does not apply to single messages:
                policies, ordered, batch, transactional, task_per_message or forward_to.
            SetupError: `timeout` is not a valid duration, or negative.
            StoreError: the database refused the statement or could not be reached.
        """
        wait = None if timeout is None else parse_non_negative("timeout", timeout)
        return await self._get_pulling("get_one").get_one(wait)

    @override
    # Unlike other iterators, a generator can be closed, as `aclosing` does.
    def __aiter__(self) -> AsyncGenerator[PulledMessage, None]:  # noqa: PYI058
        """Iterate over messages, each leased to the caller.

        The next iteration acks the previous message, unless it is settled. Closing the iterator, an
        error in the loop's body, and a stop release the last message, which is delivered again. A
        stop ends the iteration. During a transient failure of the database, the iterator waits.

        Raises:
            HasHandlerError: as for `get_one`.
            NotSupportedError: as for `get_one`.
        """
        return self._get_pulling("async for").iter_messages()

    def _get_pulling(self, usage: str) -> Pulling:
        """Return the object that claims single messages; `usage` names the caller in errors.

        Raises:
            HasHandlerError: the subscriber has a handler, which would compete for the messages.
            NotSupportedError: an option does not apply to single messages.
        """
        check_no_handlers(self.calls, usage)
        check_options(self.config.settings, usage)
        if self._pulling is None:
            self._pulling = self._make_pulling()
        return self._pulling

    def _make_pulling(self) -> Pulling:
        """Create the object that claims single messages for `get_one` and `async for`."""
        outer: Any = self._outer_config
        context = outer.context
        _, decoder = self._get_parser_and_decoder()
        return Pulling(
            outer.direct_claimer,
            outer.wakeups,
            self._make_settings(),
            self._log_of_loops,
            encode=outer.producer.encode,
            middlewares=lambda row: [make(row, context=context) for make in self.middlewares],
            parser=self._call_options.parser or outer.broker_parser,
            decoder=decoder,
            paused=self._is_paused,
        )

    @override
    def get_log_context(self, message: "StreamMessage[Any] | None") -> dict[str, str]:
        """Return the columns of the log: queue and row id; a batch has the queue of the first row,
        and an id that names the first and the last row.
        """
        raw: Any = getattr(message, "raw_message", None)
        row = raw[0] if isinstance(raw, tuple) else raw
        queue = getattr(row, "queue", None) or ",".join(self.queues)
        is_own = isinstance(row, ClaimedMessage)
        ids = format_row_ids(raw) if is_own else getattr(message, "message_id", "")
        return {"queue": queue, "message_id": ids}

    def _log_of_loops(
        self,
        level: int,
        text: str,
        *,
        exc_info: BaseException | None = None,
        message_id: int | None = None,
    ) -> None:
        """Log for the loops, with the subscriber's queues and the message's id as columns."""
        extra = {
            "queue": ",".join(self.queues),
            "message_id": "" if message_id is None else str(message_id),
        }
        self._outer_config.logger.log(text, level, extra=extra, exc_info=exc_info)


REPLACED_METHODS = {
    name: getattr(QueueSubscriber, name)
    for name in ("consume", "process_message", "get_log_context")
}
"""Methods that the compiled pipeline replaces. If anything else replaces one of them, the pipeline
is not compiled.
"""
_NO_ARCHIVE = (
    "forward_to=DESTINATION archives messages without a destination, but the schema has no archive "
    "table: set a dead_letter_queue, add an archive table to SqlBrokerSchemaConfig, or name a "
    "queue in forward_to"
)
_DELETION_WARNING = (
    "messages that fail for good are deleted, because the schema has no archive table: set a "
    "dead_letter_queue, or add an archive table to SqlBrokerSchemaConfig (to confirm the deletion, "
    "set retain_in_archive_on_reject=False)"
)


def _get_name(handler: Any) -> str:
    return getattr(handler, "__name__", None) or repr(handler)


def _check_wakeups(settings: SubscriberSettings, store: Any) -> None:
    """Refuse settings that need notifications by the database, on a store without LISTEN.

    LISTEN is PostgreSQL's wake-up; other databases are polled.
    """
    if settings.wakeup == "listen":
        msg = (
            "wakeup='listen' needs PostgreSQL through asyncpg and a pool of more than one "
            f"connection, got {store.dialect_name} through {store.driver}: use wakeup='auto', "
            "which polls here"
        )
        raise NotSupportedError(msg)
    if settings.notify_only:
        msg = (
            "max_fetch_interval=None needs PostgreSQL through asyncpg, a listen_url if the engine "
            f"uses PgBouncer, and a pool of more than one connection; got {store.dialect_name} "
            f"through {store.driver}: set a max_fetch_interval, such as 10"
        )
        raise NotSupportedError(msg)


def _add_error(msg: Any, error: BaseException) -> None:
    """Add the error to the outcome of failed rows that was recorded without an error.

    If a middleware raises on its exit, FastStream acknowledges when that error is no longer the
    current exception, so the outcome lacks it.
    """
    for row in msg if isinstance(msg, tuple) else (msg,):
        match getattr(row, "outcome", None):
            case Nack(error=None) | Reject(error=None) as outcome:
                row.replace_outcome(replace(outcome, error=error))
