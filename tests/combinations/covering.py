"""Which features are refused together, and few cases in which all other pairs occur."""

from collections.abc import Iterable
from functools import cache
from itertools import combinations
from random import Random
from warnings import catch_warnings, simplefilter

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SetupError
from tests.combinations.features import AXES, AXIS_OF, USUAL, Case, Pair, case_of, pairs
from tests.combinations.running import Running

AT_A_PUBLISH = {
    ("synchronous handler", "with_ack"): "an outcome is written by the event loop, which "
    "`publish_sync` does not reach: PublishError",
    ("ACK_FIRST", "with_ack"): "the message is acked before its handler starts: PublishError",
    ("SqlProducer", "TestSqlBroker"): "it publishes to a real database: PublishError",
}
"""Pairs that are refused when a message is published, not at the decorator."""


NOWHERE = (create_async_engine("sqlite+aiosqlite:///no.db"), create_engine("sqlite:///no.db"))
"""Engines of what is declared only."""


@cache
def refused() -> dict[Pair, str]:
    """Pairs that do not go together, with the error of the decorator."""
    errors = dict(AT_A_PUBLISH)
    with catch_warnings():
        simplefilter("error", UserWarning)  # an option that has no effect
        Running(USUAL, *NOWHERE).declare()
        for pair in pairs():
            try:
                Running(case_of(*pair), *NOWHERE).declare()
            except (SetupError, UserWarning) as error:
                errors[pair] = str(error)
    return errors


@cache
def covering(seed: int = 1) -> tuple[Case, ...]:
    """Few cases with every pair that is not refused.

    Greedy: of some cases that hold a missing pair, the one that holds the most of them.
    """
    random = Random(seed)
    missing = set(_wanted())
    in_turn = sorted(missing)
    random.shuffle(in_turn)
    cases = []
    for pair in in_turn:
        if pair in missing:
            values = max(
                (_around(pair, missing, random) for _ in range(12)),
                key=lambda given: len(pairs_of(given) & missing),
            )
            missing -= pairs_of(values)
            cases.append(case_of(*values))
    return tuple(cases)


def pairs_of(values: Iterable[str]) -> set[Pair]:
    """Every two of `values`, in the order of the axes."""
    return set(combinations(sorted(values, key=AXIS_OF.__getitem__), 2))


def _around(pair: Pair, missing: set[Pair], random: Random) -> list[str]:
    """`pair` with other features that go together with it, best with `missing` pairs."""
    values = list(pair)
    # Virtual time costs less than that of a database.
    cheap = ("TestSqlBroker",) if random.random() < 2 / 3 else ()
    for given in (cheap, *random.sample(list(AXES.values()), len(AXES))):
        if given and set(values).isdisjoint(given):
            fitting = [v for v in given if all(_fit(v, other) for other in values)]
            if fitting:
                random.shuffle(fitting)
                values.append(max(fitting, key=lambda v: len(pairs_of([v, *values]) & missing)))
    return values


def _fit(one: str, other: str) -> bool:
    if USUAL_VALUES & {one, other}:
        return True
    return pairs_of((one, other)) <= _wanted()


@cache
def _wanted() -> set[Pair]:
    return set(pairs()) - refused().keys()


USUAL_VALUES = {values[0] for values in AXES.values()}
