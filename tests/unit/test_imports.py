"""Large packages are imported on use."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LARGE = ("pyspark", "pyarrow", "pandas", "starlette", "uvicorn", "confluent_kafka", "fastavro", "google.protobuf")


@pytest.mark.parametrize(
    "module", ["aioshard", "aioshard.schema_registry", "aioshard.spark", "aioshard.cli.main", "aioshard.cli.spark"]
)
def test_importing_loads_no_large_package(module: str) -> None:
    script = f"import sys, {module}; print([name for name in {LARGE!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"


def test_a_command_without_its_extra_names_it() -> None:
    script = (
        "import sys\n"
        "sys.modules['pyarrow'] = sys.modules['pyspark'] = None\n"
        "from aioshard.cli.main import main\n"
        "main({arguments!r})"
    )
    for arguments, code, sentence in (
        (["spark", "status", "no-such-directory"], 2, "aioshard[spark]"),
        (["spark", "plan", "no_such_module:app", "--out", "runs/1"], 2, "module 'no_such_module' not found"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script.format(arguments=arguments)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
