"""A broker of a few lists that keeps all promises, and the history that its processes record.

What happens is drawn at random: commits that come late or stay unknown, crashes before and in
handlers, leases that run out, settles without an answer.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.faults.history import FIRST, LAST
from tests.faults.records import SECOND

MAX_ATTEMPTS = 3
MAX_DELIVERIES = 4
RATE = 2
PER = 0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch": {"batch": True},
    "tx": {"transactional": True, "effects": [FIRST, LAST]},
    "ordered": {"ordered": True},
    "first": {"ack_first": True, "max_attempts": None},
    "alone": {"concurrency": 1},
    "keyed": {"concurrency": 1, "per_key": True},
    "throttled": {"throttle": [RATE, PER]},
    "debounced": {"debounce": True},
    "single": {"once": True},
}
"""The queues, and the options of their subscribers."""
ANSWERING = frozenset({"plain", "batch", "tx", "ordered"})
BASE = 1_800_000_000 * SECOND
"""The database's clock when the machine's is 0: microseconds."""
PUBLISHER = 1
"""The process that publishes, and reads the rows in the end."""


class Lines:
    """Records, in the order in which they are made."""

    def __init__(self) -> None:
        """No record yet."""
        self.now = 10.0
        self.records: list[dict[str, Any]] = []

    def note(self, event: str, pid: int = PUBLISHER, **fields: Any) -> dict[str, Any]:
        """Add a record; time passes."""
        self.now = round(self.now + 0.001, 6)
        made = {"event": event, "at": self.now, "pid": pid, **fields}
        self.records.append(made)
        return made

    def stored(self) -> int:
        """Now by the database's clock."""
        return BASE + round(self.now * SECOND)

    def subscribe(self, pid: int, queue: str, **options: Any) -> None:
        """A subscriber that records its starts."""
        limits = {"max_attempts": MAX_ATTEMPTS, "max_deliveries": MAX_DELIVERIES, "lease": 1.0}
        self.note("subscribe", pid, queue=queue, noted=True, **{**limits, **options})

    def publish(
        self, queue: str, *numbers: int, outcome: str = "committed", key: str | None = None
    ) -> None:
        """A transaction."""
        began = self.now
        keys = [key] * len(numbers)
        self.note(
            "publish", numbers=list(numbers), queue=queue, keys=keys, outcome=outcome, began=began
        )

    def start(self, queue: str, number: int, pid: int, **fields: Any) -> dict[str, Any]:
        """A handler's start, whose claim took no time."""
        given = {"id": number, "deliveries": 1, "attempts": 0, "asked": self.now}
        given |= {"claimed": self.now, "stored": self.stored()}
        return self.note("start", pid, queue=queue, number=number, **{**given, **fields})

    def end(self, start: dict[str, Any], outcome: str, answer: int | None = None) -> None:
        """The end of a start."""
        mark = {"id": start["id"], "deliveries": start["deliveries"]}
        self.note("end", start["pid"], **mark, outcome=outcome, answer=answer)

    def row(self, queue: str, number: int, **fields: Any) -> dict[str, Any]:
        """An archived row."""
        given = {"table": "message_archive", "id": number, "key": None, "state": "COMPLETED"}
        given |= {"attempts": 1, "deliveries": 1, "archived": self.stored()}
        return self.note("row", queue=queue, number=number, **{**given, **fields})

    def finish(self, *processes: int, patience: float = 30.0, **more: Any) -> list[dict[str, Any]]:
        """The last records; all `processes` ended well. The whole history."""
        for pid in processes:
            self.note("exit", worker=pid, code=0)
        self.note("finish", patience=patience, **{"durable": True, **more})
        return self.records


@dataclass(eq=False)
class Entry:
    """A message."""

    number: int
    id: int
    queue: str
    key: str | None
    attempts: int = 0
    deliveries: int = 0
    holder: "Work | None" = None
    row: dict[str, Any] | None = None
    """What the archive has."""
    started: bool = False


@dataclass(eq=False)
class Work:
    """A claim of one message, or of a batch."""

    pid: int
    entries: list[Entry]
    asked: float
    claimed: float
    stored: int
    starts: dict[Entry, dict[str, Any]] = field(default_factory=dict)
    outcome: str | None = None
    lost: set[Entry] = field(default_factory=set)


class SmallBroker:
    """Messages, processes, and what they record."""

    def __init__(self, random: Random) -> None:
        """Draw from `random`."""
        self.random = random
        self.lines = Lines()
        self.live: list[Entry] = []
        self.done: list[Entry] = []
        self.pending: list[tuple[list[Entry], float]] = []
        """Transactions whose COMMIT has not come yet."""
        self.works: list[Work] = []
        self.codes: dict[int, int] = {}
        self.reports: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.looks: list[float] = []
        self.keys: dict[str | None, int] = {}
        self.count = self.ids = 0
        self.pids = 100
        self.effects: list[tuple[int, str]] = []
        self.answers: list[dict[str, Any]] = []
        self.listed: set[int] = set()
        self.faults = True
        for _ in range(2):
            self.fork()

    def fork(self) -> None:
        """Start one more process."""
        self.pids += 1
        self.codes[self.pids] = 0
        for queue, options in OPTIONS.items():
            self.lines.subscribe(self.pids, queue, **options)

    @property
    def alive(self) -> list[int]:
        """Processes that run."""
        return [pid for pid, code in self.codes.items() if code == 0]

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Do so many steps at random, and then only what brings everything to an end."""
        often = [self.publish, self.commit, self.claim, self.start, self.end, self.settle]
        seldom = [self.crash, self.expire]
        for _ in range(steps):
            self.lines.now += self.random.choice((0.0, 0.01, 0.05))
            self.random.choice(often * 4 + seldom)()
        self.faults = False
        while self.live or self.works or self.pending:
            self.lines.now += 0.05
            for step in (self.commit, self.claim, self.start, self.end, self.settle):
                step()
        return self._finish()

    def publish(self) -> None:
        """Begin a transaction, which has its ids now."""
        queue = self.random.choice(list(OPTIONS))
        key = self.random.choice((None, "a", "b"))
        if queue == "single":
            key = f"key {self.random.randint(1, 5)}"
        made = []
        for _ in range(self.random.randint(1, 3)):
            self.count += 1
            self.ids += 1
            made.append(Entry(self.count, self.ids, queue, key))
        self.pending.append((made, self.lines.now))

    def commit(self) -> None:
        """End any of the transactions."""
        if not self.pending:
            return
        made, began = self.pending.pop(self.random.randrange(len(self.pending)))
        outcome = self.random.choice(("committed",) * 6 + ("rolled back", "unknown"))
        if outcome == "committed" or (outcome == "unknown" and self.random.random() < 0.5):
            self.live += made
        first = made[0]
        numbers = [entry.number for entry in made]
        keys = [entry.key for entry in made]
        fields = {"numbers": numbers, "queue": first.queue, "keys": keys, "outcome": outcome}
        self.lines.note("publish", **fields, began=began)

    def claim(self) -> None:
        """Take a message that may be taken now; of a batch's queue, several."""
        free = [e for e in self.live if e.holder is None and self._may_be_claimed(e)]
        if not free:
            return
        chosen = self.random.choice(free)
        taken = [chosen]
        if chosen.queue == "batch":
            taken = [e for e in free if e.queue == "batch"][:3]
        asked = self.lines.now
        self.lines.now += 0.002
        stored = self.lines.stored()
        self.lines.now += 0.002
        work = Work(self.random.choice(self.alive), [], asked, self.lines.now, stored)
        for entry in taken:
            entry.deliveries += 1
            if entry.deliveries - entry.attempts > MAX_DELIVERIES:
                entry.deliveries -= 1
                self._archive(entry, "FAILED", "max_deliveries")
                continue
            if not self._begin_policies(entry):
                continue
            entry.holder = work
            work.entries.append(entry)
        if work.entries:
            self.works.append(work)

    def _may_be_claimed(self, entry: Entry) -> bool:
        others = [e for e in self.live if e.queue == entry.queue and e is not entry]
        same = [e for e in others if e.key == entry.key]
        match entry.queue:
            case "ordered" if entry.key is not None:
                return all(e.holder is None and e.id > entry.id for e in same)
            case "alone":
                return all(e.holder is None for e in others)
            case "keyed":
                return all(e.holder is None for e in same)
            case "debounced" if entry.key is not None:
                fresh = [e.id for e in same if not e.deliveries]
                leads = bool(entry.deliveries) or all(i < entry.id for i in fresh)
                return leads and all(e.holder is None for e in same)
        return True

    def _begin_policies(self, entry: Entry) -> bool:
        """Whether the message starts; it, or others, may be archived instead."""
        if entry.queue == "debounced" and entry.key is not None:
            for other in list(self.live):
                behind = other.queue == entry.queue and other.key == entry.key
                if behind and other.id < entry.id and not other.deliveries:
                    self._archive(other, "DISCARDED", "superseded", entry.id)
        if entry.queue == "single":
            owner = self.keys.setdefault(entry.key, entry.id)
            if owner != entry.id:
                self._archive(entry, "DISCARDED", "duplicate", owner)
                return False
            if entry.started:
                self._archive(entry, "FAILED", "unknown_outcome")
                return False
        if entry.queue == "first":
            self._archive(entry, "COMPLETED")
            self.listed.add(entry.number)
        return True

    def start(self) -> None:
        """Begin the handlers of a claim, or give it back."""
        waiting = [w for w in self.works if not w.starts and not w.lost]
        if not waiting:
            return
        work = self.random.choice(waiting)
        looked = self.lines.now
        if work.entries[0].queue == "throttled":
            recent = [at for at in self.looks if at > looked - PER - 0.01]
            if len(recent) >= RATE:
                self._give_back(work)
                return
            self.looks.append(looked)
        for entry in work.entries:
            entry.started = True
            work.starts[entry] = self._note(
                work.pid,
                "start",
                number=entry.number,
                queue=entry.queue,
                id=entry.id,
                deliveries=entry.deliveries,
                attempts=entry.attempts,
                asked=work.asked,
                claimed=work.claimed,
                stored=work.stored,
                looked=round(looked * SECOND),
            )

    def _give_back(self, work: Work) -> None:
        self.works.remove(work)
        for entry in work.entries:
            entry.deliveries -= 1
            entry.holder = None

    def end(self) -> None:
        """End the handlers of a claim."""
        running = [w for w in self.works if w.starts and w.outcome is None]
        if not running:
            return
        work = self.random.choice(running)
        queue = work.entries[0].queue
        bad = ["nack"] + (["committed", "rolled back"] if queue == "tx" else [])
        work.outcome = self.random.choice(["ack"] * 4 + bad)
        for entry, start in work.starts.items():
            answers = queue in ANSWERING and work.outcome == "ack"
            mark = {"id": entry.id, "deliveries": start["deliveries"], "outcome": work.outcome}
            self._note(work.pid, "end", **mark, answer=entry.number if answers else None)
            if work.outcome == "committed":
                self.effects.append((entry.number, FIRST))
        if queue == "first":
            self.works.remove(work)
            self.listed.difference_update(entry.number for entry in work.entries)

    def settle(self) -> None:
        """Write an outcome, with or without an answer to the COMMIT."""
        ended = [w for w in self.works if w.outcome is not None]
        if not ended:
            return
        work = self.random.choice(ended)
        self.works.remove(work)
        fails = self.faults and self.random.random() < 0.1
        if work.lost or fails:
            for entry in work.entries:
                if entry.holder is work:
                    entry.holder = None
                # That it is lost was reported, and is again; a batch is lost with any of it.
                self._report(work, entry, lost=bool(work.lost))
            return
        unknown = self.faults and self.random.random() < 0.1
        for entry in work.entries:
            if unknown:
                self._report(work, entry, lost=False)
            self._write(work, entry)
        if work.outcome == "ack" and work.entries[0].queue == "batch":
            numbers = [entry.number for entry in work.entries]
            self.answers.append({"numbers": numbers, "size": 9, "joint": True})

    def _write(self, work: Work, entry: Entry) -> None:
        entry.holder = None
        if work.outcome == "ack":
            entry.attempts += 1
            if entry.queue == "tx":
                self.effects += [(entry.number, FIRST), (entry.number, LAST)]
            if entry.queue in ANSWERING:
                size = entry.number
                self.answers.append({"numbers": [entry.number], "size": size, "joint": False})
            self._archive(entry, "COMPLETED")
            return
        entry.attempts += 1
        if work.outcome == "committed":
            self._archive(entry, "FAILED", "transaction_ended")
        elif entry.queue == "single":
            self._archive(entry, "FAILED", "failed_once")
        elif entry.attempts >= MAX_ATTEMPTS:
            self._archive(entry, "FAILED", "max_attempts")

    def crash(self) -> None:
        """End a process without a chance to write anything."""
        pid = self.random.choice(self.alive)
        self.codes[pid] = -9
        self.reports.pop(pid, None)
        for work in [w for w in self.works if w.pid == pid]:
            self.works.remove(work)
            for entry in work.entries:
                if entry.holder is work:
                    entry.holder = None
        self.fork()

    def expire(self) -> None:
        """Let the lease of a message run out under its worker, who says so with its next record."""
        held = [w for w in self.works if w.entries[0].queue != "first"]
        if not held:
            return
        work = self.random.choice(held)
        entry = self.random.choice(work.entries)
        if entry.holder is not work:
            return
        entry.holder = None
        work.lost.add(entry)
        self._report(work, entry, lost=True)
        if not work.starts:
            self.works.remove(work)
            for other in work.entries:
                if other.holder is work:
                    other.holder = None

    def _report(self, work: Work, entry: Entry, *, lost: bool) -> None:
        if start := work.starts.get(entry):
            fields = {"id": entry.id, "deliveries": start["deliveries"], "lost": lost}
            self.reports[work.pid].append(fields)

    def _note(self, pid: int, event: str, **fields: Any) -> dict[str, Any]:
        for report in self.reports.pop(pid, ()):
            self.lines.note("report", pid, **report)
        return self.lines.note(event, pid, **fields)

    def _archive(
        self, entry: Entry, state: str, reason: str | None = None, related: int | None = None
    ) -> None:
        self.live.remove(entry)
        self.done.append(entry)
        entry.row = {
            "table": "message_archive",
            "id": entry.id,
            "key": entry.key,
            "state": state,
            "reason": reason,
            "attempts": entry.attempts,
            "deliveries": entry.deliveries,
            "archived": self.lines.stored(),
            "related": related,
        }

    def _finish(self) -> list[dict[str, Any]]:
        for pid in list(self.reports):
            self._note(pid, "said", text="goodbye")
        for pid, code in self.codes.items():
            self.lines.note("exit", worker=pid, code=code)
        for entry in self.done:
            self.lines.note("row", queue=entry.queue, number=entry.number, **(entry.row or {}))
        for number, which in self.effects:
            self.lines.note("effect", number=number, which=which)
        for answer in self.answers:
            self.lines.note("answer", **answer)
        for number in sorted(self.listed):
            self.lines.note("listed", number=number)
        return self.lines.finish()
