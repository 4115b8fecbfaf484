"""Tell an outage of the database in two lines, one when it begins and one when it is over, however
many loops it stops.
"""

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.loop import Log

OF_WRITING = frozenset({"flush loop", "repeat loop"})
"""What may fail for one message's sake alone, and then names it."""


@dataclass
class _Lasting:
    """Failures that are not over."""

    begin: float
    failing: dict[Hashable, str] = field(default_factory=dict)
    """What fails at the moment, and its name."""
    counts: Counter[str] = field(default_factory=Counter)
    """All failures until now, by name."""


class Outages:
    """Those that the parts of one broker in this process have met.

    Failures that pass by themselves are one outage, whichever loops they stop. What the database
    refuses is told for each kind of loop by itself, as the others go on.
    """

    def __init__(self, log: Log, clock: Clock | None = None) -> None:
        """`log` gets the two lines."""
        self._log = log
        self._clock = clock or Clock()
        self._lasting: dict[str, _Lasting] = {}
        """By the name of a kind of loop; "" is the outage of all."""
        self._ended: dict[str, float] = {}
        """When the last one of each kind ended."""

    @property
    def stops_all(self) -> bool:
        """Whether more fails than writing outcomes, which may fail for what one of them is."""
        lasting = self._lasting.get("")
        return lasting is not None and not OF_WRITING.issuperset(lasting.failing.values())

    def failed(
        self, part: Hashable, name: str, error: StoreError, began: float | None = None
    ) -> None:
        """`part`, one of possibly many called `name`, has failed, and will try again.

        A try that `began` (monotonic seconds) before the last outage ended tells nothing new: its
        statement had waited all that time.
        """
        kind = "" if isinstance(error, TransientStoreError) else name
        # A part fails for one reason at a time, so the new reason ends the one before.
        for other in [
            k for k, lasting in self._lasting.items() if k != kind and part in lasting.failing
        ]:
            self._end(other, part)
        lasting = self._lasting.get(kind)
        if lasting is None:
            if began is not None and began <= self._ended.get(kind, -1.0):
                return
            lasting = self._lasting[kind] = _Lasting(self._clock.monotonic())
            passing = isinstance(error, TransientStoreError) and not isinstance(
                error, NotConnectedError
            )
            end = "until the end of this nothing else is said of it" if kind else _UNTIL_THE_END
            self._log(
                logging.WARNING if passing else logging.ERROR,
                f"the {name} failed, and tries again with growing pauses; {end}: {error}",
            )
        lasting.failing[part] = name
        lasting.counts[name] += 1

    def worked(self, part: Hashable) -> None:
        """`part`, which had failed, works again."""
        for kind in [k for k, lasting in self._lasting.items() if part in lasting.failing]:
            self._end(kind, part)

    def left(self, part: Hashable) -> None:
        """`part` has stopped; if nothing else failed, the second line says that the outage had not
        ended.
        """
        for kind, lasting in list(self._lasting.items()):
            if part in lasting.failing:
                self._end(kind, part, stopped=True)

    def _end(self, kind: str, part: Hashable, *, stopped: bool = False) -> None:
        lasting = self._lasting[kind]
        del lasting.failing[part]
        if lasting.failing:
            return
        del self._lasting[kind]
        self._ended[kind] = now = self._clock.monotonic()
        took = now - lasting.begin
        total = lasting.counts.total()
        counts = ", ".join(f"{name} {count}" for name, count in sorted(lasting.counts.items()))
        failures = "1 failure" if total == 1 else f"{total} failures"
        if stopped:
            what = (
                f"the {kind or lasting.counts.most_common(1)[0][0]} stopped before it worked again"
            )
        else:
            what = f"the {kind or 'database'} works again"
        self._log(logging.WARNING, f"{what}, after {took:.1f} s: {failures} ({counts})")


_UNTIL_THE_END = "until the end of this outage no other failure is told"
