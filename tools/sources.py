"""Files to measure, and the places in them that a measure counts."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, order=True)
class Place:
    """One line that a measure counts."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class File:
    """A file's text, by its path below the measured folder."""

    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.splitlines()

    def place(self, line: int, text: str | None = None) -> Place:
        """A place in this file, told by `text` or by the line itself."""
        return Place(self.name, line, text or self.lines[line - 1].strip())


@cache
def parsed(file: File) -> ast.Module:
    """The syntax tree; one per file, as several measures read it."""
    return ast.parse(file.text, file.name)


def read(root: Path, folders: Sequence[str], suffixes: Sequence[str]) -> list[File]:
    """The files below the folders; `.` stands for the root's own files."""
    found: set[Path] = set()
    for name in folders:
        inside = root.iterdir() if name == "." else (root / name).rglob("*")
        found |= {
            path for path in inside if path.is_file() and (path.suffix or path.name) in suffixes
        }
    return [File(str(path.relative_to(root)), path.read_text()) for path in sorted(found)]
