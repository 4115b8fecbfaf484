"""Cases in which each pair of values of two axes occurs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from random import Random

Value = tuple[str, str]
"""A value and its axis."""


def pairwise(axes: Mapping[str, Sequence[str]], seed: int = 1) -> Iterator[dict[str, str]]:
    """Few cases with every pair; the first value of each axis is the usual one.

    Greedy: of some cases that hold a missing pair, the one that holds the most of them.
    """
    random = Random(seed)
    columns = [[(name, value) for value in values] for name, values in axes.items()]
    positions = {name: n for n, name in enumerate(axes)}
    missing = {pair for one, other in combinations(columns, 2) for pair in _product(one, other)}
    ordered = sorted(missing)
    random.shuffle(ordered)
    while ordered:
        wanted = ordered.pop()
        if wanted not in missing:
            continue
        best: list[Value] = []
        held: set[tuple[Value, Value]] = set()
        for _ in range(12):
            case = [_drawn(random, column) for column in columns]
            for value in wanted:
                case[positions[value[0]]] = value
            found = missing.intersection(combinations(case, 2))
            if len(found) > len(held):
                held, best = found, case
        missing -= held
        yield dict(best)


def _product(one: Sequence[Value], other: Sequence[Value]) -> Iterator[tuple[Value, Value]]:
    return ((x, y) for x in one for y in other)


def _drawn(random: Random, values: Sequence[Value]) -> Value:
    """One of `values`, the usual one every other time: most values keep others from mattering."""
    return values[0] if random.random() < 0.5 else values[int(random.random() * len(values))]
