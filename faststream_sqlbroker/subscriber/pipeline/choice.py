"""Which pipeline a subscriber has, and why."""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.adapter.pipeline import default_filter
from faststream_sqlbroker.database.messages.handler import current
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.parser import SqlBrokerBatchParser, SqlBrokerParser
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledging
from faststream_sqlbroker.subscriber.pipeline.answers import Answers
from faststream_sqlbroker.subscriber.pipeline.arguments import Call, compile_call
from faststream_sqlbroker.subscriber.pipeline.bodies import loading, quick_parse
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.pipeline.dependencies import Found
from faststream_sqlbroker.subscriber.pipeline.fingerprints import unknown, warn_once
from faststream_sqlbroker.subscriber.pipeline.guard import Guard
from faststream_sqlbroker.subscriber.pipeline.parts import Parts
from faststream_sqlbroker.subscriber.pipeline.plain import Plain
from faststream_sqlbroker.subscriber.pipeline.replaced import ARGUMENTS, PIPELINE
from faststream_sqlbroker.subscriber.pipeline.uncompiled import NotCompiled
from faststream_sqlbroker.subscriber.pipeline.wrapped import Wrapped
from faststream_sqlbroker.subscriber.running_calls import RunningCalls
from faststream_sqlbroker.subscriber.transactions import TRANSACTION

VARIABLE = "SQLBROKER_PIPELINE"
"""Environment variable that chooses the pipeline of all subscribers."""
COMPILED = "compiled"
GENERIC = "generic"
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
        self._own = own
        self._changes = 0
        self._process: Process | None = None
        self._passes: Callable[[], bool] = lambda: False
        self._guard: Guard | None = None
        self.reason = ""
        """Why it is FastStream's own; empty if it is compiled."""
        self.arguments_reason = ""
        """Why FastDepends makes the handler's arguments; empty if they are compiled."""
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
            await self._subscriber.end_with(row, error)

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
        _refuse_unknown(subscriber, self._own)
        self._refuse_changed(PIPELINE, "FastStream runs its own pipeline")
        settings = subscriber.config.settings
        outer = subscriber._outer_config
        [item] = subscriber.calls
        found: Found = []
        scopes = Scopes(subscriber, outer.context, outer.extra_context)
        call = self._compiled_call(item, outer.fd_config, found)
        parts = _parts(subscriber, item, scopes, call)
        middlewares = tuple(subscriber._broker_middlewares)
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
            subscriber, scopes, found, self._own, transactional=settings.transactional
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


def chosen() -> str:
    """The pipeline that the environment asks for.

    Raises:
        SetupError: it asks for one that does not exist.
    """
    value = os.environ.get(VARIABLE, COMPILED)
    if value not in (COMPILED, GENERIC):
        msg = f"{VARIABLE} is {value!r}: it can be {COMPILED!r} (the default) or {GENERIC!r}"
        raise SetupError(msg)
    return value


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
