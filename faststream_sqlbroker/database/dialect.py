"""A dialect: all SQL of one database, with its operations and the parts built from them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies.seen import Seen, Swap
from faststream_sqlbroker.core.rows import (
    Around,
    Claimed,
    ClaimedMessage,
    NewMessage,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
    SignOfLife,
)
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts import live_subscribers
from faststream_sqlbroker.database.parts.handler_locks import HandlerLocks
from faststream_sqlbroker.database.parts.ordered import OrderedClaims
from faststream_sqlbroker.database.parts.policy_state import note_started
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.query import Work

if TYPE_CHECKING:
    from faststream_sqlbroker.database.postgresql.quick_jobs import SingleStatementJobs


class Dialect(Operations):
    """The interface of a database to the store."""

    ordered: OrderedClaims
    """Claims that keep the order of each key."""
    single_statement_jobs: "SingleStatementJobs | None" = None
    """Single statements for jobs of pull consumers; None if they need transactions."""
    handler_locks: HandlerLocks
    """The locks that transactions of handlers begin with."""

    @abstractmethod
    def removing(self, ids: Sequence[int]) -> Work[None]:
        """Build the deletion of the messages `ids`, whatever their state; nothing is archived.

        The work needs a transaction of its own. It waits for rows that others have locked.
        """

    def inserting(self, rows: Sequence[NewMessage]) -> Work[list[int | None]]:
        """Build `insert` as work for a separate transaction."""
        return lambda connection: self.insert(connection, rows)

    def claiming_free_keys(
        self,
        rows: Sequence[ClaimedMessage],  # noqa: ARG002
        ttl: float,  # noqa: ARG002
        worker: str,  # noqa: ARG002
    ) -> Work[set[int]] | None:
        """Build a claim of the keys of `rows` that no message has claimed before.

        The work does what `once.claim_keys` does, in a transaction of its own, and returns the ids
        whose keys were claimed; other keys are unchanged. None if the database has no short way.
        """
        return None

    def looking_at_queues(
        self,
        queues: Sequence[str],  # noqa: ARG002
        *,
        size: int,  # noqa: ARG002
        most_running: int,  # noqa: ARG002
        scopes: Sequence[str],  # noqa: ARG002
        others: Suspicion | None,  # noqa: ARG002
    ) -> Work[Seen] | None:
        """Build a consistent read of the state that a claim under policies of `queues` needs.

        The work reads `size` due messages of each priority, up to `max_running` leases, and the
        states of `scopes`, which the queue's name follows. Suspects of `suspicion` are left out.
        None if the database cannot compare and swap.
        """
        return None

    def swapping(self, swap: Swap) -> Work[Claimed | None]:
        """Build a compare-and-swap: raise the version of a queue, lease and store.

        The work returns None and writes nothing if the version differs or another claim has locked
        the queue. So a claim that was decided on outdated state writes nothing.
        """
        raise NotImplementedError

    def build_scan(self, queues: Sequence[str]) -> Work[ReadyPairs]:
        """Build a search for ready pairs as work for a separate transaction."""
        return lambda connection: self.ready_pairs(connection, queues)

    def build_poll(
        self, queues: Sequence[str], leased: Sequence[str], sign: SignOfLife | None
    ) -> Work[Around]:
        """Build a poll of `queues`, and of the first lease end in `leased`.

        The work needs a transaction of its own. With `sign` it is also a heartbeat, and reads the
        orders of operators.
        """

        def poll(connection: Connection) -> Around:
            orders = None
            if sign is not None:
                state = self.tables.policy_state
                changed = set(sign.changed)
                live_subscribers.announce(connection, state, sign.known, changed, sign.lease)
                orders = live_subscribers.orders(connection, state, sorted(sign.known))
            pairs = self.ready_pairs(connection, queues)
            return Around(pairs, self.lease_ends_in(connection, leased), orders)

        return poll

    @abstractmethod
    def claiming(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: Suspicion | None = None,
        prefetch: Prefetch | None = None,
    ) -> Work[Claimed]:
        """Build a claim of up to `limit` due rows, ordered by pair, due time and id.

        The work needs a transaction of its own. Locked rows are skipped. With `prefetch`, the first
        `prefetch.after` rows are leased for `lease` seconds and the others for `prefetch.lease`;
        those have `ClaimedMessage.prefetched` set. With `suspicion`, no suspect is leased: a crash
        that another message causes would count against it.
        """

    def build_settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """Build `settle_and_publish` as work for a separate transaction."""
        return lambda connection: self.settle_and_publish(
            connection, settlements, skip_locked=skip_locked
        )

    def settling_one(self, settlement: Settlement) -> Work[SettleResult]:
        """Build the settlement of a row without a unit.

        A session that caches plans makes a new plan.
        """
        return self.build_settle([settlement])

    def settle_and_publish(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        skip_locked: bool = False,
    ) -> SettleResult:
        """Settle unit by unit, and insert the messages published with each unit; see `units`."""
        return settle_units(self, connection, settlements, skip_locked=skip_locked)

    def remove_first(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        rows: Sequence[ClaimedMessage],
        holder: UUID,
        lease: float,
        worker: str,
    ) -> SettleResult:
        """Settle for ACK_FIRST, and record that the handlers of the removed `rows` start.

        Both are one transaction, so every removed row has its record.
        """
        result = self.settle(connection, settlements)
        if removed := [row for row in rows if row.id in result.settled]:
            note_started(connection, self.tables.policy_state, removed, holder, lease, worker)
        return result
