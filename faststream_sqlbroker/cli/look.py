"""Commands that show queues, messages, subscribers, unknown outcomes, locks and schedules."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import (
    MessageDetail,
    MessagePage,
    PoliciedQueue,
    QueueOverview,
    StoredMessage,
)
from faststream_sqlbroker.admin.findings import MAX_AGE
from faststream_sqlbroker.cli.output import (
    AsJson,
    print_error,
    print_json,
    print_line,
    print_result,
    print_table,
    to_json_dict,
    warn,
    warn_if_cut,
)
from faststream_sqlbroker.cli.shared_options import ArchivedMessageFilter
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.findings import find_queue_problems
from faststream_sqlbroker.core.imports import import_object
from faststream_sqlbroker.core.overview import Count, format_name_hint
from faststream_sqlbroker.core.times import format_duration
from faststream_sqlbroker.database.parts.live_queues import MAX_QUEUES
from faststream_sqlbroker.exceptions import SetupError, StoreError

HINT_TIMEOUT = 2.0
"""Seconds to wait for the database before a hint is left out."""
RedactBy = Annotated[
    str | None,
    typer.Option(
        "--redact", help="Function, as module:name, that redacts each message before it is shown."
    ),
]
QUEUE_COLUMNS = (
    "queue",
    "ready",
    "delayed",
    "leased",
    "retrying",
    "oldest",
    "in/min",
    "out/min",
    "live",
)
MessageId = Annotated[str, typer.Argument(help="The message's id.")]


def queues(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the messages, rates and live subscribers of each queue."""
    overviews = run(context, lambda broker: broker.admin.queues(queue))
    if as_json:
        print_json(
            [{**to_json_dict(overview), "problem": overview.problem} for overview in overviews]
        )
    else:
        print_table("Queues", QUEUE_COLUMNS, [build_queue_row(overview) for overview in overviews])
        for overview in overviews:
            for finding in find_queue_problems(overview, MAX_AGE):
                print_line(f"{overview.queue}: {finding}")
    warn_if_cut(overviews, MAX_QUEUES, "name a queue to show it")
    if not as_json and queue is not None and not overviews[0].has_messages:
        warn_if_queue_is_empty(context, queue)


def warn_if_queue_is_empty(context: typer.Context, queue: str | None) -> None:
    """Warn on stderr if a queue has no messages, subscribers or pause: the name may be misspelt.

    The warning suggests similar names. Commands call this with the queue that the user named, and
    None for no queue.

    Raises:
        SetupError: `queue` is not a valid name.
    """

    async def check_queue(broker: SqlBroker, name: str) -> None:
        """Print the warning, unless something shows that the queue is in use."""
        [overview] = await broker.admin.queues(name)
        if overview.has_messages or overview.live_subscribers or overview.paused or overview.pulled:
            return
        suggestions = await broker.admin.similar_queues(name)
        group: Any = context.parent
        if context.info_name == "list":
            # The name may be a misspelt command of the group.
            similar_commands = get_close_matches(name, group.command.commands, 1)
            suggestions += [
                f"sqlbroker {group.info_name} {command}" for command in similar_commands
            ]
        text = "the queue has no waiting messages and no live subscribers"
        warn(f"{name}: {text}{format_name_hint(suggestions)}")

    # A hint must not stop a command, which may be the one that relieves the database.
    with suppress(StoreError, TimeoutError):
        if queue is not None:
            run(context, lambda broker: asyncio.wait_for(check_queue(broker, queue), HINT_TIMEOUT))


def build_queue_row(overview: QueueOverview) -> list[Any]:
    """Return the cells of `QUEUE_COLUMNS`."""
    oldest = format_duration(overview.oldest_due_age) if overview.ready.value else ""
    rates = (overview.in_per_minute, overview.out_per_minute)
    counts = (overview.ready, overview.delayed, overview.in_flight, overview.retrying)
    return [overview.queue, *counts, oldest, *rates, overview.live_subscribers]


def messages(
    context: typer.Context,
    message_filter: ArchivedMessageFilter,
    state: Annotated[str | None, typer.Option(help="Only messages in this state.")] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help="Only messages with this header, as name=value; repeat for several."),
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Search the archive.")] = False,
    limit: Annotated[int, typer.Option(help="Maximum messages to show.")] = 50,
    after: Annotated[str | None, typer.Option(help="Continue after the previous page.")] = None,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Show bodies; with --json, also headers.")
    ] = False,
    redact: RedactBy = None,
    as_json: AsJson = False,
) -> None:
    """List or search messages, one page at a time."""
    hook = _load_redact(redact)
    page = run(
        context,
        lambda broker: broker.admin.messages(
            state=state,
            headers=parse_headers(header),
            archived=archived,
            limit=limit,
            after=after,
            bodies=bodies,
            redact=hook,
            **message_filter.filters,
        ),
    )
    if as_json:
        # The cursor is always present: a script reads on until it is null.
        page_end = {"after": page.after, "scanned_until": page.scanned_until}
        print_json(
            {
                "messages": [to_message_dict(m, with_content=bodies) for m in page.messages],
                **page_end,
            }
        )
        return
    _print_page(page, bodies=bodies)
    if not page.messages:
        warn_if_queue_is_empty(context, message_filter.queue)


def _print_page(page: MessagePage, *, bodies: bool) -> None:
    """Print a page of live or archived messages, with the option that shows the next page."""
    time_column = "ended" if any(m.archived_at for m in page.messages) else "due"
    columns = ["id", "queue", "state", "key", "attempts", "created", time_column, "reason", "error"]
    visible_columns = [*columns, "body"] if bodies else columns
    print_table(
        "Messages", visible_columns, [_build_message_cells(m, bodies=bodies) for m in page.messages]
    )
    if page.scanned_until is not None:
        print_line(f"the search stopped at a message of {page.scanned_until:%Y-%m-%d %H:%M:%S} UTC")
    if page.after is not None:
        print_line(f"there may be more messages: continue with --after {page.after}")


def _load_redact(redact: str | None) -> Any:
    """Import the function of `--redact`, which hides parts of a message; None if not given."""
    return None if redact is None else import_object(redact, option="--redact")


def parse_headers(values: Sequence[str] | None) -> dict[str, str]:
    """Parse values of `--header name=value`.

    Raises:
        SetupError: a value has another form.
    """
    headers = {}
    for header in values or ():
        name, equals, value = header.partition("=")
        if not equals or not name:
            raise SetupError(f"--header must be name=value, got {header!r}")
        headers[name] = value
    return headers


def _build_message_cells(m: StoredMessage, *, bodies: bool) -> list[Any]:
    """Return the cells of a message, in the order of the columns of `_print_page`."""
    timestamp = m.archived_at or m.next_attempt_at
    cells = [m.id, m.queue, m.state, m.key, m.attempts_count, m.created_at, timestamp]
    cells += [m.reason, m.last_error]
    return [*cells, m.body] if bodies else cells


def to_message_dict(message: StoredMessage, *, with_content: bool) -> dict[str, Any]:
    """Convert a message to a JSON object; `with_content` means that headers and body were read.

    Otherwise the object has neither, as null would mean a message without headers.
    """
    fields = to_json_dict(message)
    if not with_content:
        del fields["headers"]
        del fields["body"]
    return fields


def show(
    context: typer.Context,
    message_id: MessageId,
    body: Annotated[bool, typer.Option(help="Show headers and body.")] = True,
    redact: RedactBy = None,
    as_json: AsJson = False,
) -> None:
    """Show a live or archived message: its fields, history, and why it waits or how it ended."""
    hook = _load_redact(redact)
    detail = run(context, lambda broker: broker.admin.message(message_id, body=body, redact=hook))
    if detail is None:
        text = f"no live or archived message has the id {message_id}"
        if as_json:
            print_error(text, "NotFound", 1)
        else:
            print_line(text)
        raise typer.Exit(1)
    if as_json:
        print_json(
            {
                "message": to_message_dict(detail.message, with_content=body),
                "history": [asdict(event) for event in detail.history],
                "came_from": detail.came_from,
                "progress": detail.progress and to_json_dict(detail.progress),
                "explanation": to_json_dict(detail.explanation),
            }
        )
        return
    _print_detail(detail, body=body)


def _print_detail(detail: MessageDetail, *, body: bool) -> None:
    """Print the fields, the history and the explanation of a message."""
    fields = to_message_dict(detail.message, with_content=False)
    values = [(name, value) for name, value in fields.items() if value is not None]
    print_table(f"Message {detail.message.id}", ["field", "value"], values)
    events = [(event.at, event.text) for event in detail.history]
    print_table("History", ["time (UTC)", "event"], events)
    if (progress := detail.progress) is not None:
        print_line(f"progress {progress.fraction:.0%} {progress.text or ''} at {progress.at}")
    if detail.came_from is not None:
        print_line(f"came from {detail.came_from}")
    if body:
        print_line(f"headers: {detail.message.headers}")
        print_line(f"body: {detail.message.body!r}")
    print_line(str(detail.explanation))


def explain(context: typer.Context, message_id: MessageId, as_json: AsJson = False) -> None:
    """Explain why a message waits, or how it ended."""
    explanation = run(context, lambda broker: broker.admin.explain(message_id))
    print_result(to_json_dict(explanation), str(explanation), as_json=as_json)
    if explanation.state is None:
        raise typer.Exit(1)


def subscribers(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only subscribers of this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the live subscribers of all processes."""
    live_subscribers = run(context, lambda broker: broker.admin.subscribers(queue))
    if as_json:
        print_json([to_json_dict(subscriber) for subscriber in live_subscribers])
        return
    rows = [
        [s.worker, ", ".join(s.queues), s.max_workers, s.mode, s.since, _get_state(s)]
        for s in live_subscribers
    ]
    print_table("Subscribers", ["worker", "queues", "workers", "policies", "since", "state"], rows)
    if not live_subscribers:
        warn_if_queue_is_empty(context, queue)


def _get_state(subscriber: Any) -> str:
    """Return "claims", or what keeps a subscriber from claiming messages."""
    if subscriber.stopping:
        return "stopping"
    if subscriber.drained:
        return "drained"
    return "paused" if subscriber.paused else "claims"


Limit = Annotated[int, typer.Option(min=1, help="Maximum rows to show.")]


def policies(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum queues to show.")] = 100,
    after: Annotated[str | None, typer.Option(help="Only queues after this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how many messages wait for each policy of a queue, and until when."""
    page = run(context, lambda broker: broker.admin.policies(queue, after=after, limit=limit))
    if as_json:
        print_json([to_json_dict(queue_policies) for queue_policies in page])
    else:
        _print_policies(page)
    if queue is None and len(page) == limit:
        warn(f"there may be more queues: continue with --after {page[-1].queue}")
    elif queue is not None and not (page or as_json):
        print_line(f"no live subscriber of {queue} has policies")
        warn_if_queue_is_empty(context, queue)


def _print_policies(page: Sequence[PoliciedQueue]) -> None:
    """Print the waits of queues, and the queues whose policies are not guaranteed."""
    columns = ["queue", "policy", "reason", "messages", "due", "until", "last until"]
    print_table("Policies", columns, [row for waits in page for row in _build_wait_rows(waits)])
    for queue_policies in page:
        if len(queue_policies.ways) > 1:
            policy_sets = ", ".join(queue_policies.ways)
            print_line(
                f"{queue_policies.queue}: policies are not guaranteed because subscribers differ: "
                f"{policy_sets}"
            )


def _build_wait_rows(queue_policies: PoliciedQueue) -> list[list[Any]]:
    """Return a table row for each policy and reason for which messages of the queue wait.

    A queue without waiting messages gets a single row with its policies.
    """
    rows: list[list[Any]] = []
    for wait in queue_policies.waits:
        count = Count(wait.count, "at least" if wait.capped else "exact")
        times = (wait.until, wait.until_last)
        rows.append([queue_policies.queue, wait.policy, wait.code, count, wait.due, *times])
    return rows or [
        [queue_policies.queue, ", ".join(queue_policies.ways), "none wait", 0, 0, None, None]
    ]


def unknown(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only messages of this queue.")] = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List messages whose handler may or may not have run."""
    outcomes = run(context, lambda broker: broker.admin.unknown(queue, limit=limit))
    columns = "message_id queue key started_at worker"
    _print_listing("Unknown outcomes", columns, outcomes, limit, as_json=as_json)


def locks(context: typer.Context, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List held locks."""
    held_locks = run(context, lambda broker: broker.admin.locks(limit=limit))
    columns = "key fence acquired_at held_until worker"
    _print_listing("Locks", columns, held_locks, limit, as_json=as_json)


def schedules(context: typer.Context, limit: Limit = 1_000, as_json: AsJson = False) -> None:
    """List the schedules of all processes, with their last and next fire times."""
    stored_schedules = run(context, lambda broker: broker.admin.schedules(limit=limit))
    columns = "name expression tz last_fire_at next_fire_at failures_count paused_by"
    _print_listing("Schedules", columns, stored_schedules, limit, as_json=as_json)


def _print_listing(
    title: str, columns: str, items: Sequence[Any], limit: int, *, as_json: bool
) -> None:
    """Print items as JSON, or as a table of the attributes that `columns` names.

    The names are separated by spaces, and are the titles of the table's columns. `limit` is the
    number at which the list was cut.
    """
    if as_json:
        print_json([to_json_dict(item) for item in items])
    else:
        names = columns.split()
        print_table(title, names, [[getattr(item, name) for name in names] for item in items])
    warn_if_cut(items, limit)
