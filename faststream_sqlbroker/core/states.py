"""The states of a message and the only ways from one to another."""

from enum import Enum


class MessageState(str, Enum):
    """Where a message is in its life; the database stores the member's name.

    PENDING, PROCESSING and RETRYABLE live in the message table, the others in the archive.
    """

    PENDING = "pending"
    PROCESSING = "processing"
    RETRYABLE = "retryable"
    COMPLETED = "completed"
    FAILED = "failed"
    DISCARDED = "discarded"


LIVE_STATES = frozenset({MessageState.PENDING, MessageState.PROCESSING, MessageState.RETRYABLE})
CLAIMABLE_STATES = frozenset({MessageState.PENDING, MessageState.RETRYABLE})
ARCHIVED_STATES = frozenset({MessageState.COMPLETED, MessageState.FAILED, MessageState.DISCARDED})

_P = MessageState.PENDING
_W = MessageState.PROCESSING
_R = MessageState.RETRYABLE
_C = MessageState.COMPLETED
_F = MessageState.FAILED
_D = MessageState.DISCARDED

TRANSITIONS: tuple[tuple[MessageState | None, str, MessageState], ...] = (
    (None, "publish", _P),
    (_P, "claim", _W),
    (_R, "claim", _W),
    (_W, "ack", _C),
    (_W, "nack, strategy allows", _R),
    (_W, "nack exhausted, reject, no outcome, delivery limit, unknown outcome", _F),
    (_W, "postpone, move, dead letter queue, graceful timeout, failed COMMIT", _P),
    (_W, "handed back unstarted, lease expired", _P),
    (_W, "handed back unstarted, lease expired (after an attempt)", _R),
    (_P, "cancel, expiry, superseded, throttled", _D),
    (_R, "cancel, expiry", _D),
    (_W, "cancel, expiry or duplicate at the start", _D),
)
"""(from, event, to); None is "not there yet". The diagram of INTERNALS.md is generated from it."""
