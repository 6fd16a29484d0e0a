"""Rules for every module: its layer, its imports and its docstrings."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from aioshard.core import options
from tests.support.paths import PROJECT

PACKAGE = PROJECT / "aioshard"
MODULES = sorted(PACKAGE.rglob("*.py"))

LATE_IMPORTS = [
    *("click", "confluent_kafka", "fastavro", "prometheus_client", "pyarrow", "pydantic", "pyspark", "rich"),
    *("starlette", "uvloop"),
]
"""Packages that cost start-up time or come with an extra: imported where they are used."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


def _dotted(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


EVERY_MODULE = pytest.mark.parametrize("path", MODULES, ids=_dotted)
EVERY_PUBLIC_MODULE = pytest.mark.parametrize(
    "path", [path for path in MODULES if _is_public(_dotted(path))], ids=_dotted
)


def test_import_contracts_hold() -> None:
    """The contracts themselves are in pyproject.toml."""
    linted = _lint(PROJECT)

    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("core/offsets.py", "import asyncio", "The core uses no clock"),
        ("core/flow.py", "import aioshard.ports", "A module imports only from lower layers"),
        ("engine/worker.py", "import confluent_kafka", "The engine imports no Kafka client"),
        ("records.py", "import aioshard.errors", "A module imports only from lower layers"),
        ("cli/dlt/show.py", "import aioshard.testing", "A module imports only from lower layers"),
    ],
    ids=["clock-in-core", "core-looks-up", "vendor-in-engine", "circle-at-the-bottom", "test-kit-in-production"],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, statement: str, contract: str) -> None:
    """A contract that nothing can break proves nothing."""
    shutil.copytree(PACKAGE, tmp_path / "aioshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    source = tmp_path / "aioshard" / module
    source.write_text(f"{source.read_text()}\n{statement}\n")

    linted = _lint(tmp_path)

    assert linted.returncode == 1, linted.stdout + linted.stderr
    broken = [line for line in linted.stdout.splitlines() if "BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), linted.stdout


def _lint(project: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package in *project*, and on no other that is installed."""
    script = (
        "import sys\n"
        "sys.path.insert(0, sys.argv.pop())\n"
        "from importlinter.cli import lint_imports_command\n"
        "lint_imports_command()\n"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", script, "--no-cache", "--no-logo", str(project)],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )


def test_exceptions_that_users_catch_are_in_one_module() -> None:
    """Those of the command line end in its output, and never reach a caller."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
    }
    places = {
        node.name: _dotted(path)
        for path in MODULES
        if "cli" not in path.relative_to(PACKAGE).parts
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef) and _is_error(node.name, bases)
    }

    assert len(places) > 20
    assert {name: place for name, place in places.items() if place != "aioshard.errors"} == {}


def _is_error(name: str, bases: dict[str, set[str]]) -> bool:
    return name == "AioshardError" or any(_is_error(base, bases) for base in bases.get(name, set()) - {name})


def test_the_module_of_options_holds_options() -> None:
    """An option is a value that does not change; a mechanism belongs to the module that uses it."""
    classes = {name: found for name, found in vars(options).items() if isinstance(found, type)}
    own = {name: found for name, found in classes.items() if found.__module__ == options.__name__}

    assert own
    assert [name for name, found in own.items() if not _is_frozen(found)] == []


def _is_frozen(found: type) -> bool:
    parameters = vars(found).get("__dataclass_params__")
    return parameters is not None and bool(parameters.frozen)


@EVERY_PUBLIC_MODULE
def test_every_public_name_has_a_docstring(path: Path) -> None:
    tree = _tree(path)

    silent = [where for where, node in _public_definitions(tree, "") if ast.get_docstring(node) is None]

    assert silent == []
    assert ast.get_docstring(tree) is not None or not tree.body


def _public_definitions(owner: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, Definition]]:
    for node in owner.body:
        if not isinstance(node, Definition) or node.name.startswith("_") or _explained_elsewhere(node):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public_definitions(node, f"{prefix}{node.name}.")


def _explained_elsewhere(node: Definition) -> bool:
    """Whether the docstring is that of the overridden method, the whole overload or the property."""
    marks = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(marks & {"overload", "override", "setter"})


def test_import_is_light() -> None:
    """`import aioshard` brings in nothing that only a part of the users needs."""
    script = "import json, sys, aioshard; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    ran = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True)

    assert set(json.loads(ran.stdout)) & set(LATE_IMPORTS) == set()
