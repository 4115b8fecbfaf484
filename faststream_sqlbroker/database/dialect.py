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
    ClaimRequest,
    HeartbeatData,
    NewMessage,
    PollResult,
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
        """Build a claim of the keys of `rows` that no message has claimed before (policy `Once`).

        A short way past `once.claim_keys` for the usual case that every key is new: one transaction
        of its own, which returns the ids whose keys it claimed and leaves other keys unchanged. The
        caller then uses `once.claim_keys` for the rest. None if the database has no short way.
        """
        return None

    def build_read_queues(
        self,
        queues: Sequence[str],  # noqa: ARG002
        *,
        size: int,  # noqa: ARG002
        max_running: int,  # noqa: ARG002
        scopes: Sequence[str],  # noqa: ARG002
        suspect_rule: SuspectRule | None,  # noqa: ARG002
    ) -> Work[QueueSnapshots] | None:
        """Build a consistent read of the state that a claim under policies of `queues` needs.

        First half of an optimistic claim: read without locks, decide in Python, then write by
        `build_compare_and_swap`. The work reads `size` due messages of each priority, up to
        `max_running` leases, and the policy states whose scope is one of the prefixes `scopes`
        followed by the queue. A message that `suspect_rule` classifies as a suspect (it may have
        killed its process) is skipped. None if the database cannot compare and swap.
        """
        return None

    def build_compare_and_swap(self, swap: CompareAndSwap) -> Work[ClaimedMessages | None]:
        """Build the write of a claim that was decided on a snapshot by `build_read_queues`.

        In one statement it raises the version of the queue, leases the messages and stores the new
        policy states. If another claim has changed the version since the snapshot, or has locked
        the queue, the work writes nothing and returns None, and the caller must read again.
        """
        raise NotImplementedError

    def build_scan(self, queues: Sequence[str]) -> Work[ReadyPairs]:
        """Build a search for ready pairs as work for a separate transaction.

        A ready pair is a (queue, priority) that has claimable rows, with the due time of the first.
        """
        return lambda connection: self.find_ready_pairs(connection, queues)

    def build_poll(
        self, queues: Sequence[str], leased: Sequence[str], sign: HeartbeatData | None
    ) -> Work[PollResult]:
        """Build a poll: the ready pairs of `queues`, and the end of the first lease in `leased`.

        One transaction serves all idle subscribers of a process. With `sign` it is also their
        heartbeat: it renews their registrations, and reads the requests of operators (pauses,
        drains, cancels).
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
    def build_claim(self, request: ClaimRequest) -> Work[ClaimedMessages]:
        """Build a claim of due rows. Locked rows are skipped.

        The work needs a transaction of its own.
        """

    def build_settle(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """Build `settle_and_publish` as work for a separate transaction."""
        return lambda connection: self.settle_and_publish(
            connection, settlements, skip_locked=skip_locked
        )

    def build_settle_one(self, settlement: Settlement) -> Work[SettleResult]:
        """Build the settlement of a single row without a unit of other rows or messages.

        A session that caches query plans makes a new plan, because a cached plan may be for the
        table as it was earlier.
        """
        return self.build_settle([settlement])

    def settle_and_publish(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        skip_locked: bool = False,
    ) -> SettleResult:
        """Settle the rows unit by unit, and insert the messages published with each unit.

        A unit is a set of settlements that are written together, with the messages that its handler
        publishes on ack, or not at all. See `units`.
        """
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
