"""Columns of the two tables as Spark sees them: fixed, and the same on every database."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """One column.

    Attributes:
        name: Its name in the table and in the DataFrame.
        type: Spark SQL's name of its type.
        is_required: True if it never holds NULL. Spark treats every column of a JDBC source as
            nullable.
        description: Description of the content, with the unit.
    """

    name: str
    type: str
    is_required: bool
    description: str


_COMMON_FIELDS = (
    Field("id", "bigint", True, "id of the message; given again only after lost commits"),
    Field("queue", "string", True, "name of the queue"),
    Field("priority", "int", True, "-100 to 100, higher first"),
    Field("key", "string", False, "key of the message, for policies and ordered=True"),
    Field("dedup_id", "string", False, "deduplication id given by the publisher"),
    Field(
        "headers", "string", False, "JSON object as text; the database decides spacing and order"
    ),
    Field("payload", "binary", True, "bytes of the body, as published"),
    Field(
        "state",
        "string",
        True,
        "archive: COMPLETED, FAILED, DISCARDED; live: PENDING, PROCESSING, RETRYABLE",
    ),
    Field("attempts_count", "int", True, "number of handler runs whose end was recorded"),
    Field("deliveries_count", "int", True, "number of claims"),
    Field("publish_count", "int", True, "1, plus 1 each time it was published again"),
    Field("origin_id", "bigint", False, "id of the original message, if this is a copy"),
    Field("created_at", "timestamp", True, "when it was published"),
    Field("next_attempt_at", "timestamp", True, "last due time"),
    Field("expires_at", "timestamp", False, "expiry time"),
    Field("first_attempt_at", "timestamp", False, "end of the first attempt"),
    Field("last_attempt_at", "timestamp", False, "end of the last attempt"),
    Field("acquired_at", "timestamp", False, "time of the last claim"),
    Field("last_error", "string", False, "type and text of the last error"),
)
_EXTRA_FIELDS = (
    Field("hops", "int", True, "moves by forward_to since a handler last moved it"),
    Field("policy_key", "string", False, "key for policies, if not the value of the column key"),
)

ARCHIVE_FIELDS = (
    *_COMMON_FIELDS,
    Field("archived_at", "timestamp", True, "when it was settled"),
    Field(
        "reason",
        "string",
        False,
        "why it failed or was discarded: a code, or the text of the handler",
    ),
    *_EXTRA_FIELDS,
    Field("related_id", "bigint", False, "id of the message that the reason refers to"),
    Field(
        "error_fingerprint",
        "string",
        False,
        "identifies errors of one type from the same place in the code; NULL without an error",
    ),
)
"""Columns of `read_archive`, in this order. Timestamps are points in time (microseconds, UTC in the
table).
"""

MESSAGE_FIELDS = (
    *_COMMON_FIELDS,
    Field("lease_expires_at", "timestamp", False, "end of the lease; only while PROCESSING"),
    *_EXTRA_FIELDS,
)
"""Columns of `read_messages`, in this order."""
