"""Waiting for something to become true, with a deadline instead of a sleep."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

T = TypeVar("T")

MIN_STEP, MAX_STEP = 0.005, 0.05
"""Seconds of the first pause of `eventually`, and of the longest."""

MYSQL = ("mariadb", "mysql")
"""The two that share a dialect."""


def mysql_numbers(count: int) -> str:
    """SQL of a table of the numbers `n` from 1, on MySQL and MariaDB."""
    array = f"CONCAT('[0', REPEAT(',0', {count - 1}), ']')"
    return f"(SELECT n FROM JSON_TABLE({array}, '$[*]' COLUMNS (n FOR ORDINALITY)) numbered)"


class Awake:
    """Measures, while its block runs, the seconds for which the event loop was not held up.

    A process that the machine puts aside, or that does nothing else for a while, must not make
    the test of a limit fail.
    """

    STEP = 0.02
    """Seconds between two looks; a look that comes later tells of a pause."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> Self:
        self._last = time.monotonic()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        self._count()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.STEP)
            self._count()

    def _count(self) -> None:
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * self.STEP)
        self._last = now


async def eventually(
    check: Callable[[], Awaitable[T] | T], timeout: float = 120.0, step: float = MAX_STEP
) -> T:
    """Call `check` until it returns something true; fail with its last answer after `timeout`
    seconds.

    The pause between two calls grows to `step` seconds: most checks ask a database.
    """
    deadline = time.monotonic() + timeout
    pause = min(MIN_STEP, step)
    while True:
        answer = check()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout} seconds, last answer: {answer!r}")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, step)


def list_of_sessions(dialect: Any) -> str:
    """The table of MySQL's or MariaDB's sessions. MySQL 9 refuses reads of its older one while a
    session runs a statement with bytes that are no text."""
    kind = "information" if dialect.is_mariadb else "performance"
    return f"{kind}_schema.processlist"


@asynccontextmanager
async def bytes_in_a_statement(engine: AsyncEngine) -> AsyncIterator[None]:
    """A session of MySQL or MariaDB runs a statement with bytes that are no text, in a transaction
    of InnoDB, until the end of the block."""
    values = {"gate": f"gate {engine.url.database}", "body": b"\xff\xfe"}
    async with engine.connect() as keeper, engine.connect() as other:
        await keeper.execute(text("SELECT GET_LOCK(:gate, 600)"), values)
        await other.execute(text("SELECT count(*) FROM message FOR UPDATE"))
        waiting = asyncio.create_task(
            other.execute(text("SELECT :body, GET_LOCK(:gate, 600)"), values)
        )
        sessions = list_of_sessions(engine.dialect)
        waits = f"SELECT count(*) FROM {sessions} WHERE db = DATABASE() AND state = 'User lock'"

        async def runs() -> bool:
            return bool((await keeper.execute(text(waits))).scalar_one())

        await eventually(runs)  # type: ignore[arg-type] # mypy solves no T next to the definition
        try:
            yield
        finally:
            await keeper.execute(text("SELECT RELEASE_LOCK(:gate)"), values)
            await waiting
            await other.rollback()
