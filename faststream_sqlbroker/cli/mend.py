"""Commands that change something: each shows the change first, and asks for confirmation."""

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Admin, Repair
from faststream_sqlbroker.cli.bulk import run_bulk_action
from faststream_sqlbroker.cli.look import MessageId, parse_headers, warn_if_queue_is_empty
from faststream_sqlbroker.cli.output import print_json, print_table, refuse_json, to_json_dict, warn
from faststream_sqlbroker.cli.shared_options import (
    ActionOptions,
    BulkCommandOptions,
    ChangeOptions,
    MessageFilterOptions,
    Targets,
    is_for_all,
)
from faststream_sqlbroker.cli.target import check_arguments, run, run_confirmed
from faststream_sqlbroker.core.overview import find_similar_names, format_name_hint
from faststream_sqlbroker.core.text import pluralize
from faststream_sqlbroker.exceptions import SetupError

QueueName = Annotated[str, typer.Argument(help="The queue's full name.")]


def pause(
    context: typer.Context,
    queue: QueueName,
    options: ChangeOptions,
    reason: Annotated[str | None, typer.Option(help="Reason, shown by queues and explain.")] = None,
    until: Annotated[str | None, typer.Option(help='Length of the pause, such as "2h".')] = None,
) -> None:
    """Stop all claims from a queue, in all processes, until it is resumed."""

    async def describe_queue(broker: SqlBroker) -> str:
        """Return the question, with the messages and subscribers that the pause concerns."""
        [overview] = await broker.admin.queues(queue)
        subscribers = pluralize(overview.live_subscribers, "live subscribers")
        return f"pause {queue}: {overview.ready} ready, {subscribers}"

    warn_if_queue_is_empty(context, queue)
    if not options.yes:
        refuse_json(options.as_json)
        check_arguments(
            context, [lambda a: a.pause(queue, reason=reason, until=until, by=options.by)]
        )
        options.confirm(run(context, describe_queue))

    async def work(broker: SqlBroker) -> Any:
        """Pause the queue, and read the pause; empty if another operator has just resumed."""
        await broker.admin.pause(queue, reason=reason, until=until, by=options.by)
        return [
            paused_queue
            for paused_queue in await broker.admin.paused()
            if paused_queue.queue == queue
        ]

    for paused in run(context, work):
        end = "it is resumed" if paused.until is None else f"{paused.until:%Y-%m-%d %H:%M:%S} UTC"
        options.print_result(to_json_dict(paused), f"{queue} is paused until {end}")


def resume(context: typer.Context, queue: QueueName, options: ActionOptions) -> None:
    """End the pause of a queue."""

    # No confirmation, so that an accidental pause can be reverted at once.
    async def work(broker: SqlBroker) -> tuple[bool, str]:
        """Return True if the queue was paused, and the text to print."""
        if await broker.admin.resume(queue, by=options.by):
            return True, f"{queue} is resumed"
        paused = [paused_queue.queue for paused_queue in await broker.admin.paused()]
        return False, f"{queue} was not paused{format_name_hint(find_similar_names(queue, paused))}"

    was_paused, text = run(context, work)
    options.print_result({"queue": queue, "was_paused": was_paused}, text)


def cancel(
    context: typer.Context,
    targets: Targets,
    message_filter: MessageFilterOptions,
    options: BulkCommandOptions,
    reason: Annotated[str | None, typer.Option(help="Reason, stored with each message.")] = None,
) -> None:
    """Discard messages by id, even if they run, or all waiting messages that match."""
    if is_for_all(targets, message_filter, options):
        run_bulk_action(
            context,
            options,
            lambda a: a.bulk_cancel(reason=reason, **options.to_arguments(message_filter)),
        )
    else:
        ids = targets.message_ids
        _change_messages(
            context, "cancel", ids, options, lambda a, n: a.cancel(n, reason=reason, by=options.by)
        )


def retry(
    context: typer.Context,
    targets: Targets,
    message_filter: MessageFilterOptions,
    options: BulkCommandOptions,
) -> None:
    """Make waiting messages due now, by id or all that match."""
    if is_for_all(targets, message_filter, options):
        run_bulk_action(
            context, options, lambda a: a.bulk_retry(**options.to_arguments(message_filter))
        )
    else:
        ids = targets.message_ids
        _change_messages(
            context, "retry now", ids, options, lambda a, n: a.retry_now(n, by=options.by)
        )


def postpone(
    context: typer.Context,
    message_id: MessageId,
    until: Annotated[str, typer.Argument(help='Time until the message is due, such as "1h".')],
    options: ChangeOptions,
) -> None:
    """Make a message due later or earlier."""
    ids = [message_id]
    _change_messages(
        context, "postpone", ids, options, lambda a, n: a.postpone(n, until, by=options.by)
    )


def move(
    context: typer.Context,
    to: Annotated[str, typer.Option(help="Target queue.")],
    targets: Targets,
    message_filter: MessageFilterOptions,
    options: BulkCommandOptions,
) -> None:
    """Move waiting messages, by id or all that match, to another queue, due there now."""
    warn_if_queue_is_empty(context, to)
    if is_for_all(targets, message_filter, options):
        run_bulk_action(
            context, options, lambda a: a.bulk_move(to, **options.to_arguments(message_filter))
        )
    else:
        ids = targets.message_ids
        _change_messages(
            context, f"move to {to}", ids, options, lambda a, n: a.move(n, to, by=options.by)
        )


def edit(
    context: typer.Context,
    message_id: MessageId,
    options: ChangeOptions,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="Higher values are claimed first.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Key for policies and ordered delivery.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Remove the key.")] = False,
    due: Annotated[
        str | None, typer.Option(help='Time until the message is due, such as "1h".')
    ] = None,
) -> None:
    """Change the priority, the key or the due time of a waiting message."""
    if key is not None and no_key:
        raise SetupError("give --key or --no-key, not both")
    # Leave the key out instead of passing None, which would remove it.
    fields: dict[str, Any] = {} if key is None and not no_key else {"key": key}
    fields |= {"priority": priority, "due": due, "by": options.by}
    _change_messages(context, "edit", [message_id], options, lambda a, n: a.edit(n, **fields))


def release(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Worker's name, as listed by subscribers.")],
    options: ChangeOptions,
    force: Annotated[
        bool, typer.Option("--force", help="Release even if it is alive; its handlers continue.")
    ] = False,
) -> None:
    """Release the leased messages of a worker that ended without stopping."""
    count = run_confirmed(
        context,
        options,
        f"release all messages that {worker} has leased",
        lambda a: a.release(worker, force=force, by=options.by),
    )
    text = f"released {pluralize(count, 'messages')} of {worker}"
    options.print_result({"worker": worker, "released": count}, text)


WorkerName = Annotated[
    str,
    typer.Argument(
        help="Worker's name, as listed by subscribers; host:pid selects all of a process."
    ),
]


def drain(context: typer.Context, worker: WorkerName, options: ChangeOptions) -> None:
    """Stop all claims of a worker; it finishes its running messages and stays alive."""
    text = f"{worker} claims no more messages until it is undrained"
    names = run_confirmed(context, options, text, lambda a: a.drain(worker, by=options.by))
    lines = [f"{name} is drained" for name in names] or [f"{worker} was already drained"]
    options.print_result({"worker": worker, "drained": names}, *lines)


def undrain(context: typer.Context, worker: WorkerName, options: ActionOptions) -> None:
    """End the drain of a worker, which then claims again."""
    # No confirmation, so that an accidental drain can be reverted at once.
    names = run(context, lambda broker: broker.admin.undrain(worker, by=options.by))
    lines = [f"{name} claims again" for name in names] or [f"{worker} was not drained"]
    options.print_result({"worker": worker, "undrained": names}, *lines)


def publish(
    context: typer.Context,
    queue: QueueName,
    body: Annotated[str, typer.Argument(help="JSON or text; - reads it from stdin.")],
    options: ActionOptions,
    key: Annotated[str | None, typer.Option(help="Key for policies and ordered delivery.")] = None,
    priority: Annotated[
        int, typer.Option(help="-100 to 100; higher values are claimed first.")
    ] = 0,
    delay: Annotated[
        str | None, typer.Option(help='Time until the message is due, such as "5m".')
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="Header, as name=value; repeat for several.")
    ] = None,
) -> None:
    """Publish one message, with an entry in the audit."""
    text = sys.stdin.read() if body == "-" else body

    is_json, encoded = _parse_body(text)
    content_headers = {"content-type": "application/json"} if is_json else {}
    arguments: Any = {"key": key, "priority": priority, "delay": delay, "by": options.by}
    arguments["headers"] = {**content_headers, **parse_headers(header)}

    warn_if_queue_is_empty(context, queue)
    message_id = run(context, lambda broker: broker.admin.publish(encoded, queue, **arguments))
    message = f"published message {message_id} to {queue}"
    options.print_result({"message_id": message_id, "queue": queue}, message)
    if not is_json and text.lstrip().startswith(("{", "[")):
        # The shell may have removed quotes.
        warn("warning: the body looks like JSON but is not valid: it was published as text")


def _parse_body(text: str) -> tuple[bool, bytes | str]:
    """Return True if `text` is JSON, and the body to publish.

    JSON stays the user's text, as bytes: parsing and encoding it again would round numbers.
    """
    try:
        json.loads(text, parse_constant=_reject_constant)
        return True, text.encode()
    except (ValueError, RecursionError):
        return False, text


def _reject_constant(name: str) -> Any:
    """Reject NaN and Infinity, which only Python accepts as JSON."""
    raise ValueError(name)


def _change_messages(
    context: typer.Context,
    description: str,
    message_ids: Sequence[str] | None,
    options: ChangeOptions,
    action: Callable[[Admin, str], Awaitable[Repair]],
) -> None:
    """Show the messages, ask, and call `action` with each message id.

    `description` names the change in the question. With `--dry-run` the messages are only shown.
    The exit code is 1 if a message was not changed, for example because it is leased.
    """
    ids = message_ids or ()
    if isinstance(options, BulkCommandOptions) and options.dry_run:
        _show_affected(context, ids, as_json=options.as_json)
        return
    # A race: a message may change between this query and the action, whose result says so then.
    if not options.yes:
        refuse_json(options.as_json)
        check_arguments(context, (lambda a: action(a, message_id) for message_id in ids))  # noqa: B023 - called at once
        _show_affected(context, ids, as_json=False)
        options.confirm(f"{description}: {pluralize(len(ids), 'messages')}")

    repairs: list[Repair] = []

    # In order: each change is a transaction, and the first error ends the command.
    async def work(broker: SqlBroker) -> None:
        """Change the messages in turn, and keep what happened to each."""
        for message_id in ids:
            repairs.append(await action(broker.admin, message_id))  # noqa: PERF401 - kept at an error

    try:
        run(context, work)
    finally:
        # An error does not undo the changes before it.
        rows = [{**to_json_dict(repair), "done": repair.done} for repair in repairs]
        if rows:
            options.print_result(rows, *map(str, repairs))
    if not all(repair.is_accepted for repair in repairs):
        raise typer.Exit(1)


def _show_affected(context: typer.Context, message_ids: Sequence[str], *, as_json: bool) -> None:
    """Show the messages that a change by id would affect; exit with code 1 if none exists.

    An id without a message gets a row, too, so that the user sees a wrong id before the change.
    """
    columns = ["id", "state", "queue", "key"]

    async def read_rows(broker: SqlBroker) -> list[list[Any]]:
        """Return the cells of each message; only the id for an id without a message."""
        rows: list[list[Any]] = []
        for message_id in message_ids:
            detail = await broker.admin.message(message_id, body=False)
            m = None if detail is None else detail.message
            row = (
                [message_id, None, None, None]
                if m is None
                else [m.id, m.state.name, m.queue, m.key]
            )
            rows.append(row)
        return rows

    rows = run(context, read_rows)
    has_messages = any(row[1] for row in rows)
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        display_rows = [[row[0], row[1] or "not found", *row[2:]] for row in rows]
        print_table(
            "Messages to change" if has_messages else "No messages to change", columns, display_rows
        )
    if not has_messages:
        raise typer.Exit(1)
