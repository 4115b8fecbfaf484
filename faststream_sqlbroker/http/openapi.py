"""The OpenAPI document, made of what `described` lists."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from faststream_sqlbroker.http import channel_models as jobs
from faststream_sqlbroker.http.described import OPERATIONS, TEXT, Access, Operation, Part

_REF = "#/components/schemas/{model}"
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {
    "open": [],
    "viewer": [{"user": []}],
    "operator": [{"user": []}],
    "admin": [{"user": []}],
    "channel": [{"channelToken": []}],
    "consumer": [{"channelToken": [], "consumerToken": []}],
    "publish": [{"queueToken": []}],
    "consume": [{"queueToken": []}],
}
_SCHEMES = {
    "user": {"type": "http", "scheme": "basic", "description": "Or what the application knows."},
    "channelToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Channel-Token"},
    "consumerToken": {"type": "apiKey", "in": "header", "name": "X-Broker-Consumer-Token"},
    "queueToken": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of the queue for publish or consume.",
    },
}
_PROBLEMS = {
    400: "The request is not valid",
    401: "Not authenticated",
    403: "Not allowed, or not from here",
    404: "There is no such thing",
    408: "The body took too long",
    409: "The lease is another's, or the state does not allow it",
    413: "The body is too large",
    415: "The body is of another type",
    429: "Too many failures from this address, or the queue is full",
    500: "The server or its database has failed",
    503: "The database cannot be reached, or its answer was lost",
}


def document(parts: Iterable[Part], root: str = "") -> dict[str, Any]:
    """The document of an application that serves `parts`, mounted at `root`."""
    # Only what the application serves: its clients would ask for the rest in vain.
    wanted = set(parts)
    operations = [each for each in OPERATIONS if each.part in wanted]
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sqlbroker",
            "version": "1",
            "description": "A message broker in a relational database, over HTTP.",
        },
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {"schemas": _schemas(operations), "securitySchemes": _SCHEMES},
    }


def _schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    found: dict[type[BaseModel], None] = {jobs.Failure: None}
    for each in operations:
        for model in (each.body, *each.answers.values()):
            if isinstance(model, type):
                found[model] = None
    _, schemas = models_json_schema([(model, "validation") for model in found], ref_template=_REF)
    named: dict[str, Any] = schemas["$defs"]
    return dict(sorted(named.items()))


def _described(operation: Operation) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "tags": [operation.part],
        "security": _SECURITY[operation.access],
    }
    if operation.parameters:
        shown["parameters"] = [dict(each) for each in operation.parameters]
    if operation.body is not None:
        content: Mapping[str, Any] = _json(operation.body)
        shown["requestBody"] = {"required": True, "content": content}
    elif operation.content:
        shown["requestBody"] = {"content": operation.content}
    shown["responses"] = _answers(operation)
    return shown


def _answers(operation: Operation) -> dict[str, Any]:
    found: dict[int, Any] = {
        status: {"description": _PROBLEMS[status], "content": _json(jobs.Failure)}
        for status in (*_always(operation.access), *operation.problems)
    }
    headers = {
        name: {"schema": TEXT, "description": text} for name, text in operation.headers.items()
    }
    for status, answer in operation.answers.items():
        told: dict[str, Any] = {"description": operation.summary}
        if isinstance(answer, str):
            told["content"] = {answer: {"schema": {}}}
        elif answer is not None:
            told["content"] = _json(answer)
        if headers:
            told["headers"] = headers
        found[status] = told
    return {str(status): found[status] for status in sorted(found)}


def _always(access: Access) -> tuple[int, ...]:
    """What any request may be answered."""
    # 403 of all: without authentication, only this machine may ask.
    if access == "open":
        return (403, 500)
    if access in {"viewer", "operator", "admin"}:
        # 400: the header of a proxy that names the user is there twice.
        return (400, 401, 403, 429, 500, 503)
    return (401, 403, 429, 500, 503)


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
