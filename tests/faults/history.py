"""What happened: recorded by every process as it happens, read by the checker afterwards.

Each event is one line of JSON, appended with one write, so that it survives SIGKILL. Times are the
machine's monotonic clock, which all its processes share, in seconds.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENDS = ("ack", "nack", "refused", "tried", "caught", "rolled back", "committed")
"""How handlers end: with an ack that the database will refuse (`refused`) or may refuse (`tried`),
after errors of a deadlock (`caught`), after a raw ROLLBACK or COMMIT of their own."""
AT_MOST_ONCE = "once"
"""The queue of the subscriber with ACK_FIRST."""
FIRST = "effect 1"
LAST = "effect 2"
"""The effects of a transactional handler, before and after what it does in between."""


class Recorder:
    """Appends events of this process."""

    def __init__(self, folder: Path) -> None:
        """One file a process in `folder`."""
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **fields: Any) -> None:
        """Write `event` now."""
        line = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Write no more."""
        os.close(self._file)


@dataclass(frozen=True)
class Delivery:
    """A handler's start, and its end if it came to one."""

    number: int
    queue: str
    deliveries: int
    attempts: int
    pid: int
    at: float
    ended: str | None = None
    """How the handler ended, one of `ENDS`; None if it did not."""
    ended_at: float | None = None
    answer: int | None = None
    """Bytes of the answer that its ack brings; None brings none."""
    lost: bool = False
    """Whether its process has said that its lease was lost."""
    unknown: bool = False
    """Whether its process has said that its settle stayed unknown."""
    lost_at: float = float("inf")
    """When its process has said that its lease was lost."""
    looked: int | None = None
    """When the broker last looked whether its slot of a Throttle was over: microseconds."""
    claimed: float = float("-inf")
    """When its process was told that it has the lease."""
    asked: float | None = None
    """When its process asked for it, if that is known."""
    message_id: str = ""
    """The text by which its handler may recognise the message."""
    row: int = 0
    """The number of its row."""


@dataclass(frozen=True)
class Stall:
    """A time in which a machine that is busy with others kept `pid` from renewing its leases; None:
    everybody."""

    start: float
    end: float
    pid: int | None = None


@dataclass(frozen=True)
class Frozen:
    """A time in which the database refused to write outcomes, for want of a right or because the
    server was read-only."""

    start: float
    end: float
    unfit: frozenset[int] = frozenset()
    """Processes that were started in it."""
    brief: bool = False
    """Whether it is too short for a process to notice that has written before."""


@dataclass(frozen=True)
class Loss:
    """A time whose commits a failover may have lost."""

    start: float
    """All that was committed before has arrived at the standby."""
    down: float
    """Until now the standby gave no leases."""
    end: float
    """Leases that are given from now on are the new primary's."""


@dataclass(frozen=True)
class Takeover:
    """One server took the place of another."""

    down: float
    """From now on the old one was ending, or was not the only one."""
    writable: float
    """From now on all addresses lead to the new one, which takes writes."""
    pids: frozenset[int] = frozenset()
    """Processes that worked then."""


@dataclass(frozen=True)
class Answer:
    """A message that was published on ack."""

    numbers: tuple[int, ...]
    """The messages that it answers; none where many have sent the same, with one dedup_id."""
    size: int = 0
    joint: bool = False
    """Whether it is one answer for a whole batch."""


@dataclass
class History:
    """One run, as the checker wants it. Bodies are numbers; rows are dicts with the body as
    `number`."""

    committed: dict[int, str] = field(default_factory=dict)
    """Published and committed: number → queue."""
    rolled_back: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    """The answer to the publisher's COMMIT was lost."""
    deliveries: list[Delivery] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    """Processes that ended without a chance to write anything."""
    disturbed: set[int] = field(default_factory=set)
    """Processes that a fault may have kept from renewing their leases."""
    stalls: list[Stall] = field(default_factory=list)
    lease: float = 0.0
    """Seconds of a lease: one that is lost may have begun so long before its handler."""
    live: list[dict[str, Any]] = field(default_factory=list)
    archived: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    listed: set[int] = field(default_factory=set)
    """Numbers of the messages whose outcome is listed as unknown."""
    ticks: list[dict[str, Any]] = field(default_factory=list)
    """What a schedule has published, by the archive."""
    cancelled: set[int] = field(default_factory=set)
    """Numbers of the messages that an operator has ended."""
    asked: set[int] = field(default_factory=set)
    """Numbers of those that an operator has asked for, which includes them."""
    calm_at: float | None = None
    """When a soak ended of which it counts how long its queues take to drain."""
    effects: list[tuple[int, str]] = field(default_factory=list)
    """What transactional handlers have committed: number, and FIRST or LAST."""
    stuck: list[str] = field(default_factory=list)
    """Queues that stood still during a fault, or after it."""
    frozen: list[Frozen] = field(default_factory=list)
    health: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)
    """The health that each process reported, and when."""
    stopping: float = float("inf")
    """When the workers were told to end; what they say of their health afterwards does not count.
    """
    refused: set[int] = field(default_factory=set)
    """Processes that did not start, for want of a server that takes writes."""
    told_to_end: dict[int, float] = field(default_factory=dict)
    """When single processes were told to end, if that was before the others."""
    message_ids: dict[str, set[int]] = field(default_factory=dict)
    """The numbers of the messages that handlers have seen under each `message_id`."""
    rows: dict[int, set[int]] = field(default_factory=dict)
    """The numbers of the messages whose publishers were told that this is their row."""
    takeovers: list[Takeover] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    commits: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of messages of a failover: when the publisher sent their COMMIT, and had its answer."""
    lost: set[int] = field(default_factory=set)
    """Messages whose COMMIT was answered, and which the database has lost."""
    forgotten: list[Delivery] = field(default_factory=list)
    """Deliveries of which the database knows nothing any more."""
    max_attempts: int = 3
    max_deliveries: int = 30


def read(folder: Path) -> list[dict[str, Any]]:
    """All events in `folder`, in the order of their times."""
    lines = (line for path in folder.iterdir() for line in path.read_bytes().split(b"\n"))
    return sorted(
        (json.loads(line) for line in lines if line), key=lambda event: float(event["at"])
    )


Mark = tuple[int, int, int, str]
"""A delivery: its process, row, count and lease."""


def mark_of(event: dict[str, Any]) -> Mark:
    """Which delivery a start or an end is of. A failover may give an id again: the lease tells the
    two apart."""
    return event["pid"], event["id"], event["deliveries"], event.get("lease", "")


def deliveries(events: Iterable[dict[str, Any]]) -> list[Delivery]:
    """The starts among `events`, which are in order, with what became of each."""
    ends: dict[Mark, tuple[str, float, int | None]] = {}
    latest: dict[tuple[int, int], Mark] = {}
    named: dict[tuple[int, int, int], list[Mark]] = {}
    lost: dict[Mark, float] = {}
    unknown: set[tuple[int, int]] = set()
    starts = []
    for event in events:
        match event["event"]:
            case "start":
                starts.append(event)
                latest[event["pid"], event["id"]] = mark_of(event)
                named.setdefault(mark_of(event)[:3], []).append(mark_of(event))
            case "end":
                ends[mark_of(event)] = event["outcome"], event["at"], event.get("answer")
            case "report" if event["lost"]:
                # A report that does not say which delivery it means is about the one that has
                # started last.
                mark = latest.get((event["pid"], event["id"]))
                if "deliveries" in event:
                    # It names no lease: of an id that was given again the older one was lost first.
                    those = named.get((event["pid"], event["id"], event["deliveries"]), [])
                    mark = next((each for each in those if each not in lost), None)
                if mark is not None:
                    lost.setdefault(mark, event["at"])
            case "report":
                unknown.add((event["pid"], event["id"]))
    return [
        Delivery(
            s["number"],
            s["queue"],
            s["deliveries"],
            s["attempts"],
            s["pid"],
            s["at"],
            *ends.get(mark_of(s), (None, None, None)),
            mark_of(s) in lost,
            (s["pid"], s["id"]) in unknown,
            lost.get(mark_of(s), float("inf")),
            s.get("looked"),
            s.get("claimed", float("-inf")),
            s.get("asked"),
            s.get("message_id", ""),
            s["id"],
        )
        for s in starts
    ]
