"""Generated files: write them, or say which have drifted from what they are generated from."""

from pathlib import Path


def write_or_compare(
    wanted: dict[Path, str], folder: Path, *, check: bool, suffix: str = "sql"
) -> list[Path]:
    """Bring the files of `folder` that end so to `wanted`, or only compare; those that differ."""
    there = set(folder.rglob(f"*.{suffix}"))
    stale = there - set(wanted)
    changed = [p for p, content in wanted.items() if not p.exists() or p.read_text() != content]
    if not check:
        for path in stale:
            path.unlink()
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
    return sorted([*changed, *stale])


def report(changed: list[Path], cure: str, *, check: bool) -> int:
    """Print what differs and how to mend it, or what was written; the exit code."""
    for path in changed:
        name = f"{path.parent.name}/{path.name}"
        print(
            f"{name} differs from the code: run `{cure}` and look at the diff"
            if check
            else f"wrote {name}"
        )
    return 1 if changed and check else 0


def with_block(text: str, name: str, content: str) -> str:
    """`text` with `content` between `<!-- name -->` and `<!-- /name -->`."""
    begin = f"<!-- {name} -->\n"
    end = f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + content + end + after


def update_block(page: Path, name: str, content: str, *, check: bool) -> int:
    """Bring one block of `page` up to date, or say that it is not; the exit code."""
    text = page.read_text()
    wanted = with_block(text, name, content)
    if wanted == text:
        return 0
    if check:
        print(f"the block {name!r} of {page.name} differs from the code: run `just generate`")
        return 1
    page.write_text(wanted)
    print(f"wrote the block {name!r} of {page.name}")
    return 0
