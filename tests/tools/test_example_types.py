"""The types of the documentation's examples are checked, and errors have the page's lines."""

from pathlib import Path

from tools.example_types import FRAGMENTS, PAGES, PROGRAMS, check, examples

PAGE = """# A page

```python title="shop.py"
number: int = 1
```

* a list

  ```python
  from shop import number

  number = "text"
  ```

```py
await something_else(number)
broker.number: int = "text"
```

```text
print(nothing)
```
"""


def test_errors_have_the_lines_of_their_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    # Without the package's own imports it is quick, and they may be anything.
    errors = check([page], ["--follow-imports=skip", "--no-incremental"])
    wrong = "Incompatible types in assignment (expression has type"
    assert [error.partition(wrong)[0] for error in errors if wrong in error] == [
        f"{page}:12: error: ",
    ]
    assert not any("not defined" in error for error in errors)


def test_the_cells_of_a_notebook_are_one_program(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- one notebook -->\n```python\na = 1\n```\n\n```python\nprint(a)\n```\n")
    [(module, code)] = examples(page, "page").items()
    assert module == f"{PROGRAMS}.page"
    assert code.splitlines() == ["", "", "a = 1", "", "", "", "print(a)"]


def test_every_page_is_read() -> None:
    modules = [module for page in PAGES for module in examples(page, page.stem)]
    assert len(modules) >= 100
    assert {module.partition(".")[0] for module in modules} == {PROGRAMS, FRAGMENTS}
