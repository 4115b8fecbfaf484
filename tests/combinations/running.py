"""Runs a case: of two messages one succeeds, and the other one fails each time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI
from faststream import BaseMiddleware
from faststream.kafka import KafkaBroker, TestKafkaBroker
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from faststream_sqlbroker import (
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlConnection,
    SqlProducer,
    TestSqlBroker,
    VirtualClock,
    fastapi,
)
from faststream_sqlbroker.fastapi import SqlBrokerRouter
from faststream_sqlbroker.opentelemetry import SqlBrokerTelemetryMiddleware
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMiddleware
from tests.combinations.features import MODES, QUICK_RETRIES, RETRIES, SCHEDULED, Case
from tests.faststream.conftest import QUICK
from tests.helpers import eventually

GOOD, BAD, UNDONE = "good", "bad", "undone"
KEYS = {GOOD: "a", BAD: "b", UNDONE: "c"}
BEGIN = datetime(2032, 2, 28, 22, tzinfo=timezone.utc)
ONCE = "0 0 29 2 *"
"""When a schedule fires: within two hours in a test, by an operator's call on a database."""
OWN = "its own transaction"
CREATE = "CREATE TABLE IF NOT EXISTS work (body VARCHAR(20))"
"""What transactional handlers write to."""
OPTIONS: dict[str, dict[str, Any]] = {
    "delay": {"delay": "50ms"},
    "priority": {"priority": 7},
    "expires_in": {"expires_in": "1h"},
}
"""Of the ways to publish that are an option."""
TABLES = ("work", "message", "message_archive", "message_policy_state")


@dataclass(frozen=True)
class Row:
    """A message of a table."""

    queue: str
    body: str
    state: str


class FailedError(Exception):
    """What the handler raises for `BAD`."""


@dataclass
class Seen:
    """What became of the messages."""

    runs: Counter[str] = field(default_factory=Counter)
    """How often the handler began, by body."""
    relayed: list[str] = field(default_factory=list)
    """What came to Kafka."""
    watched: Counter[str] = field(default_factory=Counter)
    """How often the middleware saw a run, and a publish."""
    waiting: list[Row] = field(default_factory=list)
    archived: list[Row] = field(default_factory=list)
    work: list[str] = field(default_factory=list)
    """What transactional handlers have written."""


class Running:
    """One case on one database."""

    def __init__(self, case: Case, asynchronous: AsyncEngine, synchronous: Engine) -> None:
        self.case = case
        self.engine = asynchronous
        self.synchronous = synchronous
        self.seen = Seen()
        self.kafka: KafkaBroker | None = None
        self.spans = InMemorySpanExporter()
        self.registry = CollectorRegistry()
        given: Any = {"logger": None, "middlewares": self._middlewares()}
        self.router: SqlBrokerRouter | None = None
        if case.application == "FastAPI":
            self.router = SqlBrokerRouter(asynchronous, **given)
        self.broker = (
            SqlBroker(asynchronous, **given) if self.router is None else self.router.broker
        )
        self.publisher: Any = None

    async def __call__(self, ended: Callable[[Seen], bool] = lambda seen: True) -> Seen:
        """Run the case. On a database, wait until it has `ended`, or for two minutes.

        Raises:
            SetupError: The features do not go together.
        """
        self.declare()
        async with self.engine.begin() as connection:
            await connection.execute(text(CREATE))
        async with AsyncExitStack() as stack:
            if self.kafka is not None:
                await stack.enter_async_context(TestKafkaBroker(self.kafka))
            if self.case.broker == "TestSqlBroker":
                await self._run_in_test(stack)
            else:
                await self._run_on_database(stack, ended)
        await self._read()
        return self.seen

    async def _run_in_test(self, stack: AsyncExitStack) -> None:
        clock = VirtualClock(BEGIN)
        test = TestSqlBroker(self.broker, engine=self.engine, clock=clock, connect_only=False)
        await stack.enter_async_context(test)
        for body in (GOOD, BAD):
            with suppress(FailedError):
                await self._publish(body)
        with suppress(FailedError):
            await clock.advance("3h")
        await self._read()

    async def _run_on_database(self, stack: AsyncExitStack, ended: Callable[[Seen], bool]) -> None:
        await self.broker.create_tables()
        if self.router is None:
            await stack.enter_async_context(self.broker)
            await self.broker.start()
        else:
            app = FastAPI()
            app.include_router(self.router)
            await stack.enter_async_context(app.router.lifespan_context(app))
        for body in (GOOD, BAD):
            await self._publish(body)

        async def has_ended() -> bool:
            await self._read()
            return ended(self.seen)

        with suppress(AssertionError):  # the comparison says more
            await eventually(has_ended)

    async def _read(self) -> None:
        async with self.engine.connect() as connection:

            async def rows(table: str) -> list[Row]:
                found = await connection.execute(
                    text(f"SELECT queue, payload, state FROM {table} ORDER BY id")
                )
                return [Row(queue, bytes(body).decode(), state) for queue, body, state in found]

            self.seen.waiting = await rows("message")
            self.seen.archived = await rows("message_archive")
            self.seen.work = list(await connection.scalars(text("SELECT body FROM work")))
        self._count()

    async def wipe(self) -> None:
        """Empty the tables for the next case."""
        async with self.engine.begin() as connection:
            for table in TABLES:
                await connection.execute(text(f"DELETE FROM {table}"))

    # --- what is declared

    def declare(self) -> None:
        """Declare its subscribers, publishers and schedules.

        Raises:
            SetupError: The features do not go together.
        """
        case = self.case
        options = {**QUICK, **RETRIES[case.retry], **MODES[case.mode]}
        if (case.retry, case.broker) == ("default retries", "database") and case.attempts() > 1:
            options["retry_strategy"] = QUICK_RETRIES  # the default would wait for minutes
        if case.dead_letters == "dead_letter_queue":
            options["dead_letter_queue"] = "dead"
        elif case.dead_letters == "no archive":
            options["retain_in_archive_on_ack"] = options["retain_in_archive_on_reject"] = False
        if case.policies():
            options["policies"] = case.policies()
        if case.mode == "forward_to":
            self.broker.subscriber("in", **options)
            del options["forward_to"]
            options.pop("policies", None)
            queue = "next"
        else:
            queue = "in"
        handler = self._handler()
        for publisher in self._publishers():
            handler = publisher(handler)
        declared: Any = self.broker if self.router is None else self.router
        declared.subscriber(queue, **options)(handler)
        if case.publish.startswith("own publisher"):
            self.publisher = self.broker.publisher("in", batch=case.publish.endswith("batch"))
        if case.publish in SCHEDULED:
            for body in (GOOD, BAD):
                self._schedule(body)

    def _keys(self, body: str) -> dict[str, Any]:
        """The options of a publish by which policies know the message."""
        return {"key": KEYS[body], **self.case.headers(KEYS[body])}

    def _schedule(self, body: str) -> None:
        options = self._keys(body)
        for name, value in SCHEDULED[self.case.publish].items():
            options[name] = {**options.get(name, {}), **value} if name == "headers" else value
        if self.case.answer == "reply_to":
            options["reply_to"] = "answers"
        if self.case.transaction != OWN:
            options[self.case.transaction.removesuffix("=")] = self.engine  # refused
        if self.case.publish.startswith("scheduled function"):
            self.broker.schedule(ONCE, queue="in", name=body, **options)(lambda: body)
        else:
            self.broker.publish_on_schedule(body, ONCE, "in", body, **options)

    def _publishers(self) -> list[Any]:
        answer = self.case.answer
        if answer in {"stacked publisher", "SqlBrokerResponse"}:
            return [self.broker.publisher("answers")]
        if answer == "publisher of batches":
            return [self.broker.publisher("answers", batch=True)]
        if answer == "relay to Kafka":
            self.kafka = KafkaBroker(logger=None)

            @self.kafka.subscriber("answers")
            async def take(body: str) -> None:
                self.seen.relayed.append(body)

            return [self.kafka.publisher("answers")]
        return []

    def _handler(self) -> Callable[..., Any]:
        if self.case.mode == "synchronous handler":
            return self._synchronous()
        if self.case.mode == "batch":
            return self._batch()
        if self.case.mode.startswith("transactional"):
            return self._transactional()

        injected = SqlBrokerMessage if self.router is None else fastapi.SqlBrokerMessage

        async def plain(body: str, message: injected) -> Any:  # type: ignore[valid-type]
            await self._publish_with_ack()
            return self._work(body)

        return plain

    def _synchronous(self) -> Callable[..., Any]:
        def handle(body: str) -> Any:
            if self.case.answer == "with_ack":
                self.broker.publish_sync("answer", "answers", with_ack=True)
            return self._work(body)

        return handle

    def _batch(self) -> Callable[..., Any]:
        injected: Any = SqlBrokerBatchMessage
        if self.router is not None:
            injected = fastapi.SqlBrokerBatchMessage

        async def handle(bodies: list[str], message: injected) -> Any:
            answer = None
            for body, each in zip(bodies, message.messages, strict=True):
                try:
                    answer = self._work(body)
                    await self._publish_with_ack()
                except FailedError:
                    await each.nack()
            if GOOD not in bodies:
                raise FailedError
            return answer

        return handle

    def _transactional(self) -> Callable[..., Any]:
        injected: Any = SqlConnection if self.router is None else fastapi.SqlConnection

        async def handle(body: str, connection: injected) -> Any:
            await connection.execute(text("INSERT INTO work VALUES (:body)"), {"body": body})
            if self.case.mode == "transactional, publishes":
                await asyncio.gather(
                    self.broker.publish(body, "joined"),
                    self.broker.publish_batch(body, queue="joined"),
                )
            await self._publish_with_ack()
            return self._work(body)

        return handle

    async def _publish_with_ack(self) -> None:
        if self.case.answer == "with_ack":
            await self.broker.publish("answer", "answers", with_ack=True)

    def _work(self, body: str) -> Any:
        self.seen.runs[body] += 1
        if body == BAD:
            raise FailedError(body)
        if self.case.answer == "SqlBrokerResponse":
            return SqlBrokerResponse("answer", key="of answers", priority=3)
        if self.case.answer == "publisher of batches":
            return ["answer", "answer"]
        return None if self.case.answer in {"no answer", "with_ack"} else "answer"

    def _middlewares(self) -> list[Any]:
        if self.case.middleware == "Prometheus":
            return [SqlBrokerPrometheusMiddleware(registry=self.registry)]
        if self.case.middleware == "OpenTelemetry":
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(self.spans))
            return [SqlBrokerTelemetryMiddleware(tracer_provider=provider)]
        if self.case.middleware == "own middleware":
            watched = self.seen.watched

            class Watching(BaseMiddleware[Any, Any]):
                async def consume_scope(
                    self, call_next: Callable[[Any], Awaitable[Any]], msg: Any
                ) -> Any:
                    watched["run"] += 1
                    return await call_next(msg)

            return [Watching]
        return []

    def _count(self) -> None:
        """Runs that metrics and spans tell of."""
        if self.case.middleware == "Prometheus":
            runs = 0
            for metric in self.registry.collect():
                for sample in metric.samples:
                    if sample.name == "faststream_received_messages_total":
                        runs += int(sample.value)
            self.seen.watched["run"] = runs
        elif self.case.middleware == "OpenTelemetry":
            names = [span.name for span in self.spans.get_finished_spans()]
            self.seen.watched["run"] = sum(name.endswith(" process") for name in names)

    # --- what is published

    async def _publish(self, body: str) -> None:
        options = {**self._keys(body), **OPTIONS.get(self.case.publish, {})}
        if self.case.answer == "reply_to":
            options["reply_to"] = "answers"
        if self.case.publish in {"dedup_id", "lookup"}:
            options[self.case.publish] = f"of {body}"
        if self.case.publish in SCHEDULED:
            if self.case.broker == "database":
                await eventually(lambda: self.broker.admin.run_schedule(body))
        elif self.case.publish == "SqlProducer":
            # It waits for SQLite's lock, which a worker of this event loop may hold.
            await asyncio.to_thread(self._produce, body, options)
        elif (self.case.transaction, self.case.publish != "publish_sync") == (OWN, True):
            await self._publish_with(body, options)
        else:
            async with self._transaction() as given:
                await self._publish_with(UNDONE, {**options, **given})
                await next(iter(given.values())).rollback()
            async with self._transaction() as given:
                await self._publish_with(body, {**options, **given})
                await next(iter(given.values())).commit()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[dict[str, Any]]:
        """The option that names a transaction."""
        if self.case.transaction == "session=":
            async with AsyncSession(self.engine) as session:
                yield {"session": session}
        else:
            async with self.engine.connect() as connection:
                yield {"connection": connection}

    async def _publish_with(self, body: str, options: dict[str, Any]) -> None:
        way = self.case.publish
        if way == "publish_sync":
            name, given = next((n, options[n]) for n in ("connection", "session") if n in options)
            publish: Any = self.broker.publish_sync
            await given.run_sync(lambda sync: publish(body, "in", **{**options, name: sync}))
        elif way == "publish_batch":
            await self.broker.publish_batch(body, queue="in", **options)
        elif way == "own publisher":
            await self.publisher.publish(body, **options)
        elif way == "own publisher's batch":
            await self.publisher.publish_batch(body, **options)
        else:
            await self.broker.publish(body, "in", **options)

    def _produce(self, body: str, options: dict[str, Any]) -> None:
        producer = SqlProducer(self.synchronous)
        if self.case.transaction == "connection=":
            with self.synchronous.begin() as connection:
                producer.publish(body, "in", connection=connection, **options)
        elif self.case.transaction == "session=":
            with Session(self.synchronous) as session, session.begin():
                producer.publish(body, "in", session=session, **options)
        else:
            producer.publish(body, "in", **options)
