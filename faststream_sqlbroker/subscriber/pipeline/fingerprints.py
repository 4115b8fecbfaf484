"""Whether the functions of FastStream and FastDepends may be replaced: the environment lets them
be, and they are the ones that are known.

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
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from types import FunctionType
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED


class NotCompiled(Exception):  # noqa: N818 - a reason, which never leaves this package
    """What is asked for is not known here: FastStream does it."""


VARIABLE = "SQLBROKER_PIPELINE"
"""Environment variable that chooses the pipeline of all subscribers."""
COMPILED = "compiled"
GENERIC = "generic"
_LENGTH = 12
"""Hexadecimal digits of a digest that are kept: enough to tell versions apart."""
_UNSEEN = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})
"""Fields of syntax trees without a meaning here; some exist in newer versions of Python only."""


def chosen() -> str:
    """The pipeline that the environment asks for.

    Raises:
        SetupError: it asks for one that does not exist.
    """
    value = os.environ.get(VARIABLE, COMPILED)
    if value not in (COMPILED, GENERIC):
        msg = f"{VARIABLE} is {value!r}: it can be {COMPILED!r} (the default) or {GENERIC!r}"
        raise SetupError(msg)
    return value


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
    if not isinstance(function, FunctionType) or _is_patched(function):
        return ""
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(_text(tree).encode()).hexdigest()[:_LENGTH]


def _is_patched(function: FunctionType) -> bool:
    """Whether something of another file wraps it, such as a tracer."""
    own = inspect.unwrap(function).__code__.co_filename
    wrapper: Any = function
    while (inner := getattr(wrapper, "__wrapped__", None)) is not None:
        # FastStream's generators are wrapped by contextlib.
        if wrapper.__code__.co_filename not in (own, contextlib.__file__):
            return True
        wrapper = inner
    return False


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
        return "[" + ",".join([_text(each) for each in node if not _is_docstring(each)]) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return ""
    fields = []
    for name in node._fields:
        # Most of the time of a start: thousands of nodes are read.
        value = None if name in _UNSEEN else getattr(node, name, None)
        if value is not None and value != []:
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: Any) -> bool:
    # Any text that stands alone does nothing.
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "pipeline": {
        "SubscriberUsecase.process_message": ("ca8058f41574",),
        "SubscriberUsecase._SubscriberUsecase__build__middlewares_stack": ("3249b5199bdd",),
        "SubscriberUsecase._SubscriberUsecase__get_response_publisher": ("787114661cf4",),
        "SubscriberUsecase._broker_middlewares": ("b35a0340dd2c",),
        "HandlerItem.is_suitable": ("54c366527ce4",),
        "HandlerItem.call": ("be351e5efa06",),
        "HandlerCallWrapper.call_wrapped": ("d298539fb2c2",),
        "HandlerCallWrapper.trigger": ("d57dbc6dbe2c",),
        "HandlerCallWrapper.set_wrapped": ("3dfa3f365f52",),
        "AcknowledgementMiddleware.__init__": ("bb9be1763d8c",),
        "AcknowledgementMiddleware.__call__": ("549af91b23ff",),
        "_AcknowledgementMiddleware.__init__": ("89e8587fd63a",),
        "_AcknowledgementMiddleware.consume_scope": ("bbf6731076fa",),
        "_AcknowledgementMiddleware.__aexit__": ("6282a9231420",),
        "_AcknowledgementMiddleware._AcknowledgementMiddleware__do_with_logging": ("730ea6864923",),
        "_AcknowledgementMiddleware._AcknowledgementMiddleware__resolve_message": ("cab08e494f7c",),
        "_AcknowledgementMiddleware._AcknowledgementMiddleware__ack": ("5bbb2662ae13",),
        "CriticalLogMiddleware.__init__": ("120def889459",),
        "CriticalLogMiddleware.__call__": ("248c681e25a0",),
        "_LoggingMiddleware.__init__": ("f06733c810ff",),
        "_LoggingMiddleware.consume_scope": ("b9d08ba8e177",),
        "_LoggingMiddleware.__aexit__": ("9e74da8b2fbe",),
        "BaseMiddleware.__init__": ("605a38954fd2",),
        "BaseMiddleware.__aenter__": ("4fdd784f6af3",),
        "BaseMiddleware.__aexit__": ("6358277a28a7",),
        "BaseMiddleware.on_receive": ("44e2e329d329",),
        "BaseMiddleware.after_processed": ("c2e801a7877b",),
        "BaseMiddleware.consume_scope": ("9e9119e84cec",),
        "BaseMiddleware.publish_scope": ("b76e752c8295",),
        "StreamMessage.__init__": ("2e4096fc3299",),
        "StreamMessage.set_decoder": ("752c7b438abd",),
        "StreamMessage.decode": ("89311eac6370",),
        "StreamMessage.ack": ("f13863a9ec29",),
        "ContextRepo.set_local": ("90bcb7f50f7a",),
        "ContextRepo.reset_local": ("23d13e368bda",),
        "ContextRepo.get_local": ("bbe28c7a592e",),
        "ContextRepo.scope": ("e56df84aa6bb",),
        "ContextRepo.scopes": ("d30f3370f0d4",),
        "ContextRepo.clear": ("ca1a479a92ee",),
        "ContextRepoComposition.__init__": ("d12b619161f6",),
        "ContextRepoComposition.set_local": ("5cf366ad33a6",),
        "ContextRepoComposition.reset_local": ("fcbaebb48d27",),
        "ContextRepoComposition.get_local": ("47b3859a3a68",),
        "ContextRepoComposition.clear": ("3f97565bb0d2",),
        "ContextScope.__init__": ("288327280595",),
        "ContextScope.__enter__": ("175ec42cc58c",),
        "ContextScope.__exit__": ("6bcef0e1b046",),
        "ConfigComposition.broker_config": ("2b65967c784e",),
        "ConfigComposition.broker_middlewares": ("b9959e19da2a",),
        "ConfigComposition.extra_context": ("3eda8b9c29f8",),
        "ConfigComposition.add_config": ("fee2bb424d95",),
        "ConfigComposition.reset": ("a0f771345111",),
        "ConfigComposition.context": ("abdb42b271fd",),
        "ConfigComposition.logger": ("bef61475d5fa",),
        "LoggerState.log": ("0184694290be",),
        "utils.default_filter": ("4dc777cd874b",),
        "utils.ensure_response": ("2166b78375ec",),
    },
    "arguments": {
        "FastDependsConfig.build_call": ("bf2d7b9976b3",),
        "FastDependsConfig.__or__": ("bbd00da095a3",),
        "config._unwrap_message_to_fast_depends_decorator": ("7224fcad0565",),
        "CallModel.__init__": ("ebd34ae69e4e",),
        "CallModel.flat_params": ("4d49f3990752",),
        "CallModel._solve": ("54146a64a355",),
        "CallModel._cast_response": ("229f1b81cbcc",),
        "CallModel.asolve": ("22f4cf6b5e49",),
        "Provider.get_dependant": ("351609140308",),
        "Provider.add_dependant": ("af18d1f8dd29",),
        "Provider.override": ("e29af25ccc70",),
        "use._wrap_inject": ("63d7233a60d9",),
        "utils.run_async": ("b688eda6ecd2",),
        "utils.run_in_threadpool": ("47b0acc9769e",),
        "utils.solve_generator_async": ("33502925089d",),
        "Serializer.__init__": ("fc2671c2965a",),
        "Serializer.response": ("cd0b9660b7f1",),
        "_PydanticSerializer.__init__": ("75ed41d02087",),
        "_PydanticSerializer.__call__": ("f0bbad7356ff",),
        "_PydanticSerializerWithResponse.__init__": ("1b6831503336",),
        "_PydanticSerializerWithResponse.response": ("9f72776201d1",),
        "Context.__init__": ("d1b400275e94",),
        "Context.use": ("886a6d7f69a7",),
        "resolve.resolve_context_by_name": ("2a37d20d8d71",),
        "ContextRepo.get": ("1e6688132ace",),
        "ContextRepo.resolve": ("ac2a06e2a664",),
        "ContextRepoComposition.get": ("8e3bb8a8b94a",),
        "ContextRepoComposition.resolve": ("e5373cd1d2f4",),
    },
    "publishing": {
        "BrokerUsecase.connect": ("3acd4bf86f6c",),
        "BrokerUsecase.middlewares": ("55ceebc35f34",),
        "BrokerUsecase._basic_publish": ("28ea54fffdf7",),
        "PublisherUsecase._basic_publish": ("51ee74e9996c",),
        "PublisherUsecase._build_middlewares_stack": ("4bdf0318711d",),
        "Response.__init__": ("0a0b3b78a234",),
        "Response.as_publish_command": ("0a8bf179ef18",),
        "PublishCommand.__init__": ("108f411b9d82",),
        "PublishCommand.add_headers": ("d9c69853643c",),
        "BatchPublishCommand.__init__": ("d24ff25f6e8d",),
        "DefaultCodec.encode": ("91f53452ad50",),
        "utils.encode_message": ("eba31f0593c8",),
    },
}
"""Of FastStream 0.7.8 with FastDepends 3.0.9, by group and name. Several where versions differ in a
way that does not matter here."""
