"""Debug log of single messages that have the debug header: each step and its duration.

A broker without `debug_header` creates none of this. With it a claim searches the text of the
headers for the header's name, which is cheap for short texts.
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
from faststream_sqlbroker.core.text import format_value, load_headers, replace_invisible
from faststream_sqlbroker.exceptions import SetupError

CORRELATION_ID = "correlation_id"
"""Header that the parser uses."""
MAX_PER_MINUTE = 60
"""Messages of this process, of all its brokers: a producer can ask for any number."""
MINUTE = 60.0
"""Seconds."""
MAX_NAME_LENGTH = 100
"""Maximum characters of a logged name."""
_HEADER = re.compile(r"[A-Za-z0-9._-]{1,100}")
Handle = Callable[[Any], Coroutine[Any, Any, Any]]
LogDebug = Callable[[str, int | None, str], None]
"""Called with a text, the message's id and its queue."""
P = ParamSpec("P")


def _suppress_errors(step: Callable[P, None]) -> Callable[P, None]:
    """Wrap `step` to raise nothing, because messages are being processed during the call.

    A logger may raise: loguru takes braces, even of a header's text, for placeholders. An error
    here would leave a claimed message leased and never handled, or its outcome unwritten.
    """

    @wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(Exception):
            step(*args, **kwargs)

    return run


class PerMinuteLimit:
    """A limit on the number of messages per minute."""

    def __init__(self, max_count: int = MAX_PER_MINUTE, clock: Clock | None = None) -> None:
        self._max_count = max_count
        self._clock = clock or Clock()
        self._admitted: deque[float] = deque()
        self._refused_at = float("-inf")

    def try_admit(self) -> bool:
        """Return True and count the message if fewer than the limit came in the last minute.

        `_admitted` has the times of these messages, the oldest first.
        """
        now = self._clock.monotonic()
        while self._admitted and self._admitted[0] <= now - MINUTE:
            self._admitted.popleft()
        if len(self._admitted) >= self._max_count:
            return False
        self._admitted.append(now)
        return True

    def claim_refusal_log(self) -> bool:
        """Return True if a refusal may be logged, which is once a minute; the caller then logs it.

        The call itself takes the right to log: the next call within a minute returns False.
        """
        now = self._clock.monotonic()
        if now < self._refused_at + MINUTE:
            return False
        self._refused_at = now
        return True


PROCESS_LIMIT = PerMinuteLimit()
"""Limit that all brokers of the process share."""


class _WatchedMessage(NamedTuple):
    name: str
    at: float


class DebugLog:
    """The debug log of a broker, which selects the watched messages from whole batches."""

    def __init__(
        self, header: str, log_debug: LogDebug, clock: Clock, limit: PerMinuteLimit = PROCESS_LIMIT
    ) -> None:
        """Watch messages with `header`, unless the value is none, false, 0 or empty text."""
        self._header = header
        # The encoded name: a text without it cannot have the header.
        self._encoded_header = json.dumps(header, ensure_ascii=False)
        self._log_debug = log_debug
        self._clock = clock
        self._limit = limit
        self._watched: dict[int, _WatchedMessage] = {}

    # -- watched messages --------------------------------------------------------------------------

    def _is_requested(self, stored: Any) -> bool:
        """Return True if stored headers, a JSON text or an object, request the debug log.

        Most messages do not: the search for the header's name in the text avoids parsing them.
        """
        if stored is None or (isinstance(stored, str) and self._encoded_header not in stored):
            return False
        return bool(load_headers(stored).get(self._header))

    def _watch(self, message_id: int, queue: str, stored: Any) -> bool:
        """Start to log the steps of a message; return False if too many messages request the log.

        A watched message is one whose steps are logged; steps of others are skipped. A message is
        watched once per process. The first refusal of a minute is logged.
        """
        if message_id in self._watched:
            return True
        if not self._limit.try_admit():
            if self._limit.claim_refusal_log():
                text = f"debug: more than {MAX_PER_MINUTE} messages a minute request it"
                self._log_debug(f"{text}; the others are not logged", None, "")
            return False
        correlation = load_headers(stored).get(CORRELATION_ID)
        suffix = "" if correlation is None else f", correlation id {_format_name(correlation)}"
        name = f"message {message_id} of {_format_name(queue)}{suffix}"
        if len(self._watched) >= 10 * MAX_PER_MINUTE:
            # Forget the oldest: a message that was published here and handled elsewhere never ends
            # here.
            del self._watched[next(iter(self._watched))]
        self._watched[message_id] = _WatchedMessage(name, self._clock.monotonic())
        return True

    @_suppress_errors
    def _log_step(self, message_id: int, text: str, queue: str = "") -> None:
        """Log a step of a watched message, with the milliseconds since the last step.

        Messages are watched if they request the debug log by a header; others are skipped.
        """
        watched = self._watched.get(message_id)
        if watched is None:
            return
        now = self._clock.monotonic()
        self._watched[message_id] = _WatchedMessage(watched.name, now)
        elapsed_ms = (now - watched.at) * 1000
        self._log_debug(f"debug: {watched.name}: {text} (+{elapsed_ms:.1f} ms)", message_id, queue)

    def _forget(self, message_id: int) -> None:
        self._watched.pop(message_id, None)

    # -- steps -------------------------------------------------------------------------------------

    @_suppress_errors
    def log_published(
        self, rows: Sequence[NewMessage], ids: Sequence[int | None], duration: float, where: str
    ) -> None:
        """Log inserted `rows` that request the log; `where` names the caller's transaction, if any.

        An id of None means that the row was not stored.
        """
        for row, message_id in zip(rows, ids, strict=True):
            if not self._is_requested(row.headers):
                continue
            if message_id is None:
                queue = _format_name(row.queue)
                text = "not stored: its dedup_id already exists, or its queue is full"
                self._log_debug(f"debug: a message for {queue}: {text}", None, queue)
            elif self._watch(message_id, row.queue, row.headers):
                due = "now" if row.delay is None and row.next_attempt_at is None else "later"
                text = f"published{where} in {duration * 1000:.1f} ms, priority {row.priority}"
                self._log_step(message_id, f"{text}, due {due}", row.queue)

    @_suppress_errors
    def log_claimed(self, rows: Iterable[ClaimedMessage]) -> None:
        """Log leased `rows` that request the debug log.

        A row with a slot must wait: its policies have given it a time to start.
        """
        for row in rows:
            if not self._is_requested(row.stored_headers):
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
                self._log_step(row.id, text, row.queue)

    @_suppress_errors
    def log_decisions(
        self, queue: str, decisions: Mapping[int, str], stored: Mapping[int, Any]
    ) -> None:
        """Log the decisions of policies on messages of `queue` that a claim has not leased.

        `decisions` are texts and `stored` the headers, both by message id. The claim is not
        committed yet, so a rollback may still undo them.
        """
        for message_id, text in decisions.items():
            headers = stored.get(message_id)
            if self._is_requested(headers) and self._watch(message_id, queue, headers):
                self._log_step(message_id, f"policies: {text}", queue)

    def wrap_handler(self, handle: Handle) -> Handle:
        """Wrap `handle`, which runs a row or a batch, to log the start and the end of each call.

        A call without a watched message is passed through.
        """

        async def handle_logged(delivery: Any) -> Any:
            rows = [delivery] if isinstance(delivery, ClaimedMessage) else list(delivery)
            watched_rows = [row for row in rows if row.id in self._watched]
            if not watched_rows:
                return await handle(delivery)
            for row in watched_rows:
                self._log_step(row.id, f"attempt {row.attempts_count + 1} begins", row.queue)
            try:
                return await handle(delivery)
            finally:
                for row in watched_rows:
                    result = (
                        "without an outcome"
                        if row.outcome is None
                        else _format_outcome(row.outcome)
                    )
                    self._log_step(row.id, f"attempt ended: {result}", row.queue)

        return handle_logged

    @_suppress_errors
    def log_settled(self, settlements: Iterable[Settlement]) -> None:
        """Log deliveries whose outcome is decided, and waits to be written with others (flush)."""
        for settlement in settlements:
            if settlement.id in self._watched:
                self._log_step(
                    settlement.id, f"settled: {_format_settlement(settlement)}, waits for the flush"
                )

    @_suppress_errors
    def log_writing(self, settlements: Iterable[Settlement]) -> None:
        """Log settlements that are sent to the database."""
        for settlement in settlements:
            if settlement.id in self._watched:
                self._log_step(settlement.id, "flush: sent to the database")

    @_suppress_errors
    def log_written(self, settlements: Iterable[Settlement], result: SettleResult) -> None:
        """Log the database's answer for each watched message.

        A lost lease means that another worker has, or may have, the message. A message that is
        retried is watched further.
        """
        for settlement in settlements:
            if settlement.id not in self._watched:
                continue
            if settlement.id in result.lost_ids:
                self._log_step(settlement.id, "its lease was lost: nothing was written")
                self._forget(settlement.id)
            elif settlement.id in result.settled_ids:
                where = "archived" if settlement.archive else "not archived"
                suffix = f", {where}" if settlement.is_final else ""
                self._log_step(settlement.id, f"written: {_format_settlement(settlement)}{suffix}")
                if settlement.is_final:
                    self._forget(settlement.id)

    @_suppress_errors
    def log_lost(self, rows: Iterable[ClaimedMessage], phase: str) -> None:
        """Log lost leases of watched messages: another worker may have these messages now.

        `phase` names the work that found the loss, such as a renewal or a new claim; `log_written`
        logs losses that the write of outcomes finds.
        """
        for row in rows:
            if row.id in self._watched:
                self._log_step(row.id, f"its lease was lost, noticed by {phase}", row.queue)


def validate_debug_header(name: object) -> str:
    """Return `name` if a debug header may have this name.

    Raises:
        SetupError: the name is invalid.
    """
    if not isinstance(name, str) or not _HEADER.fullmatch(name):
        raise SetupError(
            "debug_header must be 1 to 100 letters, digits, dots, hyphens and underscores, such as "
            f"'X-Debug', got {format_value(name)}"
        )
    return name


def _format_settlement(settlement: Settlement) -> str:
    """Format the state and the details of `settlement` for a log line.

    A settlement is what is written for a delivery: the message's next state (None: as it was before
    the claim), the queue to move it to, and messages to publish with it.
    """
    state = "as before the claim" if settlement.state is None else settlement.state.name
    details = [
        None if settlement.reason is None else f"reason {_format_name(settlement.reason)}",
        None if settlement.queue is None else f"moved to {_format_name(settlement.queue)}",
        None if settlement.delay is None else f"due in {settlement.delay:.3f} s",
        None
        if settlement.unit is None
        else f"{len(settlement.unit.on_ack)} messages published on ack",
    ]
    return ", ".join([state, *(part for part in details if part is not None)])


def _format_outcome(outcome: Any) -> str:
    error = getattr(outcome, "error", None)
    kind = type(outcome).__name__
    # Only the class: the text of an error may quote the body.
    return kind if error is None else f"{kind} for {type(error).__name__}"


def _format_name(value: object) -> str:
    return repr(replace_invisible(str(value)[:MAX_NAME_LENGTH]))
