"""What policies have done with a message, as bits of its column `policy_marks`.

They are cleared when the message moves to another queue. A row that no policy has seen has none.
"""

DELAYED = 1
"""Its due time has been shifted by Delay, once."""
BURST = 2
"""It has taken part in a burst of Debounce, and has not been superseded so far."""
SLOT = 4
"""Its due time is the slot that a Throttle per key gave it; every attempt needs a new one."""

JOINED = 8
"""A handler's transaction has locked the row. The flag is committed only with the ack; see
`dialects.handler_locks`."""

KEPT = 0x7FFF & ~(SLOT | JOINED)
"""Mask of the flags that outlive a delivery: all 15 bits of a SMALLINT but the two above."""
