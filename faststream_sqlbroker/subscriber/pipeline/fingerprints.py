"""Decide whether functions of FastStream and FastDepends may be replaced.

They may if the environment allows it and if they are known versions. A fingerprint is a digest of a
function's syntax tree without annotations, docstrings and layout. A function with an unknown
fingerprint, or without source, may behave differently: then FastStream does that work itself. To
add a new version, review its changes, and add the digest that `python -m tools.fingerprints` prints
to `KNOWN`.
"""

import ast
import contextlib
import hashlib
import inspect
import linecache
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from types import FunctionType
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED


class NotCompiled(Exception):  # noqa: N818 - a reason, which never leaves this package
    """A reason for leaving the work to FastStream."""


VARIABLE = "SQLBROKER_PIPELINE"
"""Environment variable that selects the pipeline of all subscribers."""
COMPILED = "compiled"
GENERIC = "generic"
_LENGTH = 12
"""Hexadecimal digits of a stored digest: enough to distinguish versions."""
_IGNORED_FIELDS = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})
"""Fields of syntax trees without a meaning here; some exist only in newer versions of Python."""


def get_selected_pipeline() -> str:
    """Return the pipeline selected by the environment, for all subscribers of the process.

    COMPILED is this package's faster copy of FastStream's pipeline, GENERIC is FastStream's own.

    Raises:
        SetupError: the value is not valid.
    """
    value = os.environ.get(VARIABLE, COMPILED)
    if value not in (COMPILED, GENERIC):
        msg = f"{VARIABLE} must be {COMPILED!r} (the default) or {GENERIC!r}, got {value!r}"
        raise SetupError(msg)
    return value


def find_unknown(group: str) -> list[str]:
    """Return the functions of `group` that the compiled pipeline must not replace.

    A group is a set of functions that can only be replaced together. Functions are replaced only if
    they are the library's own, with a known digest of their source, so that their behavior is
    known. The result has the names of functions that do not belong to the library; or, if all do,
    a text with the versions whose functions differ.
    """
    group_digests = list(iter_digests(group))
    if foreign := [name for name, digest in group_digests if not digest]:
        return foreign
    return (
        [] if combine_digests(group_digests) in KNOWN[group] else [f"those of {_format_versions()}"]
    )


def combine_digests(name_digests: Iterable[tuple[str, str]]) -> str:
    """Combine the digests of all functions, sorted by name, to the digest of a group."""
    return _hash_text(repr(sorted(name_digests)))


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _format_versions() -> str:
    return f"faststream {version('faststream')} with fast-depends {version('fast-depends')}"


def warn_once(group: str, instead: str, names: Sequence[str], log: Callable[..., None]) -> None:
    """Warn about unknown functions of `group`, once per process.

    Each subscriber of the process finds the same functions. `instead` says who does the work.
    """
    if group in _warned_groups:
        return
    _warned_groups.add(group)
    text = (
        f"{instead}, because {_format_versions()} has functions that the compiled pipeline does "
        f"not know ({', '.join(names)}): messages take more CPU time, everything else is unchanged"
    )
    log(logging.WARNING, text)


_warned_groups: set[str] = set()
"""Groups that this process has warned about."""


def iter_digests(group: str) -> Iterator[tuple[str, str]]:
    """Yield the name and current digest of each function of `group`.

    A digest is a hash of the function's syntax tree, by which a changed version is recognized. It
    is empty if the function does not belong to the library that contains it.
    """
    for owner, names in REPLACED[group]:
        prefix = owner.__name__.rpartition(".")[2]
        library = _get_library(getattr(owner, "__module__", owner.__name__))
        for name in names:
            function = _get_function(owner, name)
            is_own = _get_library(str(getattr(function, "__module__", None))) == library
            yield f"{prefix}.{name}", _compute_digest(function) if is_own else ""


def _get_library(module: str) -> str:
    return module.partition(".")[0]


def _get_function(owner: Any, name: str) -> Any:
    """Return the function, or the getter of a property, without binding it to its owner.

    A bound method would be another object each time.
    """
    attribute = inspect.getattr_static(owner, name, None)
    return attribute.fget if isinstance(attribute, property) else attribute


@lru_cache(maxsize=512)
def _compute_digest(function: Any) -> str:
    """Return the digest of a function; empty without source or for other objects.

    Without a digest the function counts as unknown, so FastStream runs it itself.
    """
    if not isinstance(function, FunctionType) or _is_patched(function):
        return ""
    try:
        tree = _parse_function(function)
    except (OSError, TypeError, SyntaxError):
        return ""
    return _hash_text(_render_tree(tree))


def _is_patched(function: FunctionType) -> bool:
    """Return True if a function of another file, such as a tracer, wraps this function.

    A replacement by the compiled pipeline would skip the wrapper.
    """
    own_file = inspect.unwrap(function).__code__.co_filename
    wrapper: Any = function
    while (inner := getattr(wrapper, "__wrapped__", None)) is not None:
        # FastStream's generators are wrapped by contextlib.
        if wrapper.__code__.co_filename not in (own_file, contextlib.__file__):
            return True
        wrapper = inner
    return False


def _parse_function(function: FunctionType) -> ast.Module:
    """Parse the source lines of the code of `function`.

    Raises:
        OSError: the function has no source.
    """
    code = inspect.unwrap(function).__code__
    last = max((end for _, end, _, _ in code.co_positions() if end), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    if lines:
        # inspect finds the end token by token, which takes half of the time of a start.
        with contextlib.suppress(SyntaxError):
            return ast.parse(textwrap.dedent("".join(lines)))
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _render_tree(node: Any) -> str:
    """Render a syntax tree as text that is the same in every version of Python.

    The digest of this text shows whether a library's function has changed.
    """
    if isinstance(node, list):
        return (
            "["
            + ",".join([_render_tree(child) for child in node if not _is_docstring(child)])
            + "]"
        )
    if not isinstance(node, ast.AST):
        return repr(node)
    # An annotation without a value does nothing when the function runs.
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return ""
    fields = []
    for name in node._fields:
        # This loop takes most of the time of a start: it reads thousands of nodes.
        value = None if name in _IGNORED_FIELDS else getattr(node, name, None)
        if value is not None and value != []:
            fields.append(f"{name}={_render_tree(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: Any) -> bool:
    """Return True for a docstring, or any other string that is a separate statement.

    Such strings have no effect, so a digest must not depend on them.
    """
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


KNOWN = {
    "pipeline": ("5ffe6f55a09d",),
    "arguments": ("9be210c32f52",),
    "publishing": ("b7339a5744d2",),
}
"""A digest of all functions of each group, for FastStream 0.7.8 with FastDepends 3.0.9. A group has
several digests if versions differ in a way that does not matter here.
"""
