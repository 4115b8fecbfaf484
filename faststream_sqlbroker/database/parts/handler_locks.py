"""The lock that a handler's transaction begins with, and the proof before the ack that it holds.

A handler may end the transaction that it was given, by ROLLBACK or COMMIT. On MySQL and MariaDB a
deadlock ends it too, which rolls back, and DDL, which commits. Statements after that run in another
transaction. An ack among them would be committed without the earlier work of the handler. So the
broker proves before the ack that the transaction is still the same. If it is not, the broker must
know how it ended: after a rollback the message may be tried again, after a commit half of its work
is done.

PostgreSQL numbers its transactions and remembers how each ended, unless it crashes. On the other
databases a savepoint after the lock proves the transaction, as it vanishes with it. There the rows
are locked by writing a mark into them: other transactions see the mark only if it was committed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult

ENDED = "the transaction that the handler was given has ended before its ack"


@dataclass(frozen=True, slots=True)
class HandlerLock:
    """The rows that a handler's transaction has locked, and what identifies the transaction."""

    leases: Leases
    held: set[int]
    """Ids of the rows that are locked; the leases of the others are lost."""
    number: str = ""
    """PostgreSQL's number of the transaction."""
    since: datetime | None = None
    """PostgreSQL's time when it was locked."""


class HandlerLocks(ABC):
    """How one database locks rows for handlers, and proves and settles under the lock."""

    @abstractmethod
    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock the rows of `leases` that are still held, until the transaction ends.

        The server ends the session if the transaction is idle for `idle_limit` seconds.
        """

    @abstractmethod
    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Check that the transaction is still the one that has taken `lock`; call it once only.

        Raises:
            TransactionEndedError: it is not.
        """

    @abstractmethod
    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Prove the transaction, then write `settlements` of rows that `lock` holds, and what is
        published on ack.

        Raises:
            TransactionEndedError: the transaction is another one; nothing was written.
        """

    @abstractmethod
    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Whether the ended transaction that had taken `lock` was committed.

        Asked in another transaction.
        """
