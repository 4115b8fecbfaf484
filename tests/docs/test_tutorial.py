"""The tutorial's pages, one after the other in one folder, as a reader would follow them."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import eventually

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = ROOT / "docs" / "tutorial"
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)
PAGES = ("first_message.md", "outbox.md", "failures.md", "once.md", "workers.md")


class Reader:
    """Does what the pages say: writes their files and runs their commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.env.pop("DATABASE_URL", None)

    async def follow(self, page: str) -> None:
        blocks = BLOCK.findall(page)
        assert len(blocks) == page.count("```") / 2
        for number, (kind, title, content) in enumerate(blocks):
            if kind == "python":
                assert title, "a program of the tutorial needs the name of its file"
                (self.folder / title).write_text(content)
            elif kind == "sh":
                commands = content.splitlines()
                after = blocks[number + 1 : number + 2]
                output = after[0][2] if after and after[0][0] == "text" else ""
                assert output, "commands without their output prove nothing"
                for command in commands:
                    last = command is commands[-1]
                    await self.run(command, output if last else "")
            else:
                assert kind == "text"

    async def run(self, command: str, output: str) -> None:
        words = shlex.split(command)
        if words[0] == "python":
            done = subprocess.run(
                [sys.executable, *words[1:]],
                cwd=self.folder,
                env=self.env,
                capture_output=True,
                text=True,
                timeout=90,
                check=False,
            )
            assert (done.returncode, done.stdout) == (0, output), done.stderr
        else:
            assert words[:2] == ["faststream", "run"], command
            await self.work(words, output)

    async def work(self, words: list[str], output: str) -> None:
        """Run a worker until it has printed `output`, in any order of lines; then stop it."""
        log, errors = self.folder / "out", self.folder / "err"
        with log.open("wb") as out, errors.open("wb") as err:
            app = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.folder,
                env=self.env,
                stdout=out,
                stderr=err,
            )
        wanted = sorted(output.splitlines())
        try:
            await eventually(
                lambda: len(log.read_text().splitlines()) >= len(wanted) or app.poll() is not None,
                timeout=90,
            )
            app.send_signal(signal.SIGTERM)
            await eventually(lambda: app.poll() is not None, timeout=30)
            assert sorted(log.read_text().splitlines()) == wanted, errors.read_text()
        finally:
            app.kill()


@pytest.mark.timeout(300)  # fifteen processes, one after the other
async def test_a_reader_gets_what_the_pages_say(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for name in PAGES:
        await reader.follow((TUTORIAL / name).read_text())


def test_every_page_is_followed() -> None:
    """The tutorial on Spark is one program; test_examples runs it."""
    assert {path.name for path in TUTORIAL.glob("*.md")} == {*PAGES, "index.md", "spark.md"}
    index = (TUTORIAL / "index.md").read_text()
    assert [name for name in PAGES if f"({name})" not in index] == []
