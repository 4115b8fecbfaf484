"""Measure how readable the code is: complexity, lines, comments, words.

python -m tools.measure [--rev REV ...] [--list NAME] [--check] [FOLDER]

Without FOLDER, this repository is measured. Each `--rev REV` adds a column for that revision.
With FOLDER, every measure is taken of that folder alone, for example of another package.
`--list NAME` prints the places of one measure. `--check` fails where a limit is exceeded.
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from tools import database_layers, words
from tools.sources import File, Place, parsed, read
from tools.worktree import ROOT, worktree

LONGEST_LINE = 100
"""Characters; the same as ruff's line-length."""
MOST_COMPLEX = 10
"""Branches of a function, plus one; more counts as complex."""
RIDDLES = ("somebody", "nobody", "whoever", "beside", "meanwhile")

Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler),
    *(ast.comprehension, ast.match_case),
)


def functions(file: File) -> Iterator[tuple[Function, int]]:
    """Each function with its cyclomatic complexity.

    Counted are `if`, ternaries, loops, `except`, `case`, comprehensions, and each `and` and `or`.
    A nested function counts for itself only.
    """
    for node in ast.walk(parsed(file)):
        if isinstance(node, Function):
            yield node, 1 + sum(_branches(inner) for inner in _own(node))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _own(child)


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return isinstance(node, BRANCHES)


def complex_functions(file: File) -> Iterator[Place]:
    """Functions whose complexity is over the limit."""
    for node, complexity in functions(file):
        if complexity > MOST_COMPLEX:
            yield file.place(node.lineno, f"{node.name} has complexity {complexity}")


def packed_assignments(file: File) -> Iterator[Place]:
    """`a, b = c, d`, unless it needs to be one statement: a value reads one of the targets."""
    for node in ast.walk(parsed(file)):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
        written = {ast.unparse(part) for target in targets for part in target.elts}
        read = {
            ast.unparse(part)
            for part in ast.walk(node.value)
            if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))
        }
        if targets and not written & read:
            yield file.place(node.lineno)


def long_lines(file: File) -> Iterator[Place]:
    """Lines that are too long; a directive at the end does not count, as for ruff."""
    for number, line in enumerate(file.lines, 1):
        if len(TRAILING_DIRECTIVE.sub("", line).rstrip()) > LONGEST_LINE:
            yield file.place(number)


TRAILING_DIRECTIVE = re.compile(r"#\s*(noqa|type: ignore|pragma|pylint|mypy:|pyright:)\b.*$")


def foreign_writes(file: File) -> Iterator[Place]:
    """Attributes assigned on anything but `self` and `cls`."""
    for node in ast.walk(parsed(file)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
        ):
            yield file.place(node.lineno)


def comments(file: File) -> Iterator[Place]:
    """Lines with a comment that explains: directives to tools are none."""
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            yield file.place(token.start[0])


DIRECTIVE = re.compile(r"#\s*(noqa|type: ignore|fmt:|pragma|ruff:|mypy:|pyright:|!)[^-—]*$")


def bare_constants(file: File) -> Iterator[Place]:
    """Numeric constants of a module without a comment or a docstring that says what they mean."""
    explained = {place.line for place in comments(file)}
    body = parsed(file).body
    for node, following in zip_longest(body, body[1:]):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not _is_number(node.value):
            continue
        documented = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        around = range(node.lineno - 1, (node.end_lineno or node.lineno) + 1)
        if not documented and explained.isdisjoint(around):
            yield file.place(node.lineno)


def _is_number(value: ast.expr | None) -> bool:
    """Numbers, sums and products of them, and names among them: `2 * 3600`, `-LIMIT`."""
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return _is_number(value.left) or _is_number(value.right)
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("timedelta"):
        return True
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, int | float)
        and not isinstance(value.value, bool)
    )


def code_lines(file: File) -> Iterator[Place]:
    """Lines that hold code: no blank line, no line that begins with #, no docstring."""
    docstrings = {
        line
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for number, line in enumerate(file.lines, 1):
        if number not in docstrings and line.strip() and not line.lstrip().startswith("#"):
            yield file.place(number)


QUOTES = ('"', "'", "`")
WORD = re.compile(rf"(?<![a-z])({'|'.join(RIDDLES)})(?![a-z])", re.IGNORECASE)


def riddle_words(file: File) -> Iterator[Place]:
    """Words that hide the subject; names count, a quoted word such as a user's name does not."""
    for number, line in enumerate(file.lines, 1):
        for found in WORD.finditer(line):
            before = line[: found.start()]
            after = line[found.end() :]
            if not (before.endswith(QUOTES) and after.startswith(QUOTES)):
                yield file.place(number)


def format_skips(file: File) -> Iterator[Place]:
    """Lines that the formatter may not touch."""
    for number, line in enumerate(file.lines, 1):
        if re.search(r"#\s*fmt:\s*(skip|off)\b", line):
            yield file.place(number)


PACKAGES = ("faststream_sqlbroker", "pyspark_sqlbroker")
CODE = (*PACKAGES, "tests", "tools", "benchmarks", "docs")
PER_THOUSAND = "per 1,000 lines"
PER_THOUSAND_WORDS = "per 1,000 words"
PERCENT = "% of lines"
DOCSTRINGS = "docstrings"
PROSE = (".py", ".md", ".sql", ".toml", ".sh", "justfile")


Files = Sequence[File]
Find = Callable[[Files], Iterator[Place]]


def each(find: Callable[[File], Iterator[Place]]) -> Find:
    """Find in each file by itself."""
    return lambda files: (place for file in files for place in find(file))


@dataclass(frozen=True)
class Measure:
    """What is counted, where, and how the count is told."""

    find: Find
    folders: Sequence[str]
    unit: str
    limit: float | None = None
    least: float | None = None
    suffixes: Sequence[str] = (".py",)
    total: Callable[[File], int] = lambda file: len(file.lines)
    """How many there are of what the count is a share of."""

    def figure(self, files: Files) -> float:
        """The count, or its share of the total."""
        count = sum(1 for _ in self.find(files))
        total = sum(map(self.total, files)) or 1
        return count * {"": 1, "per": 1000 / total, "%": 100 / total}[self.unit.split(" ")[0]]

    def holds(self, figure: float) -> bool:
        """Whether the figure is within its limits."""
        return (self.limit is None or figure <= self.limit) and (
            self.least is None or figure >= self.least
        )


def _share(
    find: Callable[[File], Iterator[Place]],
    of: Callable[[File], Iterator[object]],
    unit: str,
    limit: float,
) -> Measure:
    return Measure(
        each(find), PACKAGES, f"% of {unit}", limit, total=lambda file: sum(1 for _ in of(file))
    )


def _in_pages(name: str, limit: float | None = None, least: float | None = None) -> Measure:
    find = each(words.in_pages(name))
    return Measure(find, ("docs",), PER_THOUSAND_WORDS, limit, least, (".md",), words.words)


FLOW = ("faststream_sqlbroker/flow",)
DATABASE = ("faststream_sqlbroker/database",)
TESTS = ("tests",)
MEASURES = {
    "code_lines": Measure(each(code_lines), PACKAGES, "", limit=58_055),
    "complex_functions": Measure(each(complex_functions), PACKAGES, "", limit=15),
    "packed_assignments": Measure(each(packed_assignments), PACKAGES, PER_THOUSAND, limit=0),
    "long_lines": Measure(each(long_lines), PACKAGES, PERCENT, limit=0),
    "long_lines_everywhere": Measure(each(long_lines), CODE, PERCENT, limit=0),
    "foreign_writes": Measure(each(foreign_writes), FLOW, PER_THOUSAND, limit=5),
    "comments": Measure(each(comments), PACKAGES, PERCENT, least=1.7),
    "bare_constants": Measure(each(bare_constants), PACKAGES, "", limit=0),
    "riddle_words": Measure(each(riddle_words), PACKAGES, "", limit=0),
    "riddle_words_everywhere": Measure(
        each(riddle_words), (*CODE, "."), "", limit=0, suffixes=PROSE
    ),
    "format_skips": Measure(each(format_skips), CODE, "", limit=5),
    "vague_names": _share(words.vague_names, words.assigned_names, "names", 0.2),
    "participle_functions": _share(words.participle_functions, words.functions, "functions", 0.25),
    "relative_docstrings": _share(words.relative_docstrings, words.docstrings, DOCSTRINGS, 0.1),
    "leaning_docstrings": _share(words.leaning_docstrings, words.docstrings, DOCSTRINGS, 3.5),
    "shared_class_names": Measure(words.shared_class_names, PACKAGES, "", limit=3),
    "shared_file_names": Measure(words.shared_file_names, PACKAGES, "", limit=102),
    "extreme_constants": Measure(each(words.extreme_constants), PACKAGES, "", limit=0),
    "templates": Measure(each(words.templates), DATABASE, "", limit=0),
    "transaction_wrappers": Measure(
        each(database_layers.transaction_wrappers), DATABASE, "", limit=3
    ),
    "split_constructors": Measure(each(database_layers.split_constructors), DATABASE, "", limit=0),
    "patches": Measure(each(words.patches), TESTS, "", limit=361),
    "private_stores": Measure(each(words.private_stores), TESTS, "", limit=59),
    "nominal_what": _in_pages("nominal_what", limit=0.4),
    "tell_told": _in_pages("tell_told", limit=0.1),
    "nothing_none": _in_pages("nothing_none", limit=1.0),
    "the_ones_that": _in_pages("the_ones_that", limit=0.2),
    "you": _in_pages("you", least=13.0),
}
"""Each measure with its limit: `--check` fails beyond it."""
MOVES = ("file moves", "folder moves")
TRIP_LIMITS = {
    f"{trip}: {moves}": limit
    for trip, limits in {
        "publish": (44, 18),
        "take a lock and give it back": (62, 27),
        "plan to redrive": (37, 16),
        "redrive": (160, 63),
        "deliver": (300, 57),
        "deliver under a Throttle": (1400, 315),
        "take a pull job over HTTP": (130, 63),
    }.items()
    for moves, limit in zip(MOVES, limits, strict=True)
}
"""How often each trip (`tools.trips`) moves to another file and folder at most. No test holds them:
timers of a broker run at the same time."""
HELD: frozenset[str] = frozenset(MEASURES)
"""The measures whose limits the tests hold."""


def files_of(measure: Measure, root: Path) -> list[File]:
    """What the measure reads: its folders if `root` is this repository, else all of `root`."""
    ours = (root / PACKAGES[0]).is_dir()
    return read(root, measure.folders if ours else ["", "."], measure.suffixes)


def places(name: str, root: Path) -> list[Place]:
    """All that one measure counts."""
    measure = MEASURES[name]
    return list(measure.find(files_of(measure, root)))


def mean_complexity(root: Path) -> float:
    """Of all functions of the package."""
    files = files_of(MEASURES["complex_functions"], root)
    found = [complexity for file in files for _, complexity in functions(file)]
    return sum(found) / len(found)


def column(root: Path) -> dict[str, float]:
    """The figures of one tree, of all measures that it has files for."""
    files = {name: files_of(measure, root) for name, measure in MEASURES.items()}
    figures = {name: MEASURES[name].figure(read) for name, read in files.items() if read}
    return {"mean_complexity": mean_complexity(root)} | figures | trips(root)


def trips(root: Path) -> dict[str, float]:
    """How often each trip moves to another file and folder, if `root` is this repository."""
    if not (root / PACKAGES[0]).is_dir():
        return {}
    command = [sys.executable, str(ROOT / "tools/trips.py")]
    told = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, check=True
    )
    return {
        f"{trip}: {moves}": figures[moves]
        for trip, figures in json.loads(told.stdout).items()
        for moves in MOVES
    }


def table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown: one row for each measure, one column for each tree."""
    rows = [f"| measure | {' | '.join(columns)} | limit |", "|---|" + "---:|" * (len(columns) + 1)]
    for name in dict.fromkeys(name for figures in columns.values() for name in figures):
        measure = MEASURES.get(name)
        unit = f" {measure.unit}" if measure and measure.unit else ""
        cells = [_number(figures[name]) if name in figures else "–" for figures in columns.values()]
        rows.append(f"| {name}{unit} | {' | '.join(cells)} | {_limits(name)} |")
    return "\n".join(rows)


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def _limits(name: str) -> str:
    measure = MEASURES.get(name)
    if measure is None:
        return f"≤ {TRIP_LIMITS[name]}" if name in TRIP_LIMITS else ""
    if measure.least is not None:
        return f"≥ {measure.least}"
    return "" if measure.limit is None else f"≤ {measure.limit}"


def beyond(figures: dict[str, float]) -> list[str]:
    """The measures whose limits the figures exceed."""
    measured = [name for name in MEASURES if name in figures]
    failed = [name for name in measured if not MEASURES[name].holds(figures[name])]
    return failed + [name for name, most in TRIP_LIMITS.items() if figures.get(name, 0) > most]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or a list; the exit code."""
    parser = argparse.ArgumentParser(description="Measure how readable the code is.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--rev", action="append", default=[], help="a revision to compare with")
    parser.add_argument("--list", choices=MEASURES, help="print the places of this measure")
    parser.add_argument("--check", action="store_true", help="fail where a limit is exceeded")
    args = parser.parse_args(arguments)
    if args.list:
        with ExitStack() as stack:
            root = stack.enter_context(worktree(args.rev[-1])) if args.rev else args.folder
            found = places(args.list, root)
        print(*found, f"{len(found)} places", sep="\n")
        return 0
    columns = {}
    for rev in args.rev:
        with worktree(rev) as root:
            columns[rev] = column(root)
    columns["now"] = column(args.folder)
    print(table(columns))
    if not args.check:
        return 0
    for name in (failed := beyond(columns["now"])):
        hint = f": python -m tools.measure --list {name}" if name in MEASURES else ""
        print(f"{name} is beyond its limit{hint}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
