"""A service that a YAML file describes: reading, checking, and creation of its broker."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.broker.router import SqlBrokerRouter
from faststream_sqlbroker.config.document import Document, Path, read_document
from faststream_sqlbroker.config.fields import MISSING, UNKNOWN, find_option
from faststream_sqlbroker.config.plain import merge_errors
from faststream_sqlbroker.config.sections import (
    CODE_OPTIONS,
    HTTP_OPTIONS,
    HttpSection,
    ServiceConfig,
)
from faststream_sqlbroker.core.channels import Channels, build_queue_name
from faststream_sqlbroker.core.checks import suggest_name
from faststream_sqlbroker.core.imports import import_object
from faststream_sqlbroker.exceptions import SetupError

if TYPE_CHECKING:
    from faststream_sqlbroker.http import HttpApp


B = TypeVar("B", bound=SqlBroker)


class ConfiguredService:
    """A service that a file describes; no connection is made."""

    def __init__(self, document: Document, config: ServiceConfig) -> None:
        """Create the service; `document` has the position of each value in `config`."""
        self.config = config
        self._document = document

    def broker(self, kind: type[B], options: Mapping[str, Any]) -> B:
        """Create a broker with the file's subscribers and schedules.

        Args:
            kind: `SqlBroker`, or a subclass.
            options: Options that only code can set.

        Raises:
            SetupError: an option is not among `CODE_OPTIONS`.
            ConfigError: a queue, a schedule or an option of the broker is not valid.
            MissingExtraError: the file enables metrics without the extra `prometheus`.
        """
        for name in options:
            if name not in CODE_OPTIONS or name == "engine":
                raise SetupError(
                    f"from_yaml has no option {name!r}: set it under broker in the file. from_yaml "
                    f"accepts {', '.join(CODE_OPTIONS[1:])}"
                )
        broker_options = self.config.broker.get_options()
        url = broker_options.pop("url")
        if broker_options.pop("metrics", False) and "metrics" not in options:
            broker_options["metrics"] = _create_metrics()
        routers = (*options.get("routers", ()), self._create_router())
        arguments = {**broker_options, **options, "routers": routers}
        broker: B | None = self._call(("broker",), kind, url, **arguments)
        self._document.check()
        assert broker is not None  # noqa: S101 - else a mistake was noted
        return broker

    def application(self, broker: SqlBroker) -> "HttpApp":
        """Create the HTTP application of the section `http`, for a broker of this service.

        Raises:
            ConfigError: there is no authentication, or a user or an option is not valid.
            MissingExtraError: the extra `http` is not installed.
        """
        http = self.config.http
        authenticators = [] if http is None else self._create_authenticators(http)
        self._document.check()
        if http is None or not authenticators:
            self._document.add_mistake(
                ("http",), "HTTP needs authentication: give users or proxy_auth"
            )
        self._document.check()
        section = {} if http is None else http.get_options()
        options = {name: section[name] for name in HTTP_OPTIONS if name in section}
        app: HttpApp = self._call(("http",), broker.asgi, authenticators, **options)
        self._document.check()
        return app

    def _create_authenticators(self, section: HttpSection) -> list[Any]:
        """Create the authentication; mistakes are recorded.

        Users log in with a password, or a proxy has authenticated them; a file may have both. A
        user with a mistake is None here; the file is refused then.
        """
        from faststream_sqlbroker import http  # noqa: PLC0415 - an extra

        logins = [
            self._call(("http", "users", n), http.Login, **user.get_options())
            for n, user in enumerate(section.users)
        ]
        authenticators: list[Any] = []
        if logins and None not in logins:
            authenticators.append(self._call(("http", "users"), http.BasicAuth, logins))
        if (proxy := section.proxy_auth) is not None:
            authenticators.append(
                self._call(("http", "proxy_auth"), http.ProxyAuth, **proxy.get_options())
            )
        return authenticators

    def _create_router(self) -> SqlBrokerRouter:
        """Create the subscribers and schedules; mistakes are recorded.

        A mistake in one queue does not stop the others, so that all mistakes are shown at once.
        """
        router = SqlBrokerRouter()
        for name, section in self.config.queues.items():
            options = section.get_options()
            handler = options.pop("handler", None)
            path = ("queues", name)
            subscriber = self._call(path, router.subscriber, name, **options)
            if subscriber is None or handler is None:
                continue
            function = self._call((*path, "handler"), _load_function, handler)
            if function is not None:
                self._call((*path, "handler"), subscriber, function)
        for name, plan in self.config.schedules.items():
            self._call(("schedules", name), router.publish_on_schedule, name, **plan.get_options())
        return router

    def _call(self, path: Path, create: Callable[..., Any], /, *values: Any, **options: Any) -> Any:
        """Return the result of `create`, or None after a SetupError, which is recorded.

        The mistake is at the option that the message begins with, or at `path`.
        """
        try:
            return create(*values, **options)
        except SetupError as error:
            text = str(error)
            self._document.add_mistake((*path, find_option(text) or ""), text)
            return None


def read_service(path: str | os.PathLike[str]) -> ConfiguredService:
    """Read and check a file.

    Each step needs a file without mistakes in the steps before: YAML and variables, then options
    and their types, then names of queues. So `Document.check` raises the mistakes after each step.

    Raises:
        SetupError: the file cannot be read.
        ConfigError: the file has mistakes.
    """
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    document = read_document(text, path, os.environ)
    document.check()
    config = _validate(document)
    document.check()
    assert config is not None  # noqa: S101 - else a mistake was noted
    check_references(document, config)
    document.check()
    return ConfiguredService(document, config)


def check_service(path: str | os.PathLike[str]) -> None:
    """Create everything that the file describes, without the database.

    Raises:
        SetupError: the file cannot be read.
        ConfigError: the file has mistakes.
        MissingExtraError: an extra that the file needs is not installed.
    """
    service = read_service(path)
    broker = service.broker(SqlBroker, {})
    if service.config.http is not None:
        service.application(broker)


def _validate(document: Document) -> ServiceConfig | None:
    """Return the configuration of a document, or None after mistakes, which are recorded.

    Pydantic checks names and types of all options, and its errors get lines of the file.
    """
    try:
        return ServiceConfig.model_validate(document.value)
    except ValidationError as error:
        for path, text, at_key in _merge_errors(document, error.errors(include_url=False)):
            document.add_mistake(path, text, at_key=at_key)
        return None


def _merge_errors(document: Document, errors: Iterable[Any]) -> list[tuple[Path, str, bool]]:
    """Return the path and text of each mistake, and True for a wrong key.

    For a value that may have several forms, Pydantic returns an error for each form. These errors
    become one text.
    """
    messages: dict[Path, tuple[list[str], bool]] = {}
    union_paths: set[Path] = set()
    for error in errors:
        loc: Path = tuple(error["loc"])
        path = document.find_existing_path(loc)
        if path != loc and error["type"] != MISSING:
            # The error is about one of several forms of a value.
            union_paths.add(path)
        texts, _ = messages.setdefault(path, ([], error["type"] == UNKNOWN))
        if error["msg"] not in texts:
            texts.append(error["msg"])
    return [
        (path, merge_errors(texts) if path in union_paths else "; ".join(texts), at_key)
        for path, (texts, at_key) in messages.items()
        if path not in union_paths or not any(_is_below(other, path) for other in messages)
    ]


def _is_below(path: Path, other: Path) -> bool:
    """Return True if `path` leads to a part of the value at `other`."""
    return len(path) > len(other) and path[: len(other)] == other


def _create_metrics() -> Any:
    """Create the metrics; imported here, because the extra `prometheus` may be missing."""
    from faststream_sqlbroker.prometheus.metrics import create_private_metrics  # noqa: PLC0415

    return create_private_metrics()


def _load_function(path: str) -> Any:
    """Import the handler `module:name`.

    Raises:
        SetupError: it cannot be imported, or is not callable.
    """
    function = import_object(path, option="handler")
    if not callable(function):
        raise SetupError(f"handler {path!r} is not a function")
    return function


def check_references(document: Document, config: ServiceConfig) -> None:
    """Record each queue name that is neither below `queues` nor below `destinations`.

    Messages sent to such a queue, probably a misspelt name, would never be consumed.
    """
    existing_names = {*config.queues, *config.destinations, *_iter_channel_queues(config)}
    for n, name in enumerate(config.destinations):
        if name in config.queues:
            text = f"{name!r} is also under queues: list a queue under one of the two only"
            document.add_mistake(("destinations", n), text)
    for path, name, at_key in _iter_references(config):
        if name not in existing_names:
            text = (
                f"unknown queue {name!r}: {suggest_name(name, sorted(existing_names))} "
                "(list a queue under queues, or under destinations if another program consumes it)"
            )
            document.add_mistake(path, text, at_key=at_key)


def _iter_channel_queues(config: ServiceConfig) -> Iterator[str]:
    """Yield the queues of the consumers in the file.

    Each consumer of a channel of the HTTP API has a queue, whose name is made of both names.
    """
    options: dict[str, Any] = {} if config.http is None else config.http.get_options()
    channels: Channels | None = options.get("channels")
    for name, channel in channels.channels.items() if channels else ():
        for consumer in channel.consumers:
            yield build_queue_name(name, consumer)


def _iter_references(config: ServiceConfig) -> Iterator[tuple[Path, str, bool]]:
    """Yield the path of each queue name, the name, and whether the name is a key.

    These are the queues that the service sends messages to, and those of `max_depth`; a mistake is
    shown at the path.
    """
    for queue, section in config.queues.items():
        options = section.get_options()
        yield from _iter_option_references(
            ("queues", queue), options, ("forward_to", "dead_letter_queue")
        )
        for n, name in enumerate(options.get("destinations") or ()):
            yield ("queues", queue, "destinations", n), name, False
    for schedule, plan in config.schedules.items():
        option_names = ("queue", "reply_to", "destination")
        yield from _iter_option_references(
            ("schedules", schedule), plan.get_options(), option_names
        )
    for name in config.broker.get_options().get("max_depth") or ():
        yield ("broker", "max_depth", name), name, True


def _iter_option_references(
    path: Path, values: dict[str, Any], options: tuple[str, ...]
) -> Iterator[tuple[Path, str, bool]]:
    """Yield path and name of each queue among `options`, and False: the name is no key.

    `options` are the names of options that take a queue, `values` the options that the file sets.
    """
    for option in options:
        name = values.get(option)
        # DESTINATION is an object and not a queue name; an empty reply_to means none.
        if isinstance(name, str) and name:
            yield (*path, option), name, False
