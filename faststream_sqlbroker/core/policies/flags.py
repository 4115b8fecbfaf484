"""What policies have done with a message, as bits of its column `policy_marks`.

They are cleared when the message moves to another queue. A row that no policy has seen has none.
"""

DELAYED = 1
"""Its due time has been shifted by Delay, once."""
BURST = 2
"""It has taken part in a burst of Debounce, and has not been superseded so far."""
SLOT = 4
"""A Throttle that refuses what is above its rate has found a slot for its next attempt."""

JOINED = 8
"""A handler's transaction has locked the row. The flag is committed only with the ack; see
`database.parts.handler_locks`."""

LET_IN = 16
"""Such a Throttle has let it in once: from then on it waits for its slots and is not refused."""
PUT_OFF = 32
"""Its due time is when it asks for a slot again."""
HEADER_KEY = 64
"""Its `policy_key` has been read from its headers; without it the key of the publish counts."""
HELD_DELAY = 128
"""Its due time is the end of its Delay."""
HELD_BURST = 256
"""Its due time is the end of its burst, or when the message before may have settled."""

BACKOFF_BITS = 11
"""Of the highest four bits: how often a Throttle has put it off since it last started, ..."""
MOST_BACKOFFS = 15
"""... counted up to this."""

HELD = PUT_OFF | HELD_DELAY | HELD_BURST
"""Whose the due time is: one of them at most."""
KEPT = 0x7FFF & ~(SLOT | JOINED | HELD | MOST_BACKOFFS << BACKOFF_BITS)
"""Mask of the flags that outlive a delivery: all 15 bits of a SMALLINT but those that say something
of one attempt."""


def of_backoffs(count: int) -> int:
    """The bits that count the times that a message was put off."""
    return count << BACKOFF_BITS


def backoffs(marks: int) -> int:
    """How often a message with these marks was put off."""
    return marks >> BACKOFF_BITS & MOST_BACKOFFS
