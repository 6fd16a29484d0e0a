"""Builds the compiled wheel: `AIOSHARD_COMPILE=1 pip install .`; without the variable the wheel is pure Python."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MYPY_OPTIONS = [
    "--config-file=",  # ignore the project's: it needs packages with types that a build does not need
    f"--cache-dir={os.devnull}",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--local-partial-types",
]


class CompilingBuildHook(BuildHookInterface[Any]):
    """Compiles the modules that `pyproject.toml` lists with mypyc, and adds them to the wheel beside their sources."""

    @property
    def _compiles(self) -> bool:
        return os.environ.get("AIOSHARD_COMPILE", "") not in {"", "0"}

    def dependencies(self) -> list[str]:
        """Return the requirements of a compiled build."""
        return list(self.config["compiler"]) if self._compiles else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is written; an editable install stays pure Python."""
        if not self._compiles or version == "editable":
            return
        from mypyc.build import mypycify  # noqa: PLC0415 - see `dependencies`
        from setuptools import Distribution  # noqa: PLC0415

        self._directory = tempfile.TemporaryDirectory(prefix="aioshard-compiled-")
        target = Path(self._directory.name, "lib")
        with contextlib.chdir(self.root):
            extensions = mypycify(
                [*MYPY_OPTIONS, *self.config["modules"]],
                opt_level="3",
                debug_level="0",
                group_name="aioshard",
                target_dir=self._directory.name,
            )
            command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
            command.build_lib, command.build_temp = str(target), self._directory.name
            command.ensure_finalized()
            command.run()
        build_data["force_include"].update({str(path): str(path.relative_to(target)) for path in target.rglob("*.*")})
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the files of the compiler once the wheel is written."""
        if self._compiles and version != "editable":
            self._directory.cleanup()
