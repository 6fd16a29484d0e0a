"""The code of the recipes on the page "Integrations"."""

from typing import Any

from tests.project.docs.pages import Block, blocks
from tests.project.docs.tables import DOCS

PAGE = DOCS / "integrations.md"
RECIPE = "recipe"


def recipes() -> dict[str, Block]:
    """The blocks that run, by the heading of their section."""
    lines = PAGE.read_text().splitlines()
    found: dict[str, Block] = {}
    for block in blocks("python"):
        if block.page == PAGE and block.check == RECIPE:
            heading = next(line for line in reversed(lines[: block.line]) if line.startswith("## "))
            assert heading not in found, f"{heading} has two recipes"
            found[heading.removeprefix("## ")] = block
    return found


def load(heading: str) -> dict[str, Any]:
    """Run a recipe and return its names."""
    block = recipes()[heading]
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile("\n" * block.line + block.text, str(block.page), "exec"), names)
    return names
