"""The states of a message and the allowed transitions."""

from enum import Enum


class MessageState(str, Enum):
    """The state of a message; the database stores the member's name.

    PENDING, PROCESSING and RETRYABLE are states of the message table, the rest of the archive.
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
"""(from, event, to); None stands for a message that does not exist yet. The diagram in INTERNALS.md
is generated from this table."""
