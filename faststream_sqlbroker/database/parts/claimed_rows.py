"""The selected columns of the message table, and conversion of their rows to messages.

Other programs may insert rows with plain SQL. A row with values that no message can have is
rejected alone, so that the other rows of its claim are handled.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.reasons import UNDECODABLE
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect, SuspectRule
from faststream_sqlbroker.core.text import format_value, load_text

CLAIMED_COLUMNS = (
    "id",
    "queue",
    "payload",
    "headers",
    "priority",
    "key",
    "attempts_count",
    "deliveries_count",
    "publish_count",
    "created_at",
    "next_attempt_at",
    "expires_at",
    "first_attempt_at",
    "last_attempt_at",
    "acquired_at",
    "hops",
)


READ_ERRORS = (ArithmeticError, AttributeError, TypeError, ValueError)
"""Errors raised by reading a value that its column should not hold."""
REQUIRED_TIMES = ("created_at", "next_attempt_at")
"""Times that every message has. An invalid one counts as now; any other invalid time as NULL."""
_ATTEMPTS = CLAIMED_COLUMNS.index("attempts_count")
_DELIVERIES = CLAIMED_COLUMNS.index("deliveries_count")
_ACQUIRED = CLAIMED_COLUMNS.index("acquired_at")
_TIMES = range(CLAIMED_COLUMNS.index("created_at"), CLAIMED_COLUMNS.index("acquired_at"))


class ClaimedRows:
    """Converts the rows of a database to messages."""

    warn: Callable[[str], None]
    """Called with a warning about a row with an invalid time; set by the broker."""

    def to_messages(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Convert rows selected as `CLAIMED_COLUMNS` to messages; unreadable rows are rejected."""
        return [self._to_message(row, token) for row in rows]

    def _to_message(self, values: Sequence[Any], token: UUID) -> ClaimedMessage:
        """Convert a row to a message, whatever values another program has stored.

        Invalid times are replaced, with a warning. A row with any other invalid value becomes a
        message that is rejected without a handler.
        """
        try:
            return self._build_message(values, token)
        except READ_ERRORS:
            pass
        # Another program has written this row. It must not fail the claim: the other rows of the
        # claim would not be handled either.
        invalid = [
            n
            for n in _TIMES
            if not self._is_time(values[n], required=CLAIMED_COLUMNS[n] in REQUIRED_TIMES)
        ]
        usable = list(values)
        for n in invalid:
            usable[n] = values[14] if CLAIMED_COLUMNS[n] in REQUIRED_TIMES else None
        try:
            row = self._build_message(usable, token)
        except READ_ERRORS as error:
            now = self.time(values[14])
            return ClaimedMessage(
                values[0],
                values[1],
                b"",
                values[3],
                values[4],
                None,
                0,
                1,
                1,
                now,
                now,
                None,
                None,
                None,
                now,
                token,
                outcome=Reject(UNDECODABLE, error),
            )
        names = [CLAIMED_COLUMNS[n] for n in invalid]
        self.note_unusable(row.id, names)
        description = ", ".join(
            f"{name} is {format_value(values[n])}" for n, name in zip(invalid, names, strict=True)
        )
        self.warn(
            f"message {row.id} of queue {row.queue!r} is delivered immediately: its {description}, "
            "which is not a valid time"
        )
        return row

    def note_unusable(self, message_id: int, names: Sequence[str]) -> None:
        """Record that the columns `names` of a message that was just claimed hold invalid times."""

    def _is_time(self, value: Any, *, required: bool) -> bool:
        """Return True if the value can be read as a time, or is None and not `required`."""
        if value is None:
            return not required
        try:
            self.time(value).astimezone(timezone.utc)
        except READ_ERRORS:
            return False
        return True

    def _build_message(self, values: Sequence[Any], token: UUID) -> ClaimedMessage:
        """Build a message from the values of `CLAIMED_COLUMNS`.

        Called for every claimed row, so without checks: wrong values fail in the conversions.

        Raises:
            READ_ERRORS: a value is not of the type of its column.
        """
        to_time = self.time
        return ClaimedMessage(
            values[0],
            values[1],
            load_payload(values[2]),
            values[3],
            values[4],
            load_text(values[5]),
            int(values[6]),
            int(values[7]),
            int(values[8]),
            to_time(values[9]),
            to_time(values[10]),
            None if values[11] is None else to_time(values[11]),
            None if values[12] is None else to_time(values[12]),
            None if values[13] is None else to_time(values[13]),
            to_time(values[14]),
            token,
            int(values[15]),
        )

    def time(self, value: Any) -> Any:
        """Return a selected time as an aware datetime (UTC)."""
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


def load_payload(value: Any) -> bytes:
    """Return the selected body as bytes; SQLite may also have text and numbers there."""
    if isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, bytearray | memoryview) else str(value).encode()


# Suspects found by a claim; statements use the same rule as `SuspectRule.classify`.


def get_statement_suffix(suspect_rule: SuspectRule | None) -> str:
    """Return the end of the name of the claim statement for `suspect_rule`.

    A suspect may have killed its process. There are three statements: suspects are leased like
    other messages, reported without a lease ("_apart"), or skipped ("_others").
    """
    if suspect_rule is None:
        return ""
    return "_apart" if suspect_rule.report else "_others"


def split_suspects(
    rows: Iterable[Sequence[Any]], suspect_rule: SuspectRule | None
) -> tuple[list[Sequence[Any]], dict[int, Suspect]]:
    """Return the leased rows, and by id the suspects, which have no `acquired_at`.

    A suspect may have killed its process. The claim reports it without a lease, and another claim
    leases it alone.
    """
    if suspect_rule is None:
        return list(rows), {}
    other_rows: list[Sequence[Any]] = []
    suspects: dict[int, Suspect] = {}
    for row in rows:
        if row[_ACQUIRED] is not None:
            other_rows.append(row)
        elif suspect_rule.report and (suspect := _find_suspect(row, suspect_rule)) is not None:
            suspects[row[0]] = suspect
    return other_rows, suspects


def _find_suspect(row: Sequence[Any], suspect_rule: SuspectRule) -> Suspect | None:
    """Return the row as a suspect, by the number of its lost leases, or None.

    A row whose counts are not numbers counts as a suspect: it must run alone, or be rejected,
    without harm to other messages.
    """
    try:
        return suspect_rule.classify(int(row[_DELIVERIES]) - int(row[_ATTEMPTS]))
    except (TypeError, ValueError):  # SQLite stores any value that another program writes
        return Suspect(suspect_rule.min_lost)
