"""What `broker.admin.diagnosis` finds: each thing that the broker depends on, by itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisPart:
    """One thing."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values; none of them is a secret."""
    problems: tuple[str, ...] = ()
    """What is wrong, one line each with what to do."""
    error: str | None = None
    """Why it could not be looked at; None: it was."""
    took: float = 0.0
    """Seconds."""

    @property
    def ok(self) -> bool:
        """Whether it was looked at, and nothing is wrong."""
        return self.error is None and not self.problems


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All of them."""

    parts: tuple[DiagnosisPart, ...]

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return all(part.ok for part in self.parts)

    @property
    def as_json(self) -> dict[str, Any]:
        """As JSON values: `ok`, and `parts` by name."""
        return {
            "ok": self.ok,
            "parts": {
                part.name: {
                    "ok": part.ok,
                    "facts": dict(part.facts),
                    "problems": list(part.problems),
                    "error": part.error,
                    "took": round(part.took, 3),
                }
                for part in self.parts
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process knows of itself without the database."""

    listening: bool | None = None
    """Whether it hears wake-ups of other processes now; None: it has no reason to, or the database
    has none.
    """
    relays: Mapping[str, bool] = field(default_factory=dict)
    """The publishers of other brokers that answers go to, and whether each can publish."""
    is_running: bool = False
