"""The columns of the message table as they are selected, and messages made of the rows.

Other programs may insert rows with plain SQL. A row that holds what no message can have is rejected
by itself: it must not keep the others of its claim from being handled.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timezone
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.outcome import Reject
from faststream_sqlbroker.core.reasons import UNDECODABLE
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.suspects import Suspect, Suspicion
from faststream_sqlbroker.core.text import load_text, short

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


UNREADABLE = (ArithmeticError, AttributeError, TypeError, ValueError)
"""Errors raised by reading a value that its column should not hold."""
NEEDED_TIMES = ("created_at", "next_attempt_at")
"""Times that every message has. An invalid one counts as now; any other invalid time as NULL."""
_ATTEMPTS = CLAIMED_COLUMNS.index("attempts_count")
_DELIVERIES = CLAIMED_COLUMNS.index("deliveries_count")
_ACQUIRED = CLAIMED_COLUMNS.index("acquired_at")
_TIMES = range(CLAIMED_COLUMNS.index("created_at"), CLAIMED_COLUMNS.index("acquired_at"))


class ClaimedRows:
    """Reads the rows of one database."""

    warn: Callable[[str], None]
    """Called with a warning about a row with an invalid time; set by the broker."""

    def claimed(self, rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
        """Make messages of rows selected as `CLAIMED_COLUMNS`; unreadable ones are rejected."""
        return [self._claimed_row(row, token) for row in rows]

    def _claimed_row(self, r: Sequence[Any], token: UUID) -> ClaimedMessage:
        try:
            return self._read_row(r, token)
        except UNREADABLE:
            pass
        # Another program has written this row. It must not fail the claim, as then the other rows
        # of the claim would not be handled either.
        wrong = [
            n for n in _TIMES if not self._is_time(r[n], needed=CLAIMED_COLUMNS[n] in NEEDED_TIMES)
        ]
        usable = list(r)
        for n in wrong:
            usable[n] = r[14] if CLAIMED_COLUMNS[n] in NEEDED_TIMES else None
        try:
            row = self._read_row(usable, token)
        except UNREADABLE as error:
            now = self.time(r[14])
            return ClaimedMessage(
                r[0],
                r[1],
                b"",
                r[3],
                r[4],
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
        names = [CLAIMED_COLUMNS[n] for n in wrong]
        self.note_unusable(row.id, names)
        found = ", ".join(f"{name} is {short(r[n])}" for n, name in zip(wrong, names, strict=True))
        self.warn(
            f"message {row.id} of queue {row.queue!r} is delivered at once: its {found}, which is "
            "no time"
        )
        return row

    def note_unusable(self, message_id: int, names: Sequence[str]) -> None:
        """Record that these columns of a message that was just claimed hold invalid times."""

    def _is_time(self, value: Any, *, needed: bool) -> bool:
        if value is None:
            return not needed
        try:
            self.time(value).astimezone(timezone.utc)
        except UNREADABLE:
            return False
        return True

    def _read_row(self, r: Sequence[Any], token: UUID) -> ClaimedMessage:
        at = self.time
        return ClaimedMessage(
            r[0],
            r[1],
            load_payload(r[2]),
            r[3],
            r[4],
            load_text(r[5]),
            int(r[6]),
            int(r[7]),
            int(r[8]),
            at(r[9]),
            at(r[10]),
            None if r[11] is None else at(r[11]),
            None if r[12] is None else at(r[12]),
            None if r[13] is None else at(r[13]),
            at(r[14]),
            token,
            int(r[15]),
        )

    def time(self, value: Any) -> Any:
        """A selected time as an aware datetime (UTC)."""
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)


def load_payload(value: Any) -> bytes:
    """The body as selected: bytes; SQLite also stores text and numbers there."""
    if isinstance(value, bytes):
        return value
    return bytes(value) if isinstance(value, bytearray | memoryview) else str(value).encode()


# Suspects that a claim has found; statements tell them as `Suspicion.of` does.


def statement_end(suspicion: Suspicion | None) -> str:
    """The end of the name of the claim statement for `suspicion`."""
    if suspicion is None:
        return ""
    return "_apart" if suspicion.told else "_others"


def split_suspects(
    rows: Iterable[Sequence[Any]], suspicion: Suspicion | None
) -> tuple[list[Sequence[Any]], dict[int, Suspect]]:
    """The rows that were leased, and by id the suspects, which have no `acquired_at`."""
    if suspicion is None:
        return list(rows), {}
    leased: list[Sequence[Any]] = []
    suspects: dict[int, Suspect] = {}
    for row in rows:
        if row[_ACQUIRED] is not None:
            leased.append(row)
        elif suspicion.told and (suspect := _suspect(row, suspicion)) is not None:
            suspects[row[0]] = suspect
    return leased, suspects


def _suspect(row: Sequence[Any], suspicion: Suspicion) -> Suspect | None:
    try:
        return suspicion.of(int(row[_DELIVERIES]) - int(row[_ATTEMPTS]))
    except (TypeError, ValueError):  # SQLite keeps any value that another program has written
        return Suspect(suspicion.losses)
