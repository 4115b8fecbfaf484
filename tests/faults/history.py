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


class Recorder:
    """Appends events of this process."""

    def __init__(self, folder: Path) -> None:
        """One file a process in `folder`."""
        self._file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **fields: Any) -> None:
        """Write `event` now."""
        line = {"event": event, "at": time.monotonic(), "pid": os.getpid(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


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
    """ack or nack, as the handler ended; None if it did not."""
    ended_at: float | None = None
    lost: bool = False
    """Whether its process has said that its lease was lost."""
    unknown: bool = False
    """Whether its process has said that its settle stayed unknown."""


@dataclass
class History:
    """One run, as the checker wants it. Bodies are numbers; rows are dicts with the body as `number`."""

    committed: dict[int, str] = field(default_factory=dict)
    """Published and committed: number → queue."""
    rolled_back: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    """The answer to the publisher's COMMIT was lost."""
    deliveries: list[Delivery] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    """Processes that ended without a chance to write anything."""
    disturbed: set[int] = field(default_factory=set)
    """Processes that a fault, or a busy machine, may have kept from renewing their leases."""
    live: list[dict[str, Any]] = field(default_factory=list)
    archived: list[dict[str, Any]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Numbers of the messages that were chained to an ack."""
    listed: set[int] = field(default_factory=set)
    """Numbers of the messages whose outcome is listed as unknown."""
    effects: list[int] = field(default_factory=list)
    """Numbers of the rows that transactional handlers have committed."""
    max_attempts: int = 3
    max_deliveries: int = 30


def read(folder: Path) -> list[dict[str, Any]]:
    """All events in `folder`, in the order of their times."""
    lines = (line for path in folder.iterdir() for line in path.read_bytes().split(b"\n"))
    return sorted((json.loads(line) for line in lines if line), key=lambda event: float(event["at"]))


def deliveries(events: Iterable[dict[str, Any]]) -> list[Delivery]:
    """The starts among `events`, with what became of each."""
    ends: dict[tuple[int, int, int], tuple[str, float]] = {}
    lost: set[tuple[int, int, int | None]] = set()
    unknown: set[tuple[int, int]] = set()
    starts = []
    for event in events:
        match event["event"]:
            case "start":
                starts.append(event)
            case "end":
                ends[event["pid"], event["id"], event["deliveries"]] = event["outcome"], event["at"]
            case "report":
                if event["text"].startswith("lease lost"):
                    lost.add((event["pid"], event["id"], event.get("deliveries")))
                else:
                    unknown.add((event["pid"], event["id"]))
    return [
        Delivery(
            s["number"], s["queue"], s["deliveries"], s["attempts"], s["pid"], s["at"],
            *ends.get((s["pid"], s["id"], s["deliveries"]), (None, None)),
            any((s["pid"], s["id"], d) in lost for d in (None, s["deliveries"])),
            (s["pid"], s["id"]) in unknown,
        )
        for s in starts
    ]  # fmt: skip
