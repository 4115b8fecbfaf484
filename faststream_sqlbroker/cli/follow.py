"""Commands that run until they are interrupted: `top` shows queues, `tail` shows ended messages."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import StoredMessage
from faststream_sqlbroker.cli.look import QUEUE_COLUMNS, build_queue_row, to_message_dict
from faststream_sqlbroker.cli.output import (
    AsJson,
    PlainConsole,
    build_table,
    print_json,
    print_line,
    print_table,
    to_json_dict,
    warn,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.times import parse_positive

Interval = Annotated[str, typer.Option(help="Time between polls.")]
Count = Annotated[int | None, typer.Option(help="Number of polls; default: no limit.", min=1)]
OVERLAP = timedelta(seconds=10)
"""Time before the latest row that each poll reads again: a row is dated before it is committed,
so a row that commits later may have an earlier date.
"""
PAGE_SIZE = 1_000
"""Maximum rows that one poll of `tail` reads; the latest rows are read."""


def top(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.")] = None,
    interval: Interval = "2s",
    count: Count = None,
    as_json: AsJson = False,
) -> None:
    """Show the queues and refresh them until interrupted; with --json, one document per line."""
    pause = parse_positive("interval", interval)

    async def work(broker: SqlBroker) -> None:
        """Read and show the queues at each poll."""
        if as_json:
            async for now in _iter_polls(broker, pause, count):
                overviews = await broker.admin.queues(queue)
                print_json({"at": now, "queues": [*map(to_json_dict, overviews)]}, None)
            return
        # A terminal shows one table that changes; a file gets one table per poll.
        console = PlainConsole()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for now in _iter_polls(broker, pause, count):
                rows = [build_queue_row(overview) for overview in await broker.admin.queues(queue)]
                title = f"Queues at {now:%H:%M:%S} UTC"
                if console.is_terminal:
                    table = build_table(QUEUE_COLUMNS, rows, width=console.width)
                    live.update(Group(title, table), refresh=True)
                else:
                    print_table(title, QUEUE_COLUMNS, rows)

    _run_until_interrupted(context, work)


def tail(
    context: typer.Context,
    queue: Annotated[str | None, typer.Option(help="Only messages of this queue.")] = None,
    state: Annotated[str | None, typer.Option(help="Only COMPLETED, FAILED or DISCARDED.")] = None,
    since: Annotated[str, typer.Option(help="Age of the first messages to print.")] = "10s",
    interval: Interval = "1s",
    count: Count = None,
    as_json: AsJson = False,
) -> None:
    """Print messages as they end, in the archive's order; with --json, one document per line.

    If more than 1 000 messages end between two polls, only the newest 1 000 are shown, after a
    warning.
    """
    pause = parse_positive("interval", interval)
    lookback = timedelta(seconds=parse_positive("since", since))

    async def work(broker: SqlBroker) -> None:
        """Print the messages that each poll finds and no earlier poll has printed.

        Each poll reads the last seconds again, because a row that is committed later may have an
        earlier time.
        """
        seen_keys: set[tuple[int, datetime]] = set()
        start: datetime | None = None
        async for now in _iter_polls(broker, pause, count):
            start = start or now - lookback
            page = await broker.admin.messages(
                queue=queue, state=state, since=start, archived=True, limit=PAGE_SIZE
            )
            new_messages = [m for m in reversed(page.messages) if _get_key(m) not in seen_keys]
            if page.after is not None and len(new_messages) == len(page.messages):
                warn(f"only the newest {PAGE_SIZE} are shown: earlier messages were skipped")
            for message in new_messages:
                _print_message(message, as_json=as_json)
            if page.messages:
                latest = _get_key(page.messages[0])[1]
                start = max(start, latest - OVERLAP)
            # Keys before the next poll's start are not read again.
            seen_keys |= {_get_key(message) for message in new_messages}
            seen_keys = {key for key in seen_keys if key[1] >= start}

    _run_until_interrupted(context, work)


def _get_key(message: StoredMessage) -> tuple[int, datetime]:
    """Return the identity of an archived row, by which `tail` skips printed rows.

    The id alone is not enough: a redriven message is archived again under its id.
    """
    assert message.archived_at is not None  # noqa: S101 - only the archive is read
    return message.id, message.archived_at


def _print_message(message: StoredMessage, *, as_json: bool) -> None:
    """Print an ended message in a line, with the first line of the error."""
    if as_json:
        print_json(to_message_dict(message, with_content=False), None)
        return
    parts: list[Any] = [
        f"{message.archived_at:%H:%M:%S}",
        message.id,
        message.queue,
        message.state.name,
        message.reason,
        (message.last_error or "").partition("\n")[0],
    ]
    print_line(" ".join(str(part) for part in parts if part not in {None, ""}))


async def _iter_polls(
    broker: SqlBroker, pause: float, count: int | None
) -> AsyncIterator[datetime]:
    """Yield the database's time at each poll, `pause` seconds apart.

    After `count` polls the iteration ends; None polls without end. The caller reads the tables
    after each time.
    """
    polls = 0
    while True:
        yield await broker._store.server.read_now()  # noqa: SLF001 - the same package
        polls += 1
        if polls == count:
            return
        await asyncio.sleep(pause)


def _run_until_interrupted(context: typer.Context, work: Any) -> None:
    """Run `work`; Ctrl-C, the normal end of `top` and `tail`, is no error."""
    try:
        run(context, work)
    except KeyboardInterrupt:
        return
