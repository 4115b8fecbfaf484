"""A dialect: all SQL of one database, with its operations and the parts built from them."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from sqlalchemy import Connection

from faststream_sqlbroker.core.policies.seen import CompareAndSwap, QueueSnapshots
from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ClaimedMessages,
    HeartbeatData,
    NewMessage,
    PollResult,
    Prefetch,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts import live_subscribers
from faststream_sqlbroker.database.parts.handler_locks import HandlerLocks
from faststream_sqlbroker.database.parts.ordered import OrderedClaims
from faststream_sqlbroker.database.parts.policy_state import record_starts
from faststream_sqlbroker.database.parts.units import settle_units
from faststream_sqlbroker.database.query import Work

if TYPE_CHECKING:
    from faststream_sqlbroker.database.postgresql.quick_jobs import SingleStatementJobs


class Dialect(DialectOperations):
    """The interface of a database to the store."""

    ordered: OrderedClaims
    """Claims that keep the order of each key."""
    single_statement_jobs: "SingleStatementJobs | None" = None
    """Single statements for jobs of pull consumers; None if they need transactions."""
    handler_locks: HandlerLocks
    """The locks that transactions of handlers begin with."""

    @abstractmethod
    def build_remove(self, ids: Sequence[int]) -> Work[None]:
        """Build the deletion of the messages `ids`, whatever their state; nothing is archived.

        The work needs a transaction of its own. It waits for rows that others have locked.
        """

    def build_insert(self, rows: Sequence[NewMessage]) -> Work[list[int | None]]:
        """Build `insert` as work for a separate transaction."""
        return lambda connection: self.insert(connection, rows)

    def build_claim_free_keys(
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

    def build_read_queues(
        self,
        queues: Sequence[str],  # noqa: ARG002
        *,
        size: int,  # noqa: ARG002
        max_running: int,  # noqa: ARG002
        scopes: Sequence[str],  # noqa: ARG002
        suspicion: SuspectRule | None,  # noqa: ARG002
    ) -> Work[QueueSnapshots] | None:
        """Build a consistent read of the state that a claim under policies of `queues` needs.

        The work reads `size` due messages of each priority, up to `max_running` leases, and the
        states of `scopes`, which the queue's name follows. Suspects of `suspicion` are left out.
        None if the database cannot compare and swap.
        """
        return None

    def build_compare_and_swap(self, swap: CompareAndSwap) -> Work[ClaimedMessages | None]:
        """Build a compare-and-swap: raise the version of a queue, lease and store.

        The work returns None and writes nothing if the version differs or another claim has locked
        the queue. So a claim that was decided on outdated state writes nothing.
        """
        raise NotImplementedError

    def build_scan(self, queues: Sequence[str]) -> Work[ReadyPairs]:
        """Build a search for ready pairs as work for a separate transaction."""
        return lambda connection: self.find_ready_pairs(connection, queues)

    def build_poll(
        self, queues: Sequence[str], leased: Sequence[str], sign: HeartbeatData | None
    ) -> Work[PollResult]:
        """Build a poll of `queues`, and of the first lease end in `leased`.

        The work needs a transaction of its own. With `sign` it is also a heartbeat, and reads the
        orders of operators.
        """

        def poll(connection: Connection) -> PollResult:
            orders = None
            if sign is not None:
                state = self.tables.policy_state
                changed = set(sign.changed_names)
                live_subscribers.renew_registrations(
                    connection, state, sign.descriptions, changed, sign.lease_seconds
                )
                orders = live_subscribers.load_orders(connection, state, sorted(sign.descriptions))
            pairs = self.find_ready_pairs(connection, queues)
            return PollResult(pairs, self.get_seconds_to_lease_end(connection, leased), orders)

        return poll

    @abstractmethod
    def build_claim(
        self,
        pairs: Sequence[ReadyPair],
        limit: int,
        lease: float,
        token: UUID,
        *,
        suspicion: SuspectRule | None = None,
        prefetch: Prefetch | None = None,
    ) -> Work[ClaimedMessages]:
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

    def build_settle_one(self, settlement: Settlement) -> Work[SettleResult]:
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

    def settle_ack_first(
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
        if removed := [row for row in rows if row.id in result.settled_ids]:
            record_starts(connection, self.tables.policy_state, removed, holder, lease, worker)
        return result
