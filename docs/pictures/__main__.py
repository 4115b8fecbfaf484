"""Draw the pictures of the policies and of the command line, and write both into their pages.

python -m docs.pictures [--check]
"""

import asyncio
import sys
from pathlib import Path

from docs.pictures import terminal
from docs.pictures.drawing import description, svg
from docs.pictures.streams import STREAMS, run
from tools.files import report, update_block, write_or_compare

DOCS = Path(__file__).parent.parent
EXPLANATION = DOCS / "explanation"
FOLDER = EXPLANATION / "policies"
PAGE = EXPLANATION / "policies.md"
COMMANDS = DOCS / "reference" / "commands"
COMMANDS_PAGE = DOCS / "reference" / "commands.md"


async def drawn() -> tuple[dict[Path, str], dict[str, str]]:
    """The files of policies, and the blocks of their page by their names."""
    files = {}
    blocks = {}
    for stream in STREAMS:
        seen = await run(stream)
        files[FOLDER / f"{stream.name}.svg"] = svg(stream, seen)
        blocks[stream.name] = f"![{description(stream, seen)}](policies/{stream.name}.svg)\n"
    return files, blocks


def of_commands() -> dict[Path, str]:
    """The files of the command line."""
    return {COMMANDS / f"{name}.svg": made for name, made in terminal.svgs().items()}


def main(*, check: bool) -> int:
    """Bring the pictures up to date, or say which are not; the exit code."""
    files, blocks = asyncio.run(drawn())
    changed = write_or_compare(files, FOLDER, check=check, suffix="svg")
    changed += write_or_compare(of_commands(), COMMANDS, check=check, suffix="svg")
    code = report(changed, "just generate", check=check)
    for name, text in blocks.items():
        code |= update_block(PAGE, name, text, check=check)
    return code | update_block(COMMANDS_PAGE, "views", terminal.page(), check=check)


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
