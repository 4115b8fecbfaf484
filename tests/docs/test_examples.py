"""Every Python block of the documentation runs and prints the text below it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests import forked
from tests.docs.reader import ship_an_order
from tests.spark.java import need_spark

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
NOTEBOOK = "<!-- one notebook -->"
"""First line of a page whose blocks are the cells of one program."""
BLOCK = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)


ONE_BY_ONE = """
import contextlib, io, json, shutil, sys, traceback
from pathlib import Path
from pyspark.sql import SparkSession

results = []
for code in json.load(sys.stdin):
    for path in Path().iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    output, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})
    except Exception:
        error = traceback.format_exc()
    if session := SparkSession.getActiveSession():
        session.stop()
    results.append((output.getvalue(), error))
json.dump(results, sys.stdout)
"""
"""Runs programs in the folder that Java began in. Each finds it empty, and starts a session of its
own; Java starts once."""


def blocks() -> list[tuple[str, str, str]]:
    """(name, code, output) of the pages under docs/."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        cells = BLOCK.findall(text)
        if text.startswith(NOTEBOOK):
            cells = [("\n".join(code for code, _ in cells), "".join(output for _, output in cells))]
        for number, (code, output) in enumerate(cells, 1):
            found.append((f"{page.relative_to(DOCS)} {number}", code, output))
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def programs(*, spark: bool) -> list[Any]:
    """Parameters: the blocks with or without Spark."""
    found = [block for block in blocks() if ("build_session" in block[1]) is spark]
    return [pytest.param(code, output, id=name) for name, code, output in found]


@pytest.mark.parametrize(("code", "output"), programs(spark=False))
def test_a_block_prints_what_the_page_says(tmp_path: Path, code: str, output: str) -> None:
    assert output, "a block without its output cannot fail"
    done = forked.finished("-c", code, folder=tmp_path, env=environment())
    assert (done.returncode, done.stdout) == (0, output), done.stderr


@pytest.fixture(scope="module")
def of_spark(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each block with Spark has printed, and its error."""
    need_spark("sqlite")
    codes = [program.values[0] for program in programs(spark=True)]
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input=json.dumps(codes),
        cwd=tmp_path_factory.mktemp("pages"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(codes, json.loads(done.stdout), strict=True))


@pytest.mark.timeout(900)  # a Java of its own, on a machine that may be busy
@pytest.mark.parametrize(("code", "output"), programs(spark=True))
def test_a_block_with_spark_prints_what_the_page_says(
    of_spark: dict[str, list[str]], code: str, output: str
) -> None:
    assert output, "a block without its output cannot fail"
    assert of_spark[code] == [output, ""]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_a_fragment_is_python(page: Path) -> None:
    """Blocks of the language "py" are parts of programs, and are not run."""
    for code in re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL):
        # Within a list a block is indented as its item is.
        compile(dedent(code), page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_program_that_changes_is_the_one_that_runs() -> None:
    """Of the page for those who come from another broker: the lines of its diff, without those that
    go, are its program."""
    page = (DOCS / "howto" / "coming_from.md").read_text()
    [changes] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    [(program, _)] = BLOCK.findall(page)
    lines = changes.splitlines(keepends=True)
    assert "".join(line[1:] or "\n" for line in lines if line[0] != "-") == program
    compile("".join(line[1:] or "\n" for line in lines if line[0] != "+"), "before", "exec")


def test_there_are_blocks() -> None:
    assert len(blocks()) >= 20


async def test_the_readmes_example_ships_its_order(tmp_path: Path) -> None:
    await ship_an_order(tmp_path, python=sys.executable, env=environment())


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page}: {target}"
    assert (ROOT / "README.md").read_text().count("\n") <= 120
