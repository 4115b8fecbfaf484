"""What policies have done with a message, as bits of its column `policy_marks`.

They go when the message moves to another queue. Rows that were never looked at by a policy have
none.
"""

DELAYED = 1
"""Its due time has been shifted by Delay, once."""
BURST = 2
"""It has taken part in a burst of Debounce, and has not been superseded so far."""
SLOT = 4
"""Its due time is the slot that a Throttle per key gave it; every attempt needs a new one."""

JOINED = 8
"""A handler's transaction has locked it, which is committed only with its ack; see
`dialects.handler_locks`."""

KEPT = 0x7FFF & ~(SLOT | JOINED)
"""The marks that outlive a delivery."""
