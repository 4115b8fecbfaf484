"""The bits of the column `policy_marks`, in which policies record their effects on a message.

The flags are cleared when the message moves to another queue. A row that no policy has
processed has none.
"""

DELAYED = 1
"""Delay has shifted the due time, once."""
BURST = 2
"""The message has taken part in a burst of Debounce, and has not been superseded so far."""
SLOT = 4
"""A Throttle that refuses messages above its rate has found a slot for the next attempt."""

JOINED = 8
"""A handler's transaction has locked the row. The settlement removes the flag, so a committed flag
shows that the handler committed without it; see `database.parts.handler_locks`."""

ADMITTED = 16
"""Such a Throttle has admitted the message once: from then on the message waits for slots and is
not refused."""
POSTPONED = 32
"""The due time is the time of the next request for a slot."""
HEADER_KEY = 64
"""`policy_key` was read from the headers; without this flag the key of the publish counts."""
HELD_DELAY = 128
"""The due time is the end of the Delay."""
HELD_BURST = 256
"""The due time is the end of the burst, or the time at which the message before may have
settled."""

BACKOFF_BITS = 11
"""Shift of the highest four bits, which count how often a Throttle has postponed the message since
it last started."""
MAX_BACKOFFS = 15
"""Maximum of that counter."""

HELD_MASK = POSTPONED | HELD_DELAY | HELD_BURST
"""Mask of the flags that explain the due time; at most one of these is set."""
PERSISTENT_MASK = 0x7FFF & ~(SLOT | JOINED | HELD_MASK | MAX_BACKOFFS << BACKOFF_BITS)
"""Mask of the flags that outlive a delivery: all 15 bits of a SMALLINT except those about a single
attempt."""


def encode_backoffs(count: int) -> int:
    """Return the bits that store the number of times that a message was postponed."""
    return count << BACKOFF_BITS


def decode_backoffs(flags: int) -> int:
    """Return the number of postponements of a message from the message's flags."""
    return flags >> BACKOFF_BITS & MAX_BACKOFFS
