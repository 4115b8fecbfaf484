"""Scopes: a named budget shared by several queues and subscribers, and its members.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from faststream_sqlbroker.core.checks import name_problem
from faststream_sqlbroker.core.policies.options import MICROSECONDS
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.exceptions import SetupError

MEMBER_LIVES = 60 * MICROSECONDS
"""Time after a claim during which a subscriber counts as a member of a scope."""
MEMBER_RENEWED = 15 * MICROSECONDS
"""Age after which a claim that writes nothing else renews its entry."""


def validate_scope(policy: str, scope: object, *, conflict: str | None) -> str | None:
    """Check and return a scope, which may be None.

    Args:
        policy: The name of the policy.
        scope: The value to check.
        conflict: An option that contradicts a scope; None if there is none.

    Raises:
        SetupError: the name is invalid, or the policy cannot have a scope.
    """
    if scope is None:
        return None
    if (error := name_problem(scope)) is not None:
        raise SetupError(f"{short(scope)} cannot be the scope of a {policy}: {error}")
    if conflict is not None:
        raise SetupError(
            f"{policy}'s scope is one budget of several queues, which {conflict} is not: leave one "
            "of both out"
        )
    return str(scope)


def format_scope(scope: str | None) -> str:
    """Format the scope as part of a policy's text."""
    return "" if scope is None else f", scope={scope!r}"


class Members(NamedTuple):
    """The limits of the subscribers that share leases, as known to a claim."""

    lowest: int
    kept: dict[str, int]
    """By limit, the last claim of a subscriber with this limit: the value to store."""
    must_keep: bool
    """True if the claim must be recorded."""


def members_of(info: Any, limit: int, now: int) -> Members:
    """Add a claim with `limit` at `now` to the members stored in `info`.

    Any other value of `info` counts as empty.
    """
    stored = info.get("members") if isinstance(info, Mapping) else None
    old_entries: dict[str, int] = dict(stored) if isinstance(stored, Mapping) else {}
    live = {other_limit: at for other_limit, at in old_entries.items() if now - at < MEMBER_LIVES}
    entries = {**live, str(limit): now}
    return Members(
        min(map(int, entries)), entries, now - old_entries.get(str(limit), 0) >= MEMBER_RENEWED
    )
