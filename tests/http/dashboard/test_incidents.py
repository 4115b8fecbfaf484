"""Ten incidents on one database: the command `check` and the page Overview name each. Four healthy
systems on another: both are silent.
"""

import asyncio
import html
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from typer.testing import CliRunner

from faststream_sqlbroker import ConstantRetryStrategy, SqlBroker, Throttle
from faststream_sqlbroker.admin.findings import FindingsReport
from faststream_sqlbroker.cli.app import app as command
from faststream_sqlbroker.core import findings
from faststream_sqlbroker.schema.types import clock
from tests.faststream.conftest import CALM
from tests.helpers import MYSQL, eventually
from tests.http.conftest import as_user, client_of, logins
from tests.quick_tables import TABLES

pytestmark = pytest.mark.capability("the command `sqlbroker`: look, mend, check")

OFTEN = ConstantRetryStrategy(delay_seconds=3600, max_attempts=1_000, max_total_delay_seconds=None)
PINNED = ("transactions", None, "WRONG")
"""A horizon that a long transaction holds back."""
INCIDENTS = {
    ("no subscriber", "invoices", "WRONG"),  # consumer gone
    ("dead letters", "bills", "warning"),  # poison
    ("waits for policy", "sms", "warning"),  # throttled API
    ("lease storm", "pdf", "WRONG"),
    ("no subscriber", "ordres", "WRONG"),  # misspelt queue
    ("failing", "api", "WRONG"),  # retry storm
    # And an archive that fills the disk.
    ("overdue schedule", None, "WRONG"),
    ("mixed subscribers", "mails", "WRONG"),  # policies that differ
}
Seen = set[tuple[str, str | None, str]]
"""Kind, queue and level."""


class Operator:
    """Looks as one does on call."""

    def __init__(self, broker: SqlBroker, url: str) -> None:
        self._broker = broker
        self._runner = CliRunner(env={"SQLBROKER_URL": url, "COLUMNS": "300", "TERM": "dumb"})
        self.texts = ""

    async def check(self, code: int, old_transaction: str = "1h") -> Seen:
        """What `check` tells, but what is well. Other tests have transactions on the server."""
        words = ["check", "--json", "--old-transaction", old_transaction]
        result = await asyncio.to_thread(self._runner.invoke, command, words)
        assert result.exit_code == code, (result.output, result.exception)
        told = [each for each in json.loads(result.output) if each["level"] != "ok"]
        self.texts = "\n".join(each["text"] for each in told)
        queues = [each["what"].partition("queue ")[2] or None for each in told]
        return {(t["kind"], queue, t["level"]) for t, queue in zip(told, queues, strict=True)}

    async def overview(self) -> str:
        """The problems of the page."""
        async with client_of(self._broker.asgi(logins())) as client:
            page = (await client.get("/", auth=as_user("vic"))).text
        problems = page.partition('<h2 id="problems">')[2].partition("</section>")[0]
        return " ".join(html.unescape(re.sub(r"<[^>]+>", "", problems)).split())


@pytest.fixture
async def process(database_url: str) -> AsyncIterator[Callable[[], SqlBroker]]:
    """Makes processes of their own on the same database."""
    async with AsyncExitStack() as stack:

        def make() -> SqlBroker:
            engine = create_async_engine(database_url)
            stack.push_async_callback(engine.dispose)
            broker = SqlBroker(engine, logger=None, graceful_timeout=1.0)
            stack.push_async_callback(broker.stop)
            return broker

        yield make


@pytest.fixture
def operator(broker: SqlBroker, database_url: str) -> Operator:
    return Operator(broker, database_url)


async def handle(body: int) -> None:
    """Does nothing."""


async def serve(broker: SqlBroker, process: Callable[[], SqlBroker]) -> None:
    """The services, and one that has ended, whose schedule stays."""

    @broker.subscriber("bills", **CALM, retry_strategy=None)
    async def bills(body: int) -> None:
        if body % 4 == 0:
            raise KeyError("vat_id")

    @broker.subscriber("api", **CALM, retry_strategy=OFTEN, max_workers=20)
    async def api(body: int) -> None:
        raise ConnectionError("503 from 10.0.7.3")

    other, gone = process(), process()
    broker.subscriber("sms", **CALM, policies=[Throttle(1, per="1h")])(handle)
    broker.subscriber("orders", **CALM)(handle)
    broker.subscriber("mails", **CALM, policies=[Throttle(20, "1m")])(handle)
    other.subscriber("mails", **CALM)(handle)
    gone.publish_on_schedule("nightly", "0 0 1 1 *", "reports", 1)
    await gone.start()
    await eventually(broker.admin.schedules)
    await gone.stop()
    await other.start()
    await broker.start()


async def publish(broker: SqlBroker) -> None:
    """What the services get."""
    late = datetime.now(timezone.utc) - timedelta(hours=1)
    await broker.publish(1, "invoices")
    await broker.publish(1, "ordres")
    await broker.publish_batch(*range(12), queue="bills")
    await broker.publish_batch(*range(5), queue="sms", next_attempt_at=late)
    await broker.publish_batch(*range(60), queue="api")


async def lose_leases(broker: SqlBroker, engine: AsyncEngine) -> None:
    """Processes take six messages of the queue "pdf" and are killed, three times."""
    await broker.publish_batch(*range(6), queue="pdf")
    message = TABLES.message
    over = update(message).where(message.c.queue == "pdf", message.c.lease_token.is_not(None))
    for _ in range(3):
        for _ in range(6):
            assert await broker.reserve("pdf", lease="1h", max_deliveries=None) is not None
        async with engine.begin() as connection:
            await connection.execute(over.values(lease_expires_at=clock()))


async def fill_disk(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only SQLite tells how much is free; the others have statistics of the archive."""
    monkeypatch.setattr(findings, "LARGE_ARCHIVE", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    kind = engine.dialect.name
    if kind != "sqlite":
        words = "ANALYZE TABLE" if kind in MYSQL else "ANALYZE"
        async with engine.begin() as connection:
            await connection.exec_driver_sql(f"{words} message_archive")


async def test_ten_incidents_are_named(
    broker: SqlBroker,
    process: Callable[[], SqlBroker],
    operator: Operator,
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await serve(broker, process)
    await publish(broker)
    await lose_leases(broker, engine)
    monkeypatch.setattr(findings, "SCHEDULE_LATE", timedelta(0))
    await broker.admin.run_schedule("nightly")

    async def all_tried() -> bool:
        [api, bills] = [(await broker.admin.queues(name))[0] for name in ("api", "bills")]
        return (api.retrying.value, bills.ready.value, bills.in_flight.value) == (60, 0, 0)

    await eventually(all_tried)
    message = TABLES.message
    storm = update(message).where(message.c.queue == "api")
    async with engine.begin() as connection:
        await connection.execute(storm.values(attempts_count=300, deliveries_count=300))
    await fill_disk(engine, monkeypatch)
    monkeypatch.setitem(FindingsReport.findings.__kwdefaults__, "old_transaction", 1.0)
    level = "WRONG" if engine.dialect.name == "sqlite" else "warning"
    expected = {*INCIDENTS, ("archive growth", None, level)}
    async with engine.connect() as held:
        await held.execute(text("SELECT count(*) FROM message"))

        async def is_old() -> bool:
            found = await broker.admin.findings(old_transaction=1.0)
            return any(each.kind == "transactions" for each in found.findings)

        if engine.dialect.name != "sqlite":  # which cannot tell
            await eventually(is_old, step=0.3)
            expected.add(PINNED)
        seen = await operator.check(code=1, old_transaction="1s")
        page = await operator.overview()
    for kind, queue, _ in expected:
        assert f"{kind} {queue}:" in page if queue else f"{kind}:" in page
    assert "did you mean 'orders'?" in operator.texts
    assert "60 of 60 messages have failed before" in operator.texts
    assert "after 300 attempts" in operator.texts
    expected |= {("no subscriber", "pdf", "WRONG"), ("unused", "orders", "warning")}
    assert seen == expected, "and nothing else"


async def test_four_healthy_systems_are_green(
    broker: SqlBroker, operator: Operator, engine: AsyncEngine
) -> None:
    done: list[int] = []
    broker.subscriber("front", forward_to="back")

    @broker.subscriber("back", **CALM)
    async def back(body: int) -> None:
        done.append(body)

    broker.subscriber("nightly", **CALM)(handle)
    broker.subscriber("mails", **CALM, policies=[Throttle(2, per="1h")])(handle)
    await broker.start()
    await broker.publish_batch(*range(100), queue="front")
    await broker.publish_batch(*range(20), queue="mails")
    await broker.publish_batch(*range(20), queue="served")
    token = {"scope": "queue:consume", "key": "served", "info": {"token": "t"}}
    async with engine.begin() as connection:
        await connection.execute(insert(TABLES.policy_state).values(token))
    await eventually(lambda: len(done) == 100)
    assert await operator.check(code=0) == set()
    assert await operator.overview() == "Problems No problems found."
    late = datetime.now(timezone.utc) - timedelta(hours=1)
    await broker.publish_batch(*range(5), queue="mails", next_attempt_at=late)
    assert await operator.check(code=0) == {("waits for policy", "mails", "warning")}
