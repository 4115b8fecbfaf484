"""Requests and results of pages and actions, and the message search in addresses and forms."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from faststream_sqlbroker.core.overview import JobCounts
from faststream_sqlbroker.core.states import ARCHIVED_STATES, MessageState
from faststream_sqlbroker.core.stored import Redact, StoredMessage
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.http.dashboard.shared import SharedQueries
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.users import Role, User

if TYPE_CHECKING:
    from faststream_sqlbroker.admin import Admin


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Visibility and permissions of the dashboard."""

    writes: bool
    """True if there are actions at all."""
    bodies: bool
    """True if headers, bodies and errors are visible; errors may quote bodies."""
    redact: Redact | None
    """Changes each message before it is shown."""

    @property
    def errors(self) -> bool:
        """True if errors outside of messages are visible, which `redact` cannot change."""
        return self.bodies and self.redact is None

    def redact_message(self, message: StoredMessage) -> StoredMessage:
        """Return the visible message; an error that `redact` has replaced stays."""
        redacted = message if self.redact is None else self.redact(message)
        if self.bodies or redacted.last_error != message.last_error:
            return redacted
        return replace(redacted, last_error=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardRequest:
    """A request of an authenticated user."""

    request: Request
    user: User
    admin: "Admin"
    settings: DashboardSettings
    shared: SharedQueries
    """Query results that all users share."""
    list_pull_queues: Callable[[], Awaitable[list[str]]]
    """Returns the queues of pull consumers."""
    count_jobs: Callable[[Sequence[str]], Awaitable[list[JobCounts]]]
    """Returns the jobs by state of each queue."""
    fields: Mapping[str, str]
    """Fields of the query string and of the form."""

    @property
    def writes(self) -> bool:
        """True if this user may change something."""
        return self.settings.writes and self.user.may(Role.OPERATOR)

    @property
    def message_id(self) -> str:
        """Message id in the path; `admin` refuses an invalid id."""
        # Starlette's int convertor fails at thousands of digits, before authentication.
        number: str = self.request.path_params["message"]
        return number

    def get_field(self, name: str) -> str | None:
        """Return the field `name`, or None if the field is missing or empty."""
        return self.fields.get(name) or None

    def get_required_field(self, name: str) -> str:
        """Return the field `name`.

        Raises:
            Problem: the field is missing or empty (400).
        """
        value = self.get_field(name)
        if value is None:
            raise Problem(400, f"the field {name} is empty or missing: go back, and fill it in")
        return value


@dataclass(frozen=True, slots=True)
class PageContent:
    """The template and the values of a page."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The next page after an action, and a note for the user."""

    path: str
    """Path below the dashboard's root."""
    note: str
    """A key of `NOTES`."""


NOTES = {
    "paused": "The queue is paused.",
    "resumed": "The queue is resumed.",
    "not_paused": "The queue was not paused.",
    "done": "Done.",
    "requested": "Cancel requested. If the handler ends first, its outcome counts.",
    "running": "Not changed: a subscriber has leased the message. Cancel it to end it.",
    "busy": "Not changed: another transaction has locked the message. Try again.",
    "ended": "Not changed: the message has ended, and is in the archive. Redrive it.",
    "not_found": "Not changed: the message does not exist.",
    "begun": "The job has started.",
    "stopped": "The job stops after its current batch.",
    "goes_on": "The job continues.",
    "undoing": "The undo has started.",
    "drained": "The worker is drained: it finishes its running messages, and claims no more.",
    "undrained": "The worker claims again.",
    "drain_unchanged": "Not changed: the worker is already in this state.",
    "released": "The messages that the worker had leased are due again.",
    "lock_released": "The lock is free. Its holder notices this at its next renewal.",
    "lock_free": "The lock was not held.",
    "schedule_asked": "A process that declares the schedule will publish its message once now.",
    "schedule_paused": "The schedule is paused: it publishes no messages until you resume it.",
    "schedule_resumed": "The schedule continues with its next fire time.",
    "schedule_unchanged": "Not changed: the schedule is already in this state, or does not exist.",
    "schedule_forgotten": "The schedule is forgotten. A process that declares it creates it again.",
    "no_schedule": "The schedule does not exist.",
    "nothing_released": "The worker had no leased messages.",
}
"""Texts of a page after an action; a link can only select a text, not bring its own."""


def parse_time_or_age(text: str | None) -> Duration | datetime | None:
    """Parse an ISO 8601 time (UTC without a zone), or return a duration such as 90s, 15m or 2h."""
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        return text.strip()
    return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time


N = TypeVar("N", int, float)


def parse_number(page_request: DashboardRequest, name: str, kind: type[N]) -> N | None:
    """Return the field `name` as a number, or None if the field is missing or empty.

    Raises:
        Problem: the field is not a number (400).
    """
    text = page_request.get_field(name)
    try:
        return None if text is None else kind(text)
    except ValueError:
        requirement = "a whole number" if kind is int else "a number"
        raise Problem(400, f"{name} must be {requirement}, got {format_value(text)}") from None


_TEXT_FIELDS = ("queue", "state", "key", "error", "reason", "fingerprint")
SEARCH_FIELDS = (*_TEXT_FIELDS, "header", "value", "since", "until", "archived")
"""Form fields of the message search."""
STATES = tuple(state.name for state in MessageState)


def read_search_fields(get_field: Callable[[str], str | None]) -> dict[str, str]:
    """Return the search fields that were filled in, by name."""
    return {name: value for name in SEARCH_FIELDS if (value := get_field(name)) is not None}


def to_search_arguments(fields: Mapping[str, str], settings: DashboardSettings) -> dict[str, Any]:
    """Return the arguments of `admin.messages` for the fields of a search form.

    Raises:
        Problem: only one of header name and value is given (400), or headers and errors are hidden
            (403), because a search could guess them.
    """
    if not settings.bodies and {"header", "value", "error"} & fields.keys():
        raise Problem(403, "headers and errors are hidden here, so you cannot search by them")
    arguments: dict[str, Any] = {name: fields[name] for name in _TEXT_FIELDS if name in fields}
    for name in ("since", "until"):
        if name in fields:
            arguments[name] = parse_time_or_age(fields[name])
    if ("header" in fields) != ("value" in fields):
        raise Problem(400, "a search by a header needs both its name and its value")
    if "header" in fields:
        arguments["headers"] = {fields["header"]: fields["value"]}
    if is_archived(fields):
        arguments["archived"] = True
    return arguments


def is_archived(fields: Mapping[str, str]) -> bool:
    """Return True if the search reads the archive instead of live messages.

    Final states, reasons and fingerprints of errors exist only there.
    """
    state = fields.get("state", "").upper()
    is_ended = state in {archived_state.name for archived_state in ARCHIVED_STATES}
    return is_ended or bool({"archived", "reason", "fingerprint"} & fields.keys())
