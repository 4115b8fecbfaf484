"""YAML as values with their places; variables; what is refused."""

import json
from pathlib import Path

import pytest

from faststream_sqlbroker.config.document import Document, read_document
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.exceptions import ConfigError
from tests.config.conftest import told

BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Aliases of aliases: ten to the power of nine values in nine lines."""


def read(text: str, **variables: str) -> Document:
    return read_document(text, Path("service.yaml"), variables)


def mistakes(text: str, **variables: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, **variables).check()
    # A traceback must not quote the file.
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    return told(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("5m", "5m"),
        ("22:00", "22:00"),
        ("2026-01-01", "2026-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("FALSE", False),
        ("12", 12),
        ("-3", -3),
        ("010", "010"),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("null", None),
        ("~", None),
        ("", None),
        ('"12"', "12"),
        ("'true'", "true"),
        ("!!str 5", "5"),
        ("[1, a]", [1, "a"]),
        ("{on: 1}", {"on": 1}),
        # What YAML 1.1 takes for booleans, numbers in other bases or of 60, and moments.
        ("on", "on"),
        ("Yes", "Yes"),
        ("NO", "NO"),
        ("y", "y"),
        ("0123", "0123"),
        ("-0123", "-0123"),
        ("0o17", "0o17"),
        ("0x1F", "0x1F"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("1_000.5", "1_000.5"),
        (".inf", ".inf"),
        (".NaN", ".NaN"),
        ("=", "="),
        ("<<", "<<"),
        ("2026-01-01T10:00:00Z", "2026-01-01T10:00:00Z"),
        # What is a number or nothing in both.
        ("+12", 12),
        ("0", 0),
        ("-0.5", -0.5),
        ("1.", 1.0),
        ("-.5e-3", -0.0005),
        ("NULL", None),
        ("!!int 5", 5),
        ('!!float "1"', 1.0),
        ('!!bool "true"', True),
        ("!!null ''", None),
        ("|\n  true", "true"),
        (">\n  12", "12"),
    ],
)
def test_values_are_those_of_yaml_1_2(written: str, value: object) -> None:
    found = read(f"key: {written}").value["key"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("key", ["on", "yes", "0123", "22:30", "1_000", "2026-01-01", "<<", "="])
def test_keys_are_those_of_yaml_1_2(key: str) -> None:
    assert read(f"{key}: {{a: 1}}").value == {key: {"a": 1}}
    assert read(f"%YAML 1.1\n---\n{key}: {{a: on}}").value == {key: {"a": "on"}}


@pytest.mark.parametrize("key", ["true", "12", "1.5", "~", "!!int 5"])
def test_a_key_that_is_no_text_wants_quotes(key: str) -> None:
    assert mistakes(f"{key}: x") == ["1:1 : a key must be text: put it in quotes"]
    assert read(f'"{key}": x').value == {key: "x"}


def test_a_variable_makes_no_key() -> None:
    assert read("${A}: x", A="12").value == {"${A}": "x"}


def test_an_empty_file_has_no_value() -> None:
    assert read("").value is None
    assert read("# nothing\n").value is None


def test_each_value_has_its_place() -> None:
    document = read("a:\n  - x\n  - {b: y}\n")
    places = {path: (place.line, place.column) for path, place in document.value_positions.items()}
    assert places == {
        (): (1, 1),
        ("a",): (2, 3),
        ("a", 0): (2, 5),
        ("a", 1): (3, 5),
        ("a", 1, "b"): (3, 9),
    }
    assert document.key_positions["a", 1, "b"].column == 6


def test_variables_are_replaced() -> None:
    found = read(
        'a: ${A}\nb: "${A}"\nc: x${B:-y}z\nd: $${A}\ne: ${EMPTY}\nf: ${NO:-}', A="5", EMPTY=""
    )
    assert found.value == {"a": 5, "b": "5", "c": "xyz", "d": "${A}", "e": None, "f": None}
    found.check()


@pytest.mark.parametrize(
    ("written", "variable", "value"),
    [
        ("${A}", "true", True),
        ("${A}", "1.5", 1.5),
        ("${A}", "~", None),
        ("${A}", "on", "on"),
        ("${A}", "0123", "0123"),
        ("${A}", "22:30", "22:30"),
        ("-${A}", "5", -5),
        ("'${A}'", "true", "true"),
        ("|-\n  ${A}", "5", "5"),
        ("!!int ${A}", "5", 5),
        ("!!int '${A}'", "5", 5),
        ('!!str "${A}"', "5", "5"),
    ],
)
def test_a_variable_may_be_a_number_or_a_boolean(
    written: str, variable: str, value: object
) -> None:
    found = read(f"key: {written}", A=variable).value["key"]
    assert (found, type(found)) == (value, type(value))


def test_a_variable_cannot_add_anything() -> None:
    """Its text is one value, whatever it is."""
    assert read("a: ${A}", A="x\nb: [1]\n# {").value == {"a": "x\nb: [1]\n# {"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: ${NONE}", ["1:4 a: the environment variable NONE is not set"]),
        ("b: 1\na: x${A", ["2:4 a: write a variable as"]),
        ("a: ${A-B}", ["1:4 a: write a variable as"]),
        ("a: 1\nb: 2\na: 3", ["3:1 a: duplicate key, first used in line 1"]),
        ("a: {b: 1, b: 2}", ["1:11 a.b: duplicate key, first used in line 1"]),
        ("1: x", ["1:1 : a key must be text: put it in quotes"]),
        ("a: {[1]: 2}", ["1:5 a: a key must be text"]),
        ("a: !secret x", ["1:4 a: unknown tag '!secret': remove it"]),
        ("a: !!binary eA==", ["1:4 a: unknown tag 'tag:yaml.org,2002:binary': remove it"]),
        ("a: !!int x", ["1:4 a: this is not a valid int"]),
        ("a: !!bool x", ["1:4 a: this is not a valid bool"]),
        ('a: !!int "8_0"', ["1:4 a: this is not a valid int"]),
        ('a: !!float "1_0.5"', ["1:4 a: this is not a valid float"]),
        ("a: !!float nan", ["1:4 a: this is not a valid float"]),
        ("a: 1e999", ["1:4 a: this is not a valid float"]),
        ("a: !!null x", ["1:4 a: this is not a valid null"]),
        ("a: " + "9" * 5000, ["1:4 a: this is not a valid int"]),
        ("a: !!int ${B:-x}", ["1:4 a: this is not a valid int"]),
        ("a: !secret ${B:-x}", ["1:4 a: unknown tag '!secret': remove it"]),
        ("a: !!map [1]", ["1:4 a: unknown tag 'tag:yaml.org,2002:map': remove it"]),
        ("a: !!seq x", ["1:4 a: unknown tag 'tag:yaml.org,2002:seq': remove it"]),
        (
            "a: !!timestamp 2026-01-01",
            ["1:4 a: unknown tag 'tag:yaml.org,2002:timestamp': remove it"],
        ),
        ("a: !!set {x}", ["1:4 a: unknown tag 'tag:yaml.org,2002:set': remove it"]),
        (
            "a: !!python/object/apply:os.getcwd []",
            ["1:4 a: unknown tag 'tag:yaml.org,2002:python/object/apply:os.getcwd': remove it"],
        ),
        ("a: &x 1\nb: &x 2", ["2:4 : invalid YAML: the anchor after & is defined twice"]),
        ("a: " + "[" * 3000, ["1:54 : more than 50 levels"]),
        ("a: " + "[" * 3000 + "]" * 3000, ["1:54 : more than 50 levels"]),
        ("a: " + "{b: " * 3000, ["1:201 : more than 50 levels"]),
        ("- " * 3000 + "x", ["1:103 : more than 50 levels"]),
        ("? " * 3000 + "x", ["1:103 : more than 50 levels"]),
        ("a: &x [*x]", ["1:4 a[0]"]),
        (BOMB, ["1:24 e[0]"]),
        ("a: [1", ["1:6 : invalid YAML"]),
        ("a:\n\tb: 1", ["2:1 : invalid YAML: a tab is not allowed here: indent with spaces"]),
        (
            "a:\n  b:\n    c: 1\n   d: 2",
            ["4:4 : invalid YAML: the indentation does not match the lines above (in the"],
        ),
        ("a\n  b: 1", ["2:4 : invalid YAML: ': ' is not allowed here: end the line above"]),
        ("a: b: 1", ["1:5 : invalid YAML: ': ' is not allowed here"]),
        ("a: 'x\nb: y\n", ["3:1 : invalid YAML: a quote is not closed (in the part that "]),
        ("a: 1\nb\n", ["3:1 : invalid YAML: a key has no ': ' after it (in the part that"]),
        (
            "a: {b: 1\nc: 2}",
            ["2:2 : invalid YAML: expected ',' or '}', but got ':' (in the part"],
        ),
        ("a: *x", ["1:4 : invalid YAML: found undefined alias"]),
        ("a: 1\n---\nb: 2", ["2:1 : invalid YAML: a file has a single document"]),
        (r'a: "\UFFFFFFFF"', ["1:1 : invalid YAML: it has an invalid character or version"]),
        (r'a: "\U00110000"', ["1:1 : invalid YAML: it has an invalid character or version"]),
        (
            f"%YAML 1.{'1' * 5000}\n---\na: 1",
            ["1:1 : invalid YAML: it has an invalid character or"],
        ),
        ("a: !<as%20written> 1", ["1:4 a: unknown tag 'as written': remove it"]),
        ("a: \x01", ["1:4 : invalid YAML: special characters are not allowed"]),
        ("a: 1\nbcd: x\x00y", ["2:7 : invalid YAML: special characters are not allowed"]),
    ],
)
def test_mistakes_have_their_places(text: str, found: list[str]) -> None:
    for said, wanted in zip(mistakes(text), found, strict=True):
        assert said.startswith(wanted)


def test_all_mistakes_are_told_in_their_order() -> None:
    assert [each.partition(" ")[0] for each in mistakes("a: ${X}\nb: 1\nb: 2\nc: !x y")] == [
        "1:4",
        "3:1",
        "4:4",
    ]


def test_aliases_work_and_cannot_fill_the_memory() -> None:
    assert read("a: &x [1]\nb: *x").value == {"a": [1], "b": [1]}
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    [said] = mistakes("\n".join(lines))
    assert "an alias counts in full" in said
    [said] = mistakes("a: &a [*a]")
    assert "an alias counts in full" in said


def test_values_of_variables_are_not_shown() -> None:
    document = read("a: ${PASSWORD}", PASSWORD="s3cret-word")
    document.add_mistake(("a",), "it is 's3cret-word', or s3cret-word")
    with pytest.raises(ConfigError) as caught:
        document.check()
    assert told(caught.value) == ["1:4 a: it is ${PASSWORD}, or ${PASSWORD}"]
    assert "s3cret" not in repr(document)


def test_the_beginning_of_a_long_secret_is_not_shown() -> None:
    """Errors cut a long value."""
    secret = "s3cret" * 30
    document = read("a: user:${PASSWORD}@host", PASSWORD=secret)
    assert "s3cr" not in document.mask_secrets(f"it is {format_value(document.value['a'])}")
    assert "s3cr" not in document.mask_secrets(f"it is {format_value(secret)}")


@pytest.mark.parametrize("mark", ["'", '"', "\\", "'\"", "\n", "\u202e"], ids=ascii)
def test_a_secret_with_quotes_is_not_shown_within_a_text(mark: str) -> None:
    """An error shows a text in quotes, in which such characters are escaped."""
    secret = f"s3cret{mark}-{mark}w0rd"
    for text in ("x-${PASSWORD}-y", "'${PASSWORD}", "'\"${PASSWORD}", "x" * 60 + "${PASSWORD}"):
        document = read(f"a: {json.dumps(text)}", PASSWORD=secret)
        shown = document.mask_secrets(f"it is {format_value(document.value['a'])}")
        assert "s3cret" not in shown
        assert "w0rd" not in shown


def test_a_default_is_no_secret() -> None:
    assert read("a: ${A:-text}").mask_secrets("it is 'text'") == "it is 'text'"
