"""Only the last e-mail of an hour to each user, and at most so many a minute: just email
[sqlite|postgresql].

On MariaDB and MySQL, and any other server: just email --url
mysql+aiomysql://user@host/an_empty_database

Emailer -> Debounce -> Throttle -> sending queue, as one service "Email" in two processes, one of
which is killed. At the end everything that was promised is checked against the database; an hour is
four seconds here, a minute is two. --times 10 has ten times the traffic.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.table import Table as View
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from docs.examples.database import empty_database
from docs.examples.emails import proof
from docs.examples.emails.records import (
    Send,
    archive,
    count,
    create_records,
    message,
    read_grants,
    read_mails,
    read_sends,
    sends,
)
from docs.examples.emails.service import SENDING, THROTTLED, Plan
from docs.examples.emails.traffic import Writers
from faststream_sqlbroker import SqlBroker

PATIENCE = 240.0
"""If no e-mail ends for so many seconds, those that are still there count as lost."""
MICROSECONDS = 1_000_000
WIDTH = 60
console = Console()


class EmailDemo:
    """The writers, the service's two processes, and the view of them."""

    def __init__(self, url: str, plan: Plan) -> None:
        self.url, self.plan = url, plan
        self.engine: AsyncEngine = create_async_engine(url)
        self.broker = SqlBroker(self.engine, logger=None)
        self.writers = Writers(self.broker, plan)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.killed: int | None = None

    def start_process(self) -> None:
        """Start one more process of the service."""
        command = [sys.executable, "-m", "docs.examples.emails.service", self.url, self.plan.dump()]
        self.processes.append(subprocess.Popen(command))

    async def run(self) -> proof.Result:
        """Write e-mails, kill a process, wait until all have ended, compare."""
        await self.broker.connect()
        await self.broker.create_tables()
        await create_records(self.engine, THROTTLED)
        self.start_process()
        self.start_process()
        writing = asyncio.create_task(self.writers.write())
        killing = asyncio.create_task(self.kill_one())
        ended = 0
        since = monotonic()
        with Live(console=console, refresh_per_second=4) as live:
            # How long it takes all in all is a matter of the rate and of the machine.
            while monotonic() - since < PATIENCE:
                live.update(await self.view())
                if writing.done() and await count(self.engine, message) == 0:
                    break
                before = ended
                ended = await count(self.engine, archive)
                since = since if ended == before and writing.done() else monotonic()
                await asyncio.sleep(0.3)
        await writing
        killing.cancel()
        return await self.compare()

    async def kill_one(self) -> None:
        """SIGKILL a process, between a send and its ack if possible; it is not replaced."""
        victim = self.processes[0]
        await asyncio.sleep(self.plan.publishing / 2)
        its_own = message.c.id.in_(select(sends.c.message_id).where(sends.c.process == victim.pid))
        unsettled = message.c.state == "PROCESSING", message.c.queue == SENDING
        while await count(self.engine, message, its_own, *unsettled) == 0:
            await asyncio.sleep(0.005)
        victim.send_signal(signal.SIGKILL)
        self.killed = victim.pid

    async def view(self) -> View:
        """The live picture."""
        view = View(title=f"e-mails on {self.engine.dialect.name}", min_width=WIDTH)
        view.add_column("what")
        view.add_column("number", justify="right")
        view.add_row("written", f"{len(self.writers.published)} of {self.writers.total}")
        for queue in ("email", THROTTLED, SENDING):
            view.add_row(
                f"in queue {queue}",
                str(await count(self.engine, message, message.c.queue == queue)),
            )
        superseded = await count(self.engine, archive, archive.c.state == "DISCARDED")
        view.add_row("superseded", str(superseded))
        view.add_row("sent", str(await count(self.engine, sends)))
        for process in self.processes:
            says = "killed (SIGKILL)" if process.pid == self.killed else "running"
            view.add_row(f"process {process.pid}", says)
        return view

    async def compare(self) -> proof.Result:
        """Ask the database what has happened, and print it."""
        plan, sent = self.plan, await read_sends(self.engine)
        mails, grants = await read_mails(self.engine), await read_grants(self.engine)
        hour, minute, undo = (round(s * MICROSECONDS) for s in (plan.hour, plan.minute, plan.undo))
        rules = proof.Rules(hour, minute, undo, plan.most)
        result = proof.check(self.writers.published, mails, sent, grants, self.killed, rules)
        if self.killed is None:
            result.violations.append("no process was killed")
        if self.writers.slowest >= plan.undo:
            # It might have arrived, by the definition, before anybody could see it.
            result.violations.append(
                f"nothing is proved: a publish took {self.writers.slowest:.1f} s"
            )
        console.print(*chart(sent, rules.minute), sep="\n")
        starts, moved = proof.all_starts(grants, rules.minute), proof.moves(mails, rules)
        most_starts = proof.most_within(starts, rules.minute)
        most_moved = proof.most_within(moved, rules.minute)
        console.print(
            f"at most {plan.most} starts a minute; the most in any: {most_starts} starts, "
            f"{most_moved} e-mails moved on (each after its start, by the time of a write)"
        )
        return result

    async def stop(self) -> None:
        """End the processes as an operator would."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            await asyncio.to_thread(process.wait, 30)
        await self.broker.stop()
        await self.engine.dispose()


def chart(sent: Sequence[Send], minute: int) -> list[str]:
    """How many e-mails were sent in each minute."""
    if not sent:
        return []
    first = min(send.sent_at for send in sent)
    minutes = Counter((send.sent_at - first) // minute for send in sent)
    most = max(minutes.values())
    return [
        f"minute {n:3} {'█' * round(WIDTH * minutes[n] / most)} {minutes[n]}"
        for n in range(max(minutes) + 1)
    ]


async def main(url: str, plan: Plan) -> int:
    """Run the service; the exit code."""
    demo = EmailDemo(url, plan)
    try:
        result = await demo.run()
    finally:
        await demo.stop()
    for violation in result.violations[:20]:
        console.print(f"[red]broken promise: {violation}[/red]")
    sys.stdout.write(result.line() + "\n")
    return 1 if result.violations else 0


def arguments() -> tuple[str, str | None, Plan]:
    """What the command line says: a kind of database, or the URL of an empty one, and the plan."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.examples.email_service", description=__doc__
    )
    parser.add_argument("kind", nargs="?", default="sqlite", help="sqlite or postgresql")
    parser.add_argument("--url", help="an empty database of any of the four kinds")
    for option in fields(Plan):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    given = vars(parser.parse_args())
    return given.pop("kind"), given.pop("url"), Plan(**given)


if __name__ == "__main__":
    kind, given_url, chosen = arguments()
    with tempfile.TemporaryDirectory() as temporary:
        code = asyncio.run(main(given_url or empty_database(kind, temporary, "email"), chosen))
    sys.exit(code)
