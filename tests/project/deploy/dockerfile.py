"""Runs what a Dockerfile says in a directory, without a container: COPY, RUN, ENV, WORKDIR, CMD and HEALTHCHECK.

A stage's root is a directory, and the paths in commands are moved there. While a stage is built its root has the one
name that every stage has: a virtual environment that is copied to another stage finds itself again, as in an image.
It does not run FROM (this Python takes its place), USER, EXPOSE and STOPSIGNAL.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT = 180.0
PLACED = re.compile(r"^/(?=[\w.])(?!root|usr|bin|etc)")


class CommandFailedError(RuntimeError):
    """A RUN failed; the message is its output."""


@dataclass
class Image:
    """The state of a stage."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """The working directory."""
        return self.root / self.workdir.lstrip("/")

    def moved(self, words: list[str]) -> list[str]:
        """A command with its paths below the root."""
        return [PLACED.sub(f"{self.root}/", word) for word in words]

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment of a process of the image; from this process only the variables that pip needs."""
        kept = {name: value for name, value in os.environ.items() if re.match(r"PIP_|LANG|SSL_|HTTPS?_PROXY", name)}
        path = f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin"
        own = {
            name: re.sub(r"/venv", f"{self.root}/venv", value).replace("$PATH", path)
            for name, value in self.environment.items()
        }
        return {"HOME": str(self.root), "PATH": path, **kept, **own, **more}


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """Name and argument of each instruction; continued lines are one."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, argument = line.partition(" ")
            yield name, argument.strip()


def build(dockerfile: Path, context: Path, directory: Path) -> Image:
    """Build all stages; the last one is the image.

    Raises:
        CommandFailedError: A RUN failed.
    """
    root, stages, current = directory / "root", dict[str, Path](), ""
    image = Image(root)
    for name, argument in instructions(dockerfile):
        if name == "FROM":
            if current:
                stages[current] = root.rename(directory / current)
            root.mkdir()
            current = argument.partition(" AS ")[2] or "last"
            image = Image(root)
        else:
            _apply(image, name, argument, context, stages)
    return image


def _apply(image: Image, name: str, argument: str, context: Path, stages: dict[str, Path]) -> None:
    match name:
        case "COPY":
            _copy(image, argument.split(), context, stages)
        case "RUN":
            _run(image, _words(argument))
        case "ENV":
            image.environment |= dict(word.split("=", 1) for word in argument.split())
        case "WORKDIR":
            image.workdir = argument
        case "USER":
            image.user = argument
        case "CMD":
            image.command = _words(argument)
        case "HEALTHCHECK":
            image.healthcheck = _words(argument.partition("CMD ")[2])
        case "EXPOSE" | "STOPSIGNAL":
            pass
        case _:
            raise AssertionError(f"nothing here runs {name}")


def _words(argument: str) -> list[str]:
    """The exec form; a shell form is not JSON and is refused."""
    words: list[str] = json.loads(re.sub(r"^(?:--\S+ )+", "", argument))
    return words


def _copy(image: Image, words: list[str], context: Path, stages: dict[str, Path]) -> None:
    source_root = context
    if words[0].startswith("--from="):
        source_root = stages[words.pop(0).removeprefix("--from=")]
    *sources, target = words
    for source in sources:
        origin, goal = source_root / source.lstrip("/"), image.root / target.lstrip("/")
        if origin.is_dir():
            shutil.copytree(origin, goal, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            goal.mkdir(parents=True, exist_ok=True)
            shutil.copy(origin, goal)


def _run(image: Image, words: list[str]) -> None:
    # A path may carry an extra: /src[web].
    command = image.moved(words)
    if command[0] == "python":
        command[0] = str(Path(sys.executable).resolve())
    ran = subprocess.run(
        command, cwd=image.root, env=image.variables(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if ran.returncode:
        raise CommandFailedError(f"{' '.join(words)} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
