"""A message that the handler cannot take ends alone; the others of its batch are handled."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from fast_depends.pydantic import PydanticSerializer
from faststream import AckPolicy, Context, Depends, ExceptionMiddleware
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    Once,
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlConnection,
)
from tests.faststream.conftest import QUICK, Heard, Look, on_each
from tests.helpers import eventually

pytestmark = pytest.mark.capability("batch handlers")

TWICE = ConstantRetryStrategy(delay_seconds=0.0, max_attempts=2)
BATCH: Any = {**QUICK, "batch": True, "retry_strategy": TWICE}
SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""For what has nothing to do with the database."""


class Order(BaseModel):
    id: int
    price: Annotated[float, Field(gt=0)] = 1.0


async def put(broker: SqlBroker, *bodies: Any, **options: Any) -> list[int | None]:
    """Publish `bodies` so that one claim gets them all; bytes go as broken JSON."""
    ids = []
    async with broker.engine.begin() as connection:
        for n, body in enumerate(bodies):
            headers = {"content-type": "application/json"} if isinstance(body, bytes) else None
            given = {
                name: value(n) if callable(value) else value for name, value in options.items()
            }
            published = await broker.publish(
                body, "q", connection=connection, headers=headers, **given
            )
            ids.append(published)
    return ids


def ends(rows: list[dict[str, Any]]) -> list[tuple[str, str | None, int]]:
    return [(row["state"], row["reason"], row["attempts_count"]) for row in rows]


GOOD = ("COMPLETED", None, 1)
BAD = ("FAILED", "max_attempts", 2)
INVALID = ("FAILED", "invalid_body", 1)


async def test_the_neighbours_of_a_bad_body_are_handled_together(
    broker: SqlBroker, look: Look
) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[int]) -> None:
        calls.append(bodies)

    await put(broker, 0, b"{broken", 2, {"no": "number"}, 4, b"[", 6)
    await broker.start()
    rows = await look.archived(7)
    assert ends(rows) == [GOOD, INVALID, GOOD, INVALID, GOOD, INVALID, GOOD]
    assert calls == [[0, 2, 4, 6]]
    assert "JSONDecodeError" in rows[1]["last_error"]
    assert "1 validation error" in rows[3]["last_error"]
    assert "bodies.0" in rows[3]["last_error"], "its own error, not the batch's"
    assert rows[0]["last_error"] is None


@SQLITE
async def test_models_and_parameters_from_the_context(broker: SqlBroker, look: Look) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("q", **BATCH)
    def handle(orders: list[Order], message: SqlBrokerBatchMessage) -> None:
        calls.append([order.id for order in orders])
        assert [m.raw_message.id for m in message.messages] == [
            row.id for row in message.raw_message
        ]

    await put(broker, {"id": 1}, {"id": 2, "price": -1}, {"id": "x", "price": "y"}, {"id": 4})
    await broker.start()
    assert ends(await look.archived(4)) == [GOOD, INVALID, INVALID, GOOD]
    assert calls == [[1, 4]]


@SQLITE
async def test_the_errors_of_fastdepends(engine: AsyncEngine, look: Look) -> None:
    broker = SqlBroker(
        engine, logger=None, serializer=PydanticSerializer(use_fastdepends_errors=True)
    )
    calls: list[list[int]] = []

    @broker.subscriber("q", **BATCH)
    async def handle(orders: list[Order]) -> None:
        calls.append([order.id for order in orders])

    await broker.create_tables()
    await put(broker, {"id": 1}, {"id": "x"}, {"id": 3})
    await broker.start()
    assert ends(await look.archived(3)) == [GOOD, INVALID, GOOD]
    assert calls == [[1, 3]]
    await broker.stop()


@SQLITE
@pytest.mark.parametrize("how", ["validator", "decoder", "parser", "filter"])
async def test_the_batch_is_halved_if_the_bad_message_is_unknown(
    broker: SqlBroker, look: Look, how: str
) -> None:
    calls: list[list[int]] = []

    def check(values: list[int]) -> list[int]:
        if 5 in values:
            raise ValueError("no five")
        return values

    async def decode(message: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        return check(await original(message))

    async def parse(rows: Any, original: Callable[[Any], Awaitable[Any]]) -> Any:
        check([int(row.payload) for row in rows])
        return await original(rows)

    async def is_ours(message: Any) -> bool:
        return bool(await message.decode())

    hint: Any = Annotated[list[int], AfterValidator(check)] if how == "validator" else list[int]
    options: Any = {
        "decoder": {"decoder": decode},
        "parser": {"parser": parse},
        "filter": {"decoder": decode},
    }.get(how, {})
    subscriber = broker.subscriber("q", **BATCH, **options)

    async def handle(bodies: list[int]) -> None:
        calls.append(bodies)

    handle.__annotations__["bodies"] = hint
    subscriber(handle, **({"filter": is_ours} if how == "filter" else {}))
    await put(broker, *range(8))
    await broker.start()
    rows = await look.archived(8)
    assert sorted(n for call in calls for n in call) == [0, 1, 2, 3, 4, 6, 7]
    assert [0, 1, 2, 3] in calls
    assert ends(rows) == [GOOD] * 5 + [BAD if how == "parser" else INVALID] + [GOOD] * 2


@on_each(
    "policy, bad",
    [(AckPolicy.NACK_ON_ERROR, INVALID), (AckPolicy.ACK_FIRST, GOOD)],
    [(AckPolicy.REJECT_ON_ERROR, INVALID), (AckPolicy.ACK, GOOD), (AckPolicy.MANUAL, INVALID)],
)
@pytest.mark.filterwarnings("ignore:.*retry_strategy")
async def test_a_bad_message_ends_as_it_would_without_a_batch(
    broker: SqlBroker, look: Look, policy: AckPolicy, bad: tuple[Any, ...]
) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("q", **BATCH, ack_policy=policy)
    async def handle(bodies: list[int], message: SqlBrokerBatchMessage) -> None:
        calls.append(bodies)
        if policy is AckPolicy.MANUAL:
            await message.ack()

    await put(broker, 0, "x", 2)
    await broker.start()
    rows = await look.archived(3)
    assert [end[:2] for end in ends(rows)] == [GOOD[:2], bad[:2], GOOD[:2]]
    await eventually(lambda: calls == [[0, 2]])
    assert await broker.admin.unknown() == []


async def test_the_answer_is_of_those_that_were_handled(broker: SqlBroker, look: Look) -> None:
    async def tell() -> None:
        await broker.publish("told", "told", with_ack=True)

    @broker.subscriber("q", **BATCH, dead_letter_queue="dead")
    @broker.publisher("sums")
    async def handle(bodies: list[int], _: Annotated[None, Depends(tell)]) -> int:
        return sum(bodies)

    await put(broker, 1, "x", 2)
    await broker.start()

    async def queues() -> bool:
        return sorted(r["queue"] for r in await look.rows()) == ["dead", "sums", "told"]

    await eventually(queues)
    assert ends(await look.rows(archive=True)) == [GOOD, GOOD]
    assert [bytes(r["payload"]) for r in await look.rows() if r["queue"] == "sums"] == [b"3"]


async def test_the_sql_of_a_dependency_in_the_transaction_is_committed_once(
    broker: SqlBroker, look: Look, engine: AsyncEngine
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effect (n INTEGER)"))

    async def audit(connection: SqlConnection) -> None:
        await connection.execute(text("INSERT INTO effect VALUES (100)"))

    @broker.subscriber("q", **BATCH, transactional=True)
    async def handle(
        bodies: list[int], connection: SqlConnection, _: Annotated[None, Depends(audit)]
    ) -> None:
        for n in bodies:
            await connection.execute(text("INSERT INTO effect VALUES (:n)"), {"n": n})

    await put(broker, 1, "x", 2)
    await broker.start()
    assert ends(await look.archived(3)) == [GOOD, INVALID, GOOD]
    async with engine.connect() as connection:
        effects = sorted((await connection.execute(text("SELECT n FROM effect"))).scalars())
    assert effects == [1, 2, 100]


async def test_keys_that_are_handled_once(broker: SqlBroker, look: Look) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("q", **BATCH, policies=[Once("1h")])
    async def handle(bodies: list[int]) -> None:
        calls.append(bodies)

    await put(broker, 1, "x", 2, key=lambda n: f"k{n}")
    await broker.start()
    rows = await look.archived(3)
    assert ends(rows) == [GOOD, INVALID, GOOD]
    assert calls == [[1, 2]]


@SQLITE
@pytest.mark.parametrize("how", ["body", "answer", "dependency", "context"])
async def test_an_error_without_a_bad_body_fails_the_whole_batch(
    broker: SqlBroker, look: Look, how: str
) -> None:
    calls: list[list[int]] = []

    async def dependency() -> int:
        if how == "dependency":
            raise ConnectionError("another server")
        return 1

    @broker.subscriber("q", **BATCH)
    async def handle(
        bodies: list[int],
        one: Annotated[int, Depends(dependency)],
        names: Annotated[list[int], Context("names", cast=True)],
    ) -> list[int]:
        calls.append(bodies)
        if how == "body":
            Order(id="x")  # type: ignore[arg-type]
        return ["x"] if how == "answer" else bodies  # type: ignore[list-item]

    broker.context.set_global("names", [1, "x"] if how == "context" else [])
    await put(broker, 1, 2, 3)
    await broker.start()
    assert ends(await look.archived(3)) == [BAD] * 3
    assert calls == ([[1, 2, 3]] * 2 if how in {"body", "answer"} else [])


@SQLITE
async def test_a_middleware_that_handles_the_error_hides_no_message(
    broker: SqlBroker, look: Look
) -> None:
    calls: list[list[int]] = []
    handled: list[Exception] = []
    swallow = ExceptionMiddleware()

    @swallow.add_handler(ValidationError)
    async def note(error: ValidationError) -> None:
        handled.append(error)

    broker.add_middleware(swallow)

    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[int]) -> None:
        calls.append(bodies)

    await put(broker, 1, "x", 3)
    await broker.start()
    assert ends(await look.archived(3)) == [GOOD] * 3
    assert calls == [[1, 3]]
    assert len(handled) == 2


@SQLITE
async def test_a_handler_that_was_set_up_again_is_not_called_again(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Another broker's subscriber may share it; then it is unknown whether it has started."""

    @broker.subscriber("q", **BATCH)
    async def handle(bodies: list[int]) -> None: ...

    await broker.start()
    handle.set_wrapped(dependencies=(), _call_decorators=(), config=broker.config.fd_config)
    await put(broker, 1, "x", 3)
    assert ends(await look.archived(3)) == [BAD] * 3
    assert not heard.texts("the handler did not start")
