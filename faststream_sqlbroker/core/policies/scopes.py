"""One budget by name over several queues and subscribers: what is known of those that share it.

Times are whole microseconds of the database's clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """What `str` of a policy says of its scope."""
    return "" if scope is None else f", scope={scope!r}"


@dataclass
class Members:
    """Which options the subscribers of a scope have, and when one of each last claimed."""

    seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def load(cls, info: Any) -> "Members":
        """Read what `dump` wrote; any other value counts as empty."""
        found = info.get("members") if isinstance(info, Mapping) else None
        return cls(dict(found)) if isinstance(found, Mapping) else cls()

    def dump(self, now: int) -> dict[str, int]:
        """Those that are alive, as JSON values."""
        return {options: at for options, at in self.seen.items() if now - at < MEMBER_LIVES}

    def live(self, own: str, now: int) -> list[str]:
        """`own`, and the other options that a live subscriber of the scope has."""
        return [own, *sorted(self.dump(now).keys() - {own})]

    def register(self, own: str, now: int) -> bool:
        """Note a claim with the options `own`; whether that must be written."""
        old = now - self.seen.get(own, 0) >= MEMBER_RENEWED
        self.seen[own] = now
        return old


def lowest_limit(limits: Iterable[str]) -> int:
    """Of the limits that members have."""
    return min(int(limit) for limit in limits)
