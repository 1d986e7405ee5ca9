"""Puts the tables of a study between their marks in its page."""

from pathlib import Path

from jaxthru.runtime.atomic import write_atomically


def fill(page: Path, text: dict[str, str], script: str) -> None:
    """Puts each of the named tables between its marks, which name the script. Exits if the page lacks some,
    and leaves it as it is."""
    whole = page.read_text()
    for name, table in text.items():
        begin, end = f"<!-- {name}: by scripts/study/{script} -->", f"<!-- end of {name} -->"
        before, _, rest = whole.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise SystemExit(f"{page}: lacks the marks of {name}")
        whole = f"{before}{begin}\n{table}\n{end}{after}"
    write_atomically(page, whole)
