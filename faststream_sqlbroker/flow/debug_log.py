"""Tells of single messages that have the debug header: each step, and how long it took.

A broker without `debug_header` makes none of this. With it a claim looks for the header's name in
the text of the headers, which costs what a search in a short text does.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement, SettleResult
from faststream_sqlbroker.core.text import load_headers, short, visible
from faststream_sqlbroker.exceptions import SetupError

CORRELATION_ID = "correlation_id"
"""The header of the parser's."""
MOST_A_MINUTE = 60
"""Messages of this process, of all its brokers: a producer can ask for any number."""
MINUTE = 60.0
"""Seconds."""
LONGEST = 100
"""Characters of a name that are told."""
_HEADER = re.compile(r"[A-Za-z0-9._-]{1,100}")
Handle = Callable[[Any], Coroutine[Any, Any, Any]]
Tell = Callable[[str, int | None, str], None]
"""Called with a text, the message's id and its queue."""
P = ParamSpec("P")


def _harmless(step: Callable[P, None]) -> Callable[P, None]:
    """`step`, which raises nothing: it is called in the middle of what becomes of a message.

    A logger may raise: loguru fills in what is in braces, also those of a header. Then a message
    that was claimed would be held and never be handled, or its outcome never be written.
    """

    @wraps(step)
    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(Exception):
            step(*args, **kwargs)

    return told


class PerMinute:
    """Admits a number of messages in each minute."""

    def __init__(self, most: int = MOST_A_MINUTE, clock: Clock | None = None) -> None:
        self._most = most
        self._clock = clock or Clock()
        self._admitted: deque[float] = deque()
        self._refused_at = float("-inf")

    def admit(self) -> bool:
        """Whether another message is admitted."""
        now = self._clock.monotonic()
        while self._admitted and self._admitted[0] <= now - MINUTE:
            self._admitted.popleft()
        if len(self._admitted) >= self._most:
            return False
        self._admitted.append(now)
        return True

    def may_complain(self) -> bool:
        """Whether to tell of a refusal: once a minute."""
        now = self._clock.monotonic()
        if now < self._refused_at + MINUTE:
            return False
        self._refused_at = now
        return True


OF_THIS_PROCESS = PerMinute()
"""Shared by its brokers."""


class _Watched(NamedTuple):
    name: str
    at: float


class DebugLog:
    """One broker's; its steps are called with whole batches, and pick out what is to be told."""

    def __init__(
        self, header: str, tell: Tell, clock: Clock, limit: PerMinute = OF_THIS_PROCESS
    ) -> None:
        """Watch messages with `header`, whatever its value, but none, false, 0 or empty text."""
        self._header = header
        # As it stands in JSON: a text without it cannot have the header.
        self._mark = json.dumps(header, ensure_ascii=False)
        self._tell = tell
        self._clock = clock
        self._limit = limit
        self._watched: dict[int, _Watched] = {}

    # -- who is watched ----------------------------------------------------------------------------

    def _asks(self, stored: Any) -> bool:
        """Whether stored headers ask to be told."""
        if stored is None or (isinstance(stored, str) and self._mark not in stored):
            return False
        return bool(load_headers(stored).get(self._header))

    def _watch(self, message_id: int, queue: str, stored: Any) -> bool:
        if message_id in self._watched:
            return True
        if not self._limit.admit():
            if self._limit.may_complain():
                text = f"debug: more than {MOST_A_MINUTE} messages a minute ask for it"
                self._tell(f"{text}; the others are not told", None, "")
            return False
        correlation = load_headers(stored).get(CORRELATION_ID)
        more = "" if correlation is None else f", correlation id {_clean(correlation)}"
        name = f"message {message_id} of {_clean(queue)}{more}"
        if len(self._watched) >= 10 * MOST_A_MINUTE:
            # What was published here and handled elsewhere never ends here.
            del self._watched[next(iter(self._watched))]
        self._watched[message_id] = _Watched(name, self._clock.monotonic())
        return True

    @_harmless
    def _step(self, message_id: int, text: str, queue: str = "") -> None:
        known = self._watched.get(message_id)
        if known is None:
            return
        now = self._clock.monotonic()
        self._watched[message_id] = _Watched(known.name, now)
        since = (now - known.at) * 1000
        self._tell(f"debug: {known.name}: {text} (+{since:.1f} ms)", message_id, queue)

    def _end(self, message_id: int) -> None:
        self._watched.pop(message_id, None)

    # -- the steps ---------------------------------------------------------------------------------

    @_harmless
    def published(
        self, rows: Sequence[NewMessage], ids: Sequence[int | None], took: float, where: str
    ) -> None:
        """`rows` were inserted."""
        for row, message_id in zip(rows, ids, strict=True):
            if not self._asks(row.headers):
                continue
            if message_id is None:
                queue = _clean(row.queue)
                text = "not stored: its dedup_id is there already, or its queue is full"
                self._tell(f"debug: a message for {queue}: {text}", None, queue)
            elif self._watch(message_id, row.queue, row.headers):
                due = "now" if row.delay is None and row.next_attempt_at is None else "later"
                text = f"published{where} in {took * 1000:.1f} ms, priority {row.priority}"
                self._step(message_id, f"{text}, due {due}", row.queue)

    @_harmless
    def claimed(self, rows: Iterable[ClaimedMessage]) -> None:
        """`rows` were leased."""
        for row in rows:
            if not self._asks(row.stored_headers):
                continue
            if self._watch(row.id, row.queue, row.stored_headers):
                text = (
                    f"claimed, delivery {row.deliveries_count}, attempts before "
                    f"{row.attempts_count}, publish count {row.publish_count}, due since "
                    f"{row.next_attempt_at.isoformat()}, lease {str(row.lease_token)[:8]}"
                )
                if row.slot is not None:
                    wait = max(0.0, row.slot.earliest - row.claimed_monotonic)
                    text += f"; its policies let it start in {wait * 1000:.0f} ms"
                self._step(row.id, text, row.queue)

    @_harmless
    def decided(self, queue: str, decisions: Mapping[int, str], stored: Mapping[int, Any]) -> None:
        """Policies have decided of messages without a lease; the claim is not committed yet."""
        for message_id, text in decisions.items():
            headers = stored.get(message_id)
            if self._asks(headers) and self._watch(message_id, queue, headers):
                self._step(message_id, f"policies: {text}", queue)

    def handling(self, handle: Handle) -> Handle:
        """`handle`, told before and after."""

        async def told(delivery: Any) -> Any:
            rows = [delivery] if isinstance(delivery, ClaimedMessage) else list(delivery)
            ours = [row for row in rows if row.id in self._watched]
            if not ours:
                return await handle(delivery)
            for row in ours:
                self._step(row.id, f"attempt {row.attempts_count + 1} begins", row.queue)
            try:
                return await handle(delivery)
            finally:
                for row in ours:
                    how = "without an outcome" if row.outcome is None else _kind(row.outcome)
                    self._step(row.id, f"attempt ended: {how}", row.queue)

        return told

    @_harmless
    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Deliveries have ended, and wait to be written."""
        for each in settlements:
            if each.id in self._watched:
                self._step(each.id, f"settled: {_what(each)}, waits for the flush")

    @_harmless
    def writing(self, settlements: Iterable[Settlement]) -> None:
        """They are sent to the database."""
        for each in settlements:
            if each.id in self._watched:
                self._step(each.id, "flush: sent to the database")

    @_harmless
    def written(self, settlements: Iterable[Settlement], result: SettleResult) -> None:
        """The database has answered."""
        for each in settlements:
            if each.id not in self._watched:
                continue
            if each.id in result.lost:
                self._step(each.id, "its lease was lost: nothing was written")
                self._end(each.id)
            elif each.id in result.settled:
                where = "in the archive" if each.archive else "and kept nowhere"
                end = f", {where}" if each.leaves else ""
                self._step(each.id, f"written: {_what(each)}{end}")
                if each.leaves:
                    self._end(each.id)

    @_harmless
    def lost(self, rows: Iterable[ClaimedMessage], phase: str) -> None:
        """Leases are gone."""
        for row in rows:
            if row.id in self._watched:
                self._step(row.id, f"its lease was lost, as seen by {phase}", row.queue)


def checked_header(name: object) -> str:
    """The name of a debug header.

    Raises:
        SetupError: it is none.
    """
    if not isinstance(name, str) or not _HEADER.fullmatch(name):
        raise SetupError(
            "debug_header is a name such as 'X-Debug', of 1 to 100 letters, digits, dots, hyphens "
            f"and underscores, got {short(name)}"
        )
    return name


def _what(each: Settlement) -> str:
    state = "as before the claim" if each.state is None else each.state.name
    more = [
        None if each.reason is None else f"reason {_clean(each.reason)}",
        None if each.queue is None else f"moved to {_clean(each.queue)}",
        None if each.delay is None else f"due in {each.delay:.3f} s",
        None if each.unit is None else f"{len(each.unit.on_ack)} published with it",
    ]
    return ", ".join([state, *(part for part in more if part is not None)])


def _kind(outcome: Any) -> str:
    error = getattr(outcome, "error", None)
    kind = type(outcome).__name__
    # The class alone: the text of an error may quote the body.
    return kind if error is None else f"{kind} for {type(error).__name__}"


def _clean(value: object) -> str:
    return repr(visible(str(value)[:LONGEST]))
