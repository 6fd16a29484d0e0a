"""Help of all commands: options with one name take the same kind of value everywhere."""

import click

from tests.project.docs.tables import contexts

COMMANDS = contexts()
OPTIONS = {
    f"{context.command_path} {option.opts[0]}": option
    for context in COMMANDS
    for option in context.command.params
    if isinstance(option, click.Option) and not option.hidden
}
DIFFERENT = {
    "aioshard broker --topic",  # creates topics, with a number of partitions
    "aioshard publish --key",  # the field that has the key
    "aioshard report html --out",  # a file
    "aioshard spark redrive --out",  # a second directory, since DIR is that of the run
}
"""Options whose value is not that of others of the same name."""
SHORT = {"--bootstrap-servers": "-b", "--topic": "-t", "--partition": "-p"}
SINGLE_LINE = 66
"""Characters of a summary in a list of commands, in a terminal of 80 columns."""


def value_of(option: click.Option) -> str:
    if option.is_flag:
        return "nothing"
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return option.metavar or option.type.name.upper()


def test_options_with_the_same_name_take_the_same_kind_of_value() -> None:
    values: dict[str, set[str]] = {}
    for name, option in OPTIONS.items():
        if name not in DIFFERENT:
            values.setdefault(option.opts[0], set()).add(value_of(option))

    assert {name: found for name, found in values.items() if len(found) > 1} == {}


def test_a_value_placeholder_says_more_than_its_type() -> None:
    types = {"TEXT", "INTEGER", "INTEGER RANGE", "FLOAT", "FLOAT RANGE"}

    unnamed = [name for name, option in OPTIONS.items() if value_of(option) in types]
    assert [name for name in unnamed if not name.endswith(" --title")] == []


def test_an_option_with_a_short_name_has_it_everywhere() -> None:
    for name, option in OPTIONS.items():
        if name not in DIFFERENT:
            assert option.opts[1:] == ([SHORT[option.opts[0]]] if option.opts[0] in SHORT else []), name


def test_every_option_is_explained_without_a_plural_in_parentheses() -> None:
    assert [name for name, option in OPTIONS.items() if not option.help] == []
    assert [context.command_path for context in COMMANDS if "(s)" in context.command.get_help(context)] == []


def test_a_summary_fits_the_command_list() -> None:
    cut = [
        context.command_path for context in COMMANDS if context.command.get_short_help_str(SINGLE_LINE).endswith("...")
    ]
    assert cut == []
