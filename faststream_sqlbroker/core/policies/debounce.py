"""Debounce: deliver only the newest (or the first) of a burst of messages with the same key.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from faststream_sqlbroker.core.checks import check_choice
from faststream_sqlbroker.core.policies.argument_checks import (
    CLOCK_STEP,
    format_seconds,
    parse_microseconds,
    set_attributes,
)
from faststream_sqlbroker.core.policies.header import Header, Key, check_required_key, format_key
from faststream_sqlbroker.core.policies.standby import find_target
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

KEEP_LAST = "keep_last"
"""Kind of a state written by `KeepLast`; a state of Debounce has its edge as kind."""
_PAST_TIMES = "last", "begun", "delivered_at"
"""Times in the states of both policies that are never later than the time of the write."""
_ALL_TIMES = (*_PAST_TIMES, "start", "end", "past_end")
"""All times in the states."""


def repair_clock(info: Any, now: int) -> Any:
    """Correct a state if the database's clock was set back after the state was written.

    Its times would lie in the future, and its messages would wait that long. The result looks as if
    the last message of the state had arrived now. Returns `info` itself if there is nothing to
    correct.
    """
    if not isinstance(info, dict):
        return info
    ahead = max(info.get(name, 0) for name in _PAST_TIMES) - now
    if ahead <= CLOCK_STEP:
        return info
    if info.get("kind") == "leading":
        # The real start of the burst is unknown, so it must not discard any later message.
        removed = {*_ALL_TIMES, "first", "past"}
        return {name: value for name, value in info.items() if name not in removed}
    shifted = {name: info[name] - ahead for name in _ALL_TIMES if name in info}
    return {**info, **shifted}


def list_waiting(info: dict[str, Any]) -> list[int]:
    """Return the undelivered messages of a stored state, the oldest first.

    `info` may be a state of Debounce or KeepLast: a subscriber may have changed its policy.
    """
    messages = {*info.get("ended", ()), info.get("newest")}
    if info.get("kind") == KEEP_LAST:
        messages.add(info.get("first"))
    return sorted(message for message in messages if message is not None)


@dataclass(frozen=True, init=False)
class Debounce:
    """Deliver a single message of each burst of a key; the rest is DISCARDED as superseded.

    A burst starts with the first message of its key that takes part (from its due time, or its
    arrival if that is later). It ends when no message has come for `window`, or `max_wait` after
    its start. Then its newest message, the one with the greatest id, is delivered. With
    `edge="leading"` the first is delivered at once, and later messages within `window` are
    discarded. A delivered message has left its burst: its retries are neither debounced nor
    superseded. The next burst of the key is delivered after this message has settled.
    """

    window: int
    """Microseconds."""
    edge: str
    max_wait: int | None
    """Microseconds."""
    key: Key
    without_key: str

    def __init__(
        self,
        window: Duration,
        *,
        edge: Literal["trailing", "leading"] = "trailing",
        max_wait: Duration | None = None,
        key: Key = True,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
    ) -> None:
        """Define a burst.

        Args:
            window: The quiet time that ends a burst (leading: the length of a burst).
            edge: The message of a burst to deliver: the newest at its end, or the first when due.
            max_wait: Maximum duration of a burst, so that an unbroken stream is delivered too.
            key: Bursts are per key; False is refused. `Header("tenant")`: per value of that header.
            without_key: What happens to a message that was published without a key: it is
                delivered, or it is FAILED.

        Raises:
            SetupError: a duration is not longer than 0, max_wait is shorter than the window or
                given with edge="leading", or key=False.
        """
        check_required_key("Debounce", key, without_key)
        check_choice("Debounce's edge", edge, ("trailing", "leading"))
        length = parse_microseconds("Debounce's window", window)
        limit = None if max_wait is None else parse_microseconds("Debounce's max_wait", max_wait)
        if limit is not None and edge == "leading":
            raise SetupError(
                'max_wait limits the wait of the newest message of a burst, but edge="leading" '
                "delivers the first immediately: omit max_wait"
            )
        if limit is not None and limit < length:
            raise SetupError(
                f"Debounce's max_wait must be {format_seconds(length)} (its window) or more, got "
                f"{format_seconds(limit)}: raise max_wait, or shorten the window"
            )
        set_attributes(
            self, window=length, edge=edge, max_wait=limit, key=key, without_key=without_key
        )

    def __str__(self) -> str:
        max_wait = "" if self.max_wait is None else f", max_wait={format_seconds(self.max_wait)}"
        edge = "" if self.edge == "trailing" else f", edge={self.edge}"
        key = format_key("key", self.key) if isinstance(self.key, Header) else ""
        return f"Debounce({format_seconds(self.window)}{edge}{max_wait}{key})"

    def end(self, start: int, last: int) -> int:
        """Return the end of a burst that began at `start`, if no message comes after `last`.

        With a leading edge the length is fixed; otherwise each message extends the burst, up to
        `max_wait`.
        """
        if self.edge == "leading":
            return start + self.window
        return (
            last + self.window
            if self.max_wait is None
            else min(last + self.window, start + self.max_wait)
        )

    @property
    def leading(self) -> bool:
        """True if the first message of a burst is delivered."""
        return self.edge == "leading"

    def take(self, info: Any, arrivals: Sequence[tuple[int, int]]) -> "KeyUpdate":
        """Add new messages of a key to the stored state `info` of the key.

        Returns the new state, with the changes to the messages of the key: new due times, and
        messages that stand by or are superseded. `arrivals` are sorted (time, id) pairs of messages
        that are new, or have returned after a move.
        """
        bursts = self.load(info)
        bursts.forget({message for _, message in arrivals})
        changes = add_to_bursts(self, bursts, arrivals)
        bursts.record_standby(changes.standby, leading=self.leading)
        return KeyUpdate(self.dump(bursts), changes, 0 if bursts.start is None else bursts.end)

    def load(self, info: Any) -> "Bursts":
        """Read the state of a key.

        Another policy, or other options, may have written the state: waiting messages are
        delivered, and no message is superseded that would not be under the new policy.
        """
        bursts = Bursts.load(info)
        if not isinstance(info, dict) or info.get("kind", self.edge) == self.edge:
            return bursts
        if info["kind"] == KEEP_LAST:
            return Bursts(ended=list_waiting(info), **get_shared_fields(info))
        if bursts.start is not None:
            # With a leading edge, the first message was delivered or will be; with a trailing edge,
            # the newest is delivered when due. New messages start their own burst.
            bursts.close()
        if self.edge == "leading":
            # A message newer than the last one of another policy never counts as late.
            bursts.past = None
        return bursts

    def dump(self, bursts: "Bursts") -> dict[str, Any]:
        """Return the state to store."""
        return {"kind": self.edge, **bursts.dump()}


@dataclass(slots=True, kw_only=True)
class Standby:
    """The state of a key whose messages may stand by; stored as JSON."""

    standby: bool = False
    """True if messages of the key may stand by."""
    over: int | None = None
    """The message that was delivered in place of others, some of which still stand by."""

    @classmethod
    def load(cls, info: Any) -> Self:
        """Read a state written by `dump`; any other value counts as empty.

        Fields of another policy or a newer version are ignored.
        """
        if not isinstance(info, dict):
            return cls()
        return cls(
            **{
                attribute.name: info[attribute.name]
                for attribute in fields(cls)
                if attribute.name in info
            }
        )

    def dump(self) -> dict[str, Any]:
        """Return the state as JSON values, without empty fields."""
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != []}

    @property
    def waiting(self) -> list[int]:
        """The messages to deliver, for which further messages may stand by.

        Some of the messages may have ended since.
        """
        raise NotImplementedError

    @property
    def targets(self) -> list[int]:
        """The waiting messages, and the delivered message for which messages still stand by."""
        return self.waiting if self.over is None else [*self.waiting, self.over]

    def record_standby(self, messages: Iterable[int], *, leading: bool) -> None:
        """Record that `messages` now stand by.

        A standby message stays in the queue while another message, its target, is to be delivered
        in its place. `over` is a target that was delivered, whose standby messages are superseded
        soon: a message that arrived later must not be among them, so `over` is given up.
        """
        for message in messages:
            self.standby = True
            if self.over is not None and self.over == find_target(
                self.targets, message, leading=leading
            ):
                # The message arrived after the delivery of `over`.
                self.over = None


def get_shared_fields(info: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the states of both policies have in common."""
    return {name: info[name] for name in ("current", "over", "standby") if name in info}


@dataclass(slots=True, kw_only=True)
class Bursts(Standby):
    """The bursts of a key; stored as JSON."""

    start: int | None = None
    """Start of the open burst; None if no burst is open."""
    last: int = 0
    """Time of the latest message of the open burst."""
    end: int = 0
    """End of the open burst if no other message comes."""
    newest: int | None = None
    """Message of the open burst that is delivered if no newer message comes."""
    first: int | None = None
    """Message of the open burst that was to be delivered at once (leading edge)."""
    ended: list[int] = field(default_factory=list)
    """Messages to deliver, in this order: of bursts that have ended, or started (leading edge)."""
    current: int | None = None
    """The message that was delivered last. The next message waits until this one has settled."""
    past_end: int = 0
    """End of the burst before the open one."""
    past: int | None = None
    """Message of that burst that was delivered, or is to be delivered."""

    def close(self) -> None:
        """End the open burst; the burst's message waits to be delivered.

        `past` remembers that message for messages of the burst that are committed later.
        """
        if self.newest is not None:
            self.ended.append(self.newest)
        self.past = self.newest or self.first
        self.past_end = self.end
        self.start = None
        self.newest = None
        self.first = None

    def forget(self, returned: AbstractSet[int]) -> None:
        """Remove messages that have come back after a move and therefore take part again.

        Such a message keeps its id, so the state may still list it from its first stay in the
        queue.
        """
        if self.newest in returned or self.first in returned:
            self.start = self.newest = self.first = None
        if self.past in returned:
            self.past = None
        self.ended = [message for message in self.ended if message not in returned]

    def list_messages(self) -> list[int]:
        """Return the messages that wait or are being handled; some may have ended since."""
        return [i for i in (self.current, *self.ended, self.newest) if i is not None]

    @property
    def waiting(self) -> list[int]:
        """The messages that were not delivered."""
        return self.ended if self.newest is None else [*self.ended, self.newest]

    def replace(self, message: int, replacement: int | None) -> None:
        """Replace an undelivered message, which has expired or was removed, by `replacement`.

        That is the standby message that takes its place, or None. Without a replacement an open
        burst (a series of messages of which only one is delivered) goes on: a message that comes
        until its end may still be delivered for it.
        """
        if replacement is None:
            if message not in (self.first, self.newest):
                self.ended = [item for item in self.ended if item != message]
                # A late message starts its own burst.
                self.past = None if self.past == message else self.past
            return
        self.ended = [replacement if item == message else item for item in self.ended]
        if self.first == message:
            self.first = replacement
        if self.past == message:
            self.past = replacement
        if self.newest == message:
            self.newest = replacement

    def adopt(self, message: int) -> None:
        """Add a standby message without a known target, to be delivered itself.

        The target is the message that was to be delivered in its place.
        """
        self.ended.append(message)

    def find_next(self, live: AbstractSet[int]) -> int | None:
        """Return the next message to deliver among the `live` messages, or None.

        `live` are the messages of the key that are still in the queue; the state may list others,
        too. While the message delivered last has not settled, it is the next one itself: all others
        wait for it.
        """
        return next((message for message in self.list_messages() if message in live), None)

    def record_delivery(self, message: int) -> None:
        """Record that `message` was claimed and has therefore left the burst.

        Messages that were to be delivered before it have ended, so they are dropped too. If it was
        the newest of the open burst, the burst is over.
        """
        if message == self.newest:
            self.past = message
            self.past_end = self.end
            self.start = self.newest = None
            if message != self.current:
                self.ended = []
        if message in self.ended:
            position = self.ended.index(message)
            if self.past in self.ended[:position]:
                self.past = message
            self.ended = self.ended[position + 1 :]
        self.current = message


@dataclass(slots=True)
class BurstChanges:
    """The effects of new messages on the messages of a key."""

    due: dict[int, int] = field(default_factory=dict)
    """New due times of the messages that stay."""
    standby: dict[int, int] = field(default_factory=dict)
    """For each standby message, the due time of the message that is to be delivered in its
    place."""
    superseded: dict[int, int] = field(default_factory=dict)
    """For each superseded message, the message that was delivered in its place."""


class KeyUpdate(NamedTuple):
    """The new state of a key and the changes to the key's messages."""

    info: dict[str, Any]
    """The state to store."""
    changes: BurstChanges
    until: int
    """Minimum time until which the state is needed (microseconds)."""


def add_to_bursts(
    policy: Debounce, bursts: Bursts, arrivals: Sequence[tuple[int, int]]
) -> BurstChanges:
    """Add messages of a key to `bursts`, which is changed.

    A burst is a series of messages of one key, of which only one is delivered: the newest at its
    end, or the first (leading edge). Returns new due times of the messages, and which of them stand
    by or are superseded.

    Args:
        policy: The definition of a burst.
        bursts: The bursts of the key.
        arrivals: (time, id) of each message, sorted.
    """
    changes = BurstChanges()
    replaced = list[int]()
    for at, message in arrivals:
        if (
            bursts.past is not None
            and at <= bursts.past_end
            and (policy.edge == "leading" or message < bursts.past)
        ):
            # A race: the publish was committed after its burst had ended and been closed.
            _join_past(changes, bursts, bursts.past, message)
            continue
        if bursts.start is not None and at > bursts.end:
            _record_replaced(changes, replaced, bursts)
            bursts.close()
        if bursts.start is None:
            _start_burst(policy, bursts, changes, at, message)
            continue
        bursts.last = max(bursts.last, at)
        bursts.end = policy.end(bursts.start, bursts.last)
        if bursts.newest is None:  # a leading edge: the first message is delivered
            replaced.append(message)
            continue
        replaced.append(min(bursts.newest, message))
        bursts.newest = max(bursts.newest, message)
        changes.due[bursts.newest] = bursts.end
    _record_replaced(changes, replaced, bursts)
    return changes


def _join_past(changes: BurstChanges, bursts: Bursts, past: int, message: int) -> None:
    """Decide about a late message of the burst before the open burst.

    While the message of that burst, `past`, is not delivered, the late message stands by for it.
    Afterwards it is superseded.
    """
    if past in bursts.waiting:
        changes.standby[message] = bursts.past_end
    else:
        changes.superseded[message] = past


def _start_burst(
    policy: Debounce, bursts: Bursts, changes: BurstChanges, at: int, message: int
) -> None:
    """Open a burst with `message`.

    With a leading edge it is delivered now; otherwise at the end of the burst, if no newer message
    arrives.
    """
    bursts.start = bursts.last = at
    bursts.end = policy.end(at, at)
    if policy.edge == "leading":
        bursts.first = message
        bursts.ended.append(message)
        changes.due[message] = at
    else:
        bursts.newest = message
        changes.due[message] = bursts.end


def _record_replaced(changes: BurstChanges, replaced: list[int], bursts: Bursts) -> None:
    """Record that another message, the target, is delivered in place of the `replaced` messages.

    They stand by while the target waits, so that one can take its place if it expires or is
    cancelled. If it was delivered before, they are superseded. Clears `replaced`.
    """
    target = bursts.newest if bursts.newest is not None else bursts.first
    is_waiting = target in bursts.waiting
    for message in replaced:
        changes.due.pop(message, None)
        if target is not None and is_waiting:
            changes.standby[message] = bursts.end if target == bursts.newest else bursts.start or 0
        elif target is not None:
            changes.superseded[message] = target
    replaced.clear()
