"""Each example with curl names the type of what it sends."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
COMMAND = re.compile(r"^curl (?:.*\\\n)*.*$", re.MULTILINE)
SENDS = re.compile(r" (?:-d|--data|--data-binary|--data-raw)\b")


def test_a_body_has_its_type() -> None:
    """curl says application/x-www-form-urlencoded if it is not told, and jobs keep that."""
    sending = [
        command
        for page in sorted(DOCS.rglob("*.md"))
        for command in COMMAND.findall(page.read_text())
        if SENDS.search(command)
    ]
    assert sending
    assert [each for each in sending if "-H 'Content-Type: " not in each] == []
