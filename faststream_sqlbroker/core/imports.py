"""Import objects given as text in the form module:name."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from faststream_sqlbroker.exceptions import SetupError


def import_object(path: str, *, option: str) -> Any:
    """Import the object `module:name`; modules of the current folder are found, too.

    Errors begin with the name of the option that has the path.

    Raises:
        SetupError: the object does not exist.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise SetupError(f"{option} must be module:name, got {path!r}")
    # Like `python -m` and `faststream run`; Python itself would add the folder of the command.
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        target: Any = import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SetupError(f"{option} {path!r} cannot be imported: {error}") from error
    return target
