"""The axes of the matrix: what handlers ask for, what becomes of them, what is around them."""

import asyncio
import dataclasses
import inspect
from collections import UserDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from faststream import AckPolicy, BaseMiddleware, Context, Depends, ExceptionMiddleware
from faststream.annotations import ContextRepo, Logger
from faststream.exceptions import (
    AckMessage,
    NackMessage,
    RejectMessage,
    SkipMessage,
    StopApplication,
    StopConsume,
)
from faststream.params import Header
from pydantic import BaseModel, Field, field_validator

from faststream_sqlbroker import (
    Move,
    NotReadyYet,
    Postpone,
    RetryPossible,
    SqlBrokerMessage,
    SqlBrokerResponse,
)
from faststream_sqlbroker.annotations import SqlBroker
from tests.pipeline.seen import Seen

HEADERS = '{"content-type": "application/json"}'
FULL = (
    '{"content-type": "application/json", "reply_to": "answers", "correlation_id": "c9", '
    '"nested": {"a": 1}, "tag": "blue"}'
)
ODD = '{"content-type": 5, "correlation_id": [], "reply_to": {}}'

PAYLOADS: dict[str, tuple[bytes, str | None]] = {
    "order": (b'{"order": 1, "customer": "c", "x": 2}', HEADERS),
    "reply": (b'{"order": 1, "x": 2}', FULL),
    "list": (b"[1, 2]", HEADERS),
    "misfit": (b'{"order": "z", "customer": 7}', HEADERS),
    "broken": (b"{", HEADERS),
    "deep": (b"[" * 100_000, HEADERS),
    "null": (b"null", HEADERS),
    "text": (b"hi", '{"content-type": "text/plain"}'),
    "bytes": (b"\xff", None),
    "odd headers": (b'{"order": 3}', ODD),
    "reserved": (b'{"order": 1, "stack": 2, "func": 3}', HEADERS),
}


class Order(BaseModel):
    order: int
    customer: str = "nobody"


class Checked(BaseModel):
    order: int

    @field_validator("order")
    @classmethod
    def is_first(cls, value: int) -> int:
        if value != 1:
            raise ValueError("not the first")
        return value


@dataclasses.dataclass
class Line:
    order: int
    customer: str = "nobody"


class Struct(msgspec.Struct):
    order: int
    customer: str = "nobody"


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, annotation=annotation, default=default)


def _only(name: str, annotation: Any) -> Any:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


NOTHING = inspect.Parameter.empty
BODIES: dict[str, list[Any]] = {
    "dict": [_parameter("body", dict)],
    "unannotated": [_parameter("body", NOTHING)],
    "any": [_parameter("body", Any)],
    "typed dict": [_parameter("body", dict[str, Any])],
    "model": [_parameter("body", Order)],
    "checked model": [_parameter("body", Checked)],
    "dataclass": [_parameter("body", Line)],
    "struct": [_parameter("body", Struct)],
    "list": [_parameter("body", list[int])],
    "text": [_parameter("body", str)],
    "constrained": [_parameter("body", Annotated[dict, Field(min_length=2)])],
    "default": [_parameter("body", dict, {"d": 1})],
    "many": [_parameter("order", int), _parameter("customer", str, "nobody")],
    "keyword only": [_only("body", dict)],
    "none": [],
    "reserved name": [_parameter("stack", dict)],
    "rest": [inspect.Parameter("rest", inspect.Parameter.VAR_KEYWORD)],
}
PARAMETERS: dict[str, list[Any]] = {
    "none": [],
    "message": [_only("msg", SqlBrokerMessage)],
    "context": [_only("queue", Annotated[str, Context("message.queue")])],
    "logger and others": [
        _only("log", Logger),
        _only("repo", ContextRepo),
        _only("own", SqlBroker),
        _only("msg", SqlBrokerMessage),
    ],
    "missing": [_only("gone", Annotated[Any, Context("nowhere")])],
    "default": [_only("gone", Annotated[Any, Context("nowhere", default=5)])],
    "cast": [_only("number", Annotated[int, Context("message.raw_message.id", cast=True)])],
    "initial": [_only("made", Annotated[Any, Context("made", initial=dict)])],
    "header": [_only("tag", Annotated[str, Header(default="none")])],
    "other name": [_only("message", Annotated[Any, Context("message.headers")])],
}


def dependencies(seen: Seen) -> dict[str, list[Any]]:  # noqa: C901 - functions, one by one
    """Parameters with `Depends`, whose calls `seen` records."""

    async def one() -> int:
        seen.add("one")
        return 1

    def thread() -> str:
        seen.add("thread")
        return "40"

    async def nested(
        a: Annotated[int, Depends(one)],
        b: Annotated[int, Depends(one, use_cache=False)],
        number: Annotated[str, Context("message.message_id")],
    ) -> str:
        seen.add("nested", a, b)
        return f"{a}{b}{number}"

    async def opened() -> AsyncIterator[int]:
        seen.add("opened")
        try:
            yield 7
        except BaseException as error:
            seen.add("opened sees", error)
            raise
        finally:
            seen.add("closed")

    def opened_in_thread() -> Iterator[int]:
        seen.add("opened in thread")
        try:
            yield 8
        except GeneratorExit:
            # FastDepends leaves it to the garbage collector after a BaseException: any time later.
            return
        except BaseException as error:
            seen.add("in thread sees", error)
            raise
        seen.add("closed in thread")

    async def swallows() -> AsyncIterator[int]:
        with suppress(Exception):
            yield 9

    async def fails_at_the_end() -> AsyncIterator[int]:
        yield 10
        raise ValueError("at the end")

    async def of_body(body: Any) -> Any:
        seen.add("of body", body)
        return body

    async def fails() -> int:
        raise ValueError("a dependency")

    async def returns_text() -> int:
        return "text"  # type: ignore[return-value]

    async def publishes(broker: SqlBroker) -> None:
        await broker.publish("from a dependency", "out")

    def needs(function: Any, annotation: Any = int, **options: Any) -> list[Any]:
        return [_only("needed", Annotated[annotation, Depends(function, **options)])]

    return {
        "none": [],
        "one": needs(one),
        "thread": needs(thread),
        "nested": [
            *needs(nested, str),
            _only("again", Annotated[int, Depends(one)]),
        ],
        "generator": needs(opened),
        "generator in thread": needs(opened_in_thread),
        "both generators": [
            *needs(opened),
            _only("other", Annotated[int, Depends(opened_in_thread)]),
        ],
        "swallows errors": needs(swallows),
        "fails at the end": needs(fails_at_the_end),
        "of the body": needs(of_body, Any),
        "fails": needs(fails),
        "wrong result": needs(returns_text),
        "checked result": needs(returns_text, cast_result=True),
        "publishes": needs(publishes, Any),
    }


def _raises(make: Callable[[], BaseException]) -> Callable[[Any], Awaitable[None]]:
    async def act(_message: Any) -> None:
        raise make()

    return act


def _raises_from(make: Callable[[], BaseException]) -> Callable[[Any], Awaitable[None]]:
    async def act(_message: Any) -> None:
        try:
            {}["behind"]
        except KeyError as behind:
            raise make() from behind

    return act


async def _returns(_message: Any) -> None:
    await asyncio.sleep(0)


async def _acks(message: Any) -> None:
    await message.ack()


async def _nacks(message: Any) -> None:
    await message.nack(delay=3)


async def _rejects(message: Any) -> None:
    await message.reject(reason="no")


async def _nacks_and_fails(message: Any) -> None:
    await message.nack()
    raise ValueError("after the nack")


OUTCOMES: dict[str, Callable[[Any], Awaitable[None]]] = {
    "returns": _returns,
    "acks": _acks,
    "nacks": _nacks,
    "rejects": _rejects,
    "nacks and fails": _nacks_and_fails,
    "ValueError": _raises(lambda: ValueError("boom")),
    "RuntimeError from": _raises_from(lambda: RuntimeError("boom")),
    "TimeoutError": _raises(TimeoutError),
    "AckMessage": _raises(AckMessage),
    "NackMessage": _raises(NackMessage),
    "NackMessage from": _raises_from(lambda: NackMessage(delay=5)),
    "NackMessage, odd": _raises(lambda: NackMessage(nothing=1)),
    "RejectMessage": _raises(lambda: RejectMessage(reason="no")),
    "SkipMessage": _raises(SkipMessage),
    "StopConsume": _raises(StopConsume),
    "StopApplication": _raises(StopApplication),
    "SystemExit": _raises(lambda: SystemExit(3)),
    "KeyboardInterrupt": _raises(KeyboardInterrupt),
    "CancelledError": _raises(asyncio.CancelledError),
    "GeneratorExit": _raises(GeneratorExit),
    "BaseException": _raises(lambda: BaseException("base")),
    "Postpone": _raises(lambda: Postpone(5)),
    "Postpone from": _raises_from(lambda: Postpone(5)),
    "NotReadyYet": _raises(lambda: NotReadyYet(1, 5)),
    "RetryPossible": _raises(RetryPossible),
    "Move": _raises(lambda: Move("other")),
}
ANSWERS: dict[str, tuple[Any, Any]] = {
    "none": (None, NOTHING),
    "None": (None, None),
    "text": ("answer", str),
    "model": ({"order": 4}, Order),
    "wrong": ("text", int),
    "unchecked": ({"a": [1]}, NOTHING),
    "response": (
        SqlBrokerResponse("r", priority=3, key="k", headers={"h": 1}),
        NOTHING,
    ),
}


async def _numbers_as_keys(_message: Any, _original: Any) -> Any:
    return {1: 2}


async def _mapping(_message: Any, _original: Any) -> Any:
    return UserDict(order=1, x=2)


async def _calls_original(message: Any, original: Any) -> Any:
    return await original(message)


DECODERS: dict[str, Any] = {
    "ours": None,
    "calls ours": _calls_original,
    "numbers as keys": _numbers_as_keys,
    "mapping": _mapping,
}
POLICIES: dict[str, AckPolicy | None] = {
    "default": None,
    **{policy.name: policy for policy in AckPolicy},
}


def _decrypting(kind: type[Any]) -> type[Any]:
    """A subclass of the message's class that decodes by itself."""

    async def decode(_message: Any) -> Any:
        return {"order": 1, "customer": "decrypted"}

    return type(kind.__name__, (kind,), {"decode": decode})


class _Proxy:
    """Stands for a message, and decodes by itself; it has no attributes of its own."""

    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    @property  # type: ignore[misc] # as proxies of wrapt
    def __class__(self) -> Any:
        return type(self._message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    async def decode(self) -> Any:
        return {"order": 1, "customer": "decrypted"}


def middlewares(seen: Seen) -> dict[str, list[Any]]:  # noqa: C901 - classes, one by one
    """Middlewares that record what they see in `seen`, or get in the way."""

    class Watch(BaseMiddleware):
        async def on_receive(self) -> None:
            seen.add("on_receive", self.msg)
            await super().on_receive()

        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.add("consume_scope", msg)
            try:
                return await call_next(msg)
            finally:
                seen.add("consume_scope ends", msg.committed)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            seen.add("publish_scope", cmd.body, cmd.correlation_id, cmd.destination)
            return await call_next(cmd)

        async def after_processed(self, *info: Any) -> bool | None:
            error = info[1] if info else None
            seen.add("after_processed", errors_of(error))
            seen.context("after_processed", self.context)
            return await super().after_processed(*info)

    class Changes(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.body = b'{"order": 99}'
            return await call_next(msg)

    class Decodes(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.add("decodes", await msg.decode())
            return await call_next(msg)

    class Copies(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            other = msg.__copy__()
            other.headers = {"other": True}
            return await call_next(other)

    class ReplacesDecode(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            original = msg.decode

            async def decode() -> Any:
                seen.add("decrypts", await original())
                return {"order": 1, "customer": "decrypted"}

            msg.decode = decode
            return await call_next(msg)

    class ReplacesClass(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.__class__ = _decrypting(type(msg))
            return await call_next(msg)

    class Subclass(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            other = msg.__copy__()
            other.__class__ = _decrypting(type(msg))
            return await call_next(other)

    class Wraps(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            return await call_next(_Proxy(msg))

    class Clears(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.add("clears", await msg.decode())
            msg.body = b'{"order": 98}'
            msg.clear_cache()
            return await call_next(msg)

    class ReplacesAcks(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            def replaced(name: str) -> Any:
                original = getattr(msg, name)

                async def settle(*args: Any, **options: Any) -> None:
                    seen.add("settles", name)
                    await original(*args, **options)

                return settle

            for name in ("ack", "nack", "reject"):
                setattr(msg, name, replaced(name))
            return await call_next(msg)

    class ReplacesFields(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.headers = {"tag": "replaced"}
            msg.correlation_id = "replaced"
            msg.reply_to = "replaced"
            msg.content_type = None
            return await call_next(msg)

    class ReplacesContext(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            other = msg.__copy__()
            other.headers = {"tag": "of the context"}
            with self.context.scope("message", other):
                return await call_next(msg)

    class FailsReceive(BaseMiddleware):
        async def on_receive(self) -> None:
            raise ValueError("on_receive")

    class FailsAfter(BaseMiddleware):
        async def after_processed(self, *info: Any) -> bool | None:
            raise KeyError("after_processed")

    class Answers(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            await call_next(msg)
            return "another answer"

    class Swallows(BaseMiddleware):
        async def after_processed(self, *info: Any) -> bool | None:
            return True

    def errors_of(error: BaseException | None) -> str | None:
        return None if error is None else repr(error)

    handled = ExceptionMiddleware(handlers={ValueError: lambda e: seen.add("handled", e)})
    return {
        "none": [],
        "watch": [Watch],
        "twice": [Watch, Watch],
        "changes": [Changes],
        "decodes": [Decodes, Watch],
        "copies": [Copies],
        "replaces decode": [ReplacesDecode],
        "replaces decode inside": [Decodes, ReplacesDecode],
        "replaces the class": [ReplacesClass],
        "hands a subclass on": [Subclass],
        "hands a proxy on": [Wraps],
        "clears the cache": [Clears],
        "replaces acks": [ReplacesAcks],
        "replaces fields": [ReplacesFields],
        "replaces the context": [ReplacesContext],
        "fails at first": [FailsReceive],
        "fails at last": [FailsAfter],
        "answers": [Answers],
        "swallows": [Swallows, FailsReceive],
        "handles": [handled],
        "several": [Watch, handled, FailsAfter],
    }
