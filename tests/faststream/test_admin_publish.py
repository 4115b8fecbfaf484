"""`admin.publish`: an operator's message, and the audit of it."""

import pytest
from faststream import BaseMiddleware
from sqlalchemy import text

from faststream_sqlbroker import MaxDepth, PublishError, QueueFullError, SetupError, SqlBroker
from faststream_sqlbroker.exceptions import StoreError
from tests.faststream.conftest import QUICK, Look
from tests.helpers import eventually


async def test_an_operators_message_is_handled_and_audited(broker: SqlBroker) -> None:
    seen: list[object] = []

    @broker.subscriber("q", **QUICK)
    async def handle(body: object) -> None:
        seen.append(body)

    await broker.start()
    number = await broker.admin.publish({"a": 1}, "q", by="ola", key="k", lookup="l")
    await eventually(lambda: seen == [{"a": 1}], timeout=60)
    [action] = await broker.admin.audit()
    assert (action.action, action.by, action.done) == ("publish", "ola", 1)
    assert action.arguments == {"queue": "q", "id": number}


async def test_what_is_not_published_is_not_audited(broker: SqlBroker) -> None:
    assert await broker.admin.publish("x", "q", dedup_id="d", delay=600) is not None
    assert await broker.admin.publish("x", "q", dedup_id="d", delay=600) is None
    for message, queue, options, error in [
        ("x", "", {}, SetupError),
        ("x", "q" * 300, {}, SetupError),
        ("x", "q", {"by": 7}, SetupError),
        ("x", "q", {"priority": 1_000}, PublishError),
        (object(), "q", {}, PublishError),
        ("x", "q", {"with_ack": True}, PublishError),
    ]:
        with pytest.raises(error):
            await broker.admin.publish(message, queue, **options)
    assert len(await broker.admin.audit()) == 1
    assert len((await broker.admin.messages()).messages) == 1


async def test_without_an_audit_there_is_no_message(broker: SqlBroker, look: Look) -> None:
    name = look.tables.policy_state.name
    async with broker.engine.begin() as connection:
        await connection.execute(text(f"ALTER TABLE {name} RENAME TO away"))
    with pytest.raises(StoreError):
        await broker.admin.publish("x", "q")
    async with broker.engine.begin() as connection:
        await connection.execute(text(f"ALTER TABLE away RENAME TO {name}"))
    assert not (await broker.admin.messages()).messages


async def test_middlewares_and_limits_hold(broker: SqlBroker) -> None:
    class Marked(BaseMiddleware):
        async def publish_scope(self, call_next, cmd):  # type: ignore[no-untyped-def]
            cmd.headers["mark"] = "yes"
            return await call_next(cmd)

    broker.add_middleware(Marked)
    number = await broker.admin.publish("x", "q")
    assert number is not None
    detail = await broker.admin.message(number)
    assert detail is not None
    assert (detail.message.headers or {})["mark"] == "yes"


async def test_a_full_queue_refuses_it(broker: SqlBroker, database_url: str) -> None:
    async with SqlBroker(
        database_url, logger=None, max_depth={"q": MaxDepth(1, timeout=0.1)}
    ) as limited:
        await limited.admin.publish("x", "q")

        async def refused() -> bool:
            try:
                await limited.admin.publish("x", "q")
            except QueueFullError:
                return True
            return False

        await eventually(refused, timeout=60)
