"""Objects that are named in text, as module:name."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from faststream_sqlbroker.exceptions import SetupError


def imported(path: str, *, what: str) -> Any:
    """What `module:name` leads to; modules of the current folder are found, too.

    Args:
        path: The module and the name in it.
        what: The option that has it; the error begins with it.

    Raises:
        SetupError: there is no such thing.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise SetupError(f"{what} must be module:name, got {path!r}")
    # As `python -m` and `faststream run` do; a script's own folder would be that of the command.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SetupError(f"{what} {path!r} cannot be imported: {error}") from error
    return found
