"""Whatever can be observed of a message is the same with the compiled pipeline and FastStream's.

Every pair of two values of the axes occurs in a case. Groups of axes that depend on each other are
combined in full, those of four so that each three values occur. CPU of one core: about 20 s.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product

import pytest

from tests.pipeline.pairs import pairwise
from tests.pipeline.running import AXES, Case, compare

PARTS = 8
_SOME = (
    "returns",
    "nacks",
    "ValueError",
    "RuntimeError from",
    "RejectMessage",
    "StopConsume",
    "Move",
)
FULL: dict[str, dict[str, tuple[str, ...]]] = {
    "errors and acks": {"outcome": AXES["outcome"], "policy": AXES["policy"]},
    "errors in middlewares": {"outcome": _SOME, "middlewares": AXES["middlewares"]},
    "bodies": {"body": AXES["body"], "payload": AXES["payload"]},
    "bodies in middlewares": {
        "body": ("dict", "unannotated", "model", "many", "none"),
        "middlewares": AXES["middlewares"],
        "kind": ("plain", "batch", "synchronous"),
        "decoder": ("ours", "calls ours"),
    },
    "decoders": {"body": AXES["body"], "decoder": AXES["decoder"]},
    "arguments": {"dependencies": AXES["dependencies"], "parameters": AXES["parameters"]},
    "errors and dependencies": {
        "outcome": ("returns", "ValueError", "RejectMessage", "SystemExit", "CancelledError"),
        "dependencies": ("generator", "both generators", "swallows errors", "fails at the end"),
        "kind": ("plain", "batch", "transactional"),
    },
    "answers": {
        "answer": AXES["answer"],
        "publishers": AXES["publishers"],
        "payload": ("order", "reply"),
        "middlewares": ("none", "watch"),
    },
    "publishers": {
        "publishers": AXES["publishers"],
        "source": AXES["source"],
        "middlewares": ("none", "watch"),
        "answer": ("text",),
    },
    "loggers": {
        "logger": AXES["logger"],
        "outcome": ("returns", "ValueError", "StopConsume"),
        "policy": AXES["policy"],
    },
    "changes": {"change": AXES["change"], "source": AXES["source"], "dependencies": ("one",)},
    "changes of what is answered": {
        "change": ("ack policy", "no reply", "middleware added"),
        "payload": ("order", "reply"),
        "outcome": ("returns", "ValueError"),
        "answer": ("text",),
    },
}


@cache
def pairs() -> list[Case]:
    """Cases in which every pair occurs; made by the processes of tests that run some of them."""
    return [Case(**values) for values in pairwise(AXES)]


def combined(axes: dict[str, tuple[str, ...]]) -> Iterator[Case]:
    """Every combination, or of four axes with a choice every second one: each three of their values
    still occur. The other axes have their usual values."""
    halved = sum(len(values) > 1 for values in axes.values()) > 3
    for chosen in product(*(enumerate(values) for values in axes.values())):
        if halved and sum(position for position, _ in chosen) % 2:
            continue
        values = (value for _, value in chosen)
        yield Case(**{"parameters": "message", **dict(zip(axes, values, strict=True))})


async def check(cases: list[Case]) -> Counter[str]:
    """Compare each of `cases`; how often which pipeline ran."""
    pipelines: Counter[str] = Counter()
    for case in cases:
        generic, compiled, which = await compare(case)
        assert compiled == generic, case
        pipelines[which] += 1
    return pipelines


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_pair_of_values_shows_the_same(part: int) -> None:
    pipelines = await check(pairs()[part::PARTS])
    assert pipelines["compiled pipeline"] > len(pairs()) / PARTS / 2, pipelines


@pytest.mark.parametrize("name", FULL)
async def test_what_depends_on_each_other_shows_the_same(name: str) -> None:
    pipelines = await check(list(combined(FULL[name])))
    assert pipelines["compiled pipeline"] > pipelines.total() / 2, pipelines


def test_every_pair_is_among_the_cases() -> None:
    for one, other in product(AXES, repeat=2):
        if one < other:
            found = {(getattr(case, one), getattr(case, other)) for case in pairs()}
            assert found == set(product(AXES[one], AXES[other])), (one, other)


@pytest.mark.parametrize("name", FULL)
def test_each_three_values_of_a_group_are_among_its_cases(name: str) -> None:
    group = FULL[name]
    cases = list(combined(group))
    for three in combinations(group, min(3, len(group))):
        found = {tuple(getattr(case, axis) for axis in three) for case in cases}
        assert found == set(product(*(group[axis] for axis in three))), three
