"""The names that aioshard takes from aiokafka: public ones only, and each exists in the installed version."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

PACKAGE = PROJECT / "aioshard"
ALLOWED = {
    "kafka/batches.py": {
        "aiokafka": {"codec"},
        "aiokafka.record.default_records": {"DefaultRecordBatchBuilder"},
    },
    "kafka/partitioning.py": {"aiokafka.partitioner": {"murmur2"}},
    "kafka/wire/options.py": {"aiokafka.abc": {"AbstractTokenProvider"}},
    "kafka/wire/records.py": {
        "aiokafka.errors": {"KafkaError"},
        "aiokafka.record.control_record": {"ABORT_MARKER", "ControlRecord"},
        "aiokafka.record.memory_records": {"MemoryRecords"},
    },
    "kafka/wire/sasl.py": {
        "aiokafka.conn": {
            "OAuthAuthenticator",
            "SaslGSSAPIAuthenticator",
            "SaslPlainAuthenticator",
            "ScramAuthenticator",
        }
    },
    "kafka/wire/start.py": {"aiokafka.conn": {"collect_hosts"}},
}
"""The names, by our module and theirs. `docs/design.md` says why it is these."""


def imported(path: Path) -> dict[str, set[str]]:
    """The names that a module imports from aiokafka."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aiokafka":
            found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "aiokafka":
                    found.setdefault(alias.name, set())
    return found


def test_only_these_public_names_are_used() -> None:
    used = {str(path.relative_to(PACKAGE)): names for path in PACKAGE.rglob("*.py") if (names := imported(path))}
    assert used == ALLOWED
    assert not [name for modules in used.values() for names in modules.values() for name in names if name[0] == "_"]


@pytest.mark.parametrize(
    ("module", "name"),
    sorted({(module, name) for modules in ALLOWED.values() for module, names in modules.items() for name in names}),
)
def test_each_name_exists(module: str, name: str) -> None:
    if not hasattr(importlib.import_module(module), name):
        importlib.import_module(f"{module}.{name}")


def test_the_linter_lets_no_module_use_private_attributes_of_it() -> None:
    """It finds each use of a private attribute; only those of other libraries are excused."""
    rules = (PROJECT / "pyproject.toml").read_text()
    assert not re.search(r'"aioshard/[^"]*" = \[[^\]]*SLF001', rules)
    excused = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "SLF001" in path.read_text()}
    assert excused == {"engine/loop_watch.py", "engine/stack.py", "engine/unawaited.py"}
