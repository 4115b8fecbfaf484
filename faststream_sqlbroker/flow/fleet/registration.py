"""One subscriber as the fleet knows it: its name, what it tells, and where it may claim."""

import os
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.clock import Clock, Timer
from faststream_sqlbroker.core.ended import EndedCounts
from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.status import HOLDER_BYTES, describe, worker_name
from faststream_sqlbroker.database.parts.policy_state import process_name
from faststream_sqlbroker.flow.settings import ConsumerSettings

FIRST_WAIT = 5.0
"""Most seconds that the first claim waits for the answer which queues are paused: it must not
hinder for good."""


class Registration:
    """Knows which of its queues are open: not paused for the fleet, while the subscriber itself is
    neither paused, nor drained, nor held.

    Between `begin` and the first `told` none is; after `FIRST_WAIT` seconds without it, all are.
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
        """`paused` is the subscriber's own; `on_change` is called when other queues are open than
        before, `on_cancel` with what operators ask to cancel, of any subscriber.
        """
        self._on_cancel = on_cancel
        self._settings = settings
        self._on_change = on_change
        self._clock = clock or Clock()
        self._holder = os.urandom(HOLDER_BYTES)
        self.paused = paused
        self.stopping = False
        self._drained = False
        self._holds: set[str] = set()
        self._closed: frozenset[str] | None = frozenset()
        self._timer: Timer | None = None
        self.name = worker_name(process_name(), self._holder)
        self.ended = EndedCounts(settings.queues, self._clock.monotonic())
        self.open: tuple[str, ...] = self._find_open()

    def token(self) -> UUID:
        """A new lease token: whose it is, and 8 random bytes."""
        # Half of the token names the subscriber, so `explain` finds the holder of a lease. The
        # other half makes each claim's token new, which is the fence.
        return UUID(bytes=self._holder + os.urandom(16 - HOLDER_BYTES))

    def describe(self, *, often: bool = False) -> dict[str, Any]:
        """What the fleet is told; with `often`, several times a minute, also what has ended."""
        settings = self._settings
        told = describe(
            queues=settings.queues,
            max_workers=settings.max_workers,
            ordered=settings.ordered,
            policies=settings.policies,
            paused=self.paused,
            stopping=self.stopping,
            transactional=settings.transactional,
        )
        if often:
            told["ended"] = self.ended.tell(self._clock.monotonic())
        return told

    def begin(self, *, known: bool) -> None:
        """It starts; unless it is `known` that nothing is paused, the heartbeat calls `told`."""
        self.stopping = False
        self.ended = EndedCounts(self._settings.queues, self._clock.monotonic())
        self._closed = frozenset() if known else None
        self._drained = False
        self._holds.clear()
        if not known:
            # The heartbeat may fail for as long as the database does. A pause that is noticed late
            # is better than a subscriber that never claims.
            self._timer = self._clock.call_later(FIRST_WAIT, self.told, frozenset())
        self._tell_queues()

    def told(self, paused: frozenset[str], drained: bool | None = None) -> None:
        """These queues are paused, for everybody, and no others; `drained`: an operator has drained
        the subscriber, None: as it was.
        """
        self._forget_timer()
        self._closed = paused
        if drained is not None:
            self._drained = drained
        self._tell_queues()

    def asked(self, requests: Sequence[CancelRequest]) -> None:
        """Operators ask to cancel these."""
        if requests:
            self._on_cancel(requests)

    def pause(self, paused: bool) -> None:
        """Pause the subscriber itself, or end that."""
        self.paused = paused
        self._tell_queues()

    def hold(self, reason: str, held: bool) -> None:
        """Claim nothing while outcomes cannot be written, for one of several reasons; False ends
        this one.
        """
        (self._holds.add if held else self._holds.discard)(reason)
        self._tell_queues()

    @property
    def held(self) -> bool:
        """Whether there is such a reason."""
        return bool(self._holds)

    def end(self) -> None:
        """It stops."""
        self.stopping = True
        self._forget_timer()

    @property
    def queues(self) -> Sequence[str]:
        """Those that it takes from, open or not."""
        return self._settings.queues

    @property
    def told_only(self) -> bool:
        """Whether the subscriber looks only when it is told."""
        return self._settings.told_only

    @property
    def keeps_closed(self) -> bool:
        """Whether a queue is paused for everybody, or the subscriber is drained."""
        return self._drained or bool(self._closed)

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _find_open(self) -> tuple[str, ...]:
        closed = self._closed
        queues = self._settings.queues
        return (
            ()
            if self.paused or self._drained or self.held or closed is None
            else tuple(q for q in queues if q not in closed)
        )

    def _tell_queues(self) -> None:
        found = self._find_open()
        if found != self.open and not self.stopping:
            self.open = found
            self._on_change()
