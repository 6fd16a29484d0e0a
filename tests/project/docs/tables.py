"""Generated tables of the documentation: settings, commands, exit codes, metrics and tests.

`python -m tests.project.docs.tables` writes it between the marks in the pages; a test fails when that is due.
"""

import ast
import inspect
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import click

from aioshard.cli import main as entry
from aioshard.cli.output import exit_code
from aioshard.core.assignment import ASSIGNORS, Member
from aioshard.settings import Settings, default_of, unit_of
from aioshard.telemetry.metrics import METRICS
from aioshard.telemetry.tracing import ATTRIBUTES
from tests.support.paths import PROJECT

DOCS = PROJECT / "docs"

_WIDTH = 88
_WIDE: dict[str, typing.Any] = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}


def settings() -> str:
    """One row for each setting."""
    described = descriptions()
    return _table(
        ("setting", "default", "unit", "what it is"),
        (
            (f"`{name}`", f"`{default_of(name)}`", unit_of(name) or "", f"{described[name]}{_choices(name)}")
            for name in Settings.model_fields
        ),
    )


def descriptions() -> dict[str, str]:
    """The docstring of each setting. Pydantic could extract them too, but would do so at each start, for 19 ms."""
    (definition,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        setting.target.id: " ".join(text.split())
        for setting, docstring in itertools.pairwise(definition.body)
        if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name)
        if isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
        if isinstance(text := docstring.value.value, str)
    }


def _choices(name: str) -> str:
    found = _literals(Settings.model_fields[name].annotation)
    return f" One of {', '.join(f'`{value}`' for value in found)}." if found else ""


def _literals(annotation: object) -> list[str]:
    """The values that an annotation names."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [value for part in typing.get_args(annotation) for value in _literals(part)]


def metrics() -> str:
    """One row for each metric."""
    return _table(
        ("metric", "type", "labels beside `group`", "what it is"),
        (
            (
                f"`{name}{ {'counter': '_total', 'info': '_info'}.get(kind, '') }`",
                kind,
                ", ".join(f"`{label}`" for label in labels),
                sentence,
            )
            for name, (kind, sentence, _, labels) in METRICS.items()
        ),
    )


def attributes() -> str:
    """One row for each attribute of spans."""
    rows = ((f"`{name}`", spans, meaning) for name, (spans, meaning) in ATTRIBUTES.items())
    return _table(("attribute", "spans", "what it is"), rows)


def commands() -> str:
    """The help of each command, as it is printed."""
    return "\n\n".join(
        f"### {context.command_path}\n\n```text\n{context.command.get_help(context)}\n```" for context in contexts()
    )


def contexts() -> list[click.Context]:
    """A context of each command and of each command of a group."""
    return [context for name in entry.COMMANDS for context in _with_subcommands(context_of(name))]


def _with_subcommands(context: click.Context) -> list[click.Context]:
    group = context.command
    if not isinstance(group, click.Group):
        return [context]
    found = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    return [context, *(_context(command, context, name) for name, command in found if command is not None)]


def context_of(name: str) -> click.Context:
    """A context of a command, without running it; that of a command of a group has both names with a space.

    Raises:
        KeyError: The command does not exist.
    """
    context = click.Context(entry.cli, info_name="aioshard", **entry.cli.context_settings, **_WIDE)
    for part in name.split():
        command = context.command.get_command(context, part) if isinstance(context.command, click.Group) else None
        if command is None:
            raise KeyError(name)
        context = _context(command, context, part)
    return context


def _context(command: click.Command, parent: click.Context, name: str) -> click.Context:
    return click.Context(command, parent=parent, info_name=name, **_WIDE)


def exit_codes() -> str:
    """The table of the module that has them."""
    rows = [line.strip() for line in (exit_code.__doc__ or "").splitlines() if line.strip().startswith("|")]
    assert len(rows) > 2, "exit_code has no table of exit codes"
    return "\n".join(rows)


def evidence() -> str:
    """The source of each test that a guarantee names, under the guarantee that names it first."""
    shown: set[str] = set()
    lines = []
    for heading, names in named_tests().items():
        lines.append(f"## {heading}\n")
        for name in names:
            if name in shown:
                lines.append(f"[{name.rpartition('.')[2]}](#{name}), above.\n")
            else:
                shown.add(name)
                lines.append(f"::: {name}\n{_SHOWN}\n")
    return "\n".join(lines).strip()


def named_tests() -> dict[str, list[str]]:
    """Dotted names of the tests that show each guarantee, by its heading."""
    found = {}
    for section in re.split(r"(?m)^## ", (DOCS / "guarantees.md").read_text())[1:]:
        heading = section.partition("\n")[0]
        if re.match(r"I\d+\. ", heading):
            found[heading] = re.findall(r"\(evidence\.md#([\w.]+)\)", section)
    return found


_SHOWN = """\
    options:
      heading_level: 3
      show_root_full_path: false
      show_signature: false
      show_source: true"""


def contents() -> str:
    """One line for each section of the site."""
    navigation = (PROJECT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\nplugins:")[0]
    lines = []
    for section in re.split(r"(?m)^  - ", navigation)[1:]:
        pages = re.findall(r"^      - (.+): ([\w/-]+\.md)$", section, re.MULTILINE)
        shown = ", ".join(f"[{title}]({page})" for title, page in pages if page != "index.md")
        lines.append(f"* **{section.partition(':')[0]}:** {shown}")
    return "\n".join(lines)


def assignors() -> str:
    """One group under each assignor that does not look at backlogs."""
    partitions = {f"T{number}": range(count) for number, count in enumerate((2, 1, 2, 1, 2), start=1)}
    everything, odd = frozenset(partitions), frozenset({"T1", "T3", "T5"})
    members = {"C1": Member(everything), "C2": Member(odd), "C3": Member(odd), "C4": Member(everything)}
    rows = []
    for name in ("range", "roundrobin", "fair", "sticky"):
        before = ASSIGNORS[name](members, partitions)
        rest = {who: replace(members[who], owned=before[who], generation=1) for who in ("C2", "C3", "C4")}
        after = ASSIGNORS[name](rest, partitions)
        moved = sum(len(set(before[who]) - set(after[who])) for who in rest)
        rows.append((f"`{name}`", *(", ".join(map(str, before[who])) or "nothing" for who in members), str(moved)))
    return _table(("assignor", *members, "others that move when C1 dies"), rows)


GENERATED: dict[str, Callable[[], str]] = {
    "assignors": assignors,
    "contents": contents,
    "settings": settings,
    "metrics": metrics,
    "attributes": attributes,
    "commands": commands,
    "exit codes": exit_codes,
    "evidence": evidence,
}
"""Generated parts between `<!-- generated: name -->` and `<!-- end -->`."""

_MARKED = re.compile(r"(?P<begin><!-- generated: (?P<name>[a-z ]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def _current(text: str) -> str:
    return _MARKED.sub(
        lambda found: f"{found['begin']}\n{GENERATED[found['name']]()}\n\n{found['end']}",
        text,
    )


def _pages() -> Iterable[Path]:
    return sorted(DOCS.rglob("*.md"))


def marks() -> set[str]:
    """The names of what pages ask for."""
    return {found["name"] for page in _pages() for found in _MARKED.finditer(page.read_text())}


def outdated() -> list[str]:
    """The pages whose generated parts are not what the code says now."""
    return [str(page.relative_to(DOCS)) for page in _pages() if _current(text := page.read_text()) != text]


def write() -> list[str]:
    """Bring every page up to date; returns the names of those that changed."""
    changed = outdated()
    for name in changed:
        page = DOCS / name
        page.write_text(_current(page.read_text()))
    return changed


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(f"written: {', '.join(write()) or 'nothing, all was current'}\n")
