"""Two build hooks: compiled modules, and URLs for the package index.

`AIOSHARD_COMPILE=1 pip install .` builds the compiled wheel; without the variable the wheel is pure Python.
"""

import contextlib
import os
import posixpath
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MYPY_OPTIONS = [
    "--config-file=",  # ignore the project's file: it needs typed packages that a build does not need
    f"--cache-dir={os.devnull}",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--local-partial-types",
]

IMAGES = (".gif", ".jpg", ".png", ".svg", ".webp")
CODE = re.compile(
    r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|(?P<ticks>`+)[^`].*?(?P=ticks)", re.DOTALL | re.MULTILINE
)
LINK = re.compile(
    r"""(?P<before>\]\(<?|\b(?:href|src|srcset)="|^\[[^\]]+\]:\s+)(?P<target>(?![a-z][a-z\d+.-]*:|[#/])[^\s)>"]+)""",
    re.MULTILINE,
)


class RepositoryMetadataHook(MetadataHookInterface):
    """Adds the URLs of the repository to the metadata and makes the links of the README absolute.

    It needs the variables of a GitHub workflow. Without them the README stays as it is.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`; a wheel built from an sdist keeps the values of the sdist."""
        dynamic = metadata.get("dynamic", [])
        repository = repository_url(os.environ)
        if "readme" in dynamic:
            metadata["readme"] = "README.md"
            if repository:
                text = Path(self.root, "README.md").read_text(encoding="utf-8")
                links = absolute_links(text, repository, git_ref(os.environ), Path(self.root))
                metadata["readme"] = {"content-type": "text/markdown", "text": links}
        if "urls" in dynamic and repository:
            files = f"{repository}/blob/{git_ref(os.environ)}"
            metadata["urls"] = {
                "Homepage": repository,
                "Documentation": f"{files}/docs/index.md",
                "Source": repository,
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def repository_url(variables: Mapping[str, str]) -> str:
    """Return the URL of the repository, or an empty string outside a workflow."""
    server, name = variables.get("GITHUB_SERVER_URL", ""), variables.get("GITHUB_REPOSITORY", "")
    return f"{server.rstrip('/')}/{name}" if server and name else ""


def git_ref(variables: Mapping[str, str]) -> str:
    """Return the tag that is being built, or HEAD: links of a released README must not change with the main branch."""
    return variables["GITHUB_REF_NAME"] if variables.get("GITHUB_REF_TYPE") == "tag" else "HEAD"


def absolute_links(text: str, repository: str, ref: str, root: Path) -> str:
    """Make relative links and images absolute; code, anchors and absolute links stay as they are."""

    def absolute(link: re.Match[str]) -> str:
        path, mark, anchor = link["target"].partition("#")
        path = posixpath.normpath(path)
        view = "raw" if path.endswith(IMAGES) else "tree" if (root / path).is_dir() else "blob"
        return f"{link['before']}{repository}/{view}/{ref}/{path}{mark}{anchor}"

    pieces, end = [], 0
    for code in CODE.finditer(text):
        pieces += [LINK.sub(absolute, text[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*pieces, LINK.sub(absolute, text[end:])])


DEPRECATED_THROW = "PyObject_CallFunctionObjArgs(_m, type, value, traceback, NULL)"
"""How a coroutine of mypyc passes an exception on. Since Python 3.12 it warns: where warnings are errors, it fails."""
THROW = "PyObject_CallFunctionObjArgs(_m, value, NULL)"
"""The same without a warning: the exception has its type and its traceback."""


class CompilingBuildHook(BuildHookInterface[Any]):
    """Compiles the modules that `pyproject.toml` lists with mypyc, and adds them to the wheel next to their sources.

    Compiled are the classes that every record passes through and their subclasses, because a compiled class cannot
    have interpreted subclasses or a second base. Code that calls users' functions (`attempts.py`, `failures.py`,
    `recoveries.py`, `handler.py`) is not compiled: a compiled coroutine has no frame, so `engine/stack.py` could not
    find the line where a handler waits.

    In compiled modules, an attribute has one type: no `int` in place of a `float`, no narrower type in a subclass.
    Class defaults must be constants (`PROCESSED`, not `Outcome.PROCESSED`); otherwise the attribute is missing.

    hatch-mypyc is not suitable: it renames `pyproject.toml` during the build and leaves its output in the source tree.
    """

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
        from mypyc.build import include_dir, mypycify  # noqa: PLC0415 - see `dependencies`
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
            # The compiler finds our copy of this file before the original.
            changed = Path(self._directory.name, "changed")
            changed.mkdir()
            runtime = Path(include_dir(), "misc_ops.c").read_text()
            if DEPRECATED_THROW not in runtime:
                raise RuntimeError("mypyc's misc_ops.c has changed: check how its coroutines call throw()")
            (changed / "misc_ops.c").write_text(runtime.replace(DEPRECATED_THROW, THROW))
            for extension in extensions:
                extension.include_dirs.insert(0, str(changed))
            command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
            command.build_lib, command.build_temp = str(target), self._directory.name
            command.ensure_finalized()
            command.run()
        build_data["force_include"].update({str(path): str(path.relative_to(target)) for path in target.rglob("*.*")})
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the compiler's files after the wheel is written."""
        if self._compiles and version != "editable":
            self._directory.cleanup()
