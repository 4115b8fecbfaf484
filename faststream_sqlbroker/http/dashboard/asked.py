"""What a page or an action gets, what it answers with, and the search for messages, as an address
and a form have it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from faststream_sqlbroker.core.overview import JobCounts
from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.core.stored import Redact, StoredMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.dashboard.shared import Lately
from faststream_sqlbroker.http.users import Role, User

if TYPE_CHECKING:
    from faststream_sqlbroker.admin import Admin


@dataclass(frozen=True, slots=True)
class Settings:
    """How much the dashboard shows and allows."""

    writes: bool
    """Whether there are actions at all."""
    bodies: bool
    """Whether headers, bodies and errors, which may quote them, are shown."""
    redact: Redact | None
    """Changes each message before it is shown."""

    @property
    def errors(self) -> bool:
        """Whether errors are shown that `redact` cannot change, as they are apart from messages."""
        return self.bodies and self.redact is None

    def shown(self, message: StoredMessage) -> StoredMessage:
        """The message as pages show it: an error that `redact` has replaced is the hook's own."""
        found = message if self.redact is None else self.redact(message)
        if self.bodies or found.last_error != message.last_error:
            return found
        return replace(found, last_error=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of a known user."""

    request: Request
    user: User
    admin: "Admin"
    settings: Settings
    lately: Lately
    """What all users share."""
    pulled: Callable[[], Awaitable[list[str]]]
    """The queues of pull consumers."""
    job_counts: Callable[[Sequence[str]], Awaitable[list[JobCounts]]]
    """The jobs by state of each of these."""
    fields: Mapping[str, str]
    """Of the address, and of the form that was sent."""

    @property
    def writes(self) -> bool:
        """Whether this user may change something here."""
        return self.settings.writes and self.user.may(Role.OPERATOR)

    @property
    def message(self) -> str:
        """The id of a message in the path; `admin` refuses what is none."""
        # Starlette's own numbers fail at thousands of digits, before anybody has asked who it is.
        number: str = self.request.path_params["message"]
        return number

    def given(self, name: str) -> str | None:
        """The field `name`; None: it is missing or empty."""
        return self.fields.get(name) or None

    def needed(self, name: str) -> str:
        """The field `name`.

        Raises:
            Problem: it is missing or empty (400).
        """
        found = self.given(name)
        if found is None:
            raise Problem(400, f"the field {name} is empty or missing: go back, and fill it in")
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """A page: its template and what that shows."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """An action that was done: which page follows, and what is said there."""

    path: str
    """Below the dashboard's root."""
    note: str
    """A key of `NOTES`."""


NOTES = {
    "paused": "The queue is paused.",
    "resumed": "The queue is resumed.",
    "not_paused": "The queue was not paused.",
    "done": "Done.",
    "requested": "Its subscriber is asked to cancel it. A handler that ends first wins.",
    "running": "Not changed: a subscriber has leased it. A cancel asks that to end it.",
    "busy": "Not changed: another transaction has locked it just now. Try again.",
    "ended": "Not changed: it has ended, and is in the archive. A redrive brings it back.",
    "not_found": "Not changed: there is no such message.",
    "begun": "The job has begun.",
    "stopped": "The job stops behind its running batch.",
    "goes_on": "The job goes on.",
    "undoing": "The undo has begun.",
    "drained": "The worker is drained: it ends what it runs, and claims nothing more.",
    "undrained": "The worker claims again.",
    "drain_unchanged": "Not changed: it is so already.",
    "released": "What the worker had leased is due again.",
    "lock_released": "The lock is free. Its holder learns of it at its next renewal.",
    "lock_free": "Nothing held the lock.",
    "schedule_asked": "A process that declares the schedule publishes its message once more.",
    "schedule_paused": "The schedule is paused: it publishes nothing until it is resumed.",
    "schedule_resumed": "The schedule goes on with its next fire time.",
    "schedule_unchanged": "Not changed: it is so already, or there is no such schedule.",
    "schedule_forgotten": "The schedule is forgotten. A process that declares it begins it anew.",
    "no_schedule": "There is no such schedule.",
    "nothing_released": "The worker had leased nothing.",
}
"""What a page says after an action: texts are chosen here, so that no link can bring its own."""


def moment_or_age(text: str | None) -> Duration | datetime | None:
    """A time in ISO 8601 (in UTC if it names no zone), or a duration such as 90s, 15m or 2h."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        return text.strip()
    return found.replace(tzinfo=timezone.utc) if found.tzinfo is None else found


N = TypeVar("N", int, float)


def number(asked: Asked, name: str, kind: type[N]) -> N | None:
    """Return the field `name`, a number of this kind; None: it is missing or empty.

    Raises:
        Problem: it is none (400).
    """
    text = asked.given(name)
    try:
        return None if text is None else kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise Problem(400, f"{name} must be {wanted}, got {short(text)}") from None


_TEXTS = ("queue", "state", "key", "error", "reason", "fingerprint")
SEARCH_FIELDS = (*_TEXTS, "header", "value", "since", "until", "archived")
"""Names of the fields of the search for messages."""
STATES = tuple(state.name for state in MessageState)


def given_filter(given: Callable[[str], str | None]) -> dict[str, str]:
    """What was filled in, by the names of the fields; `given` reads a field."""
    return {name: value for name in SEARCH_FIELDS if (value := given(name)) is not None}


def search_of(fields: Mapping[str, str], settings: Settings) -> dict[str, Any]:
    """The arguments of `admin.messages`.

    Raises:
        Problem: the name of a header and its value do not come together (400), or headers and
            errors are hidden (403): who may search by them can guess them.
    """
    if not settings.bodies and {"header", "value", "error"} & fields.keys():
        raise Problem(403, "headers and errors are hidden here, so there is no search by them")
    found: dict[str, Any] = {name: fields[name] for name in _TEXTS if name in fields}
    for name in ("since", "until"):
        if name in fields:
            found[name] = moment_or_age(fields[name])
    if ("header" in fields) != ("value" in fields):
        raise Problem(400, "a search by a header needs its name and its value")
    if "header" in fields:
        found["headers"] = {fields["header"]: fields["value"]}
    if is_archived(fields):
        found["archived"] = True
    return found


def is_archived(fields: Mapping[str, str]) -> bool:
    """Whether the search looks into the archive."""
    state = fields.get("state", "").upper()
    ended = state in {each.name for each in ARCHIVED_STATES}
    return ended or bool({"archived", "reason", "fingerprint"} & fields.keys())
