"""The order in which the files of a run begin."""

from types import SimpleNamespace
from typing import Any

from tests.scheduling import order, recorded, scope


def test_the_longest_begin_first_and_a_new_file_is_not_the_last() -> None:
    known = {file: seconds for file, seconds in recorded().items() if scope(file) == file}
    files = sorted(known, key=known.__getitem__)
    short, long = files[0], files[-1]
    new, *spark = "tests/flow/test_new.py", *(file for file in recorded() if scope(file) != file)
    items: list[Any] = [
        SimpleNamespace(nodeid=f"{file}::test") for file in (short, long, new, *spark)
    ]
    found = [item.nodeid.partition("::")[0] for item in order(items)]
    assert found == [*spark, new, long, short]
