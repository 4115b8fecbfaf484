"""Select the pipeline of a subscriber, and check that the configuration is unchanged.

FastStream reads its configuration for each message, so it may change while the subscriber runs: a
middleware is added, the context cleared, a handler put under test. Features that cannot be checked
this quickly are refused at the start.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import ConfigComposition, default_filter
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.parser import SqlBrokerBatchParser, SqlBrokerParser
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledger
from faststream_sqlbroker.subscriber.pipeline.answers import AnswerPublisher
from faststream_sqlbroker.subscriber.pipeline.arguments import HandlerCall, compile_call
from faststream_sqlbroker.subscriber.pipeline.bodies import make_loader, make_quick_parse
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.pipeline.dependencies import ResolvedDependencies
from faststream_sqlbroker.subscriber.pipeline.fingerprints import (
    GENERIC,
    VARIABLE,
    NotCompiled,
    find_unknown,
    get_selected_pipeline,
    warn_once,
)
from faststream_sqlbroker.subscriber.pipeline.parts import Parts, Plain, Wrapped
from faststream_sqlbroker.subscriber.pipeline.replaced import ARGUMENTS, PIPELINE
from faststream_sqlbroker.subscriber.running_calls import RunningCalls
from faststream_sqlbroker.subscriber.transactions import TRANSACTION


class Guard:
    """Checks before each message that nothing has changed since the pipeline was compiled.

    FastStream reads its configuration for each message, and the compiled pipeline has copied it. A
    change therefore needs FastStream's pipeline, or a new compilation.
    """

    __slots__ = (
        *(
            "_calls",
            "_compositions",
            "_configs",
            "_context",
            "_decoder",
            "_dependencies",
            "_handler",
        ),
        *(
            "_item",
            "_leaves",
            "_lock",
            "_methods",
            "_parser",
            "_policy",
            "_provider",
            "_scopes",
            "_state",
            "_subscriber",
        ),
        *("_transactional", "_wrapped"),
    )

    def __init__(
        self,
        subscriber: Any,
        scopes: Scopes,
        dependencies: ResolvedDependencies,
        methods: Collection[str],
        *,
        transactional: bool,
    ) -> None:
        """Store the current state of `subscriber`.

        Before each message, the methods below compare that state with the current one. After a
        change the compiled pipeline, which has copied the state, must not be used.

        Args:
            subscriber: A prepared subscriber with one handler.
            scopes: The subscriber's context.
            dependencies: The dependencies of the handler.
            methods: Names of the subscriber's methods that a test might replace.
            transactional: True if each message has a transaction.
        """
        self._subscriber = subscriber
        self._methods = frozenset(methods)
        self._scopes = scopes
        self._calls = subscriber.calls
        [self._item] = subscriber.calls
        self._parser = self._item.parser
        self._decoder = self._item.decoder
        self._handler = self._item.handler
        self._wrapped = self._handler._wrapped_call
        self._lock = subscriber.lock
        self._policy = subscriber.ack_policy
        self._transactional = transactional
        outer = subscriber._outer_config
        self._context = outer.context
        self._state = outer.logger
        self._compositions, leaves = _collect_configs(outer)
        self._leaves = [
            (leaf, leaf.broker_middlewares, list(leaf.broker_middlewares), dict(leaf.extra_context))
            for leaf in leaves
        ]
        self._dependencies = dependencies
        self._provider = outer.fd_config.provider

    def can_use_compiled(self) -> bool:
        """Return True if the next message may use the compiled pipeline.

        That pipeline does the work of FastStream's own in less time. It has copied the
        configuration at its compilation, so a change or a test makes it unusable.
        """
        # This runs before each message, so the cheapest checks come first.
        # A transactional subscriber needs a transaction, and no other may have one.
        return (
            not self._handler.is_test
            and (current_transaction.get() is None) is not self._transactional
            and self.is_unchanged()
        )

    def has_temporary_cause(self) -> bool:
        """Return True if a condition that ends by itself requires FastStream's pipeline.

        The condition is a test, or the transaction of another message. Compiling again would not
        help.
        """
        return self._handler.is_test or (current_transaction.get() is None) is self._transactional

    def is_unchanged(self) -> bool:
        """Return True if nothing that the compiled pipeline has copied has changed.

        Objects are compared by identity, which is faster and notices an equal replacement; only the
        extra context is compared by value.
        """
        return (
            self._has_same_handler()
            and self._scopes.is_unchanged()
            and self._has_same_configuration()
            and (not self._dependencies or self._has_same_dependencies())
        )

    def _has_same_handler(self) -> bool:
        """Return True if the subscriber still has the same single handler, options and methods.

        A replaced method is in the instance's `__dict__`, as after a patch by a test.
        """
        item = self._item
        calls = self._calls.data
        return (
            self._handler._wrapped_call is self._wrapped
            and item.parser is self._parser
            and item.decoder is self._decoder
            and item.filter is default_filter
            and self._subscriber.ack_policy is self._policy
            and len(calls) == 1
            and calls[0] is item
            and self._subscriber.lock is self._lock
            and self._methods.isdisjoint(self._subscriber.__dict__)
        )

    def _has_same_configuration(self) -> bool:
        """Return True if broker and routers have the same middlewares, context and logger.

        A composition combines the configurations of a broker and its routers; a leaf is the
        configuration of one of them.
        """
        for composition, configs in self._compositions:
            if composition.configs is not configs:
                return False
        for leaf, middlewares, contents, extra in self._leaves:
            current_middlewares = leaf.broker_middlewares
            if current_middlewares is not middlewares or leaf.extra_context != extra:
                return False
            # A list may change in place.
            if (current_middlewares or contents) and not _is_same_sequence(
                current_middlewares, contents
            ):
                return False
        broker = self._leaves[0][0]
        return broker.fd_config.context is self._context and broker.logger is self._state

    def _has_same_dependencies(self) -> bool:
        """Return True if the dependencies that were looked up are still current.

        An override during a test, for example, replaces them.
        """
        # A rebuilt dependency is another model under the same key.
        dependencies = self._provider.dependencies
        return all(dependencies.get(key) is model for key, model in self._dependencies)


def _is_same_sequence(current: Sequence[Any], stored: Sequence[Any]) -> bool:
    """Return True if both have the same objects, which need not support equality."""
    return len(current) == len(stored) and all(map(is_, current, stored))


def _collect_configs(config: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return the compositions in `config` with their parts, and the configurations in the parts.

    FastStream combines the configurations of a broker and its routers in compositions, which may
    contain other compositions. The first configuration is the broker's.
    """
    if not isinstance(config, ConfigComposition):
        return [], [config]
    compositions: list[tuple[Any, Any]] = [(config, config.configs)]
    leaves: list[Any] = []
    for part in config.configs:
        inner, inner_leaves = _collect_configs(part)
        compositions += inner
        leaves += inner_leaves
    return compositions, leaves


MAX_CHANGES = 100
"""Maximum number of changes while a subscriber runs; after that it uses FastStream's pipeline until
its next start.
"""

Process = Callable[[Any], Awaitable[None]]
"""Runs the handler on a row or a batch; raises the errors of FastStream's `process_message`."""


class HandlerPipeline:
    """The pipeline that the workers of a subscriber call with each row or batch."""

    def __init__(self, subscriber: Any, methods: Mapping[str, Any]) -> None:
        """Compile the pipeline of `subscriber`, which is prepared, or select FastStream's.

        The compiled pipeline does the same work as FastStream's in less time, for the usual
        features. To compile means to make all choices in advance.

        Args:
            subscriber: A `QueueSubscriber`.
            methods: Methods of its class that the compiled pipeline replaces, by name.

        Raises:
            SetupError: the environment variable has an unknown value.
        """
        self._subscriber = subscriber
        self._methods = methods
        self._changes = 0
        self._process: Process | None = None
        self._can_use_compiled: Callable[[], bool] = lambda: False
        self._guard: Guard | None = None
        self.reason = ""
        """The reason for using FastStream's own pipeline; empty if compiled."""
        self.arguments_reason = ""
        """The reason for letting FastDepends build the arguments; empty if compiled."""
        self._compile()

    @property
    def is_compiled(self) -> bool:
        """True if messages currently use the compiled pipeline."""
        return self._process is not None

    def describe(self) -> str:
        """Return the kind of pipeline and the reason, for the log."""
        if self.reason:
            return f"FastStream's own pipeline: {self.reason}"
        if self.arguments_reason:
            return f"compiled pipeline; FastDepends builds the arguments: {self.arguments_reason}"
        return "compiled pipeline"

    async def run(self, row: Any) -> None:
        """Run the handler on `row`, like `consume`; the outcome is on the row afterwards."""
        # FastStream reads its configuration for each message, so a change applies from the next
        # one.
        if not self._can_use_compiled():
            await self._run_fallback(row)
            return
        try:
            await self._process(row)  # type: ignore[misc] # None never gets here
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - handle_error decides
            await self._subscriber.handle_error(row, error)

    async def _run_fallback(self, row: Any) -> None:
        """Handle a message that the guard refused: compile again, or use FastStream's pipeline.

        `MAX_CHANGES` limits the number of compilations while the subscriber runs.
        """
        guard = self._guard
        # A test or another message's transaction ends by itself. Compiling for it would use up the
        # allowed changes.
        if guard is not None and not guard.has_temporary_cause() and self._changes < MAX_CHANGES:
            self._changes += 1
            self._compile()
            if self._process is not None and self._can_use_compiled():
                await self.run(row)
                return
        await self._subscriber.consume(row)

    def _compile(self) -> None:
        """Compile the pipeline; if that is not possible, store the reason and use FastStream's.

        To compile means to make all choices of FastStream's pipeline in advance. Called at the
        start, and again after a change that the guard has noticed.
        """
        # If anything fails from here on, FastStream's pipeline is used.
        self._process = None
        self._guard = None
        self._can_use_compiled = lambda: False
        self.reason = self.arguments_reason = ""
        try:
            self._select_pipeline()
        except NotCompiled as reason:
            self.reason = str(reason)

    def _select_pipeline(self) -> None:
        """Check that the subscriber is supported, and assemble the compiled pipeline.

        The compiled pipeline processes a message as FastStream's does, but all choices that
        FastStream makes for each message are made here once.
        """
        if get_selected_pipeline() == GENERIC:
            raise NotCompiled(f"{VARIABLE}={GENERIC}")
        subscriber = self._subscriber
        _check_supported(subscriber, self._methods)
        self._check_known(PIPELINE, "FastStream runs its own pipeline")
        settings = subscriber.config.settings
        outer = subscriber._outer_config
        [item] = subscriber.calls
        dependencies: ResolvedDependencies = []
        scopes = Scopes(subscriber, outer.context, outer.extra_context)
        call = self._make_call(item, outer.fd_config, dependencies)
        parts = _make_parts(subscriber, item, scopes, call)
        middlewares = tuple(subscriber.middlewares)
        process: Process
        # A middleware receives the row before the message exists, and FastStream's parser creates
        # the message of a batch. Only Wrapped supports either.
        if middlewares or settings.batch:
            process = Wrapped(parts, middlewares).process
        else:
            process = Plain(parts).process
        if settings.transactional:
            process = _add_transaction(process, outer.context)
        self._guard = Guard(
            subscriber, scopes, dependencies, self._methods, transactional=settings.transactional
        )
        self._can_use_compiled = self._guard.can_use_compiled
        self._process = process

    def _make_call(
        self, item: Any, injection: Any, dependencies: ResolvedDependencies
    ) -> HandlerCall:
        """Return the compiled call of the handler, or FastDepends' own call.

        FastDepends is the library that builds a handler's arguments. Its call is slower, but
        supports all kinds of parameters. `dependencies` receives those that were looked up.
        """
        try:
            self._check_known(ARGUMENTS, "FastDepends builds the arguments of handlers")
            return compile_call(item, injection, make_loader(item.decoder), dependencies)
        except NotCompiled as reason:
            self.arguments_reason = str(reason)
            # FastDepends looks the dependencies up itself.
            dependencies.clear()
            wrapped: HandlerCall = item.handler._wrapped_call
            return wrapped

    def _check_known(self, group: str, instead: str) -> None:
        """Refuse to replace functions of `group` whose source is not known; warn the first time.

        `group` is a set of functions of FastStream or FastDepends. A new version may have changed
        them, so the copy of their behavior would be wrong. `instead` describes the fallback in the
        log.

        Raises:
            NotCompiled: functions of `group` are not known.
        """
        if not (names := find_unknown(group)):
            return
        warn_once(group, instead, names, self._subscriber._log_of_loops)
        raise NotCompiled(f"unknown functions: {', '.join(names)}")


def _check_supported(subscriber: Any, methods: Mapping[str, Any]) -> None:
    """Refuse features that the compiled pipeline lacks.

    It is a faster copy of FastStream's pipeline, which supports them and is used instead.

    Raises:
        NotCompiled: the subscriber uses such a feature; the text names it.
    """
    kind = type(subscriber)
    # A method may be replaced on the instance, as by a test, or in a subclass.
    if not methods.keys().isdisjoint(vars(subscriber)) or any(
        getattr(kind, name) is not function for name, function in methods.items()
    ):
        raise NotCompiled("a method of the subscriber is replaced")
    if len(subscriber.calls) != 1:
        raise NotCompiled("several handlers")
    [item] = subscriber.calls
    if item.filter is not default_filter:
        raise NotCompiled("a filter")
    if getattr(item.parser, "__func__", None) not in _PARSERS:
        raise NotCompiled("a custom parser")
    if type(subscriber.lock) is not RunningCalls:
        raise NotCompiled("the lock is replaced")
    # FastStream's private flag must say the same as the policy: otherwise another tool set it.
    unacknowledged = subscriber.ack_policy is AckPolicy.MANUAL
    if subscriber._SubscriberUsecase__auto_ack_disabled is not unacknowledged:
        raise NotCompiled("the acknowledgement is replaced")


_PARSERS = (SqlBrokerParser.parse_message, SqlBrokerBatchParser.parse_batch)


def _make_parts(subscriber: Any, item: Any, scopes: Scopes, call: HandlerCall) -> Parts:
    """Collect the parts of the compiled pipeline for a subscriber with one handler.

    Each part does one step of FastStream's pipeline, such as to create the message of a row.
    """
    outer = subscriber._outer_config
    is_batch = subscriber.config.settings.batch
    return Parts(
        lock=subscriber.lock,
        state=outer.logger,
        context=outer.context,
        scopes=scopes,
        parse=make_quick_parse(item.parser.__self__),
        parse_any=item.parser,
        decoder=item.decoder,
        log_context=subscriber.get_log_context if is_batch else _make_log_context(subscriber),
        call=call,
        answers=AnswerPublisher(subscriber, item.handler),
        acknowledging=Acknowledger(
            outer.logger, outer.context, subscriber.ack_policy, subscriber._parser
        ),
        policy=subscriber.ack_policy,
    )


def _make_log_context(subscriber: Any) -> Callable[[Any], dict[str, str]]:
    """Return a faster `subscriber.get_log_context` for the message of a single row."""
    queues = ",".join(subscriber.queues)

    def log_context(message: Any) -> dict[str, str]:
        row = message.raw_message
        return {"queue": row.queue or queues, "message_id": str(row.id)}

    return log_context


def _add_transaction(process: Process, context: Any) -> Process:
    """Wrap `process` to set the transaction of the message in FastStream's context.

    The worker has opened the transaction; a handler requests it by its name in the context.
    """

    async def process_in_transaction(row: Any) -> None:
        with context.scope(TRANSACTION, current_transaction.get()):
            await process(row)

    return process_in_transaction
