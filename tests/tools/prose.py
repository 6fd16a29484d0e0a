"""Finds sentences that are hard to read: `python -m tests.tools.prose FILE...`; see CONTRIBUTING.md."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BEGINNING = r"(?:^|(?<=[.!?:]\s))"
PHRASES = [
    (BEGINNING + r"(?:What|Whatever|Who|Whoever|Whose)\b(?! to\b)(?![^.!?|]*\?)", "begin with the subject"),
    (r"\b(?:whoever|whatever|whichever)\b", "name the subject"),
    (r"\w\(s\)", "write '1 record' or '2 records'"),
    (r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more|less|fewer)\w+", "write 'is not a …' or 'unknown …'"),
    (r"\b(?:goes|went|going) on\b", "write 'continue', 'resume' or 'proceed'"),
    (r"\bin hand\b", "write 'in flight'"),
    (r"\bmend(?:s|ed|ing)?\b", "write 'fix'"),
    (r"\bby hand\b", "write 'manually'"),
    (r"\b(?:would|will|must|may|can) else\b", "write 'otherwise'"),
    (r"\bin vain\b", "write 'to no effect'"),
    (r"\b(?:have|has|had) to bear\b", "write 'must tolerate' or 'must be idempotent'"),
    (r"\bfor ever\b", "write 'forever' or 'indefinitely'"),
    (r"\bloop (?:turns|does not turn|stands still)\b", "write 'the event loop runs' or 'is blocked'"),
]
COMPILED = [(re.compile(phrase), advice) for phrase, advice in PHRASES]
ITEM = re.compile(r"\s*(?:[|#*>-]|\d+\. )")


def findings(path: Path) -> Iterator[str]:
    """Yield one line for each phrase, with its place and advice."""
    source = path.read_text(encoding="utf-8")
    for line, text in _python(source) if path.suffix == ".py" else _markdown(source):
        plain = re.sub(r"`[^`]*`|<!--.*?-->", "X", " ".join(text.split()))
        for phrase, advice in COMPILED:
            for found in phrase.finditer(plain):
                around = plain[max(0, found.start() - 20) : found.end() + 20]
                yield f"{path}:{line}: …{around}…: {advice}"


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    """The paragraphs, items and table rows with their lines; code blocks are left out."""
    fenced, start, paragraph = False, 1, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if fence or fenced or not line.strip() or ITEM.match(line):
            yield start, " ".join(paragraph)
            start, paragraph = number, []
        fenced ^= fence
        if not fenced and not fence and line.strip():
            start = start if paragraph else number
            paragraph.append(line.lstrip("#*>-0123456789. "))


def _python(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def main(names: list[str]) -> int:
    """Print the findings of all files; returns the exit code."""
    found = [line for name in names for line in findings(Path(name))]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
