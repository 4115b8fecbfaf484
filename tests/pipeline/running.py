"""Runs one case through a pipeline, and gives everything that could be observed."""

import contextvars
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any
from unittest.mock import patch
from uuid import UUID

from fast_depends import Provider
from fast_depends.msgspec import MsgSpecSerializer
from fast_depends.pydantic import PydanticSerializer
from faststream import AckPolicy, FastStream
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker, SqlBrokerRouter
from faststream_sqlbroker.core.correlation import CorrelationIds
from faststream_sqlbroker.core.rows import ClaimedMessage, HandlerServices
from faststream_sqlbroker.database.dialects import create_dialect
from faststream_sqlbroker.database.messages.handler import current_transaction
from faststream_sqlbroker.flow.own_context import start_coroutine
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery, current_delivery_var
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.subscriber.pipeline.choice import HandlerPipeline
from tests.pipeline import axes
from tests.pipeline.seen import Log, Seen, errors, shown

NOW = datetime(2026, 1, 2, tzinfo=timezone.utc)
TOKEN = UUID(int=7)

_ENGINE = create_async_engine("sqlite+aiosqlite:///unused.db")
_TABLES = build_tables(SqlBrokerSchemaConfig())
# A broker makes both anew, which takes most of the time of a case.
_DIALECT = create_dialect(_ENGINE.dialect, _TABLES)
_QUICK_TABLES = patch("faststream_sqlbroker.broker.broker.build_tables", lambda *_, **__: _TABLES)
_QUICK_DIALECT = patch("faststream_sqlbroker.database.store.create_dialect", lambda *_: _DIALECT)

SOURCES = ("broker", "router", "application", "publishers of another router")
LOGGERS = ("records", "none", "fails at Received", "fails at Processed", "fails at errors")
KINDS = ("plain", "synchronous", "batch", "transactional", "under test")
CHANGES = (
    *("none", "middleware added", "middleware in place", "context cleared", "rebuilt"),
    *("override", "override ends", "test begins", "test ends", "publisher stacked"),
    *("global message", "other logger", "second handler", "ack policy", "no reply"),
    "call replaced",
)
PUBLISHERS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "one": [{"queue": "out"}],
    "two": [{"queue": "out"}, {"queue": "more"}],
    "batch": [{"queue": "out", "batch": True}],
    "headers": [{"queue": "out", "headers": {"p": 1}, "reply_to": "back"}],
    "no queue": [{"queue": ""}],
}
SERIALIZERS = ("pydantic", "wrapped", "msgspec", "none", "untyped")


@dataclass(frozen=True)
class Case:
    """One value of each axis."""

    body: str = "dict"
    payload: str = "order"
    decoder: str = "ours"
    parameters: str = "none"
    dependencies: str = "none"
    middlewares: str = "none"
    policy: str = "default"
    outcome: str = "returns"
    answer: str = "none"
    publishers: str = "none"
    source: str = "broker"
    logger: str = "records"
    kind: str = "plain"
    change: str = "none"
    serializer: str = "pydantic"


AXES: dict[str, tuple[str, ...]] = {
    "body": tuple(axes.BODIES),
    "payload": tuple(axes.PAYLOADS),
    "decoder": tuple(axes.DECODERS),
    "parameters": tuple(axes.PARAMETERS),
    "dependencies": tuple(axes.dependencies(Seen())),
    "middlewares": tuple(axes.middlewares(Seen())),
    "policy": tuple(axes.POLICIES),
    "outcome": tuple(axes.OUTCOMES),
    "answer": tuple(axes.ANSWERS),
    "publishers": tuple(PUBLISHERS),
    "source": SOURCES,
    "logger": LOGGERS,
    "kind": KINDS,
    "change": CHANGES,
    "serializer": SERIALIZERS,
}
assert set(AXES) == {field.name for field in fields(Case)}


def row_of(number: int, payload: bytes, headers: str | None) -> ClaimedMessage:
    """A claimed row."""
    row = ClaimedMessage(
        *(number, "bench", payload, headers, 0, None, 0, 1, 1, NOW, NOW),
        *(None, None, None, NOW, TOKEN),
    )
    row.services = _HOLDER
    return row


async def _extends(_rows: Any, _seconds: float) -> bool:
    return True


_HOLDER = HandlerServices(
    _extends, None, ack_first=False, correlation_ids=CorrelationIds("5f0c1e2a-93d4-8b17")
)


class Run:
    """One run of a case."""

    def __init__(self, case: Case, *, compiled: bool) -> None:
        self.case = case
        self.compiled = compiled
        self.seen = Seen()
        self.why = ""
        """Which pipeline it had, and why."""
        self._results: list[Any] = []

    async def observe(self) -> Any:
        """Everything that could be observed of two messages, before and after the change."""
        try:
            await self._prepare()
        except Exception as error:
            return "no start", errors(error)
        handle = self._handle()
        if self.case.change in ("override ends", "test ends"):
            self._change_before()
        await self._deliver(handle, 7)
        self._change()
        await self._deliver(handle, 8)
        return self._results, self.seen.events

    # -- what is declared ----------------------------------------------------------------------

    async def _prepare(self) -> None:
        case, seen = self.case, self.seen
        self._dependencies = axes.dependencies(seen)
        self._middlewares = axes.middlewares(seen)
        with _QUICK_TABLES, _QUICK_DIALECT:
            self.broker = SqlBroker(
                _ENGINE,
                logger=self._logger(),
                middlewares=list(self._middlewares[case.middlewares]),
                provider=Provider(),
                **self._injection(),
            )
        router = SqlBrokerRouter(prefix="r-") if case.source == "router" else None
        place: Any = router or self.broker
        options: Any = {
            "batch": case.kind == "batch",
            "transactional": case.kind == "transactional",
            "decoder": axes.DECODERS[case.decoder],
        }
        if (policy := axes.POLICIES[case.policy]) is not None:
            options["ack_policy"] = policy
        subscriber = place.subscriber("bench", **options)
        handler: Any = self._handler()
        publishing: Any = place
        if case.source == "publishers of another router":
            router = publishing = SqlBrokerRouter(prefix="p-", middlewares=[self._watch])
        for options in PUBLISHERS[case.publishers]:
            handler = publishing.publisher(**options)(handler)
        subscriber(handler)
        if router is not None:
            self.broker.include_router(router)
        [self.subscriber] = self.broker.subscribers
        self._place = place
        await self._connect()

    def _injection(self) -> dict[str, Any]:
        serializers: dict[str, dict[str, Any]] = {
            "wrapped": {"serializer": PydanticSerializer()},
            "msgspec": {"serializer": MsgSpecSerializer(use_fastdepends_errors=False)},
            "none": {"serializer": None},
            "untyped": {"apply_types": False},
        }
        return serializers.get(self.case.serializer, {})

    def _logger(self) -> Log | None:
        kind = self.case.logger
        if kind == "none":
            return None
        fails = {"fails at errors": "boom"}.get(kind, kind.removeprefix("fails at "))
        return Log(self.seen, fails if kind.startswith("fails") else "")

    async def _connect(self) -> None:
        case, seen = self.case, self.seen
        stored = seen.add

        async def store(rows: Any, connection: Any = None, **_: Any) -> list[int]:
            for row in rows:
                stored("stored", row.queue, row.payload, row.headers, row.priority, row.key)
            return list(range(len(rows)))

        publisher: Any = self.broker.config.producer
        publisher._publisher.publish = store
        if case.source == "application":
            FastStream(self.broker)
        await self.broker.connect()
        subscriber: Any = self.subscriber
        await subscriber.prepare()
        subscriber.running = True
        subscriber._request_stop = lambda: seen.add("stop")
        self.broker.config.context.set_global("app", _App(seen))
        self.broker.config.configs[0].note_failure = lambda raw, error: seen.add(  # type: ignore[misc]
            "failure", raw, repr(error)
        )
        if case.kind == "under test":
            subscriber.calls[0].handler.set_test()

    def _handler(self) -> Callable[..., Any]:
        """A handler with the signature of the case."""
        case, seen, broker = self.case, self.seen, self.broker
        answer, returns = axes.ANSWERS[case.answer]
        act = axes.OUTCOMES[case.outcome]

        async def handler(**given: Any) -> Any:
            context = broker.config.context
            seen.add("handler", dict(sorted(given.items())))
            seen.context("handler", context)
            await act(_Settles(context.get_local("message")))
            seen.context("handler ends", context)
            return answer

        def synchronous(**given: Any) -> Any:
            seen.add("handler", dict(sorted(given.items())))
            seen.context("handler", broker.config.context)
            if case.outcome not in _NOT_IN_A_THREAD:
                _run_now(act(None))
            return answer

        function: Any = synchronous if case.kind == "synchronous" else handler
        body = axes.BODIES[case.body]
        if case.kind == "batch" and case.body not in ("many", "rest", "keyword only"):
            body = [_listed(parameter) for parameter in body]
        rest = [p for p in body if p.kind is inspect.Parameter.VAR_KEYWORD]
        parameters = [
            *(p for p in body if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(p for p in body if p.kind is inspect.Parameter.KEYWORD_ONLY),
            *axes.PARAMETERS[case.parameters],
            *self._dependencies[case.dependencies],
            *rest,
        ]
        function.__signature__ = inspect.Signature(parameters, return_annotation=returns)
        return function

    # -- what runs -----------------------------------------------------------------------------

    def _handle(self) -> Callable[[Any], Awaitable[Any]]:
        subscriber: Any = self.subscriber
        handle: Any = subscriber.consume
        if self.compiled:
            self.pipeline: HandlerPipeline = subscriber._make_pipeline()
            self.seen.events.pop() if self.seen.events else None
            self.why = self.pipeline.describe()
            handle = self.pipeline.run
        if subscriber._batches is not None:
            handle = subscriber._batches.wrap_handler(handle)
        return handle  # type: ignore[no-any-return]

    async def _deliver(
        self, handle: Callable[[Any], Coroutine[Any, Any, Any]], number: int
    ) -> None:
        case = self.case
        row = row_of(number, *axes.PAYLOADS[case.payload])
        raw: Any = row
        if case.kind == "batch":
            raw = (row, row_of(number + 100, *axes.PAYLOADS["order"]))
        here = CurrentDelivery(self.broker.config.store)  # type: ignore[attr-defined]
        here.delivery = raw
        result: Any = None
        async with AsyncExitStack() as stack:
            _set(stack, current_delivery_var, here)
            if case.kind == "transactional":
                _set(stack, current_transaction, _Transaction())  # type: ignore[arg-type]
            try:
                # As a worker does: each message has a copy of the context.
                if (suspended := start_coroutine(handle(raw))) is not None:
                    await suspended
            except BaseException as error:
                result = errors(error)
            left = self._left_behind()
        rows = raw if isinstance(raw, tuple) else (raw,)
        self._results.append(
            {
                "raised": result,
                "outcomes": [(shown(r.outcome), _error_of(r.outcome)) for r in rows],
                "chained": shown([r.chained for r in rows]),
                "context afterwards": left,
                "running": self.subscriber.lock.qsize,  # type: ignore[attr-defined]
                "calls": self._calls(),
            }
        )

    def _left_behind(self) -> dict[str, str]:
        """Variables of FastStream's context that have a value now."""
        names = ("message", "log_context", "handler_", "logger", "broker", "sql_transaction")
        found = contextvars.copy_context().items()
        known = {var.name: shown(value) for var, value in found if var.name in names}
        return {name: text for name, text in sorted(known.items()) if "EMPTY" not in text}

    def _calls(self) -> Any:
        handler: Any = self.subscriber.calls[0].handler
        if not handler.is_test:
            return None
        done = handler.future is not None and handler.future.done()
        failed = done and not handler.future.cancelled() and handler.future.exception()
        return shown(handler.mock.mock_calls), done, shown(failed)

    # -- what changes --------------------------------------------------------------------------

    def _change_before(self) -> None:
        handler: Any = self.subscriber.calls[0].handler
        if self.case.change == "test ends":
            handler.set_test()
        else:
            self._override()

    def _override(self) -> None:
        async def instead() -> int:
            self.seen.add("instead")
            return 9

        provider = self.broker.config.fd_config.provider
        for function in {
            need.annotation.__metadata__[0].dependency
            for need in self._dependencies[self.case.dependencies]
        }:
            provider.override(function, instead)

    def _change(self) -> None:
        if self.case.change != "none":
            getattr(self, "_" + self.case.change.replace(" ", "_"))()

    @property
    def _item(self) -> Any:
        return self.subscriber.calls[0]

    @property
    def _watch(self) -> Any:
        return self._middlewares["watch"][0]

    def _middleware_added(self) -> None:
        self._place.add_middleware(self._watch)

    def _middleware_in_place(self) -> None:
        config: Any = self.broker.config.configs[0]
        config.broker_middlewares.append(self._watch)

    def _context_cleared(self) -> None:
        self.broker.config.context.clear()

    def _rebuilt(self) -> None:
        self.subscriber._build_fastdepends_model()

    def _override_ends(self) -> None:
        self.broker.config.fd_config.provider.clear()

    def _test_begins(self) -> None:
        self._item.handler.set_test()

    def _test_ends(self) -> None:
        self._item.handler.reset_test()

    def _publisher_stacked(self) -> None:
        self._place.publisher("later")(self._item.handler)

    def _global_message(self) -> None:
        self.broker.config.context.set_global("message", "global")

    def _other_logger(self) -> None:
        state: Any = self.broker.config.logger
        if self.case.logger != "none":
            state.logger = type(state.logger)(Log(self.seen))

    def _ack_policy(self) -> None:
        self.subscriber.ack_policy = AckPolicy.MANUAL

    def _no_reply(self) -> None:
        self.subscriber._no_reply = True

    def _call_replaced(self) -> None:
        original = self._item.handler._wrapped_call

        async def call(message: Any) -> Any:
            self.seen.add("replaced")
            return await original(message)

        self._item.handler._wrapped_call = call

    def _second_handler(self) -> None:
        async def never(message: Any) -> bool:
            self.seen.add("filter", message)
            return False

        @self.subscriber(filter=never)
        async def second(body: Any) -> None:
            self.seen.add("second", body)

        calls = self.subscriber.calls
        calls.data.reverse()
        self.subscriber._build_fastdepends_model()


class _App:
    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def exit(self) -> None:
        self._seen.add("exit")


class _Transaction:
    connection = "connection"
    session = "session"

    def __repr__(self) -> str:
        return "transaction"


class _Settles:
    """Settles the message that the handler has; records what that raises."""

    def __init__(self, message: Any) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


_NOT_IN_A_THREAD = (
    *("acks", "nacks", "rejects", "nacks and fails", "returns"),  # which only a coroutine can
    *("SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "CancelledError"),
)


def _run_now(coroutine: Any) -> None:
    try:
        coroutine.send(None)
    except StopIteration:
        return


def _listed(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter that takes several of what `parameter` takes."""
    if parameter.annotation in (inspect.Parameter.empty, Any):
        return parameter
    return parameter.replace(annotation=list[parameter.annotation])  # type: ignore[name-defined]


def _set(stack: AsyncExitStack, variable: Any, value: Any) -> None:
    stack.callback(variable.reset, variable.set(value))


def _error_of(outcome: Any) -> Any:
    return errors(getattr(outcome, "error", None))


async def compare(case: Case) -> tuple[Any, Any, str]:
    """What FastStream's pipeline shows, what the compiled one shows, and which one that was."""
    generic = await Run(case, compiled=False).observe()
    run = Run(case, compiled=True)
    return generic, await run.observe(), run.why


__all__ = ("AXES", "Case", "compare")
