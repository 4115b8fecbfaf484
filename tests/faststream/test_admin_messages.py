"""broker.admin.messages and message: what operators see, and what they do not."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SetupError, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.admin import StoredMessage
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually

pytestmark = pytest.mark.capability("`broker.admin.messages`: lists and searches, page by page")


def redact(message: StoredMessage) -> StoredMessage:
    return message if message.body is None else replace(message, body="***", headers={})


async def test_bodies_are_shown_when_asked_for_and_redacted(broker: SqlBroker) -> None:
    message_id = await broker.publish({"card": 4111}, "q", headers={"tenant": "a"})
    admin = broker.admin
    [plain] = (await admin.messages(queue="q")).messages
    assert (plain.id, plain.body, plain.headers) == (message_id, None, None)
    [shown] = (await admin.messages(queue="q", bodies=True)).messages
    assert shown.body == {"card": 4111}
    assert shown.headers is not None
    assert shown.headers["tenant"] == "a"
    [hidden] = (await admin.messages(queue="q", bodies=True, redact=redact)).messages
    assert (hidden.body, hidden.headers) == ("***", {})
    assert message_id is not None
    detail = await admin.message(str(message_id), redact=redact)
    assert detail is not None
    assert detail.message.body == "***"
    blind = await admin.message(message_id, body=False)
    assert blind is not None
    assert blind.message.body is None

    def fails(_message: StoredMessage) -> StoredMessage:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await admin.messages(bodies=True, redact=fails)


async def test_a_message_is_followed_from_its_queue_to_its_end(
    engine: AsyncEngine, broker: SqlBroker, look: Look
) -> None:
    @broker.subscriber("q", **QUICK, retry_strategy=None, dead_letter_queue="dead")
    async def handle(_body: str) -> None:
        raise ValueError("no such customer")

    message_id = await broker.publish("x", "q")
    assert message_id is not None
    admin = SqlBroker(engine, logger=None).admin  # of another process
    waiting = await admin.message(message_id)
    assert waiting is not None
    assert [event.text for event in waiting.history] == ["published", "due"]
    assert [r.code for r in waiting.explanation.reasons] == ["no_live_subscriber"]
    await broker.start()

    async def dead() -> Any:
        page = await admin.messages(queue="dead", error="no such customer")
        return page.messages

    assert [m.id for m in await eventually(dead)] == [message_id]
    detail = await admin.message(message_id)
    assert detail is not None
    assert detail.came_from is not None
    assert detail.came_from["queue"] == "q"
    assert await admin.message(message_id + 10) is None


async def test_states_are_given_by_name_and_lead_to_their_table(broker: SqlBroker) -> None:
    await broker.publish("x", "q")
    admin = broker.admin
    assert len((await admin.messages(state="pending")).messages) == 1
    assert (await admin.messages(state="failed")).messages == ()
    assert (await admin.messages(archived=True, since="1h")).messages == ()
    assert len((await admin.messages(since="1d12h", until="0")).messages) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": "waiting"}, "state must be one of PENDING"),
        ({"queue": ""}, "cannot be the name of a queue"),
        ({"limit": 0}, "limit must be 1 to 1000, got 0"),
        ({"limit": 1001}, "limit must be 1 to 1000, got 1001"),
        ({"since": datetime(2026, 1, 1)}, "since needs a time zone"),
        ({"until": -1}, "until must be"),
        ({"since": 4e9}, "0 to 100 years"),
        ({"headers": {"a": 1}}, "headers must map names to texts, got 'a': 1"),
        ({"reason": "expired"}, "only archived messages have a reason"),
        ({"state": "PENDING", "archived": True}, "no archived message is PENDING"),
        (
            {"after": "nonsense"},
            "after must be the value that the previous call returned for the same filters",
        ),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_makes_no_sense_is_refused(
    broker: SqlBroker, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(SetupError, match=said):
        await broker.admin.messages(**given)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_without_an_archive_there_is_none_to_list(engine: AsyncEngine) -> None:
    schema = SqlBrokerSchemaConfig(message_archive_table_name=None)
    broker = SqlBroker(engine, logger=None, schema=schema)
    await broker.create_tables()
    message_id = await broker.publish("x", "q")
    with pytest.raises(SetupError, match="this broker has no archive"):
        await broker.admin.messages(archived=True)
    assert message_id is not None
    assert await broker.admin.message(message_id) is not None
    assert await broker.admin.message(message_id + 1) is None
    [queue] = await broker.admin.queues()
    assert (queue.out_per_minute, queue.used) == (None, True)


@pytest.mark.capability("`broker.admin`: dead letters by their errors")
async def test_dead_letters_of_handlers_are_grouped_by_what_raised(broker: SqlBroker) -> None:
    """Whatever the text says: each names another message."""

    @broker.subscriber("q", **QUICK, retry_strategy=None)
    async def handle(body: str) -> None:
        if body.isdigit():
            raise ValueError(f"no customer {body}")
        raise KeyError(body)

    await broker.publish_batch("1", "2", "three", queue="q")
    await broker.start()

    async def failed() -> bool:
        return (await broker.admin.dead_letters()).count == 3

    await eventually(failed)
    found = await broker.admin.dead_letters(queue="q", since="1h")
    assert [group.count for group in found.groups] == [2, 1]
    largest = found.groups[0]
    assert largest.fingerprint is not None
    assert largest.error is not None
    assert largest.error.startswith("ValueError: no customer")
    page = await broker.admin.messages(state="FAILED", fingerprint=largest.fingerprint)
    assert len(page.messages) == 2
    assert (await broker.admin.dead_letters(error="KeyError")).groups == found.groups[1:]


async def test_wrong_arguments_of_dead_letters_are_refused(broker: SqlBroker) -> None:
    with pytest.raises(SetupError, match="fingerprint must be the 16 digits"):
        await broker.admin.dead_letters(fingerprint="x")
    with pytest.raises(SetupError, match="limit must be 1 to 1000, got 0"):
        await broker.admin.dead_letters(limit=0)
    with pytest.raises(SetupError, match="only archived messages have a fingerprint"):
        await broker.admin.messages(fingerprint="1" * 16)
