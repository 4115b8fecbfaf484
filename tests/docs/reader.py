"""A reader of the documentation: writes a page's files and runs its commands."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests import forked
from tests.helpers import eventually

ROOT = Path(__file__).parent.parent.parent
BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)
PROGRAMS: dict[str, list[str]] = {
    "python": [],
    "sqlbroker": ["-c", "from faststream_sqlbroker.cli import main; main()"],
    **{name: ["-m", name] for name in ("alembic", "faststream")},
}
"""Arguments of Python that make it the program."""


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
            if kind in {"python", "yaml"}:
                assert title, "a file of a page needs its name"
                (self.folder / title).write_text(content)
            elif kind == "sh":
                commands = content.splitlines()
                after = blocks[number + 1 : number + 2]
                output = after[0][2] if after and after[0][0] == "text" else None
                for command in commands[:-1]:
                    await self.run(command, "" if output is not None else None)
                await self.run(commands[-1], output)
            else:
                assert kind in {"text", "py"}, "only a program's file, a command or a fragment"

    async def run(self, command: str, output: str | None) -> None:
        """Run `command`; it succeeds, and prints `output` if the page shows one. A command after
        "!" fails.
        """
        words = shlex.split(command)
        fails = words[0] == "!"
        words = words[fails:]
        if words[:2] == ["faststream", "run"]:
            assert output, "a worker without its output proves nothing"
            await self.work(words, output)
        else:
            assert words[0] in PROGRAMS, command
            program = PROGRAMS[words[0]]
            done = forked.finished(*program, *words[1:], folder=self.folder, env=self.env)
            assert done.returncode == fails, done.stdout + done.stderr
            assert output in {None, done.stdout}, done.stderr

    async def work(self, words: list[str], output: str) -> None:
        """Run a worker until it has printed `output`, in any order of lines; then stop it."""
        log = self.folder / "out"
        errors = self.folder / "err"
        for file in (log, errors):
            file.write_bytes(b"")
        app: forked.Process
        if "--workers" in words:  # by multiprocessing, which forked processes may not use
            with log.open("wb") as out, errors.open("wb") as err:
                app = subprocess.Popen(
                    [sys.executable, "-m", *words],
                    cwd=self.folder,
                    env=self.env,
                    stdout=out,
                    stderr=err,
                )
        else:
            app = forked.python(
                "-m", *words, said=log, errors=errors, folder=self.folder, env=self.env
            )
        wanted = sorted(output.splitlines())

        def lines() -> list[str]:
            return sorted(log.read_text().splitlines())

        try:
            await eventually(
                lambda: len(lines()) >= len(wanted) or app.poll() is not None, timeout=240
            )
            app.send_signal(signal.SIGTERM)
            await eventually(lambda: app.poll() is not None)
            assert lines() == wanted, errors.read_text()
        finally:
            app.kill()


async def ship_an_order(folder: Path, *, python: str, env: dict[str, str]) -> None:
    """Run README's example as a file of `folder` until it has handled its message; then stop it."""
    readme = (ROOT / "README.md").read_text()
    example = readme.partition("<!-- example -->")[2].partition("<!-- /example -->")[0]
    [(kind, _, code)] = BLOCK.findall(example)
    assert kind == "python"
    (folder / "shop.py").write_text(code)
    said = folder / "out"
    with said.open("wb") as out:
        app = subprocess.Popen([python, "shop.py"], cwd=folder, env=env, stdout=out, stderr=out)
    try:
        await eventually(
            lambda: "shipping order 1" in said.read_text() or app.poll() is not None, timeout=200
        )
        app.send_signal(signal.SIGTERM)
        await eventually(lambda: app.poll() is not None)
        assert "shipping order 1" in said.read_text()
        assert app.returncode == 0, said.read_text()
    finally:
        app.kill()
