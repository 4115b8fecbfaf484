"""Commands that change something: each shows first what it would change, and asks."""

import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import typer

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import Repair
from faststream_sqlbroker.cli.bulk import do_bulk
from faststream_sqlbroker.cli.look import MessageId, empty_hint, headers_of
from faststream_sqlbroker.cli.options import BulkRun, By, Targets, Which, grouped, means_all
from faststream_sqlbroker.cli.output import (
    AsJson,
    PlainConsole,
    Yes,
    ask,
    print_json,
    print_line,
    print_table,
    refuse_json,
    row_of,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.exceptions import SetupError

QueueName = Annotated[str, typer.Argument(help="The queue's full name.")]


def pause(
    context: typer.Context,
    queue: QueueName,
    reason: Annotated[str | None, typer.Option(help="Shown by queues and explain.")] = None,
    until: Annotated[str | None, typer.Option(help='For how long, like "2h".')] = None,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Stop all claims from a queue, in all processes, until it is resumed."""

    async def look(broker: SqlBroker) -> str:
        [found] = await broker.admin.queues(queue)
        text = f"pause {queue}: {found.ready} ready, {found.live_subscribers} live subscribers"
        hint = await empty_hint(broker, found)
        return text if hint is None else f"{text}\n{queue}: {hint}"

    if not yes:
        ask(run(context, look), as_json=as_json)

    async def work(broker: SqlBroker) -> Any:
        await broker.admin.pause(queue, reason=reason, until=until, by=by)
        return [each for each in await broker.admin.paused() if each.queue == queue]

    for paused in run(context, work):
        if as_json:
            print_json(row_of(paused))
        else:
            end = "it is resumed" if paused.until is None else f"{paused.until:%Y-%m-%d %H:%M:%S}"
            print_line(f"{queue} is paused until {end}")


def resume(
    context: typer.Context, queue: QueueName, by: By = None, as_json: AsJson = False
) -> None:
    """End the pause of a queue."""
    # It does not ask: what was paused by a slip can be mended at once.
    was = run(context, lambda broker: broker.admin.resume(queue, by=by))
    if as_json:
        print_json({"queue": queue, "was_paused": was})
    else:
        print_line(f"{queue} is resumed" if was else f"{queue} was not paused")


@grouped
def cancel(
    context: typer.Context,
    targets: Targets,
    which: Which,
    how: BulkRun,
    reason: Annotated[str | None, typer.Option(help="Kept with each message.")] = None,
) -> None:
    """End messages as DISCARDED: these, also while they run, or all that match and wait."""
    if means_all(targets, which, how):
        do_bulk(
            context,
            lambda broker: broker.admin.bulk_cancel(
                reason=reason, rate=how.rate, by=how.by, **which.filters
            ),
            how,
        )
        return
    _change(
        context,
        "cancel",
        targets.message_ids or [],
        lambda broker, each: broker.admin.cancel(each, reason=reason, by=how.by),
        how,
    )


@grouped
def retry(context: typer.Context, targets: Targets, which: Which, how: BulkRun) -> None:
    """Make messages due now, these or all that match, that wait for their time or an attempt."""
    if means_all(targets, which, how):
        do_bulk(
            context,
            lambda broker: broker.admin.bulk_retry(rate=how.rate, by=how.by, **which.filters),
            how,
        )
        return
    _change(
        context,
        "retry now",
        targets.message_ids or [],
        lambda broker, each: broker.admin.retry_now(each, by=how.by),
        how,
    )


def postpone(
    context: typer.Context,
    message_id: MessageId,
    until: Annotated[str, typer.Argument(help='In how long it is due, like "1h".')],
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make a message due later, or earlier, than it is."""
    _change(
        context,
        "postpone",
        [message_id],
        lambda broker, each: broker.admin.postpone(each, until, by=by),
        BulkRun(yes=yes, as_json=as_json),
    )


@grouped
def move(
    context: typer.Context,
    to: Annotated[str, typer.Option(help="The queue to move to.")],
    targets: Targets,
    which: Which,
    how: BulkRun,
) -> None:
    """Move messages that wait, these or all that match, to another queue; they are due there."""
    if means_all(targets, which, how):
        do_bulk(
            context,
            lambda broker: broker.admin.bulk_move(to, rate=how.rate, by=how.by, **which.filters),
            how,
        )
        return
    _change(
        context,
        f"move to {to}",
        targets.message_ids or [],
        lambda broker, each: broker.admin.move(each, to, by=how.by),
        how,
    )


def edit(
    context: typer.Context,
    message_id: MessageId,
    priority: Annotated[
        int | None, typer.Option(min=-100, max=100, help="Higher comes first.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="What policies and order work on.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Take the key away.")] = False,
    due: Annotated[str | None, typer.Option(help='In how long it is due, like "1h".')] = None,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the priority, the key or the due time of a message that waits."""
    if key is not None and no_key:
        raise SetupError("give --key or --no-key, not both")
    # Left out, not None: None takes the key away.
    fields = {} if key is None and not no_key else {"key": key}
    _change(
        context,
        "edit",
        [message_id],
        lambda broker, each: broker.admin.edit(each, priority=priority, due=due, by=by, **fields),
        BulkRun(yes=yes, as_json=as_json),
    )


def release(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="Its name, as subscribers lists it.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is alive: its handlers go on.")
    ] = False,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Release what a worker has leased that ended without a stop."""
    if not yes:
        ask(f"release all messages that {worker} has leased", as_json=as_json)
    count = run(context, lambda broker: broker.admin.release(worker, force=force, by=by))
    if as_json:
        print_json({"worker": worker, "released": count})
    else:
        print_line(f"released {count} messages of {worker}")


WorkerName = Annotated[
    str,
    typer.Argument(
        help="Its name, as subscribers lists it; host:pid means all of that process.",
    ),
]


def drain(
    context: typer.Context,
    worker: WorkerName,
    by: By = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Let a worker claim nothing more: it ends what it runs, and stays alive."""
    if not yes:
        ask(f"{worker} claims nothing more until it is undrained", as_json=as_json)
    names = run(context, lambda broker: broker.admin.drain(worker, by=by))
    if as_json:
        print_json({"worker": worker, "drained": names})
        return
    for name in names:
        print_line(f"{name} is drained")
    if not names:
        print_line(f"{worker} was drained already")


def undrain(
    context: typer.Context, worker: WorkerName, by: By = None, as_json: AsJson = False
) -> None:
    """End the drain of a worker: it claims again."""
    # It does not ask: what was drained by a slip can be mended at once.
    names = run(context, lambda broker: broker.admin.undrain(worker, by=by))
    if as_json:
        print_json({"worker": worker, "undrained": names})
        return
    for name in names:
        print_line(f"{name} claims again")
    if not names:
        print_line(f"{worker} was not drained")


def publish(
    context: typer.Context,
    queue: QueueName,
    body: Annotated[str, typer.Argument(help="JSON, or any text; - reads it from stdin.")],
    key: Annotated[str | None, typer.Option(help="What policies and order work on.")] = None,
    priority: Annotated[int, typer.Option(help="-100 to 100; higher comes first.")] = 0,
    delay: Annotated[str | None, typer.Option(help='In how long it is due, like "5m".')] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="A header, as name=value; may be repeated.")
    ] = None,
    by: By = None,
    as_json: AsJson = False,
) -> None:
    """Publish one message; the audit names who did."""
    text = sys.stdin.read() if body == "-" else body

    is_json, encoded = _body(text)
    known = {"content-type": "application/json"} if is_json else {}
    headers = {**known, **headers_of(header)}
    given: Any = {"key": key, "priority": priority, "delay": delay, "headers": headers}

    message_id = run(context, lambda broker: broker.admin.publish(encoded, queue, by=by, **given))
    if as_json:
        print_json({"message_id": message_id, "queue": queue})
    else:
        print_line(f"published message {message_id} to {queue}")
    if not is_json and text.lstrip().startswith(("{", "[")):
        # The shell may have eaten its quotes.
        told = "warning: the body begins like JSON, but is none: it was published as text"
        PlainConsole(stderr=True).print(told, soft_wrap=True)


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
    message_ids: Sequence[str],
    action: Callable[[SqlBroker, str], Awaitable[Repair]],
    how: BulkRun,
) -> None:
    """Show the messages, ask, and change each; exit code 1 if one was not changed."""
    if how.dry_run:
        _show_first(context, message_ids, as_json=how.as_json)
        return
    # Rows may change between the look and the action; what was not changed is reported then.
    if not how.yes:
        refuse_json(how.as_json)
        _show_first(context, message_ids, as_json=False)
        ask(f"{what}: {len(message_ids)} messages", as_json=how.as_json)

    # One after the other: each is a transaction of its own, and the first error ends the command.
    async def work(broker: SqlBroker) -> list[Repair]:
        return [await action(broker, each) for each in message_ids]

    found = run(context, work)
    if how.as_json:
        print_json([{**row_of(each), "done": each.done} for each in found])
    else:
        for each in found:
            print_line(str(each))
    if not all(each.accepted for each in found):
        raise typer.Exit(1)


def _show_first(context: typer.Context, message_ids: Sequence[str], *, as_json: bool) -> None:
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
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    shown = [[row[0], row[1] or "not found", *row[2:]] for row in rows]
    print_table("These would change", columns, shown)
