"""One budget by name over several queues and subscribers: what is known of those that share it.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

MEMBER_LIVES = 60 * MICROSECONDS
"""A subscriber counts as a member of a scope for so long after a claim."""
MEMBER_RENEWED = 15 * MICROSECONDS
"""A claim that writes nothing else renews its entry after this."""


def checked_scope(policy: str, scope: object, *, refused: str | None) -> str | None:
    """`scope`, which may be None.

    Args:
        policy: The name of its policy.
        scope: As given.
        refused: The option that contradicts a scope; None: there is none.

    Raises:
        SetupError: it is not a valid name, or the policy cannot have one.
    """
    if scope is None:
        return None
    if (problem := name_problem(scope)) is not None:
        raise SetupError(f"{short(scope)} cannot be the scope of a {policy}: {problem}")
    if refused is not None:
        raise SetupError(
            f"{policy}'s scope is one budget of several queues, which {refused} is not: leave one "
            "of both out"
        )
    return str(scope)


def scope_text(scope: str | None) -> str:
    """The part of a policy's text that names a scope."""
    return "" if scope is None else f", scope={scope!r}"


class Members(NamedTuple):
    """The limits of subscribers that share leases, as a claim knows these limits."""

    lowest: int
    kept: dict[str, int]
    """By limit, when a subscriber that has it last claimed: what is to be stored."""
    must_keep: bool
    """Whether the claim must be noted."""


def members_of(info: Any, own: int, now: int) -> Members:
    """The members that `info` has, and a claim with the limit `own` now. Any other value
    counts as empty.
    """
    stored = info.get("members") if isinstance(info, Mapping) else None
    seen: dict[str, int] = dict(stored) if isinstance(stored, Mapping) else {}
    live = {limit: at for limit, at in seen.items() if now - at < MEMBER_LIVES}
    kept = {**live, str(own): now}
    return Members(min(map(int, kept)), kept, now - seen.get(str(own), 0) >= MEMBER_RENEWED)
