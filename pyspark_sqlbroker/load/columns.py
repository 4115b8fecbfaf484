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
    Field("id", "bigint", True, "number of the message; never used twice"),
    Field("queue", "string", True, "name of the queue"),
    Field("priority", "int", True, "-100 to 100, higher first"),
    Field("key", "string", False, "what policies and ordered=True work on"),
    Field("dedup_id", "string", False, "identity given by the publisher"),
    Field(
        "headers", "string", False, "a JSON object as text; spacing and order are the database's"
    ),
    Field("payload", "binary", True, "the body's bytes, as they were published"),
    Field(
        "state",
        "string",
        True,
        "archive: COMPLETED, FAILED, DISCARDED; live: PENDING, PROCESSING, RETRYABLE",
    ),
    Field("attempts_count", "int", True, "how often a handler was started and its end recorded"),
    Field("deliveries_count", "int", True, "how often it was claimed"),
    Field("publish_count", "int", True, "1, and 1 more each time it was published again"),
    Field("origin_id", "bigint", False, "id of the message that it is a copy of"),
    Field("created_at", "timestamp", True, "when it was published"),
    Field("next_attempt_at", "timestamp", True, "when it was due last"),
    Field("expires_at", "timestamp", False, "when it would have expired"),
    Field("first_attempt_at", "timestamp", False, "end of the first attempt"),
    Field("last_attempt_at", "timestamp", False, "end of the last attempt"),
    Field("acquired_at", "timestamp", False, "the last claim"),
    Field("last_error", "string", False, "the last failure: its type and text"),
)
_EXTRA_FIELDS = (
    Field(
        "hops", "int", True, "how often the broker itself has moved it on since a handler last did"
    ),
    Field("policy_key", "string", False, "what policies work on where it is not the key"),
)

ARCHIVE_FIELDS = (
    *_COMMON_FIELDS,
    Field("archived_at", "timestamp", True, "when it was settled"),
    Field(
        "reason",
        "string",
        False,
        "why it failed or was discarded: a code, or what the handler gave",
    ),
    *_EXTRA_FIELDS,
    Field("related_id", "bigint", False, "id of the message that the reason is about"),
    Field(
        "error_fingerprint",
        "string",
        False,
        "the same for errors of one type from the same place in the code; NULL without an error",
    ),
)
"""Columns of `read_archive`, in this order. Timestamps are points in time (microseconds, UTC in the
table).
"""

MESSAGE_FIELDS = (
    *_COMMON_FIELDS,
    Field(
        "lease_expires_at", "timestamp", False, "until when a worker has it; only while PROCESSING"
    ),
    *_EXTRA_FIELDS,
)
"""Columns of `read_messages`, in this order."""
