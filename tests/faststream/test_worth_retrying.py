"""Which failures are retried: by the class of the error; an invalid body is only on request."""

import json
import logging
from typing import Annotated, Any

import pytest
from faststream import AckPolicy, BaseMiddleware, Context, Depends
from pydantic import BaseModel, TypeAdapter, ValidationError

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    Once,
    RetryPossible,
    SqlBroker,
    SqlBrokerMessage,
    SqlBrokerRouter,
)
from tests.faststream.conftest import QUICK, Heard, Look, on_each

SOON = {"delay_seconds": 0.02, "max_attempts": 3}
BROKEN = b"{"
JSON = {"content-type": "application/json"}


class Order(BaseModel):
    """A body."""

    number: int


# -- by the class of the error ---------------------------------------------------------------------


@on_each("options", [{}], [{"batch": True}, {"transactional": True}])
async def test_an_error_that_is_not_worth_a_retry_fails_at_once(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    strategy = ConstantRetryStrategy(**SOON, no_retry_on=(ValueError, KeyError))
    runs: list[Any] = []

    @broker.subscriber("q", **QUICK, retry_strategy=strategy, **options)
    async def handle(body: Any) -> None:
        runs.append(body)
        raise UnicodeError("hopeless")

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"], row["attempts_count"]) == ("FAILED", "not_retried", 1)
    assert "hopeless" in row["last_error"]
    assert len(runs) == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_other_errors_are_retried_up_to_the_limit(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber(
        "q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON, retry_on=ConnectionError)
    )
    async def handle(body: Any) -> None:
        raise ConnectionResetError

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("FAILED", 3)
    assert row["reason"] != "not_retried"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_handler_that_asks_for_a_retry_gets_it(broker: SqlBroker, look: Look) -> None:
    strategy = ConstantRetryStrategy(**SOON, no_retry_on=ValueError)

    @broker.subscriber("q", **QUICK, retry_strategy=strategy, ack_policy=AckPolicy.MANUAL)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        if message.attempts_count == 2:
            await message.ack()
            return
        try:
            raise ValueError(body)
        except ValueError as error:
            if message.attempts_count:
                raise RetryPossible from error
            await message.nack(delay=0.01)

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("COMPLETED", 3)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_nack_while_an_error_is_handled_is_asked_about(
    broker: SqlBroker, look: Look
) -> None:
    strategy = ConstantRetryStrategy(**SOON, no_retry_on=ValueError)

    @broker.subscriber("q", **QUICK, retry_strategy=strategy)
    async def handle(body: str, message: SqlBrokerMessage) -> None:
        try:
            raise ValueError(body)
        except ValueError:
            await message.nack()

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "not_retried")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_reservation_is_asked_about(broker: SqlBroker, look: Look) -> None:
    await broker.publish("x", "q")
    reserved = await broker.reserve(
        "q", retry_strategy=ConstantRetryStrategy(**SOON, no_retry_on=ValueError)
    )
    assert reserved is not None
    with pytest.raises(ValueError, match="hopeless"):
        async with reserved:
            raise ValueError("hopeless")
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "not_retried")


# -- bodies that cannot be taken -------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch": True},
    {"transactional": True},
    {"transactional": True, "batch": True},
    {"handler_timeout": 30},
    {"ack_policy": AckPolicy.MANUAL},
    {"ack_policy": AckPolicy.REJECT_ON_ERROR},
    {"policies": [Once("1h")]},
]


async def test_p3_a_body_that_cannot_be_taken_fails_at_once(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """On each database; nothing of it is lost."""
    await _fails_at_once(broker, look, {})
    assert heard.texts("ValidationError", logging.ERROR)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
async def test_an_invalid_body_fails_at_once_under_all_options(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    await _fails_at_once(broker, look, options)


async def _fails_at_once(broker: SqlBroker, look: Look, options: dict[str, Any]) -> None:
    router = SqlBrokerRouter()
    good = []
    kind = list[Order] if options.get("batch") else Order

    @router.subscriber("q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON), **options)
    async def handle(order: kind, message: SqlBrokerMessage) -> None:  # type: ignore[valid-type]
        good.extend(order if isinstance(order, list) else [order])
        await message.ack()

    broker.include_router(router)
    await broker.publish({"number": "many"}, "q", key="a")
    await broker.publish(BROKEN, "q", headers=JSON, key="b")
    await broker.publish({"number": 1}, "q", key="c")
    await broker.publish(b"\xff", "q", headers={"content-type": "text/plain"}, key="d")
    await broker.start()
    rows = await look.archived(4)
    assert good == [Order(number=1)]
    assert [(row["state"], row["reason"], row["attempts_count"]) for row in rows] == [
        ("FAILED", "invalid_body", 1),
        ("FAILED", "invalid_body", 1),
        ("COMPLETED", None, 1),
        ("FAILED", "invalid_body", 1),
    ]
    assert bytes(rows[1]["payload"]) == BROKEN
    assert "number" in rows[0]["last_error"]


@pytest.mark.parametrize(
    "options", [{}, {"ack_policy": AckPolicy.MANUAL}, {"batch": True}], ids=str
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_invalid_body_is_retried_on_request(
    broker: SqlBroker, look: Look, options: dict[str, Any]
) -> None:
    strategy = ConstantRetryStrategy(**SOON)
    kind = list[Order] if options.get("batch") else Order

    @broker.subscriber("q", **QUICK, retry_strategy=strategy, retry_invalid_body=True, **options)
    async def handle(order: kind) -> None: ...  # type: ignore[valid-type]

    await broker.publish({"number": "many"}, "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("FAILED", 3)
    assert row["reason"] != "invalid_body"


@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.ACK_FIRST])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_policy_that_always_acks_acks_an_invalid_body(
    broker: SqlBroker, look: Look, policy: AckPolicy
) -> None:
    @broker.subscriber("q", **QUICK, ack_policy=policy)
    async def handle(order: Order) -> None: ...

    await broker.publish({"number": "many"}, "q")
    await broker.start()
    [row] = await look.archived()
    assert row["state"] == "COMPLETED"


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_an_invalid_body_goes_to_the_dead_letter_queue(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, dead_letter_queue="dead")
    async def handle(order: Order) -> None: ...

    await broker.publish({"number": "many"}, "q")
    await broker.start()

    @broker.subscriber("dead", **QUICK)
    async def take(body: Any, message: SqlBrokerMessage) -> None:
        assert message.headers["dead-letter"]["reason"] == "invalid_body"
        assert body == {"number": "many"}

    await broker.start()
    [row] = await look.archived()
    assert (row["queue"], row["state"]) == ("dead", "COMPLETED")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_key_of_once_is_given_back_for_an_invalid_body(
    broker: SqlBroker, look: Look
) -> None:
    """Its handler has not started: the message that replaces it does."""

    @broker.subscriber("q", **QUICK, policies=[Once("1h")])
    async def handle(order: Order) -> None: ...

    await broker.start()
    await broker.publish({"number": "many"}, "q", key="k")
    await look.archived()
    await broker.publish({"number": 1}, "q", key="k")
    rows = await look.archived(2)
    assert [row["state"] for row in rows] == ["FAILED", "COMPLETED"]


INTEGERS = TypeAdapter(int)


def _own_error() -> int:
    return INTEGERS.validate_python("no number")


async def _raises(order: Order) -> None:
    _own_error()


async def _returns_otherwise(order: Order) -> int:
    return "no number"  # type: ignore[return-value]


async def _with_a_dependency(order: Order, number: Annotated[int, Depends(_own_error)]) -> None: ...


async def _with_a_misfit(
    order: Order, number: Annotated[int, Depends(lambda: "no number")]
) -> None: ...


async def _with_a_context(
    order: Order, number: Annotated[int, Context("message.queue", cast=True)]
) -> None: ...


async def _asks_elsewhere(order: Order) -> None:
    json.loads(BROKEN)


def _in_a_thread(order: Order) -> None:
    _own_error()


class _Refusing(BaseMiddleware):
    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        _own_error()
        return await call_next(msg)


class _ServerIsGone(BaseMiddleware):
    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        raise ConnectionError


@pytest.mark.parametrize(
    ("handler", "middlewares"),
    [
        (_raises, ()),
        (_in_a_thread, ()),
        (_returns_otherwise, ()),
        (_with_a_dependency, ()),
        (_with_a_misfit, ()),
        (_with_a_context, ()),
        (_asks_elsewhere, ()),
        (_raises, (_Refusing,)),
        (_raises, (_ServerIsGone,)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or ",".join(each.__name__ for each in value),
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_same_error_from_the_handler_is_no_invalid_body(
    broker: SqlBroker, look: Look, handler: Any, middlewares: Any
) -> None:
    """A handler's, a dependency's, a middleware's, and an answer that does not fit."""
    for middleware in middlewares:
        broker.add_middleware(middleware)
    broker.subscriber("q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON))(handler)
    await broker.publish({"number": 1}, "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["attempts_count"]) == ("FAILED", 3)
    assert row["reason"] != "invalid_body"


async def _of_two(first: int, second: int) -> None: ...


def _needs(number: int) -> int:
    return number


async def _of_a_dependencys_parameter(
    number: Any, same: Annotated[int, Depends(_needs)]
) -> None: ...


@pytest.mark.parametrize(
    ("handler", "body"),
    [
        (_of_two, 5),
        (_of_two, [1, "b"]),
        (_of_two, {"first": 1}),
        (_of_a_dependencys_parameter, {"number": "many"}),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_several_parameters_are_filled_from_one_body(
    broker: SqlBroker, look: Look, handler: Any, body: Any
) -> None:
    broker.subscriber("q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON))(handler)
    await broker.publish(body, "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "invalid_body")


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError, "invalid_body"), (ConnectionError, None)]
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_custom_decoder_reports_an_invalid_body_by_a_value_error(
    broker: SqlBroker, look: Look, error: type[Exception], reason: str | None
) -> None:
    async def decode(message: Any) -> Any:
        raise error("as it is")

    @broker.subscriber("q", **QUICK, decoder=decode, retry_strategy=ConstantRetryStrategy(**SOON))
    async def handle(body: Any) -> None: ...

    await broker.publish("x", "q")
    await broker.start()
    [row] = await look.archived()
    assert (row["reason"] == "invalid_body") is (reason is not None)
    assert row["attempts_count"] == (1 if reason else 3)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_filter_may_be_the_first_to_decode_it(broker: SqlBroker, look: Look) -> None:
    async def wanted(message: Any) -> bool:
        return bool(await message.decode())

    subscriber = broker.subscriber("q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON))

    @subscriber(filter=wanted)
    async def handle(body: Any) -> None: ...

    await broker.publish(BROKEN, "q", headers=JSON)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "invalid_body")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_too_deep_a_body_is_invalid(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=ConstantRetryStrategy(**SOON))
    async def handle(body: Any) -> None: ...

    await broker.publish(b"[" * 200_000 + b"]" * 200_000, "q", headers=JSON)
    await broker.start()
    [row] = await look.archived()
    assert (row["state"], row["reason"]) == ("FAILED", "invalid_body")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_error_that_a_middleware_raises_counts(broker: SqlBroker, look: Look) -> None:
    class Forgiving(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            try:
                return await call_next(msg)
            except ValidationError:
                return None

    broker.add_middleware(Forgiving)

    @broker.subscriber("q", **QUICK)
    async def handle(order: Order) -> None: ...

    await broker.publish({"number": "many"}, "q")
    await broker.start()
    assert (await look.archived())[0]["state"] == "COMPLETED"
