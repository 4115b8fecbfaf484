"""Commands that show what is there: queues, messages, subscribers, unknown outcomes, locks and
schedules.
"""

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
from faststream_sqlbroker.cli.options import WhichEnded
from faststream_sqlbroker.cli.output import (
    AsJson,
    print_error,
    print_json,
    print_line,
    print_table,
    row_of,
    tell,
    warn,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.findings import queue_findings
from faststream_sqlbroker.core.imports import imported
from faststream_sqlbroker.core.overview import Count, meant_text
from faststream_sqlbroker.core.times import length_text
from faststream_sqlbroker.exceptions import SetupError, StoreError

LONGEST_HINT = 2.0
"""Seconds."""
RedactBy = Annotated[
    str | None,
    typer.Option(
        "--redact", help="A function, as module:name, that changes each message before it is shown."
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
    """Show what waits in each queue, how fast it grows, and who takes from it."""
    overviews = run(context, lambda broker: broker.admin.queues(queue))
    if as_json:
        print_json([{**row_of(each), "problem": each.problem} for each in overviews])
        return
    print_table("Queues", QUEUE_COLUMNS, [queue_row(each) for each in overviews])
    for each in overviews:
        for finding in queue_findings(each, MAX_AGE):
            print_line(f"{each.queue}: {finding}")
    if queue is not None and not overviews[0].has_messages:
        warn_of_queue(context, queue)


def warn_of_queue(context: typer.Context, queue: str | None) -> None:
    """Warn of a queue that is given and has nothing: its name may be misspelt.

    Raises:
        SetupError: `queue` is not a valid name.
    """

    async def look(broker: SqlBroker, name: str) -> None:
        [each] = await broker.admin.queues(name)
        if each.has_messages or each.live_subscribers or each.paused or each.pulled:
            return
        meant = await broker.admin.similar_queues(name)
        group: Any = context.parent
        if context.info_name == "list":
            # The name may be meant for another command of the group.
            near = get_close_matches(name, group.command.commands, 1)
            meant += [f"sqlbroker {group.info_name} {command}" for command in near]
        text = "no message waits, and no live subscriber takes from it"
        warn(f"{name}: {text}{meant_text(meant)}")

    # A hint must not keep a command from its work, which may be what relieves the database.
    with suppress(StoreError, TimeoutError):
        if queue is not None:
            run(context, lambda broker: asyncio.wait_for(look(broker, queue), LONGEST_HINT))


def queue_row(each: QueueOverview) -> list[Any]:
    """The cells of `QUEUE_COLUMNS`."""
    oldest = length_text(each.oldest_due_age) if each.ready.value else ""
    rates = (each.in_per_minute, each.out_per_minute)
    counts = (each.ready, each.delayed, each.in_flight, each.retrying)
    return [each.queue, *counts, oldest, *rates, each.live_subscribers]


def messages(
    context: typer.Context,
    which: WhichEnded,
    state: Annotated[str | None, typer.Option(help="Only messages in this state.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="A header, as name=value; may be repeated.")
    ] = None,
    archived: Annotated[bool, typer.Option("--archived", help="Messages that have ended.")] = False,
    limit: Annotated[int, typer.Option(help="Most messages to show.")] = 50,
    after: Annotated[str | None, typer.Option(help="Go on where a page ended.")] = None,
    bodies: Annotated[bool, typer.Option("--bodies", help="Headers and bodies, too.")] = False,
    redact: RedactBy = None,
    as_json: AsJson = False,
) -> None:
    """List or search messages, a page at a time."""
    hook = _hook(redact)
    page = run(
        context,
        lambda broker: broker.admin.messages(
            state=state,
            headers=headers_of(header),
            archived=archived,
            limit=limit,
            after=after,
            bodies=bodies,
            redact=hook,
            **which.filters,
        ),
    )
    if as_json:
        # The cursor is there even if it is null: a script reads on until then.
        rest = {"after": page.after, "scanned_until": page.scanned_until}
        print_json({"messages": [message_row(m, hidden=bodies) for m in page.messages], **rest})
        return
    _print_page(page, bodies=bodies)
    if not page.messages:
        warn_of_queue(context, which.queue)


def _print_page(page: MessagePage, *, bodies: bool) -> None:
    moment = "ended" if any(m.archived_at for m in page.messages) else "due"
    columns = ["id", "queue", "state", "key", "attempts", "created", moment, "reason", "error"]
    shown = [*columns, "body"] if bodies else columns
    print_table("Messages", shown, [_line(m, bodies=bodies) for m in page.messages])
    if page.scanned_until is not None:
        print_line(f"looked at messages until {page.scanned_until:%Y-%m-%d %H:%M:%S} UTC")
    if page.after is not None:
        print_line(f"there may be more: --after {page.after}")


def _hook(redact: str | None) -> Any:
    return None if redact is None else imported(redact, what="--redact")


def headers_of(given: Sequence[str] | None) -> dict[str, str]:
    """The headers of `--header name=value`.

    Raises:
        SetupError: one is written otherwise.
    """
    found = {}
    for each in given or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise SetupError(f"--header must be name=value, got {each!r}")
        found[name] = value
    return found


def _line(m: StoredMessage, *, bodies: bool) -> list[Any]:
    moment = m.archived_at or m.next_attempt_at
    cells = [m.id, m.queue, m.state, m.key, m.attempts_count, m.created_at, moment]
    cells += [m.reason, m.last_error]
    return [*cells, m.body] if bodies else cells


def message_row(message: StoredMessage, *, hidden: bool) -> dict[str, Any]:
    """One message as JSON shows it; `hidden`: its headers and body were read."""
    fields = row_of(message)
    # Not null, as for a message without headers: they were not read.
    if not hidden:
        del fields["headers"]
        del fields["body"]
    return fields


def show(
    context: typer.Context,
    message_id: MessageId,
    body: Annotated[bool, typer.Option(help="Show its headers and body, too.")] = True,
    redact: RedactBy = None,
    as_json: AsJson = False,
) -> None:
    """Show one message, live or archived: its history, and why it is where it is."""
    hook = _hook(redact)
    detail = run(context, lambda broker: broker.admin.message(message_id, body=body, redact=hook))
    if detail is None:
        text = f"there is no message {message_id}, live or archived"
        if as_json:
            print_error(text, "NotFound", 1)
        else:
            print_line(text)
        raise typer.Exit(1)
    if as_json:
        print_json(
            {
                "message": message_row(detail.message, hidden=body),
                "history": [asdict(event) for event in detail.history],
                "came_from": detail.came_from,
                "progress": detail.progress and row_of(detail.progress),
                "explanation": row_of(detail.explanation),
            }
        )
        return
    _print_detail(detail, body=body)


def _print_detail(detail: MessageDetail, *, body: bool) -> None:
    fields = message_row(detail.message, hidden=False)
    given = [(name, value) for name, value in fields.items() if value is not None]
    print_table(f"Message {detail.message.id}", ["field", "value"], given)
    events = [(event.at, event.text) for event in detail.history]
    print_table("History", ["when (UTC)", "what"], events)
    if (progress := detail.progress) is not None:
        print_line(f"progress {progress.fraction:.0%} {progress.text or ''} at {progress.at}")
    if detail.came_from is not None:
        print_line(f"came from {detail.came_from}")
    if body:
        print_line(f"headers: {detail.message.headers}")
        print_line(f"body: {detail.message.body!r}")
    print_line(str(detail.explanation))


def explain(context: typer.Context, message_id: MessageId, as_json: AsJson = False) -> None:
    """Tell why a message waits, or how it ended."""
    found = run(context, lambda broker: broker.admin.explain(message_id))
    tell(row_of(found), str(found), as_json=as_json)
    if found.state is None:
        raise typer.Exit(1)


def subscribers(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only those of this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the live subscribers of all processes."""
    found = run(context, lambda broker: broker.admin.subscribers(queue))
    if as_json:
        print_json([row_of(each) for each in found])
        return
    rows = [[s.worker, ", ".join(s.queues), s.max_workers, s.way, s.since, _mode(s)] for s in found]
    print_table("Subscribers", ["worker", "queues", "workers", "way", "since", "mode"], rows)
    if not found:
        warn_of_queue(context, queue)


def _mode(subscriber: Any) -> str:
    if subscriber.stopping:
        return "stopping"
    if subscriber.drained:
        return "drained"
    return "paused" if subscriber.paused else "claims"


Limit = Annotated[int, typer.Option(min=1, help="Most lines to show.")]


def policies(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most queues to show.")] = 100,
    after: Annotated[str | None, typer.Option(help="Only queues behind this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what waits for which policy of its queue, and until when."""
    page = run(context, lambda broker: broker.admin.policies(queue, after=after, limit=limit))
    if as_json:
        print_json([row_of(each) for each in page])
        return
    columns = ["queue", "policy", "reason", "messages", "due", "until", "last until"]
    print_table("Policies", columns, [row for each in page for row in _waits(each)])
    for each in page:
        if len(each.ways) > 1:
            ways = ", ".join(each.ways)
            print_line(f"{each.queue}: no policy is guaranteed, as its subscribers differ: {ways}")
    if queue is None:
        if len(page) == limit:
            print_line(f"there may be more: --after {page[-1].queue}")
    elif not page:
        print_line(f"no live subscriber of {queue} has policies")
        warn_of_queue(context, queue)


def _waits(each: PoliciedQueue) -> list[list[Any]]:
    """The lines of a queue: one for each reason, or one that nothing waits."""
    lines: list[list[Any]] = []
    for wait in each.waits:
        count = Count(wait.count, "at least" if wait.capped else "exact")
        times = (wait.until, wait.until_last)
        lines.append([each.queue, wait.policy, wait.code, count, wait.due, *times])
    return lines or [[each.queue, ", ".join(each.ways), "nothing waits", 0, 0, None, None]]


def unknown(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only messages of this queue.")] = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """List messages whose handler may or may not have run."""
    found = run(context, lambda broker: broker.admin.unknown(queue, limit=limit))
    _print_listing(
        "Unknown outcomes", "message_id queue key started_at worker", found, as_json=as_json
    )


def locks(context: typer.Context, limit: Limit = 100, as_json: AsJson = False) -> None:
    """List the locks that have a holder."""
    found = run(context, lambda broker: broker.admin.locks(limit=limit))
    _print_listing("Locks", "key fence acquired_at held_until worker", found, as_json=as_json)


def schedules(context: typer.Context, limit: Limit = 1_000, as_json: AsJson = False) -> None:
    """List the schedules of all processes, with their last and next times."""
    found = run(context, lambda broker: broker.admin.schedules(limit=limit))
    columns = "name expression tz last_fire_at next_fire_at failures_count paused_by"
    _print_listing("Schedules", columns, found, as_json=as_json)


def _print_listing(title: str, columns: str, found: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        print_json([row_of(each) for each in found])
        return
    names = columns.split()
    print_table(title, names, [[getattr(each, name) for name in names] for each in found])
