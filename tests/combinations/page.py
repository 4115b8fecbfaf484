"""The table of docs/reference/combinations.md: python -m tests.combinations.page."""

from pathlib import Path

from tests.combinations.covering import refused
from tests.combinations.features import AXES, SECOND, pairs
from tests.quick_tables import keep_built
from tools.files import with_block

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "combinations.md"
BLOCK = "pairs"
NAMES = {
    "policy": "policy of a subscriber",
    "mode": "delivery",
    "middleware": "middleware",
    "retry": "retry strategy",
    "answer": "answer",
    "publish": "how it is published",
    "transaction": "in which transaction",
    "dead_letters": "failed messages",
    "application": "application",
    "broker": "where it runs",
}


def updated(page: str) -> str:
    """`page` with the table of today."""
    shown = {pair: why for pair, why in refused().items() if not _repeated(*pair)}
    count = sum(not _repeated(*pair) for pair in pairs())
    lines = [
        "| | features |",
        "|---|---|",
        *(f"| {name} | {', '.join(AXES[axis])} |" for axis, name in NAMES.items()),
        "",
        f"{count} pairs, of which {len(shown)} are refused:",
        "",
        "| feature | and | why not |",
        "|---|---|---|",
        *(f"| {one} | {other} | {why} |" for (one, other), why in shown.items()),
    ]
    return with_block(page, BLOCK, "\n".join(lines) + "\n")


def _repeated(one: str, other: str) -> bool:
    """Whether it is about the second policy of a subscriber, but not about its first."""
    return (one in SECOND) or (other in SECOND and one not in AXES["policy"])


if __name__ == "__main__":
    keep_built()
    PAGE.write_text(updated(PAGE.read_text()))
