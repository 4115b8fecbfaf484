"""`just test-oldest` covers every extra, and refuses lower bounds that tell two stories."""

import tomllib

import pytest
from packaging.requirements import Requirement

from tools.oldest import OWN, ROOT, TESTS, lower_bounds, requirements

EXTRAS = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])


def test_each_extra_has_tests() -> None:
    assert {*TESTS, OWN} == set(EXTRAS)
    named = {test for tests in TESTS.values() for test in tests}
    assert [test for test in sorted(named) if not (ROOT / "tests" / test).exists()] == []


def test_each_requirement_has_one_lower_bound() -> None:
    pins = lower_bounds(EXTRAS)
    assert len(pins) == len({one.name.lower() for named in EXTRAS.values() for one in named})


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("rich>=14", "Rich>=13", "rich is >=14 for a and >=13 for b"),
        ("rich>=14", "typer", "typer of b needs one lower bound"),
        ("rich>=14", "typer>=1,>=2", "of b needs one lower bound"),
    ],
)
def test_bounds_that_cannot_be_tried_are_refused(first: str, second: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lower_bounds({"a": [Requirement(first)], "b": [Requirement(second)]})


def test_extras_of_a_distribution_are_joined() -> None:
    named = {"a": [Requirement("x[b]>=1")], "b": [Requirement("X[a]>=1,<2"), Requirement("y>=2")]}
    assert lower_bounds(named) == ["x[a,b]==1", "y==2"]
