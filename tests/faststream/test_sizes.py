"""Messages near a small limit, and beyond it: what the application sees, and what becomes of the
attempt.

MariaDB and MySQL are private servers, as max_allowed_packet is everybody's; for the others the
limit is written down smaller.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import (
    ConstantRetryStrategy,
    MessageTooLargeError,
    PublishError,
    SqlBroker,
    SqlBrokerMessage,
    StoreError,
)
from faststream_sqlbroker.database.parts import sizes
from faststream_sqlbroker.database.postgresql.dialect import PostgresqlDialect
from faststream_sqlbroker.database.sqlite.dialect import SqliteDialect
from tests.conftest import Servers
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually
from tools.private import CannotDownloadError, CannotStartError, mariadb, mysql
from tools.servers import NoServerError

LIMIT = 1024 * 1024
LARGEST = LIMIT - sizes.ROW_OVERHEAD
PACKET = f"--max-allowed-packet={LIMIT}"
AGAIN = ConstantRetryStrategy(delay_seconds=0.05, max_attempts=2)
ORDERS = [b"first", b"too large", b"third", b"fourth"]
"""Bodies that are no JSON; the answer to the second is."""


class SmallServers(Servers):
    """Those of MariaDB and MySQL take packets of `LIMIT` bytes."""

    def _find(self, kind: str) -> Engine | NoServerError:
        if kind == "postgresql":
            return super()._find(kind)
        if reason := os.environ.get(f"SQLBROKER_{kind.upper()}_URL_MISSING"):
            missing = NoServerError(reason)
            missing.excused = True
            return missing
        try:
            started = mariadb(PACKET) if kind == "mariadb" else mysql(PACKET)
            url, _ = self._stack.enter_context(started)
        except CannotStartError as error:
            missing = NoServerError(str(error))
            missing.excused = isinstance(error, CannotDownloadError)
            return missing
        return create_engine(url, isolation_level="AUTOCOMMIT")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = SmallServers()
    yield servers
    servers.close()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for dialect in (PostgresqlDialect, SqliteDialect):
        limit = sizes.SizeLimit(LIMIT, "the limit of this test", "or change the test")
        monkeypatch.setattr(dialect, "known_size_limit", limit)


async def bodies(look: Look, *, archive: bool = False) -> list[bytes]:
    return [bytes(row["payload"]) for row in await look.rows(archive)]


async def archived(look: Look, count: int) -> list[dict[str, Any]]:
    async def done() -> list[dict[str, Any]]:
        rows = await look.rows(archive=True)
        return rows if len(rows) == count else []

    return await eventually(done)


async def check_outcomes(look: Look, heard: Heard) -> None:
    """The attempts of the one were charged and the others were acked with their answers; nothing
    was tried otherwise."""
    rows = await archived(look, len(ORDERS))
    states = {bytes(row["payload"]): (row["state"], row["attempts_count"]) for row in rows}
    others = dict.fromkeys(ORDERS, ("COMPLETED", 1))
    assert states == {**others, b"too large": ("FAILED", 2)}
    [failed] = [row for row in rows if row["state"] == "FAILED"]
    assert "MessageTooLargeError" in failed["last_error"]
    assert str(LIMIT) in failed["last_error"]
    assert sorted(await bodies(look)) == [
        b"answer to first",
        b"answer to fourth",
        b"answer to third",
    ]
    assert not heard.texts("refused by the database")
    assert not heard.texts("could not be written")


async def test_the_largest_message_goes_there_and_back(broker: SqlBroker, look: Look) -> None:
    seen: list[bytes] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: bytes) -> None:
        seen.append(body)

    largest = b"x" * (LARGEST - len(b'{"content-type":"application/octet-stream"}') - 200)
    await broker.publish(largest, "q")
    await broker.start()
    await archived(look, 1)
    assert seen == [largest]


async def test_too_large_is_refused_before_anything_is_sent(
    broker: SqlBroker, engine: AsyncEngine, look: Look, database: str
) -> None:
    """A broker that was never started says so, too, and the caller's transaction goes on."""
    expected = (
        "max_allowed_packet is 1048576; send less"
        if database in {"mariadb", "mysql"}
        else "is 1048576; send"
    )
    with pytest.raises(MessageTooLargeError, match=expected) as caught:
        await broker.publish(b"x" * LIMIT, "q")
    assert isinstance(caught.value, PublishError)
    assert isinstance(caught.value, StoreError)
    with pytest.raises(MessageTooLargeError):
        await broker.publish_batch(b"small", b"x" * LIMIT, queue="q")
    with pytest.raises(MessageTooLargeError, match="headers of 1"):
        await broker.publish(b"", "q", headers={"much": "x" * LIMIT})
    async with engine.begin() as connection:
        await broker.publish(b"before", "q", connection=connection)
        with pytest.raises(MessageTooLargeError):
            await broker.publish(b"x" * LIMIT, "q", connection=connection)
        with pytest.raises(MessageTooLargeError):
            await broker.publish_batch(b"small", b"x" * LIMIT, queue="q", connection=connection)
        await connection.execute(text("SELECT 1"))
        await broker.publish(b"after", "q", connection=connection)
    assert await bodies(look) == [b"before", b"after"]


@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_bytes_that_the_driver_escapes_count_twice(broker: SqlBroker, look: Look) -> None:
    half = LARGEST // 2 - 200
    for byte in b"\0\n\r\x1a\"'\\":
        with pytest.raises(MessageTooLargeError):
            await broker.publish(bytes([byte]) * (LARGEST // 2 + 1), "q")
    body = (b"\0\n\r\x1a\"'\\" * half)[:half]
    await broker.publish(body, "q")
    assert await bodies(look) == [body]


async def test_a_batch_that_is_larger_in_all_than_the_limit(broker: SqlBroker, look: Look) -> None:
    many = [bytes([n]) * 300_000 for n in range(12)]
    await broker.publish_batch(*many, queue="q")
    assert await bodies(look) == many


@pytest.mark.parametrize("how", ["stacked", "with_ack", "at once", "moved"])
@pytest.mark.capability("sizes: what is too large is refused before it is sent")
async def test_an_answer_that_is_too_large_fails_the_attempt(
    broker: SqlBroker, look: Look, heard: Heard, how: str
) -> None:
    """The retry strategy decides what follows, and the others are settled with it."""

    async def send(body: bytes, answer: bytes, message: SqlBrokerMessage) -> None:
        if how == "moved" and body == b"too large":
            await message.move_to("out", body=answer)
        else:
            await broker.publish(answer, "out", with_ack=how != "at once")

    @broker.subscriber("in", **QUICK, retry_strategy=AGAIN)
    async def handle(body: bytes, message: SqlBrokerMessage) -> None:
        await send(body, answer_to(body), message)

    @broker.subscriber("stacked", **QUICK, retry_strategy=AGAIN)
    @broker.publisher("out")
    async def answer(body: bytes) -> bytes:
        return answer_to(body)

    await broker.start()
    await broker.publish_batch(*ORDERS, queue="stacked" if how == "stacked" else "in")
    await check_outcomes(look, heard)


def answer_to(body: bytes) -> bytes:
    return b"x" * LIMIT if body == b"too large" else b"answer to " + body


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("stacked", [True, False])
async def test_a_batch_whose_answer_is_too_large_fails_as_a_whole(
    broker: SqlBroker, look: Look, heard: Heard, stacked: bool, transactional: bool
) -> None:
    """Its answer belongs to all of it; what comes after is handled."""
    # A second attempt might come in two batches, of which one has no large body.
    once = ConstantRetryStrategy(delay_seconds=0.05, max_attempts=1)
    options: Any = {**QUICK, "batch": True, "retry_strategy": once, "transactional": transactional}

    # One subscriber only: a claim of the queue that comes before, by the index, locks the first row
    # of this one for an instant on MariaDB and MySQL, and a batch leaves out what is locked.
    if stacked:

        @broker.subscriber("q", **options)
        @broker.publisher("out")
        async def answer(bodies: list[bytes]) -> bytes:
            return b"x" * (LIMIT if b"large" in bodies else 1)

    else:

        @broker.subscriber("q", **options)
        async def handle(bodies: list[bytes]) -> None:
            await broker.publish(b"x" * (LIMIT if b"large" in bodies else 1), "out", with_ack=True)

    await broker.publish_batch(b"small", b"large", b"small", queue="q")
    await broker.start()
    rows = await archived(look, 3)
    assert {(row["state"], row["attempts_count"]) for row in rows} == {("FAILED", 1)}
    assert all("MessageTooLargeError" in row["last_error"] for row in rows)
    await broker.publish(b"small", "q")
    assert (await archived(look, 4))[-1]["state"] == "COMPLETED"
    assert await bodies(look) == [b"x"]
    assert not heard.texts("refused by the database")


async def test_a_schedule_whose_message_is_too_large_is_put_off(
    broker: SqlBroker, heard: Heard
) -> None:
    """As one whose function fails; other schedules go on."""
    broker.publish_on_schedule("large", "* * * * * *", "q", b"x" * LIMIT)
    await broker.start()
    await eventually(lambda: heard.texts("could not create the messages of schedule 'large'"))
