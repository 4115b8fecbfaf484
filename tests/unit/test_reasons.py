"""Every reason that the product writes by itself is a code of the table in the docs, with no id in
its text."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from faststream_sqlbroker.core import reasons
from tests.unit.test_layers import FILES, tree_of
from tests.unit.test_layers import name as name_of

PLACE = {"Reject": 0, "Discard": 0, "_fail": 3, "_reject": 1}
"""Which argument of what is written is the reason; or it is given by name."""
PASSED_ON = {"reason", "outcome.reason or REJECTED", "settlement.reason or SETTLE_ERROR"}
"""Reasons given by a handler or decided before."""
CODES = {
    name: value
    for name, value in vars(reasons).items()
    if name.isupper() and isinstance(value, str)
}


@cache
def written() -> list[tuple[str, str]]:
    """Where a reason is written, and what."""
    return [(place, ast.unparse(node)) for place, node in _written()]


def _written() -> Iterator[tuple[str, ast.expr]]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                if getattr(node.targets[0], "attr", "") == "reason":
                    yield f"{name_of(path)}:{node.lineno}", node.value
            if not isinstance(node, ast.Call):
                continue
            place = f"{name_of(path)}:{node.lineno}"
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            if name in PLACE and len(node.args) > PLACE[name]:
                yield place, node.args[PLACE[name]]
            if name in {*PLACE, "replace"}:
                yield from ((place, k.value) for k in node.keywords if k.arg == "reason")


def test_all_codes_are_in_the_table() -> None:
    assert set(CODES.values()) == set(reasons.MEANINGS)
    assert all(re.fullmatch("[a-z_]+", code) for code in reasons.MEANINGS)


def test_what_is_written_is_one_of_them() -> None:
    found = dict(written())
    assert {
        place: text for place, text in found.items() if text not in PASSED_ON | set(CODES)
    } == {}
    assert set(found.values()) > PASSED_ON


@pytest.mark.parametrize("name", CODES)
def test_every_code_is_written_somewhere(name: str) -> None:
    assert any(name in re.findall(r"\w+", text) for _, text in written())
