"""Size limits of messages and statements, by the limit of the database."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import MessageTooLargeError

T = TypeVar("T")

ROW_OVERHEAD = 4096
"""Maximum bytes of a row's statement besides body and headers: names of 255 characters, times, the
SQL.
"""
MAX_STATEMENT_BYTES = 8 * 1024 * 1024
"""Maximum bytes of bodies and headers in a statement with several rows: larger ones save nothing.
"""
_ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")
"""Bytes that the drivers of MySQL and MariaDB write as two bytes."""
_MAX_CHARACTER_BYTES = 4
"""In UTF-8; no character of more than one byte is escaped."""


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """Maximum bytes of a message in a statement, a row or a packet."""

    max_bytes: int
    name: str
    """Name of the limit, in a sentence that goes on with "is N"."""
    remedy: str
    """Advice that follows "send less"."""
    escapes_values: bool = False
    """True if values are written into the text of the statement, so that some bytes take two."""

    def check(self, rows: Sequence[NewMessage], size: int | None = None) -> None:
        """Refuse rows that cannot be sent; `size` is `count_bytes(rows)` if known.

        Usually all rows together are so small that none needs to be measured: each byte takes at
        most `_MAX_CHARACTER_BYTES` in a statement.

        Raises:
            MessageTooLargeError: one of `rows` is too large; names the size, the limit and the
                remedy.
        """
        size = count_bytes(rows) if size is None else size
        if size > (self.max_bytes - ROW_OVERHEAD) // _MAX_CHARACTER_BYTES:
            for row in rows:
                self.check_parts(row.payload, row.headers)

    def check_parts(self, payload: bytes | None, headers: str | None = None) -> None:
        """Refuse a message by body and headers, as `check`."""
        body = payload or b""
        header_bytes = (headers or "").encode()
        size = self._count_bytes(body) + self._count_bytes(header_bytes) + ROW_OVERHEAD
        if size > self.max_bytes:
            raise MessageTooLargeError(
                f"a message with a body of {len(body)} bytes and headers of {len(header_bytes)} "
                f"bytes takes {size} bytes to write, but {self.name} is {self.max_bytes}; send "
                f"less, such as a reference to the stored body, {self.remedy}"
            )

    def can_share_statement(self, rows: Sequence[NewMessage]) -> bool:
        """Return True if `rows` surely fit into a single statement.

        By an upper bound, which is quick to compute. If not, the caller sends fewer rows at a time.
        """
        return sum(map(self._estimate_size, rows)) <= min(MAX_STATEMENT_BYTES, self.max_bytes)

    def can_send_text(self, text: str) -> bool:
        """Return True if a statement that binds the ASCII `text` can be sent."""
        if 2 * len(text) + ROW_OVERHEAD <= self.max_bytes:
            return True  # nearly always
        return self._count_bytes(text.encode()) + ROW_OVERHEAD <= self.max_bytes

    def _estimate_size(self, row: NewMessage) -> int:
        """Return an upper bound of the bytes that the row takes in a statement.

        Quick to compute: nothing is encoded. A character takes at most 4 bytes, and an escaped byte
        two.
        """
        names = (
            len(row.queue) + len(row.key or "") + len(row.dedup_id or "") + len(row.headers or "")
        )
        body = (2 if self.escapes_values else 1) * len(row.payload)
        return body + _MAX_CHARACTER_BYTES * names + 300  # times and the SQL of one row

    def _count_bytes(self, value: bytes) -> int:
        return len(value) + (sum(map(value.count, _ESCAPED)) if self.escapes_values else 0)


def split_to_fit(
    limit: SizeLimit, items: Sequence[T], text_of: Callable[[Sequence[T]], str]
) -> Iterator[str]:
    """Yield the texts of `items`, halved until each can be sent.

    `text_of` returns the text that a statement binds for some items: usually all fit into one.

    Raises:
        MessageTooLargeError: the text of one item cannot be sent.
    """
    if not items:
        return
    text = text_of(items)
    if limit.can_send_text(text):
        yield text
        return
    if len(items) == 1:
        raise MessageTooLargeError(
            f"an outcome takes {len(text)} bytes, mostly headers or error text, but {limit.name} "
            f"is {limit.max_bytes}; reduce the headers and the error text, {limit.remedy}"
        )
    half = len(items) // 2
    yield from split_to_fit(limit, items[:half], text_of)
    yield from split_to_fit(limit, items[half:], text_of)


def count_bytes(rows: Sequence[NewMessage]) -> int:
    """Count the bytes of bodies and headers; a character of headers counts as a byte."""
    size = 0
    for row in rows:
        size += len(row.payload)
        if row.headers:
            size += len(row.headers)
    return size


def split_by_bytes(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Yield slices of `items` of at most `MAX_STATEMENT_BYTES`, or of a single item.

    Each slice becomes one statement. An item that is larger by itself gets a statement of its own.
    """
    start = total = 0
    for n, item in enumerate(items):
        size = size_of(item)
        if n > start and total + size > MAX_STATEMENT_BYTES:
            yield items[start:n]
            start = n
            total = 0
        total += size
    if items:
        yield items[start:]


POSTGRESQL = SizeLimit(
    2**29 - 2**16,
    "PostgreSQL's limit for values sent as text (pg_dump, psycopg)",
    "and keep the body itself elsewhere",
)
"""Source: PostgreSQL's documentation, appendix "PostgreSQL Limits": field size 1 GB; a byte takes
two characters in text."""

SQLITE = SizeLimit(10**9 - 2**16, "SQLite's limit for a row", "and keep the body itself elsewhere")
"""Source: SQLite's documentation, "Limits In SQLite", SQLITE_MAX_LENGTH."""


def create_packet_limit(max_bytes: int) -> SizeLimit:
    """Create the limit of a MySQL or MariaDB server from `max_bytes`, the max_allowed_packet."""
    return SizeLimit(
        max_bytes,
        "the server's max_allowed_packet",
        "or raise max_allowed_packet on the server, which applies to new connections",
        escapes_values=True,
    )


# Lists too long for one statement.


IDS_PER_STATEMENT = 500
"""Below MariaDB's in_predicate_conversion_threshold (1 000), above which IN becomes a join by scan.
"""


def iter_chunks(items: Sequence[T], size: int = IDS_PER_STATEMENT) -> Iterator[Sequence[T]]:
    """Yield slices of `items` of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
