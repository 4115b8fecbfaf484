"""KeepLast: of each key the first message goes at once, then the newest, one in each window.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Literal

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.core.policies.debounce import (
    KEEP_LAST,
    BurstChanges,
    Standby,
    Taken,
    shared_in,
    waiting_in,
)
from faststream_sqlbroker.core.policies.header import Header, Key, key_text, keyed
from faststream_sqlbroker.core.policies.options import (
    WITHOUT_KEY,
    assign,
    microseconds,
    seconds,
)
from faststream_sqlbroker.core.times import Duration


@dataclass(frozen=True, init=False)
class KeepLast:
    """The first message of a key goes at once; after that its newest, at most one in each `window`.

    Others are DISCARDED as superseded. So each key has a delivery every `window` while messages
    keep coming, and none is lost but those that a newer one has replaced: a throttle with a leading
    and a trailing edge. A window begins when a message is claimed. While a message of the key is
    handled, the next one waits; while one waits for its retry, a newer one supersedes it.
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
        """Say how often a key may have a delivery.

        Args:
            window: Least time from one delivery of a key to the next message's.
            key: False is refused. `Header("tenant")`: the value of that header is the key.
            without_key: What happens to a message that was published without a key: it is
                delivered, or it is FAILED.

        Raises:
            SetupError: the window is not longer than 0, or key=False.
        """
        keyed("KeepLast", key)
        length = microseconds("KeepLast's window", window)
        one_of("KeepLast's without_key", without_key, WITHOUT_KEY)
        assign(self, window=length, key=key, without_key=without_key)

    def __str__(self) -> str:
        of = key_text("key", self.key) if isinstance(self.key, Header) else ""
        return f"KeepLast({seconds(self.window)}{of})"

    @property
    def leading(self) -> bool:
        """Whether an older message is delivered in the place of newer ones: never."""
        return False

    def take(self, info: Any, arrivals: Sequence[tuple[int, int]]) -> Taken:
        """Add messages of one key, as (time, id), sorted, to what is known of it."""
        latest = self.load(info)
        latest.forget({message for _, message in arrivals})
        changes = take_newest(self, latest, arrivals)
        latest.note(changes.standby, leading=False)
        return Taken(self.dump(latest), changes, latest.opens(self))

    def load(self, info: Any) -> "Latest":
        """What is known of a key. After another policy the newest message that waits goes when it
        is due; older ones are superseded.
        """
        if not isinstance(info, dict) or info.get("kind", KEEP_LAST) == KEEP_LAST:
            return Latest.load(info)
        newest = max(waiting_in(info), default=None)
        return Latest(newest=newest, **shared_in(info))

    def dump(self, latest: "Latest") -> dict[str, Any]:
        """What is to be stored."""
        return {"kind": KEEP_LAST, **latest.dump()}


@dataclass(slots=True, kw_only=True)
class Latest(Standby):
    """The messages of one key that wait, and the one that was delivered last; stored as JSON."""

    first: int | None = None
    """The message that has found its key idle, and goes at once; None: there is none, or it has
    been delivered."""
    begun: int = 0
    """When it came."""
    newest: int | None = None
    """The message that goes when the window is over, if no newer one comes."""
    current: int | None = None
    """The message that was delivered last. It may be handled now, or wait for a retry."""
    delivered_at: int = 0
    """When."""

    def forget(self, back: AbstractSet[int]) -> None:
        """Of the messages that come, these were moved away: they take part anew."""
        if self.first in back:
            self.first = None
        if self.newest in back:
            self.newest = None

    def known(self) -> list[int]:
        """The messages that wait or are being handled. Some may have ended since."""
        return [i for i in (self.current, self.first, self.newest) if i is not None]

    def opens(self, policy: KeepLast) -> int:
        """When the next message may go, as far as windows are concerned."""
        if self.first is not None:
            return self.begun + policy.window
        return 0 if self.current is None else self.delivered_at + policy.window

    @property
    def waiting(self) -> list[int]:
        """Those that were not delivered."""
        return [message for message in (self.first, self.newest) if message is not None]

    def replace(self, gone: int, by: int | None) -> None:
        """`by` takes the place of the message `gone`, which was not delivered."""
        if self.first == gone:
            self.first = by
        if self.newest == gone:
            self.newest = by

    def adopt(self, message: int) -> None:
        """`message` has stood by, and it is not known for which: it is newer than what waits."""
        if message != self.current:
            self.newest = message

    def delivered(self, message: int, now: int) -> None:
        """Record that `message` was claimed."""
        if message == self.newest:
            self.first = self.newest = None
        elif message == self.first:
            self.first = None
        self.current = message
        self.delivered_at = now


def take_newest(
    policy: KeepLast, latest: Latest, arrivals: Sequence[tuple[int, int]]
) -> BurstChanges:
    """Add messages of one key; `latest` is changed.

    Args:
        policy: How long a window is.
        latest: What is known of the key.
        arrivals: (time, id) of each message, sorted.
    """
    taken = BurstChanges()
    for at, message in arrivals:
        if latest.first is not None and message < latest.first:
            taken.standby[message] = latest.begun
        elif (current := _before(latest, at, message)) is not None:
            # It came before that one, and was committed late.
            taken.superseded[message] = current
        elif latest.newest is not None:
            older, latest.newest = sorted((latest.newest, message))
            taken.standby[older] = latest.opens(policy)
        elif latest.first is None and at >= latest.opens(policy):
            latest.first = message
            latest.begun = at
            taken.due[message] = at
        else:
            latest.newest = message
        if latest.newest == message:
            taken.due[message] = max(at, latest.opens(policy))
    for message in taken.standby:
        taken.due.pop(message, None)
    return taken


def _before(latest: Latest, at: int, message: int) -> int | None:
    """The message that was delivered last, if it is newer than `message`, which came before."""
    current = latest.current
    late = current is not None and message < current and at <= latest.delivered_at
    return current if late else None


@dataclass(slots=True)
class Turn:
    """What becomes of the messages of a key that are due."""

    goes: int | None = None
    """The message to deliver, if it is due."""
    not_before: int = 0
    """When."""
    waits_for: int | None = None
    """The message that is being handled: nothing goes until it has settled."""
    superseded: dict[int, int] = field(default_factory=dict)
    """Older messages that wait, and the one that is delivered in their place."""


def next_turn(policy: KeepLast, latest: Latest, states: Mapping[int, str], now: int) -> Turn:
    """Whose turn it is, by the `states` of those messages of the key that are still live."""
    waiting = [message for message in latest.known() if message in states]
    for message in waiting:
        if states[message] == "PROCESSING":
            return Turn(waits_for=message)
    if not waiting:
        return Turn()
    goes = waiting[-1]
    not_before = 0
    if goes == latest.newest:
        not_before = latest.opens(policy)
        if latest.first in waiting and now < not_before:
            goes = waiting[-2]
            not_before = 0
        # Else no worker was free for a whole window, so the first is superseded, too.
    older = waiting[: waiting.index(goes)]
    return Turn(goes, not_before, superseded=dict.fromkeys(older, goes))
