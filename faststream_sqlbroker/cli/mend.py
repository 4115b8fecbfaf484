"""Commands that change something: each shows first what it would change, and asks."""

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Admin, Repair
from faststream_sqlbroker.cli.bulk import do_bulk
from faststream_sqlbroker.cli.look import MessageId, headers_of, warn_of_queue
from faststream_sqlbroker.cli.options import Act, BulkRun, Change, Targets, Which, means_all
from faststream_sqlbroker.cli.output import (
    print_json,
    print_table,
    refuse_json,
    row_of,
    warn,
)
from faststream_sqlbroker.cli.target import check, run, run_confirmed
from faststream_sqlbroker.core.overview import meant_text, nearest_names
from faststream_sqlbroker.exceptions import SetupError

QueueName = Annotated[str, typer.Argument(help="The queue's full name.")]


def pause(
    context: typer.Context,
    queue: QueueName,
    how: Change,
    reason: Annotated[str | None, typer.Option(help="Shown by queues and explain.")] = None,
    until: Annotated[str | None, typer.Option(help='For how long, like "2h".')] = None,
) -> None:
    """Stop all claims from a queue, in all processes, until it is resumed."""

    async def look(broker: SqlBroker) -> str:
        [found] = await broker.admin.queues(queue)
        return f"pause {queue}: {found.ready} ready, {found.live_subscribers} live subscribers"

    warn_of_queue(context, queue)
    if not how.yes:
        refuse_json(how.as_json)
        check(context, [lambda a: a.pause(queue, reason=reason, until=until, by=how.by)])
        how.confirm(run(context, look))

    async def work(broker: SqlBroker) -> Any:
        await broker.admin.pause(queue, reason=reason, until=until, by=how.by)
        return [each for each in await broker.admin.paused() if each.queue == queue]

    for paused in run(context, work):
        end = "it is resumed" if paused.until is None else f"{paused.until:%Y-%m-%d %H:%M:%S}"
        how.tell(row_of(paused), f"{queue} is paused until {end}")


def resume(context: typer.Context, queue: QueueName, how: Act) -> None:
    """End the pause of a queue."""

    # It does not ask: what was paused by a slip can be mended at once.
    async def work(broker: SqlBroker) -> tuple[bool, str]:
        if await broker.admin.resume(queue, by=how.by):
            return True, f"{queue} is resumed"
        paused = [each.queue for each in await broker.admin.paused()]
        return False, f"{queue} was not paused{meant_text(nearest_names(queue, paused))}"

    was, text = run(context, work)
    how.tell({"queue": queue, "was_paused": was}, text)


def cancel(
    context: typer.Context,
    targets: Targets,
    which: Which,
    how: BulkRun,
    reason: Annotated[str | None, typer.Option(help="Kept with each message.")] = None,
) -> None:
    """End messages as DISCARDED: these, also while they run, or all that match and wait."""
    if means_all(targets, which, how):
        do_bulk(context, how, lambda a: a.bulk_cancel(reason=reason, **how.options(which)))
    else:
        ids = targets.message_ids
        _change(context, "cancel", ids, how, lambda a, n: a.cancel(n, reason=reason, by=how.by))


def retry(context: typer.Context, targets: Targets, which: Which, how: BulkRun) -> None:
    """Make messages due now, these or all that match, that wait for their time or an attempt."""
    if means_all(targets, which, how):
        do_bulk(context, how, lambda a: a.bulk_retry(**how.options(which)))
    else:
        ids = targets.message_ids
        _change(context, "retry now", ids, how, lambda a, n: a.retry_now(n, by=how.by))


def postpone(
    context: typer.Context,
    message_id: MessageId,
    until: Annotated[str, typer.Argument(help='In how long it is due, like "1h".')],
    how: Change,
) -> None:
    """Make a message due later, or earlier, than it is."""
    ids = [message_id]
    _change(context, "postpone", ids, how, lambda a, n: a.postpone(n, until, by=how.by))


def move(
    context: typer.Context,
    to: Annotated[str, typer.Option(help="The queue to move to.")],
    targets: Targets,
    which: Which,
    how: BulkRun,
) -> None:
    """Move messages that wait, these or all that match, to another queue; they are due there."""
    warn_of_queue(context, to)
    if means_all(targets, which, how):
        do_bulk(context, how, lambda a: a.bulk_move(to, **how.options(which)))
    else:
        ids = targets.message_ids
        _change(context, f"move to {to}", ids, how, lambda a, n: a.move(n, to, by=how.by))


def edit(
    context: typer.Context,
    message_id: MessageId,
    how: Change,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="Higher comes first.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="What policies and order work on.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Take the key away.")] = False,
    due: Annotated[str | None, typer.Option(help='In how long it is due, like "1h".')] = None,
) -> None:
    """Change the priority, the key or the due time of a message that waits."""
    if key is not None and no_key:
        raise SetupError("give --key or --no-key, not both")
    # Left out, not None: None takes the key away.
    fields: dict[str, Any] = {} if key is None and not no_key else {"key": key}
    fields |= {"priority": priority, "due": due, "by": how.by}
    _change(context, "edit", [message_id], how, lambda a, n: a.edit(n, **fields))


def release(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its name, as subscribers lists it.")],
    how: Change,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is alive: its handlers go on.")
    ] = False,
) -> None:
    """Release what a worker has leased that ended without a stop."""
    count = run_confirmed(
        context,
        how,
        f"release all messages that {worker} has leased",
        lambda a: a.release(worker, force=force, by=how.by),
    )
    how.tell({"worker": worker, "released": count}, f"released {count} messages of {worker}")


WorkerName = Annotated[
    str,
    typer.Argument(
        help="Its name, as subscribers lists it; host:pid means all of that process.",
    ),
]


def drain(context: typer.Context, worker: WorkerName, how: Change) -> None:
    """Let a worker claim nothing more: it ends what it runs, and stays alive."""
    text = f"{worker} claims nothing more until it is undrained"
    names = run_confirmed(context, how, text, lambda a: a.drain(worker, by=how.by))
    lines = [f"{name} is drained" for name in names] or [f"{worker} was drained already"]
    how.tell({"worker": worker, "drained": names}, *lines)


def undrain(context: typer.Context, worker: WorkerName, how: Act) -> None:
    """End the drain of a worker: it claims again."""
    # It does not ask: what was drained by a slip can be mended at once.
    names = run(context, lambda broker: broker.admin.undrain(worker, by=how.by))
    lines = [f"{name} claims again" for name in names] or [f"{worker} was not drained"]
    how.tell({"worker": worker, "undrained": names}, *lines)


def publish(
    context: typer.Context,
    queue: QueueName,
    body: Annotated[str, typer.Argument(help="JSON, or any text; - reads it from stdin.")],
    how: Act,
    key: Annotated[str | None, typer.Option(help="What policies and order work on.")] = None,
    priority: Annotated[int, typer.Option(help="-100 to 100; higher comes first.")] = 0,
    delay: Annotated[str | None, typer.Option(help='In how long it is due, like "5m".')] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="A header, as name=value; may be repeated.")
    ] = None,
) -> None:
    """Publish one message; the audit names who did."""
    text = sys.stdin.read() if body == "-" else body

    is_json, encoded = _body(text)
    known = {"content-type": "application/json"} if is_json else {}
    given: Any = {"key": key, "priority": priority, "delay": delay, "by": how.by}
    given["headers"] = {**known, **headers_of(header)}

    warn_of_queue(context, queue)
    message_id = run(context, lambda broker: broker.admin.publish(encoded, queue, **given))
    done = f"published message {message_id} to {queue}"
    how.tell({"message_id": message_id, "queue": queue}, done)
    if not is_json and text.lstrip().startswith(("{", "[")):
        # The shell may have eaten its quotes.
        warn("warning: the body begins like JSON, but is none: it was published as text")


def _body(text: str) -> tuple[bool, bytes | str]:
    """Whether the text is JSON, and the body: JSON as it was given, with all digits of a number."""
    try:
        json.loads(text, parse_constant=_no_json)
        return True, text.encode()
    except (ValueError, RecursionError):
        return False, text


def _no_json(name: str) -> Any:
    """Refuse NaN and Infinity, which Python takes and others do not."""
    raise ValueError(name)


def _change(
    context: typer.Context,
    what: str,
    message_ids: Sequence[str] | None,
    how: Change,
    action: Callable[[Admin, str], Awaitable[Repair]],
) -> None:
    """Show the messages, ask, and change each; exit code 1 if one was not changed."""
    ids = message_ids or ()
    if isinstance(how, BulkRun) and how.dry_run:
        _show_first(context, ids, as_json=how.as_json)
        return
    # Rows may change between the look and the action; what was not changed is reported then.
    if not how.yes:
        refuse_json(how.as_json)
        check(context, (lambda a: action(a, each) for each in ids))  # noqa: B023 - called at once
        _show_first(context, ids, as_json=False)
        how.confirm(f"{what}: {len(ids)} messages")

    # One after the other: each is a transaction of its own, and the first error ends the command.
    async def work(broker: SqlBroker) -> list[Repair]:
        return [await action(broker.admin, each) for each in ids]

    found = run(context, work)
    rows = [{**row_of(each), "done": each.done} for each in found]
    how.tell(rows, *map(str, found))
    if not all(each.accepted for each in found):
        raise typer.Exit(1)


def _show_first(context: typer.Context, message_ids: Sequence[str], *, as_json: bool) -> None:
    """Show the messages; end the command if there is none of them."""
    columns = ["id", "state", "queue", "key"]

    async def look(broker: SqlBroker) -> list[list[Any]]:
        rows: list[list[Any]] = []
        for each in message_ids:
            detail = await broker.admin.message(each, body=False)
            m = None if detail is None else detail.message
            found = [each, None, None, None] if m is None else [m.id, m.state.name, m.queue, m.key]
            rows.append(found)
        return rows

    rows = run(context, look)
    some = any(row[1] for row in rows)
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        shown = [[row[0], row[1] or "not found", *row[2:]] for row in rows]
        print_table("These would change" if some else "Nothing would change", columns, shown)
    if not some:
        raise typer.Exit(1)
