"""The measures of readability count what they say, and their held limits are kept."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tools import database_layers, measure, sources, words
from tools.sources import File, Place
from tools.worktree import ROOT


@cache
def read(folders: tuple[str, ...], suffixes: tuple[str, ...]) -> list[File]:
    """This repository's files; each is read once."""
    return sources.read(ROOT, folders, suffixes)


def lines(find: Callable[[File], Iterator[Place]], text: str) -> list[int]:
    return [place.line for place in find(File("planted.py", text))]


def test_complexity_counts_each_branch_and_leaves_nested_functions_out() -> None:
    text = """
async def outer(a, b):
    if a and b or a:
        return [x for x in b if x]
    async for x in b:
        try:
            y = 1 if a else 2
        except ValueError:
            pass
    match a:
        case 1:
            pass

    def inner():
        while a:
            pass
"""
    found = {node.name: count for node, count in measure.functions(File("planted.py", text))}
    assert found == {"outer": 9, "inner": 2}


def test_functions_over_the_limit_are_complex() -> None:
    branches = "".join("    if a:\n        pass\n" for _ in range(measure.MOST_COMPLEX))
    assert lines(measure.complex_functions, f"def f(a):\n{branches}") == [1]
    assert (
        lines(measure.complex_functions, f"def f(a):\n{branches[: -len('    if a: pass    ')]}")
        == []
    )


def test_code_lines_leave_out_blank_lines_comments_and_docstrings() -> None:
    text = '''"""A module,
of two lines."""

import a  # Why.

# A comment.
LIMIT = 5
"""What it limits."""


def f():
    """Do it."""
    text = """
    """
    return (
        # Why.
        text
    )
'''
    assert lines(measure.code_lines, text) == [4, 7, 11, 13, 14, 15, 17, 18]


def test_assignments_of_unrelated_things_are_packed_and_exchanges_are_not() -> None:
    text = "a, b = 1, 2\nself.a, self.b = c, d\na, b = b, a\na, b = f()\na = b, c\na = b = 1\n"
    assert lines(measure.packed_assignments, text) == [1, 2]


def test_what_only_passes_its_arguments_to_a_transaction_is_a_wrapper() -> None:
    text = """
class Locks:
    async def extend(self, key):
        \"\"\"Extend it.\"\"\"
        return await self._database.run(lambda c: extend(c, self._table, key), LOCK)

    async def read(self, key):
        await self._database.run(partial(read, table=self._table, key=key), write=False)

    async def renew(self, key):
        return await self._database.run(lambda c: self._dialect.renew(c, key), LOCK)

    async def count(self, keys):
        return await self._database.run(lambda c: count(c, sorted(keys)), LOCK)
"""
    assert lines(database_layers.transaction_wrappers, text) == [3, 7]
    of_schema = "from faststream_sqlbroker.schema.locks import extend" + text
    assert lines(database_layers.transaction_wrappers, of_schema) == [7]


def test_a_constructor_with_a_connection_and_its_dialect_is_split() -> None:
    text = "class A:\n    def __init__(self, engine, dialect): ...\n"
    assert lines(database_layers.split_constructors, text) == [2]
    assert lines(database_layers.split_constructors, text.replace("engine, ", "")) == []


def test_writes_on_other_objects_are_foreign() -> None:
    text = "self.a = 1\nrow.a = 1\nself.row.a = 1\nrow.a += 1\na, row.b = c\nrow.a.b\ncls.a = 1\n"
    assert lines(measure.foreign_writes, text) == [2, 3, 4, 5]


def test_comments_explain_and_directives_do_not() -> None:
    text = (
        "# why\n"
        "a = 1  # noqa: E501\n"
        "b = 2  # type: ignore[x]\n"
        "c = 3  # noqa: E501 - why\n"
        'd = "# no comment"\n'
    )
    assert lines(measure.comments, text) == [1, 4]


def test_constants_need_a_comment_or_a_docstring() -> None:
    text = (
        "A = 1\n"
        "\n"
        "# Seconds.\n"
        "B = 2.0\n"
        "C = 3  # bytes\n"
        "D = -4\n"
        '"""Explained."""\n'
        "E: Final = 2 * UNIT\n"
        "F = timedelta(seconds=1)\n"
        "G = True\n"
        'H = "text"\n'
        "def f():\n"
        "    x = 1\n"
    )
    assert lines(measure.bare_constants, text) == [1, 8, 9]


def test_riddle_words_are_found_in_names_too_and_quoted_users_are_not() -> None:
    word = measure.RIDDLES[1]
    names = f"# {word.title()} knows\ndef test_{word}_knows(): ...\n"
    text = f"{names}user = '{word}'\nx{word}y = 1\n# `{word}`\n"
    assert lines(measure.riddle_words, text) == [1, 2]


def test_lines_and_skips_are_counted() -> None:
    text = f"{'a' * 100}  # noqa: E1\n{'a' * 101}\nb = 1  # fmt: {'skip'}\n"
    assert lines(measure.long_lines, text) == [2]
    assert lines(measure.format_skips, text) == [3]


def test_a_limit_that_is_exceeded_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = "# Seconds.\nA = 1\n\n\ndef f(a):\n    return a\n"
    (tmp_path / "good.py").write_text(explained)
    assert measure.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text("a, b = 1, 2\n" + explained)
    assert measure.main(["--check", str(tmp_path)]) == 1
    assert "packed_assignments is beyond its limit" in capsys.readouterr().out
    assert measure.main(["--list", "packed_assignments", str(tmp_path)]) == 0
    assert "bad.py:1: a, b = 1, 2\n1 places\n" in capsys.readouterr().out


def test_names_that_say_nothing_are_found() -> None:
    text = (
        "found = 1\n_kept = 2\nfor each in rows:\n    row = each\n"
        "def told(): ...\ndef tell(): ...\n"
    )
    assert lines(words.vague_names, text) == [1, 3]
    assert lines(words.participle_functions, text) == [5]
    assert measure.MEASURES["vague_names"].figure([File("a.py", text)]) == 50


def test_docstrings_that_need_another_sentence_are_found() -> None:
    text = (
        'def a():\n    """Whether it is."""\n'
        'class B:\n    """The time of one."""\n'
        'def c():\n    """Publish a message."""\n'
        "def d(): ...\n"
    )
    assert lines(words.relative_docstrings, text) == [1]
    assert lines(words.leaning_docstrings, text) == [1, 3]
    assert measure.MEASURES["leaning_docstrings"].figure([File("a.py", text)]) == 200 / 3


def test_patches_and_private_stores_are_found() -> None:
    text = """
def test(monkeypatch, broker):
    monkeypatch.setattr(worker, "PAUSE", 0)
    store = broker._store
    setattr(worker, "PAUSE", 0)
    stores = broker._stores
"""
    assert lines(words.patches, text) == [3]
    assert lines(words.private_stores, text) == [4]


def test_constants_and_templates_are_found() -> None:
    text = "MOST_ROWS = 1\n_LONGEST_WAIT = 2\nMAX_ROWS = 3\na = b.replace" + '("{c}", d)\n'
    assert lines(words.extreme_constants, text) == [1, 2]
    assert lines(words.templates, text) == [4]


def test_names_that_two_files_share_are_found() -> None:
    texts = {"a/b.py": "class X: ...\n", "c/b.py": "class _X: ...\n", "d.py": "class Y: ...\n"}
    files = [File(name, text) for name, text in texts.items()]
    assert [place.text for place in words.shared_class_names(files)] == ["X"]
    assert [place.file for place in words.shared_file_names(files)] == ["a/b.py", "c/b.py"]


def test_words_of_pages_are_counted_outside_of_code() -> None:
    page = File("a.md", "You see what is there.\n```\nyou\n```\nNothing told.\n")
    found = {name: [place.line for place in words.in_pages(name)(page)] for name in words.IN_PAGES}
    assert found == {
        "you": [1],
        "nominal_what": [1],
        "nothing_none": [5],
        "tell_told": [5],
        "the_ones_that": [],
    }
    assert measure.MEASURES["you"].figure([page]) == 1000 / 7


@pytest.mark.parametrize("name", sorted(measure.HELD))
def test_the_held_limits_are_kept(name: str) -> None:
    """`just measure --list NAME` shows the places."""
    held = measure.MEASURES[name]
    files = read(held.folders, held.suffixes)
    assert len(files) > 5
    assert held.holds(held.figure(files))
