"""KeepLast: deliver the first message of a key at once, then only the newest of each window.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

from faststream_sqlbroker.core.policies.argument_checks import (
    format_seconds,
    parse_microseconds,
    set_attributes,
)
from faststream_sqlbroker.core.policies.debounce import (
    KEEP_LAST,
    BurstChanges,
    KeyUpdate,
    Standby,
    get_shared_fields,
    list_waiting,
)
from faststream_sqlbroker.core.policies.header import Header, Key, check_required_key, format_key
from faststream_sqlbroker.core.times import Duration


@dataclass(frozen=True, init=False)
class KeepLast:
    """Deliver the first message of a key immediately, then the newest of each `window`.

    Other messages are DISCARDED as superseded. So each key has a delivery every `window` while
    messages keep coming, and the only messages lost are those replaced by a newer one: a throttle
    with a leading and a trailing edge. A window begins when a message is claimed. While a message
    of the key is handled, the next one waits; while one waits for its retry, a newer one
    supersedes it.
    """

    window: int
    """Microseconds."""
    key: Key
    without_key: str

    def __init__(
        self,
        window: Duration,
        *,
        key: Key = True,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
    ) -> None:
        """Set the minimum time between deliveries of a key.

        Args:
            window: Minimum time from one delivery of a key to the delivery of its next message.
            key: False is refused. `Header("tenant")`: the value of that header is the key.
            without_key: What happens to a message that was published without a key: it is
                delivered, or it is FAILED.

        Raises:
            SetupError: the window is not longer than 0, or key=False.
        """
        check_required_key("KeepLast", key, without_key)
        length = parse_microseconds("KeepLast's window", window)
        set_attributes(self, window=length, key=key, without_key=without_key)

    def __str__(self) -> str:
        key = format_key("key", self.key) if isinstance(self.key, Header) else ""
        return f"KeepLast({format_seconds(self.window)}{key})"

    @property
    def leading(self) -> bool:
        """Always False: an older message is never delivered in place of newer messages."""
        return False

    def take(self, info: Any, arrivals: Sequence[tuple[int, int]]) -> KeyUpdate:
        """Add new messages of a key to the stored state `info` of the key.

        Returns the new state, with the changes to the messages of the key: new due times, and
        messages that stand by or are superseded. `arrivals` are sorted (time, id) pairs of messages
        that are new, or have returned after a move.
        """
        latest = self.load(info)
        latest.forget({message for _, message in arrivals})
        changes = add_to_latest(self, latest, arrivals)
        latest.record_standby(changes.standby, leading=False)
        return KeyUpdate(self.dump(latest), changes, latest.get_opening_time(self))

    def load(self, info: Any) -> "Latest":
        """Read the state of a key.

        After another policy the newest waiting message is delivered when due; older messages are
        superseded.
        """
        if not isinstance(info, dict) or info.get("kind", KEEP_LAST) == KEEP_LAST:
            return Latest.load(info)
        latest = max(list_waiting(info), default=None)
        return Latest(newest=latest, **get_shared_fields(info))

    def dump(self, latest: "Latest") -> dict[str, Any]:
        """Return the state to store."""
        return {"kind": KEEP_LAST, **latest.dump()}


@dataclass(slots=True, kw_only=True)
class Latest(Standby):
    """The waiting messages of a key, and the message that was delivered last; stored as JSON."""

    first: int | None = None
    """The message that found its key idle and is delivered at once; None if there is none, or if it
    has been delivered."""
    begun: int = 0
    """Arrival time of `first`."""
    newest: int | None = None
    """The message to deliver after the window, if no newer message comes."""
    current: int | None = None
    """The message that was delivered last. It may be running, or wait for a retry."""
    delivered_at: int = 0
    """Time of that delivery."""

    def forget(self, returned: AbstractSet[int]) -> None:
        """Remove messages that have come back after a move and therefore take part again.

        Such a message keeps its id, so the state may still list it from its first stay in the
        queue.
        """
        if self.first in returned:
            self.first = None
        if self.newest in returned:
            self.newest = None

    def list_messages(self) -> list[int]:
        """Return the messages that wait or are being handled; some may have ended since."""
        return [i for i in (self.current, self.first, self.newest) if i is not None]

    def get_opening_time(self, policy: KeepLast) -> int:
        """Return the time from which the windows allow the next delivery.

        A window begins with a delivery; before that, with the arrival of `first`.
        """
        if self.first is not None:
            return self.begun + policy.window
        return 0 if self.current is None else self.delivered_at + policy.window

    @property
    def waiting(self) -> list[int]:
        """The messages that were not delivered."""
        return [message for message in (self.first, self.newest) if message is not None]

    def replace(self, message: int, replacement: int | None) -> None:
        """Replace an undelivered message, which has expired or was removed, by `replacement`.

        That is the standby message that takes its place, if there is any.
        """
        if self.first == message:
            self.first = replacement
        if self.newest == message:
            self.newest = replacement

    def adopt(self, message: int) -> None:
        """Add a standby message of unknown target, newer than all waiting messages."""
        if message != self.current:
            self.newest = message

    def record_delivery(self, message: int, now: int) -> None:
        """Record that `message` was claimed.

        If `first` still waits when the newest is claimed, no worker was free for it in time, and it
        is superseded.
        """
        if message == self.newest:
            self.first = self.newest = None
        elif message == self.first:
            self.first = None
        self.current = message
        self.delivered_at = now


def add_to_latest(
    policy: KeepLast, latest: Latest, arrivals: Sequence[tuple[int, int]]
) -> BurstChanges:
    """Add messages of a key to the state `latest`, which is changed.

    A message that finds its key idle is delivered at once. Of the others only the newest is
    delivered, when the window that began with the last delivery is over; older messages stand by
    for it. Returns new due times, and which messages stand by or are superseded.

    Args:
        policy: The length of a window.
        latest: The state of the key.
        arrivals: (time, id) of each message, sorted.
    """
    changes = BurstChanges()
    for at, message in arrivals:
        if latest.first is not None and message < latest.first:
            changes.standby[message] = latest.begun
        elif (current := _find_newer_delivery(latest, at, message)) is not None:
            # A race: it arrived before the current message, but was committed after its delivery.
            changes.superseded[message] = current
        elif latest.newest is not None:
            older, latest.newest = sorted((latest.newest, message))
            changes.standby[older] = latest.get_opening_time(policy)
        elif latest.first is None and at >= latest.get_opening_time(policy):
            latest.first = message
            latest.begun = at
            changes.due[message] = at
        else:
            latest.newest = message
        if latest.newest == message:
            changes.due[message] = max(at, latest.get_opening_time(policy))
    for message in changes.standby:
        changes.due.pop(message, None)
    return changes


def _find_newer_delivery(latest: Latest, at: int, message: int) -> int | None:
    """Return the last delivered message if `message` is older and arrived before the delivery.

    Then `message` is superseded: the newer message was delivered while this one was not committed
    yet.
    """
    current = latest.current
    is_late = current is not None and message < current and at <= latest.delivered_at
    return current if is_late else None


@dataclass(slots=True)
class NextDelivery:
    """The decision about the due messages of a key."""

    message: int | None = None
    """The message to deliver, if it is due."""
    not_before: int = 0
    """Minimum time of that delivery."""
    waits_for: int | None = None
    """The message that is being handled: nothing is delivered until it has settled."""
    superseded: dict[int, int] = field(default_factory=dict)
    """Older waiting messages, each with the message that is delivered in its place."""


def find_next_delivery(
    policy: KeepLast, latest: Latest, states: Mapping[int, str], now: int
) -> NextDelivery:
    """Decide which message of a key is delivered next.

    `states` has the states of the key's messages that still exist. While one is being handled, no
    other is delivered. Older messages that wait, also for a retry, are superseded. Only the newest
    waits for the end of the window; until then `first`, which found its key idle, may still be
    delivered.
    """
    waiting = [message for message in latest.list_messages() if message in states]
    for message in waiting:
        if states[message] == "PROCESSING":
            return NextDelivery(waits_for=message)
    if not waiting:
        return NextDelivery()
    message_to_deliver = waiting[-1]
    not_before = 0
    if message_to_deliver == latest.newest:
        not_before = latest.get_opening_time(policy)
        if latest.first in waiting and now < not_before:
            message_to_deliver = waiting[-2]
            not_before = 0
        # Otherwise no worker was free for a complete window, so the first is superseded, too.
    older = waiting[: waiting.index(message_to_deliver)]
    return NextDelivery(
        message_to_deliver, not_before, superseded=dict.fromkeys(older, message_to_deliver)
    )
