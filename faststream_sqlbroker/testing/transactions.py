"""Messages published in a transaction of the test's: they wait for its COMMIT."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event

PAUSE = 0.001
"""Seconds between two looks at a transaction that is being committed, as no event comes after it,
and at handlers that it starts."""

Commit = Callable[[], Awaitable[None]]


@dataclass
class _Open:
    """What one connection's transaction has published so far."""

    held: list[tuple[float, Commit]] = field(default_factory=list)
    """Each with the number of its innermost savepoint, or 0."""


class HeldPublishes:
    """Calls what was held when its transaction has been committed; forgets it on a rollback."""

    def __init__(self) -> None:
        """Nothing is held; made in the event loop in which commits go on."""
        self._loop = asyncio.get_running_loop()
        self._open: WeakKeyDictionary[Connection, _Open] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected = 0
        self._errors: list[BaseException] = []

    @property
    def count(self) -> int:
        """Publishes that wait for a COMMIT."""
        return sum(len(opened.held) for opened in self._open.values())

    def hold(self, connection: Connection, commit: Commit) -> None:
        """Call `commit` in the event loop after the transaction of `connection`."""
        if connection not in self._open:
            self._listen(connection)
        self._open[connection].held.append((_savepoint(connection), commit))

    def _listen(self, connection: Connection) -> None:
        opened = self._open[connection] = _Open()

        def committing(_connection: Connection) -> None:
            held, opened.held = [commit for _, commit in opened.held], []
            if held:
                self._expected += 1
                transaction = connection.get_transaction()
                # Synchronous code may commit in a thread.
                self._loop.call_soon_threadsafe(self._start, connection, transaction, held)

        def rolled_back(_connection: Connection) -> None:
            opened.held.clear()

        def rolled_back_to(_connection: Connection, name: str, _context: Any) -> None:
            # Savepoints are numbered as they begin: those inside of another have greater numbers.
            number = _number(name)
            opened.held[:] = [one for one in opened.held if one[0] < number]

        event.listen(connection, "commit", committing)
        event.listen(connection, "rollback", rolled_back)
        event.listen(connection, "rollback_savepoint", rolled_back_to)

    def _start(self, connection: Connection, transaction: Any, held: Sequence[Commit]) -> None:
        task = asyncio.get_running_loop().create_task(self._commit(connection, transaction, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(
        self, connection: Connection, transaction: Any, held: Sequence[Commit]
    ) -> None:
        try:
            while transaction.is_active:
                await asyncio.sleep(PAUSE)
            # SQLAlchemy leaves a transaction in its place whose COMMIT has failed.
            if connection.get_transaction() is transaction:
                return
            for commit in held:
                try:
                    await commit()
                except Exception as error:  # noqa: BLE001 - `drain` raises it
                    self._errors.append(error)
        finally:
            self._expected -= 1

    def take_errors(self) -> list[BaseException]:
        """What handlers, or the store, have raised since the last call."""
        errors, self._errors = self._errors, []
        return errors

    @property
    def is_committing(self) -> bool:
        """Whether something has been committed, and is on its way."""
        return bool(self._expected)

    async def close(self) -> None:
        """Forget everything."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _savepoint(connection: Connection) -> float:
    """The number of the innermost savepoint of `connection`; 0 without one.

    The event of a savepoint does not name it, only that of its rollback does.
    """
    nested = connection.get_nested_transaction()
    return 0 if nested is None else _number(getattr(nested, "_savepoint", ""))


def _number(name: str) -> float:
    """Of a savepoint; what cannot be told goes with every rollback."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else float("inf")
