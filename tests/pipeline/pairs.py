"""Cases in which each pair of values of two axes occurs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from random import Random

Pair = tuple[str, str, str, str]


def pairwise(axes: Mapping[str, Sequence[str]], seed: int = 1) -> Iterator[dict[str, str]]:
    """Few cases with every pair; the first value of each axis is the usual one.

    Greedy: of some cases that hold a missing pair, the one that holds the most of them.
    """
    random = Random(seed)
    names = list(axes)
    missing = {(a, x, b, y) for a, b in combinations(names, 2) for x in axes[a] for y in axes[b]}
    ordered = sorted(missing)
    random.shuffle(ordered)
    while ordered:
        wanted = ordered.pop()
        if wanted not in missing:
            continue
        best: dict[str, str] = {}
        most = -1
        for _ in range(12):
            case = {name: _drawn(random, axes[name]) for name in names}
            a, x, b, y = wanted
            case[a], case[b] = x, y
            found = sum(pair in missing for pair in _pairs(case))
            if found > most:
                most, best = found, case
        missing.difference_update(_pairs(best))
        yield best


def _drawn(random: Random, values: Sequence[str]) -> str:
    """One of `values`, the usual one every other time: most values keep others from mattering."""
    return values[0] if random.random() < 0.5 else random.choice(values)


def _pairs(case: Mapping[str, str]) -> Iterator[Pair]:
    names = list(case)
    for a, b in combinations(names, 2):
        yield a, case[a], b, case[b]
