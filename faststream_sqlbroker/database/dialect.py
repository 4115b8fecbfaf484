"""A dialect: all SQL of one database, its operations and what is built of them."""

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
    from faststream_sqlbroker.database.postgresql.quick_jobs import QuickJobs


class Dialect(Operations):
    """What the store asks of a database."""

    ordered: OrderedClaims
    """Claims that keep the order of each key."""
    quick_jobs: "QuickJobs | None" = None
    """Single statements for jobs of pull consumers; None: they take transactions."""
    handler_locks: HandlerLocks
    """The locks that transactions of handlers begin with."""

    @abstractmethod
    def removing(self, ids: Sequence[int]) -> Work[None]:
        """Delete the messages `ids`, whatever their state, and keep nothing of them.

        It is work for a transaction of its own. Rows that others have locked are waited for.
        """

    def inserting(self, rows: Sequence[NewMessage]) -> Work[list[int | None]]:
        """`insert` as work for a transaction of its own."""
        return lambda connection: self.insert(connection, rows)

    def claiming_free_keys(
        self,
        rows: Sequence[ClaimedMessage],  # noqa: ARG002
        ttl: float,  # noqa: ARG002
        worker: str,  # noqa: ARG002
    ) -> Work[set[int]] | None:
        """Claim those keys of `rows` that no message has claimed before, as `once.claim_keys`, in a
        transaction of its own: the ids whose keys were claimed. The others are as before.

        None: the database has no short way.
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
        """Read, of one moment, what a claim under policies of `queues` decides by: `size` due
        messages of each priority, up to `most_running` leases, and the states of `scopes`, which
        the queue's name follows. Without the suspects that `others` tells.

        None: the database has no `swapping`.
        """
        return None

    def swapping(self, swap: Swap) -> Work[Claimed | None]:
        """Raise the version of a queue, lease and store; None, and nothing is written: the version
        is another, or another claim has locked it.

        So a claim that has decided by what is no longer true writes nothing.
        """
        raise NotImplementedError

    def scan(self, queues: Sequence[str]) -> Work[ReadyPairs]:
        """`ready_pairs` as work for a transaction of its own."""
        return lambda connection: self.ready_pairs(connection, queues)

    def looking_around(
        self, queues: Sequence[str], leased: Sequence[str], sign: SignOfLife | None
    ) -> Work[Around]:
        """`scan` of `queues`, and the end of the first lease in `leased`, in one transaction of its
        own; with `sign` it is also a sign of life, and reads what operators have asked.
        """

        def look(connection: Connection) -> Around:
            orders = None
            if sign is not None:
                state = self.tables.policy_state
                changed = set(sign.changed)
                live_subscribers.announce(connection, state, sign.known, changed, sign.lease)
                orders = live_subscribers.orders(connection, state, sorted(sign.known))
            pairs = self.ready_pairs(connection, queues)
            return Around(pairs, self.lease_ends_in(connection, leased), orders)

        return look

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
        """Lease up to `limit` due rows; ordered by pair, due time, id. Locked rows are skipped. It
        is work for a transaction of its own.

        With `prefetch`, the first `prefetch.after` rows are leased for `lease` seconds and the
        others for `prefetch.lease`; those have `ClaimedMessage.prefetched` set. With `suspicion`,
        no suspect is leased: a crash that another message causes would count against it.
        """

    def settling(
        self, settlements: Sequence[Settlement], *, skip_locked: bool = False
    ) -> Work[SettleResult]:
        """`settle_and_publish` as work for a transaction of its own."""
        return lambda connection: self.settle_and_publish(
            connection, settlements, skip_locked=skip_locked
        )

    def settling_one(self, settlement: Settlement) -> Work[SettleResult]:
        """`settling` of one row without a unit; a session that caches plans makes a new one."""
        return self.settling([settlement])

    def settle_and_publish(
        self,
        connection: Connection,
        settlements: Sequence[Settlement],
        *,
        skip_locked: bool = False,
    ) -> SettleResult:
        """`settle`, unit by unit, and insert the messages published with them; see `units`."""
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
        """`settle` for ACK_FIRST, and record that the handlers of the removed `rows` start.

        Both are one transaction, so every removed row has its record.
        """
        result = self.settle(connection, settlements)
        if started := [row for row in rows if row.id in result.settled]:
            note_started(connection, self.tables.policy_state, started, holder, lease, worker)
        return result
