"""The page of `aioshard run --web`: its options, its token and its routes."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from aioshard.app import App

__all__ = ["TOKEN_VARIABLE", "Page", "warn_of_readers", "web_options"]

logger = logging.getLogger("aioshard.cli")

TOKEN_VARIABLE = "AIOSHARD_WEB_TOKEN"  # noqa: S105 - a name


class Page(NamedTuple):
    """A page that is to be served."""

    token: str | None
    """Who has it may act; None: the page only shows."""

    @classmethod
    def of(cls, token_file: str | None) -> Self:
        """The page with the token of a file, or else of the environment.

        Raises:
            click.UsageError: The file cannot be read.
        """
        if token_file is None:
            return cls(os.environ.get(TOKEN_VARIABLE) or None)
        try:
            return cls(Path(token_file).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--token-file {token_file} cannot be read: {error}") from None

    def routes(self, app: "App") -> "list[BaseRoute]":
        """Its routes.

        Raises:
            SettingsError: The token is too short, or cannot be sent in a header.
        """
        from aioshard.web.page import page_routes  # noqa: PLC0415 (needs the extra `web`)

        return page_routes(app, token=self.token)


def warn_of_readers(token_file: str) -> None:
    """Say so where anybody may read the token in a file whose mode this user can change.

    A secret that a cluster mounts is another user's or cannot be written: its mode is none of this process's.
    """
    if os.name == "nt":
        return
    found = os.stat(token_file)  # noqa: PTH116
    mounted = os.statvfs(token_file).f_flag & os.ST_RDONLY
    if found.st_mode & stat.S_IROTH and found.st_uid == os.geteuid() and not mounted:
        logger.warning("anybody on this machine can read the token in %s: chmod 600 %s", token_file, token_file)


def web_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--web` and `--token-file`."""
    command = click.option(
        "--token-file",
        type=click.Path(exists=True, dir_okay=False, readable=True),
        help=f"File with the token for the page's actions, in place of {TOKEN_VARIABLE}; at least 16 characters. "
        "Without a token the page only shows.",
    )(command)
    return click.option(
        "--web",
        is_flag=True,
        help="Serve a page that shows the app, at / of the health server; without --health-port on a free port.",
    )(command)
