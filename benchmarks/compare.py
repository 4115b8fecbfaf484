"""What is read from measurements: ratios and figures, round by round, and what is wanted of their
medians."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Result, Variant

Round = dict[str, Result]
"""One run of each variant of a suite, by the variant's name."""
Reading = Callable[[Round], float | None]
"""One number of a round; None where this machine cannot tell."""


def over(above: str, below: str, figure: str = "rate") -> Reading:
    """`figure` of one variant ÷ that of another."""
    return lambda runs: runs[above][figure] / runs[below][figure]


def alone(name: str, figure: str) -> Reading:
    """`figure` of one variant, in its own unit."""
    return lambda runs: runs[name][figure]


@dataclass(frozen=True)
class Spread:
    """A number that was taken once a round."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    """Median and extremes of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Comparison:
    """What is read of each round; `least` (or `most`) is what we want of the median."""

    name: str
    read: Reading
    least: float | None = None
    most: float | None = None
    digits: int = 2

    def verdict(self, results: dict[str, list[Result]]) -> tuple[str, bool]:
        """The row of the report, and whether the target is reached; unmeasured is not reached."""
        wanted = "" if self.most is None else f"≤ {self.most}"
        wanted = wanted if self.least is None else f"≥ {self.least}"
        rounds = [
            dict(zip(results, runs, strict=True)) for runs in zip(*results.values(), strict=True)
        ]
        values = [value for runs in rounds if (value := self.read(runs)) is not None]
        if not values:
            return f"| {self.name} | {wanted} | not measurable here | | 0 |", not wanted
        found = spread(values)
        reached = (self.least is None or found.median >= self.least) and (
            self.most is None or found.median <= self.most
        )
        median, low, high = (f"{n:.{self.digits}f}" for n in (found.median, found.low, found.high))
        mark = "" if reached else " **short**"
        return (
            f"| {self.name} | {wanted} | {median}{mark} | {low} to {high} | {found.rounds} |",
            reached,
        )


@dataclass(frozen=True)
class Suite:
    """Variants that are run in turn, and what is read from them."""

    name: str
    variants: list[Variant]
    comparisons: list[Comparison] = field(default_factory=list)
    shows: tuple[str, ...] = ("rate", "cpu_each", "instructions_each")
    """Figures of each variant that the report tells (`report.FIGURES`); its chart draws the first
    ones of one unit."""
    axis: str | None = None
    """The figure on the x axis of its chart, which then has lines; None for bars."""
    most_rounds: int | None = None
    """Rounds that are enough, however many are asked for."""
    aside: bool = False
    """Whether it needs next to no processor, so that it runs while the others are measured."""
