"""The documentation pages with their fenced blocks and links."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.project.docs.tables import DOCS
from tests.support.paths import PROJECT

PAGES = (PROJECT / "README.md", *sorted(DOCS.rglob("*.md")))

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]+)(?:[ ]\{data-check=\"(?P<check>[a-z]+)\"\})?[ ]*\n"
    r"(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.DOTALL | re.MULTILINE,
)
_ANY_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


class Block(NamedTuple):
    """One fenced block; its info string is the language and, in braces, `data-check="…"`."""

    page: Path
    line: int
    language: str
    check: str
    """How it is tested; empty where the page does not say."""
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


class Link(NamedTuple):
    """One link that is not to another site."""

    page: Path
    text: str
    file: str
    anchor: str


def name_of(page: Path) -> str:
    """The path of a page in the documentation, such as `reference/app.md`."""
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else PROJECT))


def blocks(*languages: str) -> list[Block]:
    """The blocks of these languages, page by page from top to bottom."""
    return [block for page in PAGES for block in _blocks(page) if block.language in languages]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found["language"], found["check"] or "", found["text"])


def links(page: Path) -> list[Link]:
    """The links of a page to other pages, files and places."""
    prose = re.sub(r"`[^`\n]+`", "", _ANY_FENCE.sub("", page.read_text()))
    found = []
    for link in _LINK.finditer(prose):
        if not re.match(r"[a-z]+:", link["target"]):
            file, _, anchor = link["target"].partition("#")
            found.append(Link(page, link["text"], file, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """The places of a page that can be linked to: its headings, and names that the reference documents."""
    text = _ANY_FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    documented = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    return {_slug(heading) for heading in headings} | set(documented)


def _slug(heading: str) -> str:
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)
