"""A subscriber's registration in the fleet: its name, its description and its open queues."""

import os
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock, Timer
from faststream_sqlbroker.core.ended import EndedCounts
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.status import HOLDER_BYTES, build_description, build_worker_name
from faststream_sqlbroker.database.parts.policy_state import get_process_name
from faststream_sqlbroker.flow.settings import ConsumerSettings

FIRST_WAIT = 5.0
"""Maximum seconds that the first claim waits to learn which queues are paused: a failing heartbeat
must not block it for good.
"""


class Registration:
    """The state of a subscriber in the fleet, which determines the open queues.

    A queue is open if it is not paused for the fleet, while the subscriber itself is neither
    paused, nor drained, nor held.

    Between `start` and the first `update_paused` no queue is open. After `FIRST_WAIT` seconds
    without that call, all are.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        *,
        paused: bool,
        on_change: Callable[[], None],
        on_cancel: Callable[[Sequence[CancelRequest]], None] = lambda _requests: None,
        clock: Clock | None = None,
    ) -> None:
        """Call `on_change` when the open queues change, and `on_cancel` with operators' requests.

        `paused` is the subscriber's own pause. The requests of `on_cancel` may concern any
        subscriber.
        """
        self._on_cancel = on_cancel
        self._settings = settings
        self._on_change = on_change
        self._clock = clock or Clock()
        # Identifies this subscriber: part of its name, and of the tokens of its leases.
        self._holder = os.urandom(HOLDER_BYTES)
        self.paused = paused
        self.stopping = False
        self._drained = False
        self._holds: set[str] = set()
        self._paused_queues: frozenset[str] | None = frozenset()
        self._timer: Timer | None = None
        self.name = build_worker_name(get_process_name(), self._holder)
        self.ended = EndedCounts(settings.queues, self._clock.monotonic())
        self.open_queues: tuple[str, ...] = self._find_open()

    def create_token(self) -> UUID:
        """Create a lease token: the holder's id and 8 random bytes."""
        # Half of the token identifies the subscriber, so that `explain` finds the holder of a
        # lease. The other half makes each claim's token new, which is the fence.
        return UUID(bytes=self._holder + os.urandom(16 - HOLDER_BYTES))

    def describe(self, *, is_frequent: bool = False) -> dict[str, Any]:
        """Return the description that other processes read in the heartbeat's row.

        With `is_frequent`, which means at least once a minute, it includes the counts of messages
        that have ended in the last minute: rare heartbeats would report old counts.
        """
        settings = self._settings
        description = build_description(
            queues=settings.queues,
            max_workers=settings.max_workers,
            ordered=settings.ordered,
            policies=settings.policies,
            paused=self.paused,
            stopping=self.stopping,
            transactional=settings.transactional,
            max_deliveries=settings.max_deliveries,
        )
        if is_frequent:
            description["ended"] = self.ended.take_report(self._clock.monotonic())
        return description

    def start(self, *, pauses_known: bool) -> None:
        """Start a new life of the subscriber, as after a restart: an operator's drain is over.

        `pauses_known` is True if no heartbeat will report paused queues: all count as open. Else no
        queue is open until the heartbeat calls `update_paused`, or `FIRST_WAIT` is over. Holds,
        which are reasons why outcomes could not be written, are forgotten.
        """
        self.stopping = False
        self.ended = EndedCounts(self._settings.queues, self._clock.monotonic())
        self._paused_queues = frozenset() if pauses_known else None
        self._drained = False
        self._holds.clear()
        if not pauses_known:
            # The heartbeat may fail for as long as the database does. Noticing a pause late is
            # better than a subscriber that never claims.
            self._timer = self._clock.call_later(FIRST_WAIT, self.update_paused, frozenset())
        self._update_open()

    def update_paused(self, paused: frozenset[str], drained: bool | None = None) -> None:
        """Set the queues that are paused for all subscribers of the fleet.

        Called after each heartbeat. `drained` is True if an operator has ordered this subscriber to
        claim nothing; None leaves that as it was.
        """
        self._cancel_timer()
        self._paused_queues = paused
        if drained is not None:
            self._drained = drained
        self._update_open()

    def notify_cancels(self, requests: Sequence[CancelRequest]) -> None:
        """Pass on operators' requests to cancel messages."""
        if requests:
            self._on_cancel(requests)

    def pause(self, paused: bool) -> None:
        """Pause or resume the subscriber itself."""
        self.paused = paused
        self._update_open()

    def hold(self, reason: str, is_active: bool) -> None:
        """Stop claiming while outcomes cannot be written for `reason`; False ends this reason.

        There may be several reasons, such as missing rights; claims resume when all have ended.
        """
        (self._holds.add if is_active else self._holds.discard)(reason)
        self._update_open()

    @property
    def is_held(self) -> bool:
        """True if there is a reason why outcomes cannot be written."""
        return bool(self._holds)

    def mark_stopping(self) -> None:
        """Mark the subscriber as stopping."""
        self.stopping = True
        self._cancel_timer()

    @property
    def queues(self) -> Sequence[str]:
        """All queues of the subscriber, open or not."""
        return self._settings.queues

    @property
    def notify_only(self) -> bool:
        """True if the subscriber polls only when notified."""
        return self._settings.notify_only

    @property
    def has_closed_queues(self) -> bool:
        """True if a queue is paused for everybody, or the subscriber is drained."""
        return self._drained or bool(self._paused_queues)

    def _cancel_timer(self) -> None:
        """Cancel the timer that opens all queues if the first heartbeat does not answer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _find_open(self) -> tuple[str, ...]:
        """Return the queues from which the subscriber may claim now.

        None as the paused queues means that they are not known yet: then nothing is open.
        """
        paused_queues = self._paused_queues
        queues = self._settings.queues
        return (
            ()
            if self.paused or self._drained or self.is_held or paused_queues is None
            else tuple(q for q in queues if q not in paused_queues)
        )

    def _update_open(self) -> None:
        """Compute the open queues; report a change, unless the subscriber is stopping.

        The report makes the subscriber poll queues that are open now, and release rows of others
        that no handler has started.
        """
        open_queues = self._find_open()
        if open_queues != self.open_queues and not self.stopping:
            self.open_queues = open_queues
            self._on_change()
