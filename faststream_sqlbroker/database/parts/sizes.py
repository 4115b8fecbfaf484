"""How large a message may be, and how much goes into one statement, by the database's limit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import MessageTooLargeError

T = TypeVar("T")

OTHERS = 4096
"""Most bytes that a row's statement takes besides body and headers: names of 255 characters, times,
the SQL."""
BYTES_TOGETHER = 8 * 1024 * 1024
"""Most bytes of bodies and headers in a statement with several rows: larger ones save nothing."""
_ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")
"""What the drivers of MySQL and MariaDB write as two bytes."""
_MOST_BYTES_OF_A_CHARACTER = 4
"""In UTF-8; no character that takes more than one byte is escaped."""


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """Bytes that one message may take in a statement, its row or its packet."""

    most: int
    name: str
    """What it is a limit of, in a sentence that goes on with "is N"."""
    cure: str
    """What to do, after "send less"."""
    written_out: bool = False
    """Whether values are written into the text of the statement, so that some of their bytes take
    two."""

    def check(self, rows: Sequence[NewMessage], size: int | None = None) -> None:
        """Refuse what cannot be sent; `size` is `bytes_of(rows)`, if that is known.

        Raises:
            MessageTooLargeError: one of `rows` is too large; it names the size, the limit and what
                to do.
        """
        size = bytes_of(rows) if size is None else size
        if size > (self.most - OTHERS) // _MOST_BYTES_OF_A_CHARACTER:
            for row in rows:
                self.check_parts(row.payload, row.headers)

    def check_parts(self, payload: bytes | None, headers: str | None = None) -> None:
        """As `check`, of a message with this body and these headers."""
        body = payload or b""
        head = (headers or "").encode()
        size = self._bytes(body) + self._bytes(head) + OTHERS
        if size > self.most:
            raise MessageTooLargeError(
                f"a message with a body of {len(body)} bytes and headers of {len(head)} cannot be "
                f"written: that takes {size} bytes, and {self.name} is {self.most}; send less, for "
                f"example where the body is stored, {self.cure}"
            )

    def together(self, rows: Sequence[NewMessage]) -> bool:
        """Whether `rows` surely go into one statement."""
        return sum(map(self._at_most, rows)) <= min(BYTES_TOGETHER, self.most)

    def text_fits(self, text: str) -> bool:
        """Whether a statement that binds `text`, which is ASCII, can be sent."""
        if 2 * len(text) + OTHERS <= self.most:
            return True  # nearly always
        return self._bytes(text.encode()) + OTHERS <= self.most

    def _at_most(self, row: NewMessage) -> int:
        names = (
            len(row.queue) + len(row.key or "") + len(row.dedup_id or "") + len(row.headers or "")
        )
        body = (2 if self.written_out else 1) * len(row.payload)
        return body + _MOST_BYTES_OF_A_CHARACTER * names + 300  # times and the SQL of one row

    def _bytes(self, value: bytes) -> int:
        return len(value) + (sum(map(value.count, _ESCAPED)) if self.written_out else 0)


def parts_that_fit(
    limit: SizeLimit, items: Sequence[T], text_of: Callable[[Sequence[T]], str]
) -> Iterator[str]:
    """The texts of `items`, halved until each can be sent.

    Raises:
        MessageTooLargeError: the text of one item cannot.
    """
    if not items:
        return
    text = text_of(items)
    if limit.text_fits(text):
        yield text
        return
    if len(items) == 1:
        raise MessageTooLargeError(
            f"an outcome of {len(text)} bytes, most of them headers or the text of an error, "
            f"cannot be written: {limit.name} is {limit.most}; give the message less, {limit.cure}"
        )
    half = len(items) // 2
    yield from parts_that_fit(limit, items[:half], text_of)
    yield from parts_that_fit(limit, items[half:], text_of)


def bytes_of(rows: Sequence[NewMessage]) -> int:
    """Of bodies and headers; these count a byte for a character."""
    size = 0
    for row in rows:
        size += len(row.payload)
        if row.headers:
            size += len(row.headers)
    return size


def by_bytes(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Slices of `items` of at most `BYTES_TOGETHER`, or of one item."""
    start = taken = 0
    for n, item in enumerate(items):
        size = size_of(item)
        if n > start and taken + size > BYTES_TOGETHER:
            yield items[start:n]
            start = n
            taken = 0
        taken += size
    if items:
        yield items[start:]


POSTGRESQL = SizeLimit(
    2**29 - 2**16,
    "the most that PostgreSQL can give back as text, which pg_dump and psycopg ask for,",
    "and keep the body itself elsewhere",
)
"""Source: PostgreSQL's documentation, appendix "PostgreSQL Limits": field size 1 GB; a byte takes
two characters in text."""

SQLITE = SizeLimit(
    10**9 - 2**16, "the most that SQLite takes in one row", "and keep the body itself elsewhere"
)
"""Source: SQLite's documentation, "Limits In SQLite", SQLITE_MAX_LENGTH."""


def max_allowed_packet(most: int) -> SizeLimit:
    """The limit of a MySQL or MariaDB server, as its session says."""
    return SizeLimit(
        most,
        "the server's max_allowed_packet",
        "or raise max_allowed_packet on the server, which holds for connections that are made "
        "afterwards",
        written_out=True,
    )


# Lists too long for one statement.


IDS_PER_STATEMENT = 500
"""Below MariaDB's in_predicate_conversion_threshold (1 000), above which IN becomes a join by scan.
"""


def chunks(items: Sequence[T], size: int = IDS_PER_STATEMENT) -> Iterator[Sequence[T]]:
    """Slices of `items` of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
