"""The OpenAPI document of the HTTP API, as a file of the documentation.

python -m tools.openapi [--check]
"""

import json
import sys
from pathlib import Path

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Channels, Queues
from tools.files import report, write_or_compare

FOLDER = Path(__file__).parent.parent / "docs" / "reference"


def files() -> dict[Path, str]:
    """The document of all parts."""
    broker = SqlBroker("sqlite+aiosqlite:///never_opened.db")
    app = broker.asgi(lambda _request: None, channels=Channels(), queues=Queues(), dashboard="off")
    found = app.document()
    return {FOLDER / "openapi.json": json.dumps(found, indent=2, ensure_ascii=False) + "\n"}


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    changed = write_or_compare(files(), FOLDER, check=check, suffix="json")
    sys.exit(report(changed, "just generate", check=check))
