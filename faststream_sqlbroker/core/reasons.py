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
        "`Debounce`, `KeepLast`: another message of its key has started in its place, or a "
        "`Throttle` has refused that one.",
        "that one",
    ),
    DUPLICATE: Meaning(
        "DISCARDED",
        "`Once`: another message of its key was handled.",
        "the one that has claimed the key",
    ),
    EXPIRED: Meaning("DISCARDED", "`expires_in` was over before a handler could start."),
    CANCELLED: Meaning("DISCARDED", "An operator cancelled it; who and why is in `last_error`."),
    THROTTLED: Meaning(
        "DISCARDED, FAILED",
        '`Throttle` had no slot, with `when_exceeded="drop"` or `"dead_letter"`.',
    ),
    REJECTED: Meaning(
        "DISCARDED, FAILED",
        "Its handler rejected it, the ack policy did, or a client over HTTP gave it up; no reason "
        "was given.",
    ),
    MAX_ATTEMPTS: Meaning(
        "FAILED",
        "It failed, and the retry strategy gives up: its attempts or its time are used up, or "
        "there is none.",
    ),
    NOT_RETRIED: Meaning(
        "FAILED", "It failed with an exception that `retry_on`, `no_retry_on` do not retry."
    ),
    INVALID_BODY: Meaning(
        "FAILED", "Its body fails the validation of its handler's parameters, or decoding."
    ),
    NOT_READY: Meaning(
        "FAILED", "Its handler raised `NotReadyYet` until `give_up_after` was over."
    ),
    NO_OUTCOME: Meaning("FAILED", "`AckPolicy.MANUAL`: its handler ended and had not settled it."),
    RETRY_STRATEGY_ERROR: Meaning(
        "FAILED", "The retry strategy raised an error, which is in `last_error`."
    ),
    TRANSACTION_ENDED: Meaning(
        "FAILED",
        "`transactional=True`: its handler committed or rolled back by itself, so that its "
        "effects may be there.",
    ),
    SETTLE_ERROR: Meaning("FAILED", "The database refused its end again and again."),
    MAX_DELIVERIES: Meaning(
        "FAILED",
        "`max_deliveries` of its deliveries ended without an outcome, such as by the end of their "
        "process; of a pull job, its time was over more than `max_retries` times.",
    ),
    UNKNOWN_OUTCOME: Meaning(
        "FAILED", "`Once`: its handler was started before, and its process was not heard of again."
    ),
    FAILED_ONCE: Meaning("FAILED", "`Once`: its handler failed, and may not be started again."),
    NO_KEY: Meaning("FAILED", 'A policy needs a key, and says `without_key="dead_letter"`.'),
    NO_DESTINATION: Meaning(
        "FAILED", "`forward_to=DESTINATION`: its header names no queue that it can be moved to."
    ),
    DESTINATION_NOT_ALLOWED: Meaning(
        "FAILED",
        "`forward_to=DESTINATION`: its header names a queue that is not among `destinations`.",
    ),
    TOO_MANY_HOPS: Meaning(
        "FAILED", "`forward_to` has moved it on 32 times since a handler last did: it goes round."
    ),
    UNDECODABLE: Meaning("FAILED", "Its row holds what no message can have."),
}
"""The meanings of all codes."""
