"""What a process imports: what it uses, and no more."""

import ast
import subprocess
import sys
from pathlib import Path

import faststream_sqlbroker

INIT = Path(faststream_sqlbroker.__file__)


def test_every_public_name_is_there_and_lives_where_type_checkers_look() -> None:
    """Type checkers read imports that are never run; a process reads a table."""
    homes = {}
    for node in ast.walk(ast.parse(INIT.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module not in {"importlib", "typing"}:
            for alias in node.names:
                homes[alias.asname or alias.name] = (node.module, alias.name)
    assert homes.keys() == set(faststream_sqlbroker.__all__)
    for name, (module, original) in homes.items():
        __import__(str(module))
        expected = getattr(sys.modules[str(module)], original)
        assert getattr(faststream_sqlbroker, name) is expected
        assert name in dir(faststream_sqlbroker)


def test_modules_that_users_name_need_no_import_of_their_own() -> None:
    code = "import faststream_sqlbroker as it; it.exceptions.PublishError, it.testing, it.message"
    assert "faststream_sqlbroker.exceptions" in ours_after(code)


def test_the_package_alone_imports_nothing_else() -> None:
    """Spark imports it, below `faststream_sqlbroker.core`, in every Python worker."""
    assert ours_after("import faststream_sqlbroker") == {"faststream_sqlbroker"}


def ours_after(code: str) -> set[str]:
    """The modules of the package that `code` has imported."""
    show = "import sys; print(*(m for m in sys.modules if m.startswith('faststream_sqlbroker')))"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(faststream_sqlbroker, "Nothing")
