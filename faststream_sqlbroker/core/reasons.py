"""Codes of the reasons for which the broker ends a message, or a handler skips it.

They are written to the archive's column `reason`, and to the header of a dead letter. The column
`related_id` holds the related message; the text never does. A text that a handler passes to
`reject(reason=…)` is written unchanged.
"""

from typing import NamedTuple

SUPERSEDED = "superseded"
DUPLICATE = "duplicate"
EXPIRED = "expired"
CANCELLED = "cancelled"
THROTTLED = "throttled"
SKIPPED = "skipped"
REJECTED = "rejected"
MAX_ATTEMPTS = "max_attempts"
NOT_RETRIED = "not_retried"
INVALID_BODY = "invalid_body"
NOT_READY = "not_ready"
NO_OUTCOME = "no_outcome"
RETRY_STRATEGY_ERROR = "retry_strategy_error"
TRANSACTION_ENDED = "transaction_ended"
SETTLE_ERROR = "settle_error"
MAX_DELIVERIES = "max_deliveries"
UNKNOWN_OUTCOME = "unknown_outcome"
FAILED_ONCE = "failed_once"
NO_KEY = "no_key"
NO_DESTINATION = "no_destination"
DESTINATION_NOT_ALLOWED = "destination_not_allowed"
TOO_MANY_HOPS = "too_many_hops"
UNDECODABLE = "undecodable"


class Meaning(NamedTuple):
    """The meaning of a code."""

    states: str
    """States of messages with this reason."""
    text: str
    related: str = ""
    """The message whose id is in `related_id`; empty if `related_id` is NULL."""


MEANINGS: dict[str, Meaning] = {
    SKIPPED: Meaning(
        "COMPLETED", "Its handler, a dependency or a middleware raised `SkipMessage`."
    ),
    SUPERSEDED: Meaning(
        "DISCARDED",
        "`Debounce`, `KeepLast`: another message of its key started in its place, or a "
        "`Throttle` refused that message.",
        "that message",
    ),
    DUPLICATE: Meaning(
        "DISCARDED",
        "`Once`: another message of its key was handled.",
        "the message that claimed the key",
    ),
    EXPIRED: Meaning("DISCARDED", "`expires_in` had passed before a handler could start."),
    CANCELLED: Meaning(
        "DISCARDED", "An operator cancelled it; `last_error` has the name and reason."
    ),
    THROTTLED: Meaning(
        "DISCARDED, FAILED",
        '`Throttle` had no slot, with `when_exceeded="drop"` or `"dead_letter"`.',
    ),
    REJECTED: Meaning(
        "DISCARDED, FAILED",
        "Its handler, the ack policy or an HTTP client rejected it without a reason.",
    ),
    MAX_ATTEMPTS: Meaning(
        "FAILED",
        "It failed, and the retry strategy gave up because its attempts or its time were used up, "
        "or there is no retry strategy.",
    ),
    NOT_RETRIED: Meaning(
        "FAILED", "It failed with an exception that `retry_on` or `no_retry_on` excludes."
    ),
    INVALID_BODY: Meaning(
        "FAILED", "Its body cannot be decoded, or is invalid for its handler's parameters."
    ),
    NOT_READY: Meaning(
        "FAILED", "Its handler raised `NotReadyYet` until `give_up_after` had passed."
    ),
    NO_OUTCOME: Meaning("FAILED", "`AckPolicy.MANUAL`: its handler ended without settling it."),
    RETRY_STRATEGY_ERROR: Meaning(
        "FAILED", "The retry strategy raised an error, which is in `last_error`."
    ),
    TRANSACTION_ENDED: Meaning(
        "FAILED",
        "`transactional=True`: its handler ended the transaction by itself, so its effects may "
        "be committed.",
    ),
    SETTLE_ERROR: Meaning("FAILED", "The database repeatedly refused to store its outcome."),
    MAX_DELIVERIES: Meaning(
        "FAILED",
        "`max_deliveries` deliveries ended without an outcome, for example because their process "
        "ended; or a pull job timed out more than `max_retries` times.",
    ),
    UNKNOWN_OUTCOME: Meaning(
        "FAILED", "`Once`: an earlier delivery started its handler and reported no outcome."
    ),
    FAILED_ONCE: Meaning("FAILED", "`Once`: its handler failed, and must not run again."),
    NO_KEY: Meaning("FAILED", 'It has no key, and a policy has `without_key="dead_letter"`.'),
    NO_DESTINATION: Meaning(
        "FAILED", "`forward_to=DESTINATION`: its header does not name a valid destination."
    ),
    DESTINATION_NOT_ALLOWED: Meaning(
        "FAILED",
        "`forward_to=DESTINATION`: its header names a queue that is not among `destinations`.",
    ),
    TOO_MANY_HOPS: Meaning(
        "FAILED", "`forward_to` moved it 32 times without a handler: its queues form a loop."
    ),
    UNDECODABLE: Meaning("FAILED", "Its row has a value that no message can have."),
}
"""The meanings of all codes."""
