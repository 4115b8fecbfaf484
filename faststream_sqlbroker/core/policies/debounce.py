"""Debounce: of a burst of messages of one key, only the newest (or the first) is delivered.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from faststream_sqlbroker.core.checks import one_of
from faststream_sqlbroker.core.policies.header import Header, Key, key_text, keyed
from faststream_sqlbroker.core.policies.options import (
    CLOCK_STEP,
    WITHOUT_KEY,
    assign,
    microseconds,
    seconds,
)
from faststream_sqlbroker.core.policies.standby import chosen_for
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError

KEEP_LAST = "keep_last"
"""The kind of a state that `KeepLast` has written; those of Debounce have its edge."""
_PAST = "last", "begun", "delivered_at"
"""Times in the states of both policies that are never later than the moment of the write."""
_TIMES = (*_PAST, "start", "end", "past_end")
"""All times in them."""


def mend_clock(info: Any, now: int) -> Any:
    """A state as if its last message had come now, if it shows that the database's clock was set
    back since it was written.
    """
    if not isinstance(info, dict):
        return info
    ahead = max(info.get(name, 0) for name in _PAST) - now
    if ahead <= CLOCK_STEP:
        return info
    if info.get("kind") == "leading":
        # It is not known how long ago the burst began. It must discard nothing that comes later.
        over = {*_TIMES, "first", "past"}
        return {name: value for name, value in info.items() if name not in over}
    late = {name: info[name] - ahead for name in _TIMES if name in info}
    return {**info, **late}


def waiting_in(info: dict[str, Any]) -> list[int]:
    """The messages that wait by a state, whichever policy has written it; the oldest first."""
    found = {*info.get("ended", ()), info.get("newest")}
    if info.get("kind") == KEEP_LAST:
        found.add(info.get("first"))
    return sorted(message for message in found if message is not None)


@dataclass(frozen=True, init=False)
class Debounce:
    """Of each burst of a key one message is delivered; the others are DISCARDED as superseded.

    A burst starts with the first message of its key that takes part (from its due time, or its
    arrival if that is later), and ends when no other has come for `window`, or `max_wait` after its
    start. Then its newest message, the one with the greatest id, is delivered. `edge="leading"`
    delivers the first at once and discards what comes within `window` of it. A delivered message
    has left its burst: its retries are neither debounced nor superseded. The next burst of its key
    is delivered after it has settled.
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
        """Say what a burst is.

        Args:
            window: The quiet time that ends a burst (leading: how long a burst lasts).
            edge: Which message of a burst is delivered: the newest at its end, or the first at
                once.
            max_wait: Most time from a burst's start to its end, so that an unbroken stream is
                delivered too.
            key: Bursts are of one key; False is refused. `Header("tenant")`: of one value of that
                header.
            without_key: What happens to a message that was published without a key: it is
                delivered, or it is FAILED.

        Raises:
            SetupError: a length that is not longer than 0, max_wait shorter than the window or with
                edge="leading", or key=False.
        """
        keyed("Debounce", key)
        one_of("Debounce's edge", edge, ("trailing", "leading"))
        one_of("Debounce's without_key", without_key, WITHOUT_KEY)
        length = microseconds("Debounce's window", window)
        most = None if max_wait is None else microseconds("Debounce's max_wait", max_wait)
        if most is not None and edge == "leading":
            raise SetupError(
                'max_wait bounds how long a burst can put off its newest message; edge="leading" '
                "delivers the first at once, so leave max_wait out"
            )
        if most is not None and most < length:
            raise SetupError(
                f"Debounce's max_wait ({seconds(most)}) ends every burst before its window "
                f"({seconds(length)}) can: raise max_wait to the window or more, or shorten the "
                "window"
            )
        assign(self, window=length, edge=edge, max_wait=most, key=key, without_key=without_key)

    def __str__(self) -> str:
        most = "" if self.max_wait is None else f", max_wait={seconds(self.max_wait)}"
        edge = "" if self.edge == "trailing" else f", edge={self.edge}"
        of = key_text("key", self.key) if isinstance(self.key, Header) else ""
        return f"Debounce({seconds(self.window)}{edge}{most}{of})"

    def end(self, start: int, last: int) -> int:
        """When a burst that began at `start` ends if nothing comes after `last`."""
        if self.edge == "leading":
            return start + self.window
        return (
            last + self.window
            if self.max_wait is None
            else min(last + self.window, start + self.max_wait)
        )

    @property
    def leading(self) -> bool:
        """Whether the first of a burst is delivered."""
        return self.edge == "leading"

    def take(self, info: Any, arrivals: Sequence[tuple[int, int]]) -> "Taken":
        """Add messages of one key, as (time, id), sorted, to what is known of it."""
        bursts = self.load(info)
        bursts.forget({message for _, message in arrivals})
        changes = take(self, bursts, arrivals)
        bursts.note(changes.standby, leading=self.leading)
        return Taken(self.dump(bursts), changes, 0 if bursts.start is None else bursts.end)

    def load(self, info: Any) -> "Bursts":
        """What is known of a key. Another policy, or other options, may have written it: what waits
        is delivered, and no message is superseded that would not be under the new policy.
        """
        bursts = Bursts.load(info)
        if not isinstance(info, dict) or info.get("kind", self.edge) == self.edge:
            return bursts
        if info["kind"] == KEEP_LAST:
            return Bursts(ended=waiting_in(info), **shared_in(info))
        if bursts.start is not None:
            # Of a leading edge the first message was delivered, or is to be; of a trailing edge the
            # newest goes when it is due. What comes now is a burst of its own.
            bursts.close()
        if self.edge == "leading":
            # A newer message than the last of another policy is never late.
            bursts.past = None
        return bursts

    def dump(self, bursts: "Bursts") -> dict[str, Any]:
        """What is to be stored."""
        return {"kind": self.edge, **bursts.dump()}


@dataclass(slots=True, kw_only=True)
class Standby:
    """What is known of a key, and whether messages of it stand by; stored as JSON."""

    standby: bool = False
    """Whether any may stand by."""
    over: int | None = None
    """The message that was delivered in the place of others, of which some still stand by."""

    @classmethod
    def load(cls, info: Any) -> Self:
        """Read what `dump` wrote; any other value counts as empty."""
        if not isinstance(info, dict):
            return cls()
        return cls(**{each.name: info[each.name] for each in fields(cls) if each.name in info})

    def dump(self) -> dict[str, Any]:
        """As JSON values, without empty fields."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != []}

    @property
    def waiting(self) -> list[int]:
        """The messages to deliver, for which others may stand by. Some may have ended since."""
        raise NotImplementedError

    @property
    def chosen(self) -> list[int]:
        """The same, and the one that was delivered in the place of what still stands by."""
        return self.waiting if self.over is None else [*self.waiting, self.over]

    def note(self, standing: Iterable[int], *, leading: bool) -> None:
        """`standing` now stand by."""
        for message in standing:
            self.standby = True
            if self.over is not None and self.over == chosen_for(
                self.chosen, message, leading=leading
            ):
                # It came after that one was delivered.
                self.over = None


def shared_in(info: dict[str, Any]) -> dict[str, Any]:
    """What the states of both policies have in common, as either has stored that."""
    return {name: info[name] for name in ("current", "over", "standby") if name in info}


@dataclass(slots=True, kw_only=True)
class Bursts(Standby):
    """The bursts of a key; stored as JSON."""

    start: int | None = None
    """When its open burst began; None: none is open."""
    last: int = 0
    """When the latest message of the open burst came."""
    end: int = 0
    """When the open burst ends if no other message comes."""
    newest: int | None = None
    """The message of the open burst that is delivered if nothing newer comes."""
    first: int | None = None
    """The message of the open burst that was to be delivered at once (leading edge)."""
    ended: list[int] = field(default_factory=list)
    """Messages to deliver, in this order: of bursts that have ended, or begun (leading edge)."""
    current: int | None = None
    """The message that was delivered last. The next one waits until it has settled."""
    past_end: int = 0
    """When the burst before the open one ended."""
    past: int | None = None
    """The message of that burst that was delivered, or is to be delivered."""

    def close(self) -> None:
        """End the open burst; its message waits to be delivered."""
        if self.newest is not None:
            self.ended.append(self.newest)
        self.past = self.newest or self.first
        self.past_end = self.end
        self.start = None
        self.newest = None
        self.first = None

    def forget(self, back: AbstractSet[int]) -> None:
        """Of the messages that come, these were moved away: they take part anew."""
        if self.newest in back or self.first in back:
            self.start = self.newest = self.first = None
        if self.past in back:
            self.past = None
        self.ended = [message for message in self.ended if message not in back]

    def known(self) -> list[int]:
        """The messages that wait or are being handled. Some may have ended since."""
        return [i for i in (self.current, *self.ended, self.newest) if i is not None]

    @property
    def waiting(self) -> list[int]:
        """Those that were not delivered."""
        return self.ended if self.newest is None else [*self.ended, self.newest]

    def replace(self, gone: int, by: int | None) -> None:
        """`by` takes the place of the message `gone`, which was not delivered.

        Without it an open burst goes on: what comes until its end may still be delivered for it.
        """
        if by is None:
            if gone not in (self.first, self.newest):
                self.ended = [message for message in self.ended if message != gone]
                # What comes late begins a burst of its own.
                self.past = None if self.past == gone else self.past
            return
        self.ended = [by if message == gone else message for message in self.ended]
        if self.first == gone:
            self.first = by
        if self.past == gone:
            self.past = by
        if self.newest == gone:
            self.newest = by

    def adopt(self, message: int) -> None:
        """`message` has stood by, and it is not known for which."""
        self.ended.append(message)

    def next(self, live: set[int]) -> int | None:
        """The message to deliver next, among those that are still `live`; None: there is none."""
        return next((message for message in self.known() if message in live), None)

    def delivered(self, message: int) -> None:
        """Record that `message` was claimed, and so has left its burst."""
        if message == self.newest:
            self.past = message
            self.past_end = self.end
            self.start = self.newest = None
            if message != self.current:
                self.ended = []
        if message in self.ended:
            place = self.ended.index(message)
            if self.past in self.ended[:place]:
                self.past = message
            self.ended = self.ended[place + 1 :]
        self.current = message


@dataclass(slots=True)
class BurstChanges:
    """What happened to messages that have arrived."""

    due: dict[int, int] = field(default_factory=dict)
    """The new due times of the messages that stay."""
    standby: dict[int, int] = field(default_factory=dict)
    """Of the messages that stand by, when the message is due that is to be delivered in their
    place."""
    superseded: dict[int, int] = field(default_factory=dict)
    """Of each superseded message, the message that was delivered in its place."""


class Taken(NamedTuple):
    """What became of the messages of a key, and of the key."""

    info: dict[str, Any]
    """What is to be stored."""
    changes: BurstChanges
    until: int
    """Until when the key is needed, at least (microseconds)."""


def take(policy: Debounce, bursts: Bursts, arrivals: Sequence[tuple[int, int]]) -> BurstChanges:
    """Add messages of one key to its bursts; `bursts` is changed.

    Args:
        policy: What a burst is.
        bursts: The bursts of the key.
        arrivals: (time, id) of each message, sorted.
    """
    taken = BurstChanges()
    gone = list[int]()
    for at, message in arrivals:
        if (
            bursts.past is not None
            and at <= bursts.past_end
            and (policy.edge == "leading" or message < bursts.past)
        ):
            # A race: its publish was committed after its burst had ended and been closed.
            _join_past(taken, bursts, bursts.past, message)
            continue
        if bursts.start is not None and at > bursts.end:
            _replace(taken, gone, bursts)
            bursts.close()
        if bursts.start is None:
            _begin(policy, bursts, taken, at, message)
            continue
        bursts.last = max(bursts.last, at)
        bursts.end = policy.end(bursts.start, bursts.last)
        if bursts.newest is None:
            gone.append(message)
            continue
        gone.append(min(bursts.newest, message))
        bursts.newest = max(bursts.newest, message)
        taken.due[bursts.newest] = bursts.end
    _replace(taken, gone, bursts)
    return taken


def _join_past(taken: BurstChanges, bursts: Bursts, past: int, message: int) -> None:
    if past in bursts.waiting:
        taken.standby[message] = bursts.past_end
    else:
        taken.superseded[message] = past


def _begin(policy: Debounce, bursts: Bursts, taken: BurstChanges, at: int, message: int) -> None:
    bursts.start = bursts.last = at
    bursts.end = policy.end(at, at)
    if policy.edge == "leading":
        bursts.first = message
        bursts.ended.append(message)
        taken.due[message] = at
    else:
        bursts.newest = message
        taken.due[message] = bursts.end


def _replace(taken: BurstChanges, gone: list[int], bursts: Bursts) -> None:
    """Record that another message is delivered in the place of the messages `gone`, as of now."""
    stays = bursts.newest if bursts.newest is not None else bursts.first
    waits = stays in bursts.waiting
    for message in gone:
        taken.due.pop(message, None)
        if stays is not None and waits:
            taken.standby[message] = bursts.end if stays == bursts.newest else bursts.start or 0
        elif stays is not None:
            taken.superseded[message] = stays
    gone.clear()
