"""Which pipeline a subscriber has, why, and whether what was found at its start still holds.

FastStream reads its configuration anew for each message, so it may change while the subscriber
runs: a middleware is added, the context cleared, a handler put under test. What cannot be asked
this quickly is refused at the start.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import ConfigComposition, default_filter
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.parser import SqlBrokerBatchParser, SqlBrokerParser
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledging
from faststream_sqlbroker.subscriber.pipeline.answers import Answers
from faststream_sqlbroker.subscriber.pipeline.arguments import Call, compile_call
from faststream_sqlbroker.subscriber.pipeline.bodies import loading, quick_parse
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.pipeline.dependencies import Found
from faststream_sqlbroker.subscriber.pipeline.fingerprints import (
    GENERIC,
    VARIABLE,
    NotCompiled,
    chosen,
    unknown,
    warn_once,
)
from faststream_sqlbroker.subscriber.pipeline.parts import Parts, Plain, Wrapped
from faststream_sqlbroker.subscriber.pipeline.replaced import ARGUMENTS, PIPELINE
from faststream_sqlbroker.subscriber.running_calls import RunningCalls
from faststream_sqlbroker.subscriber.transactions import TRANSACTION


class Guard:
    """Asked before each message of one subscriber."""

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
        found: Found,
        own: Collection[str],
        *,
        transactional: bool,
    ) -> None:
        """Remember what `subscriber` has now.

        Args:
            subscriber: Prepared, with one handler.
            scopes: Its context.
            found: The dependencies of its handler.
            own: Names of its methods that a test might replace.
            transactional: Whether each message has a transaction.
        """
        self._subscriber = subscriber
        self._methods = frozenset(own)
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
        self._compositions, leaves = _parts_of(outer)
        self._leaves = [
            (leaf, leaf.broker_middlewares, list(leaf.broker_middlewares), dict(leaf.extra_context))
            for leaf in leaves
        ]
        self._dependencies = found
        self._provider = outer.fd_config.provider

    def passes(self) -> bool:
        """Whether the next message may go the compiled way."""
        # Before each message: the cheapest questions come first.
        return (
            not self._handler.is_test
            and (current.get() is None) is not self._transactional
            and self.holds()
        )

    def is_passing(self) -> bool:
        """Whether something that does not last asks for FastStream's pipeline: a test, or another
        message's transaction.
        """
        return self._handler.is_test or (current.get() is None) is self._transactional

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return (
            self._same_handler()
            and self._scopes.holds()
            and self._same_configuration()
            and (not self._dependencies or self._same_dependencies())
        )

    def _same_handler(self) -> bool:
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

    def _same_configuration(self) -> bool:
        for composition, configs in self._compositions:
            if composition.configs is not configs:
                return False
        for leaf, middlewares, contents, extra in self._leaves:
            now = leaf.broker_middlewares
            if now is not middlewares or leaf.extra_context != extra:
                return False
            # A list may change in place.
            if (now or contents) and not _same(now, contents):
                return False
        broker = self._leaves[0][0]
        return broker.fd_config.context is self._context and broker.logger is self._state

    def _same_dependencies(self) -> bool:
        # A dependency that was built anew is another model under the same key.
        known = self._provider.dependencies
        return all(known.get(key) is model for key, model in self._dependencies)


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _parts_of(config: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The compositions in `config`, each with what it is made of, and the configurations in them.

    The first configuration is the broker's.
    """
    if not isinstance(config, ConfigComposition):
        return [], [config]
    compositions: list[tuple[Any, Any]] = [(config, config.configs)]
    leaves: list[Any] = []
    for part in config.configs:
        inner, of_part = _parts_of(part)
        compositions += inner
        leaves += of_part
    return compositions, leaves


MOST_CHANGES = 100
"""After so many changes while it runs, a subscriber keeps FastStream's pipeline until its next
start."""

Process = Callable[[Any], Awaitable[None]]
"""Runs the handler on a row or a batch; raises what FastStream's `process_message` raises."""


class Pipeline:
    """What the workers of one subscriber call with each row, or each batch."""

    def __init__(self, subscriber: Any, own: Mapping[str, Any]) -> None:
        """Compile the pipeline of `subscriber`, which is prepared, or choose FastStream's.

        Args:
            subscriber: A `QueueSubscriber`.
            own: Its class's methods that the compiled pipeline replaces, by name.

        Raises:
            SetupError: the environment variable has an unknown value.
        """
        self._subscriber = subscriber
        self._methods = own
        self._changes = 0
        self._process: Process | None = None
        self._passes: Callable[[], bool] = lambda: False
        self._guard: Guard | None = None
        self.reason = ""
        """The reason for using FastStream's own pipeline; empty if compiled."""
        self.arguments_reason = ""
        """The reason for letting FastDepends build the arguments; empty if compiled."""
        self._compile()

    @property
    def is_compiled(self) -> bool:
        """Whether messages take the compiled way, for now."""
        return self._process is not None

    def describe(self) -> str:
        """Which pipeline it is, and why, for the log."""
        if self.reason:
            return f"FastStream's own pipeline: {self.reason}"
        if self.arguments_reason:
            return f"compiled pipeline; FastDepends makes the arguments: {self.arguments_reason}"
        return "compiled pipeline"

    async def run(self, row: Any) -> None:
        """Run the handler on `row`; its outcome is on the row afterwards. As `consume`."""
        # FastStream reads its configuration for each message, so a change holds from the next one.
        if not self._passes():
            await self._run_otherwise(row)
            return
        try:
            await self._process(row)  # type: ignore[misc] # it passes only if there is one
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - decided there
            await self._subscriber.handle_error(row, error)

    async def _run_otherwise(self, row: Any) -> None:
        guard = self._guard
        # A test or another message's transaction ends by itself: to compile for it would use up the
        # changes that are allowed.
        if guard is not None and not guard.is_passing() and self._changes < MOST_CHANGES:
            self._changes += 1
            self._compile()
            if self._process is not None and self._passes():
                await self.run(row)
                return
        await self._subscriber.consume(row)

    def _compile(self) -> None:
        # Whatever fails from here on leaves FastStream's pipeline.
        self._process = None
        self._guard = None
        self._passes = lambda: False
        self.reason = self.arguments_reason = ""
        try:
            self._choose()
        except NotCompiled as why:
            self.reason = str(why)

    def _choose(self) -> None:
        if chosen() == GENERIC:
            raise NotCompiled(f"{VARIABLE}={GENERIC}")
        subscriber = self._subscriber
        _refuse_unknown(subscriber, self._methods)
        self._refuse_changed(PIPELINE, "FastStream runs its own pipeline")
        settings = subscriber.config.settings
        outer = subscriber._outer_config
        [item] = subscriber.calls
        found: Found = []
        scopes = Scopes(subscriber, outer.context, outer.extra_context)
        call = self._compiled_call(item, outer.fd_config, found)
        parts = _parts(subscriber, item, scopes, call)
        middlewares = tuple(subscriber.middlewares)
        process: Process
        # A middleware gets the row before there is a message, and FastStream's parser makes the
        # message of a batch. Only Wrapped does either.
        if middlewares or settings.batch:
            process = Wrapped(parts, middlewares).process
        else:
            process = Plain(parts).process
        if settings.transactional:
            process = _in_transaction(process, outer.context)
        self._guard = Guard(
            subscriber, scopes, found, self._methods, transactional=settings.transactional
        )
        self._passes = self._guard.passes
        self._process = process

    def _compiled_call(self, item: Any, injection: Any, found: Found) -> Call:
        try:
            self._refuse_changed(ARGUMENTS, "FastDepends makes the arguments of handlers")
            return compile_call(item, injection, loading(item.decoder), found)
        except NotCompiled as why:
            self.arguments_reason = str(why)
            # FastDepends looks them up by itself.
            found.clear()
            wrapped: Call = item.handler._wrapped_call
            return wrapped

    def _refuse_changed(self, group: str, instead: str) -> None:
        """Refuse what was compiled from other functions; the first time with a warning.

        Raises:
            NotCompiled: functions of `group` are not known.
        """
        if not (names := unknown(group)):
            return
        warn_once(group, instead, names, self._subscriber._log_of_loops)
        raise NotCompiled(f"unknown functions: {', '.join(names)}")


def _refuse_unknown(subscriber: Any, own: Mapping[str, Any]) -> None:
    """Refuse what the compiled pipeline does not do.

    Raises:
        NotCompiled: why.
    """
    kind = type(subscriber)
    if not own.keys().isdisjoint(vars(subscriber)) or any(
        getattr(kind, name) is not function for name, function in own.items()
    ):
        raise NotCompiled("a method of the subscriber is replaced")
    if len(subscriber.calls) != 1:
        raise NotCompiled("several handlers")
    [item] = subscriber.calls
    if item.filter is not default_filter:
        raise NotCompiled("a filter")
    if getattr(item.parser, "__func__", None) not in _PARSERS:
        raise NotCompiled("a parser of the user's")
    if type(subscriber.lock) is not RunningCalls:
        raise NotCompiled("the lock is another one")
    unacknowledged = subscriber.ack_policy is AckPolicy.MANUAL
    if subscriber._SubscriberUsecase__auto_ack_disabled is not unacknowledged:
        raise NotCompiled("the acknowledgement is another one")


_PARSERS = (SqlBrokerParser.parse_message, SqlBrokerBatchParser.parse_batch)


def _parts(subscriber: Any, item: Any, scopes: Scopes, call: Call) -> Parts:
    outer = subscriber._outer_config
    is_batch = subscriber.config.settings.batch
    return Parts(
        lock=subscriber.lock,
        state=outer.logger,
        context=outer.context,
        scopes=scopes,
        parse=quick_parse(item.parser.__self__),
        parse_any=item.parser,
        decoder=item.decoder,
        log_context=subscriber.get_log_context if is_batch else _log_context_of(subscriber),
        call=call,
        answers=Answers(subscriber, item.handler),
        acknowledging=Acknowledging(
            outer.logger, outer.context, subscriber.ack_policy, subscriber._parser
        ),
        policy=subscriber.ack_policy,
    )


def _log_context_of(subscriber: Any) -> Callable[[Any], dict[str, str]]:
    """`subscriber.get_log_context`, for the message of a row."""
    queues = ",".join(subscriber.queues)

    def log_context(message: Any) -> dict[str, str]:
        return {
            "queue": message.raw_message.queue or queues,
            "message_id": message.message_id,
        }

    return log_context


def _in_transaction(process: Process, context: Any) -> Process:
    """`process`, with the transaction of the message in the context."""

    async def process_in_transaction(row: Any) -> None:
        with context.scope(TRANSACTION, current.get()):
            await process(row)

    return process_in_transaction
