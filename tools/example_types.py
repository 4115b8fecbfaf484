"""Check the types of all Python examples in the documentation, in one run of mypy.

A block of the language "python" is a program, one of the language "py" a part of one: names that
it does not define may be anything, except those of this package. What short examples leave out,
such as annotations, is allowed (pyproject.toml).
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

import faststream_sqlbroker

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NOTEBOOK = "<!-- one notebook -->"
"""First line of a page whose blocks are the cells of one program."""
PROGRAMS = "example_programs"
FRAGMENTS = "example_fragments"
KNOWN = (
    f"from faststream_sqlbroker import {', '.join(faststream_sqlbroker.__all__)}; "
    "broker: SqlBroker; message: SqlBrokerMessage"
)
"""First line of a fragment, in place of an empty one."""
_BLOCK = re.compile(
    r'^ *```(?P<language>python|py)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^ *```',
    re.DOTALL | re.MULTILINE,
)


def examples(page: Path, name: str) -> dict[str, str]:
    """The code of each example of `page` by its module; it begins at its line of the page.

    Args:
        page: A Markdown file.
        name: Of the page, as the beginning of the modules' names.
    """
    text = page.read_text()
    blocks = list(_BLOCK.finditer(text))
    files = {Path(block["title"]).stem for block in blocks if block["title"]}
    modules: dict[str, str] = {}
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        module = f"{PROGRAMS if block['language'] == 'python' else FRAGMENTS}.{name}"
        if block["title"]:
            module += f"_{Path(block['title']).stem}"
        elif not text.startswith(NOTEBOOK):
            module += f"_{line}"
        code = modules.get(module, "")
        code += "\n" * (line - code.count("\n")) + dedent(block["code"])
        for file in files:
            code = re.sub(rf"^from {file} import", f"from {PROGRAMS}.{name}_{file} import", code)
            code = re.sub(rf"\nfrom {file} import", f"\nfrom {PROGRAMS}.{name}_{file} import", code)
        modules[module] = code if block["language"] == "python" else KNOWN + code
    return modules


def check(pages: Iterable[Path], options: Sequence[str] = ()) -> list[str]:
    """The errors in the examples of `pages`, each with its page and line.

    Args:
        pages: Markdown files.
        options: Further ones of mypy.

    Raises:
        RuntimeError: mypy could not be run.
    """
    with TemporaryDirectory() as folder:
        written = {}
        for package in (PROGRAMS, FRAGMENTS):
            Path(folder, package).mkdir()
            Path(folder, package, "__init__.py").touch()
        for page in pages:
            name = re.sub(r"\W", "_", str(page.relative_to(page.anchor).with_suffix("")))
            for module, code in examples(page, name).items():
                file = Path(folder, *module.split(".")).with_suffix(".py")
                file.write_text(code)
                written[str(file)] = page
        command = [sys.executable, "-m", "mypy", "--no-error-summary", *options, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1:
        raise RuntimeError(done.stdout + done.stderr)
    lines = (line.partition(":") for line in done.stdout.splitlines())
    return [f"{written.get(path, path)}:{rest}" for path, _, rest in lines]


def main() -> None:
    """Print the errors; end with 1 if there are any."""
    errors = check(PAGES)
    print(*errors, sep="\n" if errors else "")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
