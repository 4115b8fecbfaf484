"""Messages published in a transaction of the test: they wait for its COMMIT."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event

POLL_INTERVAL = 0.001
"""Seconds between two polls of a transaction that is being committed, which sends no event
afterwards, and of handlers that it starts.
"""

CommitCallback = Callable[[], Awaitable[None]]


@dataclass
class _PendingPublishes:
    """Publishes of a connection's transaction so far."""

    callbacks: list[tuple[float, CommitCallback]] = field(default_factory=list)
    """Callbacks, each with the number of its innermost savepoint, or 0."""


class HeldPublishes:
    """Runs held publishes after the commit of their transaction, or discards all on a rollback."""

    def __init__(self) -> None:
        """Start empty; must be created in the event loop in which handlers run after a COMMIT."""
        self._loop = asyncio.get_running_loop()
        self._pending: WeakKeyDictionary[Connection, _PendingPublishes] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._committing_count = 0
        self._errors: list[BaseException] = []

    @property
    def count(self) -> int:
        """Number of publishes that wait for a COMMIT."""
        return sum(len(pending.callbacks) for pending in self._pending.values())

    def hold(self, connection: Connection, commit: CommitCallback) -> None:
        """Call `commit` in the event loop once the transaction of `connection` has committed.

        After a rollback, of the transaction or of a savepoint that began before, it is not called.
        """
        if connection not in self._pending:
            self._listen(connection)
        self._pending[connection].callbacks.append((_get_savepoint_number(connection), commit))

    def _listen(self, connection: Connection) -> None:
        """Start to observe the transactions of `connection`.

        Only a commit makes its publishes visible to handlers. A rollback discards all of them, and
        the rollback of a savepoint discards the publishes since that savepoint.
        """
        pending = self._pending[connection] = _PendingPublishes()

        def on_commit(_connection: Connection) -> None:
            commits, pending.callbacks = [commit for _, commit in pending.callbacks], []
            if commits:
                self._committing_count += 1
                transaction = connection.get_transaction()
                # Synchronous code may commit in a thread; handlers run in the event loop.
                self._loop.call_soon_threadsafe(
                    self._start_commit, connection, transaction, commits
                )

        def on_rollback(_connection: Connection) -> None:
            pending.callbacks.clear()

        def on_savepoint_rollback(_connection: Connection, name: str, _context: Any) -> None:
            # Savepoints are numbered as they begin: nested savepoints have greater numbers. Keep
            # the publishes from before this savepoint.
            number = _parse_savepoint_number(name)
            pending.callbacks[:] = [
                callback for callback in pending.callbacks if callback[0] < number
            ]

        event.listen(connection, "commit", on_commit)
        event.listen(connection, "rollback", on_rollback)
        event.listen(connection, "rollback_savepoint", on_savepoint_rollback)

    def _start_commit(
        self, connection: Connection, transaction: Any, commits: Sequence[CommitCallback]
    ) -> None:
        """Run the callbacks of a committed transaction in a task of the test's event loop.

        The set keeps the task until its end, because asyncio refers to tasks weakly.
        """
        task = asyncio.get_running_loop().create_task(
            self._commit(connection, transaction, commits)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(
        self, connection: Connection, transaction: Any, commits: Sequence[CommitCallback]
    ) -> None:
        """Wait until the COMMIT has ended, and after a success run the callbacks.

        SQLAlchemy announces a commit before the database has executed it, and has no event for its
        end: the transaction is polled. Errors are kept for `drain`: no publish waits for them.
        """
        try:
            while transaction.is_active:
                await asyncio.sleep(POLL_INTERVAL)
            # Trap: after a failed COMMIT, SQLAlchemy still returns the transaction.
            if connection.get_transaction() is transaction:
                return
            for commit in commits:
                try:
                    await commit()
                except Exception as error:  # noqa: BLE001 - `drain` raises it
                    self._errors.append(error)
        finally:
            self._committing_count -= 1

    def take_errors(self) -> list[BaseException]:
        """Take the errors of handlers, or of the store, since the last call.

        `drain` raises these errors of publishes in transactions, which have returned long before.
        """
        errors, self._errors = self._errors, []
        return errors

    @property
    def is_committing(self) -> bool:
        """True if publishes of a committed transaction are still running."""
        return bool(self._committing_count)

    async def close(self) -> None:
        """Cancel the callbacks of committed transactions that still run, at the end of the test."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _get_savepoint_number(connection: Connection) -> float:
    """Return the number of the innermost savepoint of `connection`; 0 without a savepoint.

    A rollback to a savepoint discards the publishes since then, whose numbers are not smaller.
    SQLAlchemy names a savepoint in the event of its rollback only, so the name is read here.
    """
    nested = connection.get_nested_transaction()
    return 0 if nested is None else _parse_savepoint_number(getattr(nested, "_savepoint", ""))


def _parse_savepoint_number(name: str) -> float:
    """Return the number in a savepoint's name; infinity if unknown, to go with every rollback."""
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else float("inf")
