"""A handler's actions for each message number: the same in every process and in the checker."""

SIZES = (60, 1, 3_000, 0, 100_000)
"""Bytes of answers."""
REFUSED_PRIORITY = 66
"""Of answers that a constraint in the database refuses, where a cell has one."""
SAME = "same"
"""The dedup_id of answers of which only one may be stored."""


TRANSACTIONAL = frozenset({"tx", "dead", "catching", "ending"})
"""Queues whose handlers work in a transaction."""
RATE = 10
"""Messages that a throttled queue starts in `PER` seconds at most."""
PER = 4
"""Seconds: long enough that a slow machine could start too many."""
LIMITED = ("limited", "also limited")
"""Queues with one budget: of both together, one message runs at a time."""
BUDGET = "budget"
ONE_KEY = 20
"""So many numbers have the same key where a key is to start once."""


def key_of(number: int) -> str | None:
    """The key of a message of the ordered queue; some have none."""
    return None if number % 4 == 3 else f"key {number % 4}"


def key_in(queue: str, number: int) -> str | None:
    """The key of a message of `queue`."""
    match queue:
        case "ordered" | "debounced":
            return key_of(number)
        case "once a key":
            return f"key {number // ONE_KEY}"
    return None


def slow(number: int) -> bool:
    """Whether its handler works longer than a lease, which has to be renewed."""
    return number % 12 == 0


def fails(number: int, attempts: int) -> bool:
    """Whether the handler of a single message fails after `attempts`."""
    return number % 7 == 0 and attempts < number % 4


def spoils(number: int, attempts: int) -> bool:
    """Whether it makes the whole batch fail that it is in."""
    return number % 14 == 0 and attempts == 0


def leaves(number: int, attempts: int) -> bool:
    """Whether it is nacked by itself, while the others of its batch are acked."""
    return number % 14 == 7 and attempts == 0


def answer_size(number: int, large: int) -> int:
    """Bytes of its answer; `large` is the size of the largest that a cell writes, or 0.

    Of those around it some are stored together, and some are too large for the server.
    """
    if large and number % 5 == 2:
        return large * (number % 3 + 1) // 2
    return SIZES[number % 5]


def may_be_too_large(number: int, large: int) -> bool:
    """Whether the server may refuse its answer."""
    return bool(large) and answer_size(number, large) > large // 2


def is_refused(number: int, attempts: int) -> bool:
    """Whether its answer is refused, where a cell has a constraint for it."""
    return number % 5 == 1 and attempts == 0


def dedups(number: int) -> bool:
    """Whether it has one answer more, with the dedup_id that others use, too."""
    return number % 13 == 5
