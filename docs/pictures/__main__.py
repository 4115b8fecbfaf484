"""Draw the pictures of docs/explanation/policies.md, and write their words into the page.

python -m docs.pictures [--check]
"""

import asyncio
import sys
from pathlib import Path

from docs.pictures.drawing import description, svg
from docs.pictures.streams import STREAMS, run
from tools.files import report, update_block, write_or_compare

EXPLANATION = Path(__file__).parent.parent / "explanation"
FOLDER = EXPLANATION / "policies"
PAGE = EXPLANATION / "policies.md"


async def drawn() -> tuple[dict[Path, str], dict[str, str]]:
    """The files, and the blocks of the page by their names."""
    files = {}
    blocks = {}
    for stream in STREAMS:
        seen = await run(stream)
        files[FOLDER / f"{stream.name}.svg"] = svg(stream, seen)
        blocks[stream.name] = f"![{description(stream, seen)}](policies/{stream.name}.svg)\n"
    return files, blocks


def main(*, check: bool) -> int:
    """Bring the pictures up to date, or say which are not; the exit code."""
    files, blocks = asyncio.run(drawn())
    changed = write_or_compare(files, FOLDER, check=check, suffix="svg")
    code = report(changed, "just generate", check=check)
    for name, text in blocks.items():
        code |= update_block(PAGE, name, text, check=check)
    return code


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
