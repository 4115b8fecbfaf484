"""Whether answers are what the OpenAPI document says."""

import json
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
Key = tuple[str, str, int]
"""Method, path and status."""
SEEN: set[Key] = set()
"""What has been answered in this process."""


@cache
def whole() -> dict[str, Any]:
    """The document of all parts, which `test_generated` compares with the code."""
    found: dict[str, Any] = json.loads(DOCUMENT.read_text())
    return found


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and what is said of them."""
    return [
        (method, path, told)
        for path, methods in whole()["paths"].items()
        for method, told in methods.items()
    ]


@cache
def _paths() -> list[tuple[re.Pattern[str], str, str]]:
    found = []
    for method, path, _ in operations():
        parts = re.split(r"(\{\w+\})", path)
        pattern = "".join(
            (".*" if part == "{queue}" else "[^/]*") if part.startswith("{") else re.escape(part)
            for part in parts
        )
        found.append((re.compile(pattern), method.upper(), path))
    return found


def documented(method: str, path: str) -> str | None:
    """The path in the document; None: it is not of the API, or has no such method."""
    return next(
        (name for pattern, known, name in _paths() if known == method and pattern.fullmatch(path)),
        None,
    )


@cache
def _validator(reference: str) -> Any:
    schemas = whole()["components"]
    return jsonschema_rs.Draft202012Validator({"$ref": reference, "components": schemas})


async def is_documented(answer: httpx.Response, served: Collection[str] | None = None) -> None:
    """Refuse an answer of another status or shape than the document says; `served` are the paths
    that the application has, None: all.
    """
    request = answer.request
    path = documented(request.method, request.url.path)
    if path is None or (served is not None and path not in served):
        return
    key = (request.method, path, answer.status_code)
    answers = whole()["paths"][path][request.method.lower()]["responses"]
    assert str(answer.status_code) in answers, key
    SEEN.add(key)
    content = answers[str(answer.status_code)].get("content")
    body = await answer.aread()
    if content is None:
        assert body == b"", key
        return
    [(kind, told)] = content.items()
    given = answer.headers["content-type"].partition(";")[0]
    assert given == kind, key
    if "$ref" in told["schema"]:
        errors = [
            each.message
            for each in _validator(told["schema"]["$ref"]).iter_errors(json.loads(body))
        ]
        assert errors == [], (key, errors)
