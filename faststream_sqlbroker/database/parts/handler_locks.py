"""Lock rows at the start of a handler's transaction, and prove before the ack that the lock holds.

A handler may end its transaction by ROLLBACK or COMMIT. On MySQL and MariaDB a deadlock, which
rolls back, and DDL, which commits, end it too. Later statements run in another transaction. An
ack among them would be committed without the earlier work of the handler. So the broker proves
before the ack that the transaction is still the same. If it is not, the broker must know how it
ended: after a rollback the message may be tried again, after a commit half of its work is done.

PostgreSQL numbers its transactions and remembers how each ended, unless it crashes; another server,
such as a promoted standby, may give the same number to another transaction. On the other
databases a savepoint after the lock proves the transaction, as it vanishes with it. There the rows
are locked by writing a mark into them: other transactions see the mark only if it was committed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection

from faststream_sqlbroker.core.rows import Leases, Settlement, SettleResult

TRANSACTION_ENDED = "the transaction of the handler ended before its ack"


@dataclass(frozen=True, slots=True)
class HandlerLock:
    """The rows locked by a handler's transaction, and the identity of that transaction."""

    leases: Leases
    locked_ids: set[int]
    """Ids of the locked rows; the leases of other rows are lost."""
    number: str = ""
    """PostgreSQL's number of the transaction."""
    locked_at: datetime | None = None
    """PostgreSQL's time of the lock."""
    server_started_at: datetime | None = None
    """Start of the server that gave the number; no other server knows the transaction by it."""


class HandlerLocks(ABC):
    """Locks rows for handlers on a database, and proves and settles under the lock."""

    @abstractmethod
    def lock(self, connection: Connection, leases: Leases, idle_limit: float) -> HandlerLock:
        """Lock the rows of `leases` that are still held, until the transaction ends.

        The server ends the session if the transaction is idle for `idle_limit` seconds.
        """

    @abstractmethod
    def prove(self, connection: Connection, lock: HandlerLock) -> None:
        """Check that the transaction still holds `lock`; call this once only.

        Raises:
            TransactionEndedError: it is another transaction.
        """

    @abstractmethod
    def settle(
        self, connection: Connection, lock: HandlerLock, settlements: Sequence[Settlement]
    ) -> SettleResult:
        """Prove the transaction, then write `settlements` of rows that `lock` holds.

        Also inserts the messages that are published on ack.

        Raises:
            TransactionEndedError: the transaction is another one; nothing was written.
        """

    @abstractmethod
    def was_committed(self, connection: Connection, lock: HandlerLock) -> bool:
        """Return True if the ended transaction that held `lock` was committed.

        Call it in another transaction.
        """
