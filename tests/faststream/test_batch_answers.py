"""The answer of a batch handler is written with all messages it acked or moved, or not at all."""

from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import text

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, SqlBrokerBatchMessage
from tests.faststream.conftest import QUICK, Heard, Look
from tests.helpers import eventually

BATCH: Any = {**QUICK, "batch": True, "max_workers": 1}
AGAIN = ConstantRetryStrategy(delay_seconds=0.1, max_attempts=2)


async def released(look: Look, number: str) -> None:
    """What an expired lease ends in: the smallest or largest id of the queue "in"."""
    async with look.engine.begin() as connection:
        which = f"SELECT m FROM (SELECT {number}(id) AS m FROM message WHERE queue = 'in') x"
        await connection.execute(
            text(
                "UPDATE message SET state = 'PENDING', acquired_at = NULL, lease_token = NULL, "
                f"lease_expires_at = NULL WHERE id = ({which})"
            )
        )


async def answers(look: Look) -> list[str]:
    return [bytes(row["payload"]).decode() for row in await look.rows() if row["queue"] == "out"]


def flat(calls: list[list[int]]) -> list[int]:
    return [body for call in calls for body in call]


async def done(look: Look, count: int) -> bool:
    return len(await look.rows(archive=True)) == count


@pytest.mark.parametrize("which", ["min", "max"])
async def test_a_lost_lease_sends_the_others_back_without_an_attempt(
    broker: SqlBroker, look: Look, heard: Heard, which: str
) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("in", **BATCH)
    @broker.publisher("out")
    async def handle(bodies: list[int]) -> str:
        calls.append(bodies)
        if len(calls) == 1:
            await released(look, which)
        return " ".join(map(str, bodies))

    await broker.publish_batch(*range(5), queue="in")
    await broker.start()
    await eventually(lambda: done(look, 5))
    assert calls[0] == [0, 1, 2, 3, 4]
    assert sorted(flat(calls[1:])) == [0, 1, 2, 3, 4], "each is handled once more"
    assert sorted(" ".join(await answers(look)).split()) == ["0", "1", "2", "3", "4"]
    rows = await look.rows(archive=True)
    assert {(row["state"], row["attempts_count"], row["deliveries_count"]) for row in rows} == {
        ("COMPLETED", 1, 2)
    }
    assert (
        len(heard.texts("lease lost"))
        == len(heard.texts("are delivered again: the handler's work"))
        == 1
    )


async def test_without_a_limit_on_attempts_a_lost_lease_costs_the_others_an_attempt(
    broker: SqlBroker, look: Look
) -> None:
    """Then they do not count as messages that may have killed their process."""
    calls: list[list[int]] = []
    unlimited = ConstantRetryStrategy(
        delay_seconds=0.1, max_attempts=None, max_total_delay_seconds=None
    )

    @broker.subscriber("in", **BATCH, retry_strategy=unlimited)
    @broker.publisher("out")
    async def handle(bodies: list[int]) -> str:
        calls.append(bodies)
        if len(calls) == 1:
            await released(look, "max")
        return " ".join(map(str, bodies))

    await broker.publish_batch(*range(3), queue="in")
    await broker.start()
    await eventually(lambda: done(look, 3))
    assert calls[0] == [0, 1, 2]
    rows = await look.rows(archive=True)
    assert [(row["attempts_count"], row["deliveries_count"]) for row in rows] == [
        (2, 2),
        (2, 2),
        (1, 2),
    ]


async def test_a_lease_that_is_lost_while_the_handler_runs(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Known before the answer is there: the extension of the lease has told."""
    calls: list[list[int]] = []

    @broker.subscriber("in", **BATCH)
    @broker.publisher("out")
    async def handle(bodies: list[int], message: SqlBrokerBatchMessage) -> str:
        calls.append(bodies)
        if len(calls) == 1:
            await released(look, "max")
            assert not await message.extend_lease(60)
        return " ".join(map(str, bodies))

    await broker.publish_batch(*range(3), queue="in")
    await broker.start()
    await eventually(lambda: done(look, 3))
    assert sorted(" ".join(await answers(look)).split()) == ["0", "1", "2"]
    assert sorted(flat(calls[1:])) == [0, 1, 2]
    assert len(heard.texts("are delivered again: the handler's work")) == 1


async def refuse_answers(broker: SqlBroker, look: Look) -> None:
    """A constraint of the user's."""
    async with look.engine.begin() as connection:
        if look.engine.dialect.name == "sqlite":
            sql = (
                "CREATE TRIGGER refuse BEFORE INSERT ON message WHEN NEW.queue = 'out' "
                "BEGIN SELECT RAISE(ABORT, 'no answers'); END"
            )
        else:
            sql = "ALTER TABLE message ADD CONSTRAINT no_answers CHECK (queue <> 'out')"
        await connection.execute(text(sql))


async def test_a_refused_answer_is_a_failed_attempt_of_all(broker: SqlBroker, look: Look) -> None:
    calls: list[list[int]] = []

    @broker.subscriber("in", **BATCH, retry_strategy=AGAIN)
    @broker.publisher("out")
    async def handle(bodies: list[int]) -> str:
        calls.append(bodies)
        return "sum"

    await refuse_answers(broker, look)
    await broker.publish_batch(*range(3), queue="in")
    with patch("faststream_sqlbroker.flow.deliver.outcome_writer.REDUCE_AFTER", 2):
        await broker.start()
        await eventually(lambda: done(look, 3))
    assert sorted(flat(calls)) == [0, 0, 1, 1, 2, 2]
    rows = await look.rows(archive=True)
    assert {(row["state"], row["attempts_count"], row["reason"]) for row in rows} == {
        ("FAILED", 2, "max_attempts")
    }
    assert all(
        "the database refused the messages that the handler published with its ack"
        in row["last_error"]
        for row in rows
    )
    assert await answers(look) == []


async def test_a_message_settled_otherwise_by_hand_is_not_part_of_it(
    broker: SqlBroker, look: Look
) -> None:
    """Its attempt has failed; what the handler answered belongs to what it acked."""
    calls: list[list[int]] = []

    @broker.subscriber("in", **BATCH, retry_strategy=AGAIN)
    @broker.publisher("out")
    async def handle(bodies: list[int], message: SqlBrokerBatchMessage) -> str:
        calls.append(bodies)
        if len(calls) == 1:
            await message.messages[0].nack()
            await message.messages[1].reject()
        return " ".join(str(body) for n, body in enumerate(bodies) if len(calls) > 1 or n > 1)

    await broker.publish_batch(*range(4), queue="in")
    await broker.start()
    await eventually(lambda: done(look, 4))
    assert calls == [[0, 1, 2, 3], [0]]
    assert await answers(look) == ["2 3", "0"]
    states = [(row["state"], row["attempts_count"]) for row in await look.rows(archive=True)]
    assert states == [("COMPLETED", 2), ("FAILED", 1), ("COMPLETED", 1), ("COMPLETED", 1)]


async def test_no_answer_is_written_if_nothing_is_acked(broker: SqlBroker, look: Look) -> None:
    @broker.subscriber("in", **BATCH, retry_strategy=None)
    @broker.publisher("out")
    async def handle(bodies: list[int], message: SqlBrokerBatchMessage) -> str:
        for each in message.messages:
            await each.nack()
        return "answer"

    await broker.publish_batch(*range(2), queue="in")
    await broker.start()
    await eventually(lambda: done(look, 2))
    assert await answers(look) == []


async def test_a_lost_lease_in_a_handlers_transaction_costs_the_others_no_attempt(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """Nothing is committed; the commit is the first to notice."""
    from faststream_sqlbroker.core.rows import SettleResult
    from faststream_sqlbroker.database.messages.handler import HandlerTransaction

    calls: list[list[int]] = []
    commit = HandlerTransaction.commit

    @broker.subscriber("in", **BATCH, transactional=True)
    @broker.publisher("out")
    async def handle(bodies: list[int]) -> str:
        calls.append(bodies)
        return " ".join(map(str, bodies))

    async def losing(transaction: HandlerTransaction, settlements: Any) -> SettleResult:
        if len(calls) == 1:
            return SettleResult(lost_ids={settlements[-1].id})
        return await commit(transaction, settlements)

    await broker.publish_batch(*range(3), queue="in")
    with patch.object(HandlerTransaction, "commit", losing):
        await broker.start()
        await eventually(lambda: heard.texts("are delivered again: the handler's work"))
        await released(look, "max")
        await eventually(lambda: done(look, 3))
    rows = await look.rows(archive=True)
    assert {(row["state"], row["attempts_count"], row["deliveries_count"]) for row in rows} == {
        ("COMPLETED", 1, 2)
    }
    assert sorted(" ".join(await answers(look)).split()) == ["0", "1", "2"]
