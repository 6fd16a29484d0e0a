"""Runs the quick start with an installed aioshard: `python tests/tools/quick_start.py DIRECTORY_OF_ITS_PROGRAMS`.

The release workflow runs it on the built wheel, in an environment without the tools of the tests. So it imports nothing
but the standard library.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"
DEADLINE = 60.0
POLL = 0.05


class QuickStartError(RuntimeError):
    """The quick start did not do what the README shows; the message has the output."""


def quick_start(programs: Path) -> str:
    """Start a broker and the app, publish an order and stop both with Ctrl-C.

    Returns:
        The output of the app.

    Raises:
        QuickStartError: The order did not arrive, or the app ended with an error.
    """
    aioshard = str(programs / "aioshard")
    with tempfile.TemporaryDirectory(prefix="aioshard-quick-start-") as name:
        directory = Path(name)
        broker = subprocess.Popen(
            [aioshard, "broker", "--topic", "orders:2", "--json"], cwd=directory, stdout=subprocess.PIPE
        )
        try:
            assert broker.stdout is not None
            started = json.loads(broker.stdout.readline())
            address = started["bootstrap_servers"]
            (directory / "quickstart.py").write_text(EXAMPLE.read_text().replace("localhost:9092", address))
            kept = {variable: value for variable, value in os.environ.items() if not variable.startswith("PYTHON")}
            return _first_order(aioshard, directory, address, {**kept, **started["environment"]})
        finally:
            broker.send_signal(signal.SIGINT)
            broker.communicate()


def _first_order(aioshard: str, directory: Path, address: str, variables: dict[str, str]) -> str:
    log = directory / "app.log"
    with log.open("wb") as output:
        app = subprocess.Popen(
            [aioshard, "run", "quickstart:app"], cwd=directory, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        subprocess.run(
            [aioshard, "publish", "-", "orders", "--key", "customer", "--bootstrap-servers", address],
            input=b'{"customer": "alice", "item": "book"}\n',
            check=True,
        )
        deadline = time.monotonic() + DEADLINE
        while "b'alice' 0" not in log.read_text():
            if app.poll() is not None or time.monotonic() > deadline:
                raise QuickStartError(f"the order did not arrive:\n{log.read_text()}")
            time.sleep(POLL)
        app.send_signal(signal.SIGINT)
        if (code := app.wait(DEADLINE)) != 0:
            raise QuickStartError(f"the app ended with {code}:\n{log.read_text()}")
    finally:
        if app.poll() is None:
            app.kill()
            app.wait()
    return log.read_text()


if __name__ == "__main__":
    print(quick_start(Path(sys.argv[1]).resolve()))
