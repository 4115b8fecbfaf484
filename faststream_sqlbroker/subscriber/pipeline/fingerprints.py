"""Whether the functions of FastStream and FastDepends are the ones that are replaced here.

A fingerprint is a digest of a function's syntax tree without annotations, docstrings and layout.
A function with an unknown fingerprint, or without source, may do something else: then FastStream
does that work itself. To make a new version known, read what has changed in it, and add the
digests that `python -m tools.fingerprints` prints to `KNOWN`.
"""

import ast
import contextlib
import hashlib
import inspect
import linecache
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from types import FunctionType
from typing import Any

from faststream_sqlbroker.subscriber.pipeline.known import KNOWN
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED

_LENGTH = 12
"""Hexadecimal digits of a digest that are kept: enough to tell versions apart."""
_UNSEEN = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})
"""Fields of syntax trees without a meaning here; some exist in newer versions of Python only."""


def unknown(group: str) -> list[str]:
    """The functions of `group` that are not known, by name."""
    return [name for name, digest in digests(group) if digest not in KNOWN[group].get(name, ())]


def warn_once(group: str, instead: str, names: Sequence[str], log: Callable[..., None]) -> None:
    """Warn of unknown functions, the first time that this process finds any of `group`."""
    if group in _told:
        return
    _told.add(group)
    text = (
        f"{instead}, as faststream {version('faststream')} with fast-depends "
        f"{version('fast-depends')} has functions that the compiled pipeline does not know: "
        f"messages take more CPU, nothing else changes ({', '.join(names)})"
    )
    log(logging.WARNING, text)


_told: set[str] = set()
"""Groups that this process has warned of."""


def digests(group: str) -> Iterator[tuple[str, str]]:
    """Name and digest of each function of `group`, as they are now."""
    for owner, names in REPLACED[group]:
        prefix = owner.__name__.rpartition(".")[2]
        for name in names:
            yield f"{prefix}.{name}", _digest(_function(owner, name))


def _function(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None)
    return found.fget if isinstance(found, property) else found


@lru_cache(maxsize=512)
def _digest(function: Any) -> str:
    """The digest of a function; empty if there is no source, or it is no function."""
    if not isinstance(function, FunctionType):
        return ""
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(_text(tree).encode()).hexdigest()[:_LENGTH]


def _tree(function: FunctionType) -> ast.Module:
    """The syntax tree of `function`, from the lines that its code is of.

    Raises:
        OSError: it has no source.
    """
    code = inspect.unwrap(function).__code__
    last = max((end for _, end, _, _ in code.co_positions() if end), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    if lines:
        # inspect finds the end by reading token after token, which is half of the time of a start.
        with contextlib.suppress(SyntaxError):
            return ast.parse(textwrap.dedent("".join(lines)))
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _text(node: Any) -> str:
    """A syntax tree as text that is the same in every version of Python."""
    if isinstance(node, list):
        return "[" + ",".join(_text(each) for each in node if not _is_docstring(each)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return ""
    fields = ",".join(
        f"{name}={_text(value)}"
        for name, value in ast.iter_fields(node)
        if name not in _UNSEEN and value is not None and value != []
    )
    return f"{type(node).__name__}({fields})"


def _is_docstring(node: Any) -> bool:
    # Any text that stands alone does nothing.
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
