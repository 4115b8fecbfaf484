"""The histories of runs, for a release to publish: a file each, named by what was run, and with the
fingerprint of the code that was run.
"""

import gzip
import json
import re
from pathlib import Path

from tests.faults.records import read

FOLDER = Path(__file__).parents[2] / "build" / "histories"
ENDING = ".jsonl.gz"


def keep(events: Path, what: str, code: str) -> None:
    """Write all records of a run, in the order of their times, to a file of the folder."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"\W+", "-", what)
    with gzip.open(FOLDER / f"{name}.{code}{ENDING}", "wt") as file:
        for record in sorted(read(events), key=lambda record: record["at"]):
            file.write(json.dumps(record) + "\n")


def remove_old(code: str) -> None:
    """Remove the histories of other code than `code`."""
    for file in FOLDER.glob(f"*{ENDING}"):
        if not file.name.endswith(f".{code}{ENDING}"):
            file.unlink()
