"""Scopes: a named budget shared by several queues and subscribers, and its members.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from faststream_sqlbroker.core.checks import validate_name
from faststream_sqlbroker.core.policies.argument_checks import MICROSECONDS
from faststream_sqlbroker.exceptions import SetupError

MEMBER_LIFETIME = 60 * MICROSECONDS
"""Time after a claim during which a subscriber counts as a member of a scope."""
MEMBER_RENEWAL_INTERVAL = 15 * MICROSECONDS
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
    validate_name(scope, f"the scope of a {policy}")
    if conflict is not None:
        raise SetupError(
            f"{policy}'s scope is one budget for several queues, which excludes {conflict}: remove "
            "one of the two"
        )
    return str(scope)


def format_scope(scope: str | None) -> str:
    """Format the scope as part of a policy's text."""
    return "" if scope is None else f", scope={scope!r}"


class Members(NamedTuple):
    """The limits of the subscribers that share leases, as known to a claim."""

    min_limit: int
    entries: dict[str, int]
    """By limit, the last claim of a subscriber with this limit: the value to store."""
    must_store: bool
    """True if the claim must be recorded."""


def update_members(info: Any, limit: int, now: int) -> Members:
    """Add a claim with `limit` at `now` to the members stored in `info`.

    Members are the subscribers that share leases: of a scope, or of a queue. They may have
    different limits, as during a deployment; the lowest applies. A limit that no claim has used for
    a minute no longer counts. Any other value of `info` counts as empty.
    """
    stored = info.get("members") if isinstance(info, Mapping) else None
    old_entries: dict[str, int] = dict(stored) if isinstance(stored, Mapping) else {}
    live = {
        other_limit: at for other_limit, at in old_entries.items() if now - at < MEMBER_LIFETIME
    }
    entries = {**live, str(limit): now}
    return Members(
        min(map(int, entries)),
        entries,
        now - old_entries.get(str(limit), 0) >= MEMBER_RENEWAL_INTERVAL,
    )
