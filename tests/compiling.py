"""The compilation of the tests' files, shared by the processes of a run.

In a clean clone each process would compile all of them, with pytest's rewritten assertions: twenty
seconds. So each begins with a part of its own, and finds the others' in `__pycache__`.
"""

import sys
from contextlib import suppress
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def compile_share(config: pytest.Config) -> None:
    """Compile the files of this process's part, if it is one of several that run all tests."""
    worker = getattr(config, "workerinput", None)
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS
    if worker is None or chosen or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    for file in sorted((ROOT / "tests").rglob("*.py"))[number :: worker["workercount"]]:
        _compile(".".join(file.relative_to(ROOT).with_suffix("").parts))


def _compile(name: str) -> None:
    """Let its loader compile a module and keep the code, which then fails at its first import: it
    is imported when tests are collected, with their filters of warnings."""
    spec = find_spec(name)
    if spec is None or spec.loader is None or name in sys.modules:
        return
    module = module_from_spec(spec)
    vars(module)["__builtins__"] = {}
    with suppress(Exception):
        spec.loader.exec_module(module)
