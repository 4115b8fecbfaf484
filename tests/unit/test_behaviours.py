"""tests/README.md explains the ids in the tests' docstrings, and has no others."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
README = TESTS / "README.md"
ID = re.compile(r"\b[DFMPWZ][1-9][0-9]?\b")


def cited(text: str) -> set[str]:
    """The ids in the docstrings of a module, its classes and its functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented)
    ]
    return {found for docstring in docstrings for found in ID.findall(docstring)}


def explained() -> list[str]:
    """The ids of the table, as they stand there."""
    return re.findall(r"^\| ([A-Z][0-9]+) \|", README.read_text(), re.MULTILINE)


def test_every_cited_id_is_explained_and_every_explained_id_is_cited() -> None:
    everywhere = set().union(*(cited(file.read_text()) for file in TESTS.rglob("test_*.py")))
    assert set(explained()) == everywhere
    assert len(explained()) == len(set(explained())) > 30


def test_ids_are_found_in_docstrings_only() -> None:
    assert cited('"""F1, Z10: x. SF3 and P100 are none."""\ny = "P7"\ndef f():\n  "D2"\n') == {
        "F1",
        "Z10",
        "D2",
    }
