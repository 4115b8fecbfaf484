"""Measures of the language of the code and of its pages: vague names, docstrings that lean on
others, names that two places share, words that make a page harder to read.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from tools.sources import File, Place, parsed

VAGUE = re.compile(
    """
    after | again | all | apart | asked | before | both | coming | each | found | given | held |
    here | kept | known | least | left | lost | mine | more | most | moved | much | noted | ours
    | others | own | patient | late | rest | said | shown | sure | theirs | these | told |
    wanted | way | ways | what | which | how | who | whole | whose | words | mine | one
    """,
    re.VERBOSE,
)
"""Pronouns, determiners and participles: as a variable's name they say nothing of its value."""
PARTICIPLES = re.compile(
    """
    abandoned | accepted | acked | admitted | altered | answered | apart | asked | awaited |
    bounded | cancelled | capped | changed | checked | chosen | claimed | classed | committed |
    counted | covered | damaged | dated | decided | denied | derived | described | drained |
    dropped | encoded | ended | escaped | estimated | fired | followed | forgotten | found |
    freed | given | gone | granted | grouped | guarded | halved | held | hidden | joined | kept
    | known | lacked | leased | limited | listed | located | looked | lost | made | marked |
    masked | measured | merged | mixed | mounted | moved | named | needed | noted | numbered |
    opened | planned | prepared | published | pulled | queued | read | refused | registered |
    released | removed | rendered | renewed | reopened | replaced | requested | restored |
    resumed | said | saved | saw | sent | settled | shaped | shared | shown | skipped | spread |
    stacked | started | stopped | submitted | swapped | taken | told | translated | typed |
    unchecked | written | woken | wrote
    """,
    re.VERBOSE,
)
"""As the whole name of a function they do not say what it does."""
RELATIVE_START = re.compile(
    r"(What|Whether|Those|Which|How|Where|When|As `|As |Of |Up to|The same)"
)
"""A docstring that begins so is half a sentence."""
LEANING = re.compile(r"\b(it|they|them|those|these|one|ones|others|its)\b")
"""The reader has to know of what."""
EXTREME = re.compile(r"_?(MOST|LONGEST|SHORTEST|LEAST)_\w+")
"""The others are MAX_ and MIN_."""
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)
IN_PAGES: dict[str, str] = {
    "nominal_what": r"(?<![?.] )\b[Ww]hat (?:is|was|it|they|he|a|an|the|has|had|nobod"
    r"y|no|you|one|cannot|can|may|must|waits|fails|runs|ended|only|each|this|that)\b",
    "tell_told": r"\b[Tt](?:ell|ells|old)\b",
    "nothing_none": r"\b[Nn](?:othing|one)\b",
    "the_ones_that": r"\b(?:the ones? that|those that|those who)\b",
    "you": r"\b[Yy]ou(?:r|rs|rself)?\b",
}
"""By measure, the pattern."""


def assigned_names(file: File) -> Iterator[ast.Name]:
    """Each name that is assigned, wherever it is."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node


def functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Each function and method."""
    return (node for node in ast.walk(parsed(file)) if isinstance(node, Function))


def docstrings(file: File) -> Iterator[tuple[int, str]]:
    """The line and the first line of the docstring of each function and class that has one."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, (*Function, ast.ClassDef)) and (text := ast.get_docstring(node)):
            yield node.lineno, text.splitlines()[0]


def vague_names(file: File) -> Iterator[Place]:
    """Assigned names that are pronouns, determiners or participles."""
    for node in assigned_names(file):
        if VAGUE.fullmatch(node.id):
            yield file.place(node.lineno, node.id)


def participle_functions(file: File) -> Iterator[Place]:
    """Functions that are named by a bare participle."""
    for node in functions(file):
        if PARTICIPLES.fullmatch(node.name.removeprefix("_")):
            yield file.place(node.lineno, node.name)


def relative_docstrings(file: File) -> Iterator[Place]:
    """Docstrings that begin with What, Whether, Those, Which, How, Where, When, As or Of."""
    for line, text in docstrings(file):
        if RELATIVE_START.match(text):
            yield file.place(line, text)


def leaning_docstrings(file: File) -> Iterator[Place]:
    """Docstrings whose first line has it, they, those, one or others."""
    for line, text in docstrings(file):
        if LEANING.search(text):
            yield file.place(line, text)


def extreme_constants(file: File) -> Iterator[Place]:
    """Constants that begin with MOST_, LONGEST_, SHORTEST_ or LEAST_."""
    for number, line in enumerate(file.lines, 1):
        if found := EXTREME.match(line):
            yield file.place(number, found[0])


def templates(file: File) -> Iterator[Place]:
    """Replacements of a placeholder that make text from text."""
    for number, line in enumerate(file.lines, 1):
        if '.replace("{' in line:
            yield file.place(number)


def shared_class_names(files: Sequence[File]) -> Iterator[Place]:
    """Names of classes that stand in two files or more."""
    found = defaultdict[str, list[Place]](list)
    for file in files:
        names = {
            node.name.lstrip("_"): node.lineno
            for node in ast.walk(parsed(file))
            if isinstance(node, ast.ClassDef)
        }
        for name, line in names.items():
            found[name].append(file.place(line, name))
    return (places[0] for _, places in sorted(found.items()) if len(places) > 1)


def shared_file_names(files: Sequence[File]) -> Iterator[Place]:
    """Files whose name a file of another folder has, too."""
    found = defaultdict[str, list[File]](list)
    for file in files:
        found[PurePath(file.name).name].append(file)
    found.pop("__init__.py", None)
    for name, alike in sorted(found.items()):
        if len(alike) > 1:
            yield from (file.place(1, name) for file in alike)


def words(file: File) -> int:
    """How many words a page has, without its blocks of code."""
    return len(re.findall(r"\b\w+\b", CODE_BLOCK.sub("", file.text)))


def in_pages(name: str) -> Callable[[File], Iterator[Place]]:
    """Find a pattern of `IN_PAGES` outside of blocks of code."""
    pattern = re.compile(IN_PAGES[name])

    def find(file: File) -> Iterator[Place]:
        text = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), file.text)
        lines = text.splitlines()
        for found in pattern.finditer(text):
            number = text[: found.start()].count("\n")
            yield file.place(number + 1, lines[number].strip())

    return find


PATCH = re.compile(r"\bmonkeypatch\.setattr\(")
PRIVATE_STORE = re.compile(r"\._store\b")


def patches(file: File) -> Iterator[Place]:
    """Find the lines of tests that replace an attribute of the code under test."""
    return _matching_lines(file, PATCH)


def private_stores(file: File) -> Iterator[Place]:
    """Find the lines of tests that read the private store of an object."""
    return _matching_lines(file, PRIVATE_STORE)


def _matching_lines(file: File, pattern: re.Pattern[str]) -> Iterator[Place]:
    for number, line in enumerate(file.lines, 1):
        if pattern.search(line):
            yield file.place(number)
