"""Whatever can be observed of a message is the same with the compiled pipeline and FastStream's.

Every pair of two values of the axes occurs in a case; groups of axes that depend on each other are
combined in full. CPU of one core: about 30 s.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from tests.pipeline.pairs import pairwise
from tests.pipeline.running import AXES, Case, compare

PAIRS = [Case(**values) for values in pairwise(AXES)]
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


def combined(axes: dict[str, tuple[str, ...]]) -> Iterator[Case]:
    """Every combination; the other axes have their usual values."""
    for values in product(*axes.values()):
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
    pipelines = await check(PAIRS[part::PARTS])
    assert pipelines["compiled pipeline"] > len(PAIRS) / PARTS / 2, pipelines


@pytest.mark.parametrize("name", FULL)
async def test_what_depends_on_each_other_shows_the_same(name: str) -> None:
    pipelines = await check(list(combined(FULL[name])))
    assert pipelines["compiled pipeline"] > pipelines.total() / 2, pipelines


def test_every_pair_is_among_the_cases() -> None:
    for one, other in product(AXES, repeat=2):
        if one < other:
            found = {(getattr(case, one), getattr(case, other)) for case in PAIRS}
            assert found == set(product(AXES[one], AXES[other])), (one, other)
