"""The texts that the package can print, read from its source; `…` stands for each variable part."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import PROJECT

_VARIES = re.compile(r"%(?:\(\w+\))?[-+ #0]*[\d.]*[srdgfcx]")
_SHORTEST = 12


@cache
def texts() -> frozenset[str]:
    """Every text of the package that is long enough to be a message."""
    return frozenset(
        text
        for path in sorted((PROJECT / "aioshard").rglob("*.py"))
        for text in _texts_of(path)
        if len(text) >= _SHORTEST
    )


def _texts_of(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _VARIES.sub("…", node.value)


def is_printed(message: str) -> bool:
    """Whether some text contains the parts of *message* between its `…`, in this order."""
    expected = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    return any(expected.search(text) for text in texts())
