"""tests/MODULES.md names every module once, and tests that exist; every unit test is named."""

import re
from collections import Counter

import pytest

from tools.module_tests import PACKAGE, READERS, ROOT, TABLE, modules, name_of, paths_of

WITHOUT_A_MODULE = {
    "unit/test_behaviours.py",
    "unit/test_helpers.py",
    "unit/test_layers.py",
    "unit/test_measure.py",
}
"""Unit tests of the repository's own rules."""


def test_each_module_is_named_once() -> None:
    there = {
        name_of(path)
        for package in (PACKAGE, READERS)
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and path.parent.name != "versions"
    }
    named = Counter(name for name, _ in modules(TABLE.read_text()))
    assert set(named) - there == set(), "these are in tests/MODULES.md only"
    assert there - set(named) == set(), "tests/MODULES.md does not say where these are tested"
    assert [name for name, count in named.items() if count > 1] == []


def test_each_named_test_exists() -> None:
    named = {test for _, tests in modules(TABLE.read_text()) for test in tests}
    assert [test for test in sorted(named) if not (ROOT / "tests" / test).exists()] == []
    assert all(tests for _, tests in modules(TABLE.read_text()))


def test_each_unit_test_is_found() -> None:
    there = {f"unit/{path.name}" for path in (ROOT / "tests" / "unit").glob("test_*.py")}
    named = {test for _, tests in modules(TABLE.read_text()) for test in tests}
    assert there - named == WITHOUT_A_MODULE


def test_a_module_leads_to_its_tests() -> None:
    assert paths_of("flow/tasks/cron.py") == ["tests/unit/test_cron.py"]
    assert paths_of("faststream_sqlbroker/flow/tasks/cron.py") == ["tests/unit/test_cron.py"]
    assert paths_of("flow/none.py") == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/README.md"])
def test_a_guide_names_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    named = re.findall(r"`([\w./]+(?:\.(?:py|md|toml|sql)|/))`", text)
    missing += [
        name for name in named if not any((base / name).exists() for base in (ROOT, PACKAGE))
    ]
    assert missing == []
    assert links
