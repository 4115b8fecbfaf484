"""The records of a history as the second checker reads them: one line of JSON each.

`at` is the machine's monotonic clock in seconds, which all its processes share; `stored`,
`created`, `acquired` and `archived` are the database's clock in microseconds. The records:

* subscribe: a process has a subscriber for `queue`, with its options;
* publish: a transaction with `numbers` (the bodies) for `queue`, sent at `began` and answered at
  `at`; `outcome` is "committed", "rolled back" or "unknown";
* start: a handler begins; `id` is the row's, `message_id` what its handler sees, if that differs.
  `asked`, `claimed` and `stored` belong to its claim: when it was sent (if that is still known),
  answered, and the database's time in it; `lease` is its token;
* end: it ended with `outcome` (`history.ENDS`), and its ack brings `answer` bytes;
* report: the process says that a lease is lost (`lost`), or that a settle stayed unknown;
* exit: the process `worker` ended with `code`; other than 0 is a crash;
* row: what the table `table` has of the message after the run: the commits of its outcomes;
* effect: what a transactional handler has written and committed;
* answer: a message for the queue `out`, which answers `numbers`;
* listed: `broker.admin.unknown()` lists the message;
* finish: the rows were read; workers had `patience` seconds for each message. `durable` is false if
  the database may have lost commits that it has confirmed.
"""

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
ACKED = frozenset({"ack", "tried", "caught"})
"""Ends after which the message may be COMPLETED."""
SECOND = 1_000_000


@dataclass(slots=True)
class Run:
    """A start of a handler, and what became of it."""

    number: int
    queue: str
    message_id: Any
    delivery: int
    attempts: int
    pid: int
    at: float
    asked: float | None = None
    claimed: float | None = None
    stored: int | None = None
    looked: int | None = None
    end: str | None = None
    ended: float | None = None
    answer: int | None = None
    lost: bool = False
    unknown: bool = False

    def __str__(self) -> str:
        """Name the records and their times."""
        text = f"delivery {self.delivery} in process {self.pid} (started at {self.at:.3f}"
        if self.ended is not None:
            text += f", ended with {self.end} at {self.ended:.3f}"
        if self.lost:
            text += ", lost its lease"
        return text + ")"


@dataclass(slots=True)
class Row:
    """A row of the message table or the archive after the run."""

    table: str
    id: int
    number: int
    queue: str
    key: str | None
    state: str
    reason: str | None
    attempts: int
    deliveries: int
    acquired: int | None
    archived: int | None
    related: int | None

    def __str__(self) -> str:
        """Name the record."""
        when = "" if self.archived is None else f" at {self.archived / SECOND:.6f}"
        reason = "" if self.reason is None else f" ({self.reason})"
        where = f"{self.table} row {self.id} of {self.queue!r}"
        return f"{where}: {self.state}{reason}{when}, {self.deliveries} deliveries"


@dataclass(slots=True)
class Publish:
    """A transaction of a publisher."""

    numbers: tuple[int, ...]
    queue: str
    key: Mapping[int, str | None]
    outcome: str
    began: float
    at: float


@dataclass(slots=True)
class Message:
    """All records of one message."""

    number: int
    publish: Publish | None = None
    runs: list[Run] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)
    answers: list[int] = field(default_factory=list)
    """Bytes of each that it has alone."""
    joint: int = 0
    """Answers that it shares with its batch."""
    listed: bool = False

    @property
    def row(self) -> Row | None:
        """The row, if there is one."""
        return self.rows[0] if self.rows else None

    @property
    def completed(self) -> bool:
        """Whether its recorded outcome is an ack."""
        return self.row is not None and self.row.state == "COMPLETED"

    def deciding(self) -> Run | None:
        """The run of the delivery that the row counts last; of several the one that acked."""
        row = self.row
        found = [r for r in self.runs if row and r.delivery == row.deliveries]
        found = [r for r in found if row and r.queue == row.queue]
        return max(found, key=lambda r: r.end in ACKED, default=None)


class Story:
    """A history, read once: messages, processes and subscribers."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Read `records`, which may come in any order."""
        self.messages: dict[int, Message] = {}
        self.publishes: list[Publish] = []
        self.queues: dict[str, dict[str, Any]] = {}
        self.codes: dict[int, int] = {}
        self.last: dict[int, float] = {}
        """When each process wrote its last record."""
        self.finish: Record = {}
        self.finished_at = inf
        self.newest: dict[tuple[int, str], int] = {}
        """The greatest delivery of each message that started, by queue."""
        self._open: dict[tuple[int, Any, int, str], Run] = {}
        self._named: dict[tuple[int, Any, int], Run] = {}
        self._latest: dict[tuple[int, Any], Run] = {}
        readers: dict[str, Callable[[Record], None]] = {
            "subscribe": self._subscribe,
            "publish": self._publish,
            "start": self._start,
            "end": self._end,
            "report": self._report,
            "exit": self._exit,
            "row": self._row,
            "effect": self._effect,
            "answer": self._answer,
            "listed": self._listed,
            "finish": self._finish,
        }
        for record in sorted(records, key=lambda r: r["at"]):
            self.last[record["pid"]] = record["at"]
            if read := readers.get(record["event"]):
                read(record)
        self.by_row = {row.id: m for m in self.messages.values() for row in m.rows}

    def of(self, number: int) -> Message:
        """The message `number`."""
        found = self.messages.get(number)
        if found is None:
            found = self.messages[number] = Message(number)
        return found

    def has(self, queue: str, option: str) -> Any:
        """The `option` of the subscriber for `queue`; None if no subscriber is recorded."""
        return self.queues.get(queue, {}).get(option)

    def crashed(self, pid: int, before: float) -> bool:
        """Whether the process ended badly, so that its messages may have started anew `before`.

        A process that wrote records for longer than a lease after that had noticed the loss.
        """
        lease = max((q.get("lease") or 0.0 for q in self.queues.values()), default=0.0)
        return self.codes.get(pid, 1) != 0 and self.last.get(pid, 0.0) <= before + lease

    def _subscribe(self, record: Record) -> None:
        known = self.queues.setdefault(record["queue"], dict(record))
        for option in ("lease", "max_attempts", "max_deliveries", "concurrency"):
            if known.get(option) is not None and record.get(option) is not None:
                known[option] = max(known[option], record[option])

    def _publish(self, record: Record) -> None:
        numbers = tuple(record["numbers"])
        keys = dict(zip(numbers, record.get("keys") or [None] * len(numbers), strict=True))
        made = Publish(
            numbers, record["queue"], keys, record["outcome"], record["began"], record["at"]
        )
        self.publishes.append(made)
        for number in numbers:
            self.of(number).publish = made

    def _start(self, r: Record) -> None:
        run = Run(
            r["number"],
            sys.intern(r["queue"]),
            r.get("message_id", r["id"]),
            r["deliveries"],
            r["attempts"],
            r["pid"],
            r["at"],
            r.get("asked"),
            r.get("claimed"),
            r.get("stored"),
            r.get("looked"),
        )
        self.of(run.number).runs.append(run)
        mark = run.number, run.queue
        self.newest[mark] = max(run.delivery, self.newest.get(mark, 0))
        self._open[run.pid, r["id"], run.delivery, r.get("lease", "")] = run
        self._named[run.pid, r["id"], run.delivery] = run
        self._latest[run.pid, r["id"]] = run

    def _end(self, r: Record) -> None:
        run = self._open.get((r["pid"], r["id"], r["deliveries"], r.get("lease", "")))
        if run is not None and run.end is None:
            run.end, run.ended, run.answer = sys.intern(r["outcome"]), r["at"], r.get("answer")

    def _report(self, r: Record) -> None:
        if named := r.get("deliveries"):
            run = self._named.get((r["pid"], r["id"], named))
        else:
            run = self._latest.get((r["pid"], r["id"]))
        if run is not None:
            run.lost |= r["lost"]
            run.unknown |= not r["lost"]

    def _exit(self, r: Record) -> None:
        self.codes[r["worker"]] = r["code"]

    def _row(self, r: Record) -> None:
        self.of(r["number"]).rows.append(
            Row(
                sys.intern(r["table"]),
                r["id"],
                r["number"],
                sys.intern(r["queue"]),
                r.get("key"),
                sys.intern(r["state"]),
                r.get("reason"),
                r["attempts"],
                r["deliveries"],
                r.get("acquired"),
                r.get("archived"),
                r.get("related"),
            )
        )

    def _effect(self, r: Record) -> None:
        self.of(r["number"]).effects[r["which"]] += 1

    def _answer(self, r: Record) -> None:
        for number in r["numbers"]:
            message = self.of(number)
            if r.get("joint"):
                message.joint += 1
            else:
                message.answers.append(r["size"])

    def _listed(self, r: Record) -> None:
        self.of(r["number"]).listed = True

    def _finish(self, r: Record) -> None:
        self.finish = r
        self.finished_at = r["at"]


def read(path: Path) -> Iterator[Record]:
    """The records of a file, or of all files in a folder."""
    if path.is_dir():
        for each in sorted(path.iterdir()):
            yield from read(each)
        return
    opened = gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
    with opened as file:
        # Parsed together, records share their names of fields: a third of the memory.
        lines = (line for line in file if line.strip())
        while some := list(islice(lines, 10_000)):
            yield from json.loads(b"[" + b",".join(some) + b"]")
