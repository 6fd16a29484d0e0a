"""`aioshard asyncapi`: the topics and payloads of an app as an AsyncAPI document."""

import click

from aioshard.asyncapi import document
from aioshard.cli import options
from aioshard.cli.loading import load_app
from aioshard.cli.output import print_json


@click.command()
@options.target
@options.app_dir
@click.option("--title", metavar="TEXT", help="Title of the document.  [default: the group id]")
@click.option("--api-version", metavar="VERSION", default="0.1.0", show_default=True, help="Version of the document.")
def command(target: str, *, app_dir: str, title: str | None, api_version: str) -> None:
    """Print the topics and payloads of an app as an AsyncAPI document.

    AsyncAPI 3.0 in JSON: a channel for each topic, a receive operation for each handler, and the schema of its payload.
    """
    app = load_app(target, app_dir)
    app.check()
    print_json(document(app, title or app.group_id, api_version), indent=2)
