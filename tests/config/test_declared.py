"""Options are declared once: a file has those that Python has."""

import inspect
import re
from typing import Any, get_args

import pytest
from faststream import AckPolicy

from faststream_sqlbroker import MaxDepth, Retention, SqlBroker, SqlBrokerSchemaConfig
from faststream_sqlbroker.broker.scheduling import ScheduleOptions
from faststream_sqlbroker.config import ServiceConfig, json_schema, sections
from faststream_sqlbroker.config.fields import Section
from faststream_sqlbroker.core import retry
from faststream_sqlbroker.core.policies import Policy
from faststream_sqlbroker.http import Channel, Channels, Consumer, Login, ProxyAuth, Role
from faststream_sqlbroker.subscriber.options import SubscriberOptions

OF_FILES = {
    sections.BrokerSection: {"url", "metrics"},
    sections.QueueSection: {"handler"},
    sections.ScheduleSection: set(),
    sections.HttpSection: {"host", "port", "certificate", "key", "users", "proxy_auth"},
}
"""What a section has besides the options of Python."""


def arguments(function: Any) -> set[str]:
    """What can be given by name."""
    return {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in {parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    } - {"self"}


@pytest.mark.parametrize(
    ("section", "options"),
    [
        (sections.BrokerSection, arguments(SqlBroker.__init__) - set(sections.CODE_OPTIONS)),
        (sections.QueueSection, set(SubscriberOptions.__annotations__)),
        (
            sections.ScheduleSection,
            (arguments(SqlBroker.publish_on_schedule) - {"name"})
            | set(ScheduleOptions.__annotations__),
        ),
        (sections.HttpSection, arguments(SqlBroker.asgi) - {"auth", "redact"}),
    ],
)
def test_a_section_has_the_options_of_python(section: type[Section], options: set[str]) -> None:
    """An option for which a file has no form fails at the import: add it to `CODE_OPTIONS`."""
    assert set(section.list_options()) == options | OF_FILES[section]


def test_what_only_code_can_give_exists() -> None:
    assert set(sections.CODE_OPTIONS) <= arguments(SqlBroker.__init__)


def test_users_have_the_options_of_the_http_package() -> None:
    assert set(sections.UserSection.list_options()) == arguments(Login)
    assert set(sections.ProxySection.list_options()) == arguments(ProxyAuth)
    [roles] = {sections.UserSection.model_fields["role"].annotation}
    assert set(get_args(roles)) == {role.name.lower() for role in Role}


def test_each_policy_and_each_strategy_has_a_key() -> None:
    definitions = json_schema()["$defs"]
    assert set(definitions["Policy"]["properties"]) == {
        sections.to_key(kind) for kind in get_args(Policy)
    }
    strategies = {
        kind
        for kind in vars(retry).values()
        if isinstance(kind, type) and kind.__name__.endswith("Strategy")
    }
    assert set(definitions["RetryStrategy"]["properties"]) == {
        sections.to_key(kind) for kind in strategies
    }
    assert sections.to_key(retry.ConstantWithJitterRetryStrategy) == "constant_with_jitter"


@pytest.mark.parametrize(
    "kind",
    [
        *get_args(Policy),
        *sections.STRATEGIES,
        Retention,
        MaxDepth,
        SqlBrokerSchemaConfig,
        Channels,
        Channel,
        Consumer,
    ],
)
def test_objects_have_the_arguments_of_their_classes(kind: type) -> None:
    written = set(json_schema()["$defs"][kind.__name__]["properties"])
    assert written == {name for name in arguments(kind) if not name.startswith("_")}


def test_the_schema_tells_the_meaning_of_each_option() -> None:
    """From the docstrings in the code."""
    for name in ("BrokerSection", "QueueSection", "ScheduleSection", "HttpSection", "Retention"):
        properties = json_schema()["$defs"][name]["properties"]
        assert [key for key, value in properties.items() if not value.get("description")] == []
    queue = json_schema()["$defs"]["QueueSection"]["properties"]
    assert queue["max_workers"]["description"].startswith(
        "Maximum number of handlers that run at the same time"
    )
    assert "default" not in queue["max_workers"]


TYPES: dict[str, Any] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


def problem(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> str | None:
    """What is wrong with a value: as much of JSON Schema as ours uses."""
    if "$ref" in schema:
        return problem(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if "anyOf" in schema:
        found = [problem(each, value, root) for each in schema["anyOf"]]
        return None if None in found else "; ".join(map(str, found))
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[kind]) for kind in kinds):
        return f"{value!r} is not of {kinds}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{value!r} is not in {schema['enum']}"
    if isinstance(value, dict):
        return problem_inside(schema, value, root)
    items = value if isinstance(value, list) else []
    return next((p for each in items if (p := problem(schema.get("items", {}), each, root))), None)


def problem_inside(
    schema: dict[str, Any], value: dict[str, Any], root: dict[str, Any]
) -> str | None:
    """The same for an object."""
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    if missing := set(schema.get("required", ())) - value.keys():
        return f"{missing} missing"
    if len(value) > schema.get("maxProperties", len(value)):
        return "too many"
    if more is False and (unknown := value.keys() - known.keys()):
        return f"{unknown.pop()} is not known"
    others = more if isinstance(more, dict) else {}
    inner = ((known.get(name, others), each) for name, each in value.items())
    return next((p for part, each in inner if (p := problem(part, each, root))), None)


GOOD: Any = {
    "broker": {"url": "x", "retention": {"completed": "30d"}, "max_depth": {"a": 5}},
    "queues": {
        "a": {
            "forward_to": "b",
            "policies": [{"delay": "5m"}, {"throttle": {"rate": 1, "per": 60}}],
            "retry_strategy": {"constant": {"delay_seconds": "1s", "retry_on": "OSError"}},
            "ack_policy": "ack_first",
            "max_workers": 3,
        }
    },
    "destinations": ["b"],
}


def test_the_schema_knows_good_from_bad() -> None:
    schema = json_schema()
    assert problem(schema, GOOD, schema) is None
    ServiceConfig.model_validate(GOOD)
    for bad, said in (
        ({"queues": {}}, "missing"),
        ({**GOOD, "destinations": "b"}, "is not of"),
        ({**GOOD, "queues": {"a": {"max_worker": 3}}}, "max_worker is not known"),
        ({**GOOD, "queues": {"a": {"max_workers": "x"}}}, "is not of"),
        ({**GOOD, "queues": {"a": {"ack_policy": "x"}}}, "is not in"),
        ({**GOOD, "queues": {"a": {"policies": [{"delay": 1, "once": 1}]}}}, "too many"),
        ({**GOOD, "queues": {"a": {"policies": [{"throttle": {"rate": 1}}]}}}, "missing"),
    ):
        assert re.search(said, problem(schema, bad, schema) or "")


def test_ack_policies_are_all_there() -> None:
    written = json_schema()["$defs"]["QueueSection"]["properties"]["ack_policy"]["enum"]
    assert written == [policy.name.lower() for policy in AckPolicy]
