"""The figures that README.md and docs/explanation/speed.md quote of benchmarks/results, those on
durable settings first: python -m benchmarks.quotes writes them."""

import sys

from benchmarks.harness import ROOT
from benchmarks.report import Content, kept
from tools.files import update_block

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "explanation" / "speed.md"
NAME = "speed"
"""The block, in both."""
MISSING = "–"
COLUMNS = {
    "check_durable": "durable (`./dev bench-check --durable`)",
    "check": "`fsync = off` (`./dev bench-check`)",
}
"""Results that are compared, as the tables name them."""

QUOTED = (
    (
        "consume and archive ÷ faststream-sqlbroker 0.1.0a11",
        "consume + archive ÷ faststream-sqlbroker 0.1.0a11",
    ),
    ("consume without archive ÷ faststream-outbox", "consume without archive ÷ faststream-outbox"),
    ("consume without archive ÷ pgqueuer", "consume without archive ÷ pgqueuer"),
    (
        "consume and archive ÷ FastStream's own dispatch, from memory",
        "consume + archive, typed dict ÷ FastStream's own dispatch",
    ),
    (
        "one publish at a time ÷ asyncpg's INSERTs",
        "publish single ÷ raw asyncpg INSERT autocommit",
    ),
    (
        "time of a claim among 100,000 ready messages ÷ among 1,000",
        "claim of 100 with 100,000 ready and as many future rows ÷ with 1,000",
    ),
)
"""What README says, and the row of each that is meant."""
Row = tuple[str, str, str]
"""What is wanted, the median, its mark included, and the spread."""


def _columns(contents: dict[str, Content]) -> dict[str, str]:
    """Those of which there is a result."""
    return {which: title for which, title in COLUMNS.items() if which in contents}


def rows(content: Content) -> dict[str, Row]:
    """The rows of a result by their names."""
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in content["rows"])
    return {name: (wanted, median, spread) for name, wanted, median, spread, _ in cells}


def _median(row: Row) -> str:
    return row[1].removesuffix(" **short**")


def of_readme(contents: dict[str, Content]) -> str:
    """The block of README.md."""
    columns = _columns(contents)
    compared = [rows(contents[which]) for which in columns]
    lines = [f"| ratio | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
    for text, name in QUOTED:
        medians = [MISSING if (row := of.get(name)) is None else _median(row) for of in compared]
        if set(medians) != {MISSING}:
            lines.append(f"| {text} | {' | '.join(medians)} |")
    return "\n".join([*lines, ""])


def of_page(contents: dict[str, Content]) -> str:
    """The block of the page: all rows that are compared, with their spread."""
    columns = _columns(contents)
    compared = [rows(contents[which]) for which in columns]
    lines = [
        f"| figure | wanted | {' | '.join(columns.values())} |",
        f"|---|---|{'---:|' * len(columns)}",
    ]
    wanted = {name: row[0] for of in compared for name, row in of.items()}
    for name, least in wanted.items():
        cells = [MISSING if (row := of.get(name)) is None else _cell(row) for of in compared]
        lines.append(f"| {name} | {least} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(row: Row) -> str:
    _, median, spread = row
    return f"{median} ({spread})" if spread else median


def write(contents: dict[str, Content], *, check: bool = False) -> int:
    """Bring both blocks up to date, or say which are not; the exit code."""
    codes = [
        update_block(README, NAME, of_readme(contents), check=check),
        update_block(PAGE, NAME, of_page(contents), check=check),
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(write(kept()))
