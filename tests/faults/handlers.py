"""The workers' handlers: sometimes slow, sometimes failing, always recorded."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faststream import AckPolicy
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from faststream_sqlbroker import (
    SqlBroker,
    SqlBrokerBatchMessage,
    SqlBrokerMessage,
    SqlBrokerResponse,
    SqlConnection,
)
from tests.faults import plan
from tests.faults.history import FIRST, LAST, Recorder
from tests.faults.last_records import micros

QUICK = (0.0, 0.0, 0.005, 0.03)
"""Seconds that a handler works, most of the time."""
FOR_A_BATCH = (0.005, 0.05, 0.1)
SLOW_PARTS = 4
"""Pieces of the work of a slow handler: between them one with a transaction sends something."""
TRIES = 5
"""How often a handler repeats a statement that a deadlock has ended."""


@dataclass(frozen=True)
class Manners:
    """How the handlers of a cell behave."""

    lease: float
    """Seconds; slow handlers work longer."""
    one_writer: bool = False
    """Whether a transaction keeps everybody from writing (SQLite)."""
    refusing: bool = False
    """Whether some answers are such that a constraint in the database refuses them."""
    large: int = 0
    """Bytes of the largest answer that the server takes, if a cell tries larger ones."""


class Handlers:
    """The handlers of all queues but those whose transactions are harmed (`transactions.py`)."""

    def __init__(self, broker: SqlBroker, recorder: Recorder, seed: int, manners: Manners) -> None:
        """`broker` sends what joins an ack."""
        self._broker = broker
        self._recorder = recorder
        self._manners = manners
        self._random = random.Random(seed)

    def subscribe(self, queue: str, options: Mapping[str, Any], **policies: Any) -> None:
        """Note that these handlers have a subscriber for `queue`, and what holds for it."""
        transactional = options.get("transactional", False)
        self._recorder.note(
            "subscribe",
            queue=queue,
            noted=True,
            ordered=options.get("ordered", False),
            batch=options.get("batch", False),
            transactional=transactional,
            effects=[FIRST, LAST] if transactional else [],
            ack_first=options.get("ack_policy") is AckPolicy.ACK_FIRST,
            max_attempts=getattr(options.get("retry_strategy"), "max_attempts", None),
            max_deliveries=options["max_deliveries"],
            lease=options["release_stuck_timeout"],
            **policies,
        )

    def start(self, number: int, message: SqlBrokerMessage, **more: Any) -> None:
        """Note a start, with both clocks of its claim."""
        row = message.raw_message
        # A renewal overwrites when the claim was sent.
        asked = row.renewed_monotonic if row.renewed_monotonic <= row.claimed_monotonic else None
        fields = {
            "number": number,
            "queue": message.queue,
            "attempts": message.attempts_count,
            "asked": asked,
            "claimed": row.claimed_monotonic,
            "stored": micros(row.acquired_at),
            "message_id": message.message_id,
        }
        self._recorder.note("start", **_ids(message), **fields, **more)

    def end(self, message: SqlBrokerMessage, outcome: str, answer: int | None = None) -> None:
        """Note an end; `answer` is the size of what the ack brings."""
        self._recorder.note("end", **_ids(message), outcome=outcome, answer=answer)

    async def plain(self, number: int, message: SqlBrokerMessage) -> SqlBrokerResponse:
        """Answer when done."""
        self.start(number, message)
        return await self._answer(number, message)

    async def tx(self, number: int, message: SqlBrokerMessage, connection: SqlConnection) -> Any:
        """Write an effect before and after the work; a failure is to roll the first one back."""
        self.start(number, message)
        await effect(connection, number, FIRST)
        return await self._answer(number, message, connection)

    async def once(self, number: int, message: SqlBrokerMessage) -> None:
        """Work without a second chance."""
        self.start(number, message)
        await self.work([number], message.queue)
        self._end_or_fail(number, message)

    async def batch(self, numbers: list[int], message: SqlBrokerBatchMessage) -> Any:
        """Answer each message, and return one answer for all."""
        messages = message.messages
        pairs = list(zip(numbers, messages, strict=True))
        for pair in pairs:
            self.start(*pair)
        await self.work(numbers, "batch")
        if any(plan.spoils(number, one.attempts_count) for number, one in pairs):
            for one in messages:
                self.end(one, "nack")
            raise RuntimeError(f"one of {numbers}")
        for number, one in pairs:
            if plan.leaves(number, one.attempts_count):
                self.end(one, "nack")
                await one.nack()
        # What is settled by hand is settled alone; the answers go with all others, or with none.
        acked = [
            (number, one) for number, one in pairs if not plan.leaves(number, one.attempts_count)
        ]
        outcome = self._outcome(acked)
        for number, one in acked:
            self.end(one, outcome, None if outcome == "refused" else self._size(number))
        for pair in acked:
            await self._send(*pair)
        together = [number for number, _ in acked]
        return _response(json.dumps(together).encode(), together, joint=True)

    async def work(
        self, numbers: Sequence[int], queue: str, connection: SqlConnection | None = None
    ) -> None:
        """Take some time, now and then longer than a lease."""
        # A transaction in SQLite would keep the leases from being renewed.
        renewed = not (self._manners.one_writer and queue in plan.TRANSACTIONAL)
        slow = renewed and any(map(plan.slow, numbers))
        quick = self._random.choice(FOR_A_BATCH if queue == "batch" else QUICK)
        if not slow:
            await asyncio.sleep(quick)
            return
        for _ in range(SLOW_PARTS):
            await asyncio.sleep(1.3 * self._manners.lease / SLOW_PARTS)
            if connection is not None:
                # The server ends a handler's transaction in which nothing is sent for a lease.
                await connection.execute(text("SELECT 1"))

    def _end_or_fail(self, number: int, message: SqlBrokerMessage) -> None:
        failing = plan.fails(number, message.attempts_count)
        self.end(message, "nack" if failing else "ack")
        if failing:
            raise RuntimeError(f"attempt {message.attempts_count} of {number}")

    async def _answer(
        self, number: int, message: SqlBrokerMessage, connection: SqlConnection | None = None
    ) -> SqlBrokerResponse:
        await self.work([number], message.queue, connection)
        if plan.fails(number, message.attempts_count):
            self._end_or_fail(number, message)
        if connection is not None:
            await effect(connection, number, LAST)
        outcome = self._outcome([(number, message)])
        size = self._size(number)
        self.end(message, outcome, None if outcome == "refused" else size)
        if plan.dedups(number):
            await self._send_same()
        return _response(b"x" * size, [number], priority=self._priority(number, message))

    async def _send(self, number: int, message: SqlBrokerMessage) -> None:
        priority = self._priority(number, message)
        headers = {"numbers": [number]}
        await self._broker.publish(
            b"x" * self._size(number), "out", with_ack=True, headers=headers, priority=priority
        )
        if plan.dedups(number):
            await self._send_same()

    async def _send_same(self) -> None:
        await self._broker.publish(
            b"", "out", with_ack=True, headers={"numbers": []}, dedup_id=plan.SAME
        )

    def _size(self, number: int) -> int:
        return plan.answer_size(number, self._manners.large)

    def _priority(self, number: int, message: SqlBrokerMessage) -> int:
        refused = self._manners.refusing and plan.is_refused(number, message.attempts_count)
        return plan.REFUSED_PRIORITY if refused else 0

    def _outcome(self, pairs: Sequence[tuple[int, SqlBrokerMessage]]) -> str:
        """The outcome of the ack of these messages."""
        if any(self._priority(*pair) for pair in pairs):
            return "refused"
        return (
            "tried"
            if any(plan.may_be_too_large(n, self._manners.large) for n, _ in pairs)
            else "ack"
        )


class TransactionHandlers(Handlers):
    """Handlers whose transaction comes to harm while they work, and who go on."""

    async def catching(
        self, number: int, message: SqlBrokerMessage, connection: SqlConnection
    ) -> Any:
        """Change two rows that others change in the other order, and repeat what a deadlock has
        ended."""
        self.start(number, message)
        outcome = "ack"
        try:
            await effect(connection, number, FIRST)
            for account in (1, 2) if number % 2 else (2, 1):
                outcome = await self._change(connection, account, outcome)
                await asyncio.sleep(0.03)
            await effect(connection, number, LAST)
        except Exception:
            self.end(message, "nack")
            raise
        size = self._size(number)
        self.end(message, outcome, size)
        return _response(b"x" * size, [number])

    async def _change(self, connection: SqlConnection, account: int, outcome: str) -> str:
        for _ in range(TRIES):
            try:
                await connection.execute(
                    text("UPDATE account SET balance = balance + 1 WHERE id = :id"), {"id": account}
                )
            except DBAPIError:
                outcome = "caught"
                await asyncio.sleep(self._random.random() * 0.1)
            else:
                break
        return outcome

    async def ending(
        self, number: int, message: SqlBrokerMessage, connection: SqlConnection
    ) -> Any:
        """End the transaction behind the broker's back, and go on."""
        self.start(number, message)
        await effect(connection, number, FIRST)
        outcome = await self._end_it(number, message, connection)
        try:
            await effect(connection, number, LAST)
        except Exception:
            self.end(message, "nack" if outcome == "ack" else outcome)
            raise
        size = self._size(number)
        self.end(message, outcome, size)
        return _response(b"x" * size, [number])

    async def _end_it(
        self, number: int, message: SqlBrokerMessage, connection: SqlConnection
    ) -> str:
        """What the database takes for the transaction's end, if anything: what it says of the
        handler's end."""
        if number % 4 == 0 and message.attempts_count == 0:
            await connection.execute(text("ROLLBACK"))
            return "rolled back"
        if number % 4 == 1:
            await connection.execute(text("COMMIT"))
            return "committed"
        if number % 4 == 2:
            await connection.execute(
                text(f"CREATE TABLE made_{number}_{message.deliveries_count} (n INTEGER)")
            )
            implicit = connection.dialect.name in {"mysql", "mariadb"}
            return "committed" if implicit else "ack"
        return "ack"


async def effect(connection: SqlConnection, number: int, which: str) -> None:
    """What a handler does in the database."""
    await connection.execute(
        text("INSERT INTO effects (number, which) VALUES (:n, :w)"), {"n": number, "w": which}
    )


def _response(
    body: bytes, numbers: list[int], *, joint: bool = False, priority: int = 0
) -> SqlBrokerResponse:
    return SqlBrokerResponse(body, headers={"numbers": numbers, "joint": joint}, priority=priority)


def _ids(message: SqlBrokerMessage) -> dict[str, Any]:
    row = message.raw_message
    return {"id": row.id, "deliveries": row.deliveries_count, "lease": row.lease_token.hex}
