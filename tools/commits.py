"""Check the subjects of commits.

python -m tools.commits [--since REV]

A subject has at most 72 characters, begins with a capital letter and a verb in the imperative
("Release expired leases", not "Released …" or "Releases …"), and does not end with a full stop.
Commits up to REV are not checked. The command exits with 1 if a subject breaks a rule.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence

from tools.worktree import ROOT

MAX_SUBJECT = 72
"""Characters: `git log --oneline` then fits a terminal of 80 columns."""
FIRST_CHECKED = "78a330289dfe24376dabcf9b2f73a4a90cfb1470"
"""Commits up to this revision were written before there was a rule."""
NOT_IMPERATIVE = re.compile(r"\w+(ed|ing|[^s]s)", re.IGNORECASE)
IMPERATIVES = frozenset({"bring", "embed", "exceed", "feed", "focus", "need", "proceed", "seed"})
"""Verbs that only look like a past tense, a participle or a third person."""


def find_mistakes(subject: str) -> list[str]:
    """Return the rules that `subject` breaks, each as a sentence without a subject."""
    verb = subject.split(" ", 1)[0]
    mistakes = []
    if len(subject) > MAX_SUBJECT:
        mistakes.append(f"has {len(subject)} characters, at most {MAX_SUBJECT} are allowed")
    if not verb[:1].isupper():
        mistakes.append("must begin with a capital letter")
    if verb.lower() not in IMPERATIVES and NOT_IMPERATIVE.fullmatch(verb):
        mistakes.append(f"must begin with an imperative such as 'Add' or 'Fix', not {verb!r}")
    if subject.endswith("."):
        mistakes.append("must not end with a full stop")
    return mistakes


def read_subjects(since: str) -> list[tuple[str, str]]:
    """Return the short hash and the subject of each commit after `since`.

    A shallow clone may not have `since`: then all commits that it has are returned.
    """
    is_present = _run("cat-file", "-e", f"{since}^{{commit}}").returncode == 0
    commits = _run(
        "log", "--no-merges", "--format=%h %s", f"{since}..HEAD" if is_present else "HEAD"
    )
    if commits.returncode:
        raise SystemExit(f"cannot read the commits of {ROOT}: {commits.stderr.strip()}")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in commits.stdout.splitlines()]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the mistakes and return the exit code."""
    parser = argparse.ArgumentParser(description="Check the subjects of commits.")
    parser.add_argument("--since", default=FIRST_CHECKED, help="the last commit not to check")
    options = parser.parse_args(arguments)
    mistakes = [
        f"{commit} {subject!r} {mistake}"
        for commit, subject in read_subjects(options.since)
        for mistake in find_mistakes(subject)
    ]
    print(*mistakes, sep="\n", end="\n" if mistakes else "")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
