"""Files of Maven Central that tests need besides jars of the class path."""

import shutil
import subprocess
from pathlib import Path

from tests.support.kafka_libs import FETCH_TIMEOUT


def copy_artifact(artifact: str, folder: Path, unavailable: type[RuntimeError]) -> None:
    """Copy an artifact into an empty folder, which is created.

    Args:
        artifact: Its coordinates.
        folder: Where it goes; what is there is removed first.
        unavailable: Raised if there is no Maven, or Maven cannot fetch it.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise unavailable(f"{artifact} is not in {folder.parent} and no `mvn` is on PATH to fetch it: install Maven")
    shutil.rmtree(folder, ignore_errors=True)
    command = [maven, "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
    fetched = subprocess.run(
        command, cwd=folder.parent, capture_output=True, text=True, timeout=FETCH_TIMEOUT, check=False
    )
    if fetched.returncode != 0:
        raise unavailable(f"Maven could not fetch {artifact}:\n{fetched.stdout}{fetched.stderr}")
