"""One poll for all idle subscribers of a process.

Without sharing, each subscriber would poll every `max_fetch_interval`. The first one that is due
polls the queues of all idle subscribers. The same statement finds when the first lease of any
process ends, so that the search for expired leases needs no statement of its own, and it carries
heartbeats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.orders import OperatorRequests
from faststream_sqlbroker.core.rows import PollResult, ReadyPairs
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.fleet.heartbeat import Heartbeat

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MAX_SILENCE = 1.0
"""Maximum seconds between polls of a notified subscriber while it could not claim a due message: no
wake-up announces when it can.
"""
MAX_LEASE_INFO_AGE = 5.0
"""Seconds for which the known end of the first lease is trusted: a newer lease may end sooner."""
LEASED_INTERVAL = 5.0
"""Seconds between polls of a notified subscriber while leases exist. Neither their ends nor the end
of what they hold back is notified.
"""
NOTIFIED_INTERVAL = 3600.0
"""Seconds between polls of a notified subscriber while no leases exist."""
MAX_POLL_WAIT = 1.0
"""Maximum seconds to wait for a poll in progress by another subscriber."""
MIN_RECHECK_WAIT = 0.05
"""Minimum seconds until the next check whether that poll is still in progress."""


class PollMember(Protocol):
    """A subscriber that takes part in shared polls."""

    @property
    def open_queues(self) -> Sequence[str]:
        """Queues that the subscriber polls."""

    @property
    def all_queues(self) -> Sequence[str]:
        """All queues of the subscriber, paused or not."""

    @property
    def is_idle(self) -> bool:
        """True if the subscriber waits only for time to pass, for the longest interval."""

    @property
    def max_poll_interval(self) -> float:
        """Maximum seconds between two polls while idle; infinite if the subscriber polls only when
        notified.
        """

    @property
    def polled_at(self) -> float:
        """Time when the subscriber's last poll ended (monotonic seconds)."""

    def on_poll_result(self, result: ReadyPairs) -> None:
        """Handle the result that another subscriber's poll has found for the open queues."""


@dataclass(frozen=True, slots=True)
class LeaseExpiry:
    """The end of the first lease in `queues`, as read at the time `at` (monotonic seconds)."""

    at: float
    queues: frozenset[str]
    expires_in: float | None


class SharedPoller:
    """Polls for all subscribers of a broker in this process."""

    def __init__(
        self,
        store: "Store",
        clock: Clock,
        heartbeat: Heartbeat | None = None,
        *,
        has_notifications: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send due heartbeats of `heartbeat` with polls.

        `has_notifications` returns True while wake-ups of other processes arrive.
        """
        self._store = store
        self._clock = clock
        self._heartbeat = heartbeat
        self._has_notifications = has_notifications
        self._members: dict[PollMember, Callable[[], None]] = {}
        self._sharing_members: dict[PollMember, Sequence[str]] = {}
        """Members for which the current poll was sent, each with the queues polled for it."""
        self._polled_at = float("-inf")
        self._leases = LeaseExpiry(float("-inf"), frozenset(), None)

    def join(self, member: PollMember, on_leases: Callable[[], None] = lambda: None) -> None:
        """Share polls with `member` while that subscriber is idle.

        `on_leases` is called when leases are found and none existed before: from now on their
        expiry must be watched.
        """
        self._members[member] = on_leases

    def leave(self, member: PollMember) -> None:
        """Stop sharing polls with `member`."""
        self._members.pop(member, None)
        self._sharing_members.pop(member, None)

    def is_polling_for(self, member: PollMember) -> bool:
        """Return True if a poll in progress covers `member`, which need not poll itself.

        The poll must have been sent for exactly the queues that the member has open now.
        """
        # Do not wait for a poll that hangs: another connection may answer.
        max_wait = min(member.max_poll_interval, MAX_POLL_WAIT)
        is_recent = self._clock.monotonic() - self._polled_at < max_wait
        return is_recent and self._sharing_members.get(member) == member.open_queues

    async def poll_for(self, requester: PollMember) -> ReadyPairs:
        """Poll the queues of `requester`, which is idle, and of all other idle members.

        So one statement serves all subscribers of the process. Each gets the pairs of queue and
        priority that have claimable messages in its own queues, due now or later.

        Raises:
            StoreError: as `Store.find_ready_pairs`; the other members get no result.
        """
        shares = {
            member: member.open_queues
            for member in self._members
            if member.is_idle and member.open_queues
        }
        shares[requester] = requester.open_queues
        sharing_members = self._sharing_members = dict(shares)
        polled_at = self._polled_at = self._clock.monotonic()
        try:
            result = await self._query(list(dict.fromkeys(chain.from_iterable(shares.values()))))
            for member, queues in shares.items():
                # A member that was woken since then, or has other queues now, polls by itself.
                has_same_queues = (
                    member is not requester and sharing_members.get(member) == member.open_queues
                )
                if has_same_queues and self._is_waiting(member, polled_at):
                    member.on_poll_result(_select_queues(result.pairs, queues, len(shares)))
        finally:
            # Another member may have started a newer poll, because this one hung.
            if self._sharing_members is sharing_members:
                self._sharing_members = {}
        return _select_queues(result.pairs, shares[requester], len(shares))

    def _is_waiting(self, member: PollMember, polled_at: float) -> bool:
        """Return True if `member` still waits for the result of a poll sent at `polled_at`."""
        # A member that has polled since knows more. This result may lack a due time that is not
        # notified again.
        return member in self._members and member.is_idle and member.polled_at <= polled_at

    def get_notified_wait(self) -> float:
        """Return the seconds until a notified subscriber polls again, if nothing is due.

        Such a subscriber polls only after a wake-up, so an hour will do. But without a connection
        for wake-ups it must poll, and while a lease exists too, because its end is not notified.
        """
        if not self._has_notifications():
            return MAX_SILENCE
        return NOTIFIED_INTERVAL if self._leases.expires_in is None else LEASED_INTERVAL

    async def lease_expires_in(
        self, queues: Sequence[str], *, notify_only: bool = False
    ) -> float | None:
        """Return the seconds until the first lease of any process ends, or None without leases.

        Called to release expired leases in time. Leases in `queues` count, and those in other
        queues of this broker. The answer comes from the last poll unless that is too old.

        With `notify_only` an old answer of "no leases" is good enough: such a subscriber polls
        again whenever there may be new ones.

        Raises:
            StoreError: as `Store.get_seconds_to_lease_end`.
        """
        leases = self._leases
        age = self._clock.monotonic() - leases.at
        max_age = (
            NOTIFIED_INTERVAL if notify_only and leases.expires_in is None else MAX_LEASE_INFO_AGE
        )
        if age > max_age or not leases.queues >= set(queues):
            started_at = self._clock.monotonic()
            lease_queues = self._list_lease_queues(queues)
            expires_in = await self._store.get_seconds_to_lease_end(lease_queues)
            leases = LeaseExpiry(started_at, frozenset(lease_queues), expires_in)
            self._record_leases(leases)
            age = self._clock.monotonic() - started_at
        return None if leases.expires_in is None else leases.expires_in - age

    def forget_leases(self) -> None:
        """Forget when the first lease ends, because leases were released.

        The next question for it asks the database.
        """
        self._leases = LeaseExpiry(float("-inf"), frozenset(), None)

    def _list_lease_queues(self, queues: Sequence[str] = ()) -> list[str]:
        """Return `queues` and all queues of the members, paused too: their leases also expire."""
        member_queues = (queue for member in self._members for queue in member.all_queues)
        return list(dict.fromkeys((*queues, *member_queues)))

    async def _query(self, queues: Sequence[str]) -> PollResult:
        """Poll `queues`, with a due heartbeat if possible, and note when the first lease ends.

        The time of the note is that of the start: leases that are given later are not in it.
        """
        started_at = self._clock.monotonic()
        lease_queues = self._list_lease_queues(queues)
        result = await self._poll_with_heartbeat(queues, lease_queues)
        if result is None:
            result = await self._store.poll_all(queues, lease_queues)
        self._record_leases(LeaseExpiry(started_at, frozenset(lease_queues), result.lease_ends_in))
        return result

    def _record_leases(self, leases: LeaseExpiry) -> None:
        """Keep the `leases` that a query has read, unless a later query is known.

        If leases exist and none did before, the members are called to watch their expiry.
        """
        previous = self._leases
        # The older of two queries may be answered last. It may lack a lease that no other poll
        # would find for an hour.
        if leases.at < previous.at:
            return
        self._leases = leases
        if leases.expires_in is not None and previous.expires_in is None:
            for on_leases in self._members.values():
                on_leases()

    async def _poll_with_heartbeat(
        self, queues: Sequence[str], lease_queues: Sequence[str]
    ) -> PollResult | None:
        """Poll and send a due heartbeat in the same transaction, which saves one.

        Return None if no heartbeat is due, or if the statement failed: then a plain poll follows.
        """
        if self._heartbeat is None:
            return None
        async with self._heartbeat.piggyback() as heartbeat:
            if heartbeat is None:
                return None
            try:
                result = await self._store.poll_all(queues, lease_queues, heartbeat.sign)
            except StoreError:
                # Polls do not depend on heartbeats, for which a right may be missing.
                heartbeat.mark_failed()
                return None
            heartbeat.mark_committed(result.requests or OperatorRequests())
            return result


def _select_queues(pairs: ReadyPairs, queues: Sequence[str], member_count: int) -> ReadyPairs:
    """Return the pairs of `queues` from a shared poll, with a share of the poll's duration.

    Each of the `member_count` subscribers counts an equal share, because a subscriber with slow
    polls polls less often: a poll for many must not seem slow to each.
    """
    requested = set(queues)
    selected = ReadyPairs(pair for pair in pairs if pair.queue in requested)
    selected.duration = pairs.duration / member_count
    selected.at = pairs.at
    return selected
