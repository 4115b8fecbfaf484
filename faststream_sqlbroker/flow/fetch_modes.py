"""Whether the next claim looks first: the modes of a subscriber's claims, and the only ways from
one to another.
"""

from enum import Enum


class Mode(Enum):
    """What the next claim does."""

    START = "looks first: nothing is known yet but priority 0"
    LOOK = "looks first, whatever wakes it"
    IDLE = "looks first, unless a wake-up comes"
    GUESS = (
        "claims from the known pairs of the queues that a wake-up named, looks if it gets nothing"
    )
    FOLLOW = "claims from the pairs that the last look found, and looks when that is old"
    BLIND = "claims from all known pairs: looks are slow, and go on in the background"


class Event(Enum):
    """What leads from one mode to another."""

    WOKEN = "wake-up"
    CHANGED = "other queues are open"
    GUESSED = "the claim is sent"
    LOOKING = "a look is sent"
    FEWER = "fewer rows than asked for"
    QUICK = "a look was quick"
    SLOW = "a look was slow"
    UNANSWERED = "a look failed for a passing reason"
    BROKEN = "a look failed for another reason"


# A look is FOLLOW from the moment it is sent, so that what comes while it runs leads on.
TRANSITIONS: tuple[tuple[Mode, Event, Mode], ...] = (
    (Mode.START, Event.QUICK, Mode.FOLLOW),
    (Mode.START, Event.SLOW, Mode.BLIND),
    (Mode.LOOK, Event.LOOKING, Mode.FOLLOW),
    (Mode.IDLE, Event.LOOKING, Mode.FOLLOW),
    (Mode.IDLE, Event.WOKEN, Mode.GUESS),
    # Not twice without a look between: a pair that is not known may have a higher priority.
    (Mode.GUESS, Event.GUESSED, Mode.LOOK),
    (Mode.FOLLOW, Event.FEWER, Mode.IDLE),
    (Mode.FOLLOW, Event.WOKEN, Mode.GUESS),
    *((mode, Event.CHANGED, Mode.LOOK) for mode in (Mode.IDLE, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.SLOW, Mode.BLIND) for mode in (Mode.LOOK, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.UNANSWERED, Mode.BLIND) for mode in (Mode.LOOK, Mode.GUESS, Mode.FOLLOW)),
    *((mode, Event.BROKEN, Mode.LOOK) for mode in (Mode.GUESS, Mode.FOLLOW)),
    (Mode.BLIND, Event.QUICK, Mode.FOLLOW),
)
"""(from, event, to); any other event leaves the mode as it is. The diagram in
docs/explanation/fetching.md is generated from it."""

_NEXT = {(source, event): target for source, event, target in TRANSITIONS}


def after(mode: Mode, event: Event) -> Mode:
    """Where `event` leads from `mode`."""
    return _NEXT.get((mode, event), mode)
