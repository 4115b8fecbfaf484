"""Commands that go on until they are interrupted: top shows the queues, tail what ends."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.admin import StoredMessage
from faststream_sqlbroker.cli.look import QUEUE_COLUMNS, message_row, queue_row
from faststream_sqlbroker.cli.output import (
    AsJson,
    PlainConsole,
    print_json_line,
    print_line,
    print_table,
    row_of,
    table_of,
)
from faststream_sqlbroker.cli.target import run
from faststream_sqlbroker.core.times import positive_seconds

Interval = Annotated[str, typer.Option(help="Time between two looks.")]
Count = Annotated[int | None, typer.Option(help="Looks; default until it is interrupted.", min=1)]
OVERLAP = timedelta(seconds=10)
"""How far each look reaches back behind the last row seen: a row is dated before it is committed,
and one that commits later may be dated earlier."""
PAGE = 1_000
"""Rows that one look of `tail` reads, at most: the newest."""


def top(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(help="Only this queue.")] = None,
    interval: Interval = "2s",
    count: Count = None,
    as_json: AsJson = False,
) -> None:
    """Show the queues again and again; with --json one document a line."""
    pause = positive_seconds("interval", interval)

    async def work(broker: SqlBroker) -> None:
        if as_json:
            async for now in _turns(broker, pause, count):
                found = [row_of(each) for each in await broker.admin.queues(queue)]
                print_json_line({"at": now, "queues": found})
            return
        # A terminal shows one table that changes; a file gets one table after the other.
        console = PlainConsole()
        with Live(console=console, auto_refresh=False, transient=False) as live:
            async for now in _turns(broker, pause, count):
                rows = [queue_row(each) for each in await broker.admin.queues(queue)]
                title = f"Queues at {now:%H:%M:%S} UTC"
                if console.is_terminal:
                    table = table_of(QUEUE_COLUMNS, rows, width=console.width)
                    live.update(Group(title, table), refresh=True)
                else:
                    print_table(title, QUEUE_COLUMNS, rows)

    _until_interrupted(context, work)


def tail(
    context: typer.Context,
    queue: Annotated[str | None, typer.Option(help="Only messages of this queue.")] = None,
    state: Annotated[str | None, typer.Option(help="COMPLETED, FAILED or DISCARDED only.")] = None,
    since: Annotated[str, typer.Option(help="Begin with what ended so long ago.")] = "10s",
    interval: Interval = "1s",
    count: Count = None,
    as_json: AsJson = False,
) -> None:
    """Print messages as they end, in the archive's order; with --json one document a line.

    Of more than 1 000 that end between two looks the newest are shown.
    """
    pause = positive_seconds("interval", interval)
    back = timedelta(seconds=positive_seconds("since", since))

    async def work(broker: SqlBroker) -> None:
        seen: set[tuple[int, datetime]] = set()
        begin: datetime | None = None
        async for now in _turns(broker, pause, count):
            begin = begin or now - back
            page = await broker.admin.messages(
                queue=queue, state=state, since=begin, archived=True, limit=PAGE
            )
            fresh = [m for m in reversed(page.messages) if _place(m) not in seen]
            for message in fresh:
                _print(message, as_json=as_json)
            if page.messages:
                newest = _place(page.messages[0])[1]
                begin = max(begin, newest - OVERLAP)
            # What lies before the next look's begin is not read again.
            seen |= {_place(message) for message in fresh}
            seen = {place for place in seen if place[1] >= begin}

    _until_interrupted(context, work)


def _place(message: StoredMessage) -> tuple[int, datetime]:
    # An id may end more than once: a message that was redriven is archived again.
    assert message.archived_at is not None  # noqa: S101 - only the archive is read
    return message.id, message.archived_at


def _print(message: StoredMessage, *, as_json: bool) -> None:
    if as_json:
        print_json_line(message_row(message, hidden=False))
        return
    words: list[Any] = [
        f"{message.archived_at:%H:%M:%S}",
        message.id,
        message.queue,
        message.state.name,
        message.reason,
        (message.last_error or "").partition("\n")[0],
    ]
    print_line(" ".join(str(word) for word in words if word not in {None, ""}))


async def _turns(broker: SqlBroker, pause: float, count: int | None) -> AsyncIterator[datetime]:
    """The database's time at each turn, `pause` seconds apart; `count` turns, None without end."""
    turn = 0
    while True:
        yield await broker._store.server.now()  # noqa: SLF001 - the same package
        turn += 1
        if turn == count:
            return
        await asyncio.sleep(pause)


def _until_interrupted(context: typer.Context, work: Any) -> None:
    try:
        run(context, work)
    except KeyboardInterrupt:
        # The ordinary end; the screen keeps what was shown.
        return
