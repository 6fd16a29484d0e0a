"""Rules for every module: its layer, its size and its docstrings."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.running import PROJECT

PACKAGE = PROJECT / "aioshard"
MODULES = sorted(PACKAGE.rglob("*.py"))

LATE_IMPORTS = ["click", "prometheus_client", "pyarrow", "pydantic", "pyspark", "rich", "starlette", "uvloop"]
"""Packages that cost start-up time or come with an extra: imported where they are used."""

MOST_STATEMENTS = 17_000
MOST_MODULES = 200

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
EVERY_PUBLIC_MODULE = pytest.mark.parametrize("path", [one for one in MODULES if _is_public(_dotted(one))], ids=_dotted)


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
    ],
    ids=["clock-in-core", "core-looks-up", "vendor-in-engine", "circle-at-the-bottom"],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path: Path, module: str, statement: str, contract: str) -> None:
    """A contract that nothing can break proves nothing."""
    shutil.copytree(PACKAGE, tmp_path / "aioshard", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    source = tmp_path / "aioshard" / module
    source.write_text(f"{source.read_text()}\n{statement}\n")

    linted = _lint(tmp_path)

    assert linted.returncode == 1, linted.stdout + linted.stderr
    broken = [line for line in linted.stdout.splitlines() if line.endswith("BROKEN")]
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


def test_the_package_stays_small() -> None:
    """Lower these figures whenever the package shrinks; raise them only for a new capability."""
    nodes = [node for path in MODULES for node in ast.walk(_tree(path)) if isinstance(node, ast.stmt)]
    statements = sum(1 for node in nodes if not _is_docstring(node))

    assert len(MODULES) <= MOST_MODULES
    assert statements <= MOST_STATEMENTS


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
