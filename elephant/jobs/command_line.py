"""The settings of a job from its command line, and from the job file that this names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from elephant.errors import ConfigurationError
from elephant.jobs.job_file import checked, read_yaml, unknown
from elephant.jobs.settings import ALTERNATIVES, Setting, key_of

_PLACE = "the arguments"


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}. See --help.")


def read_settings(name: str, description: str, settings: Sequence[Setting], words: Sequence[str]) -> dict[str, Any]:
    """Returns what a job was told, by the names of its settings; arguments win over the job file.

    Args:
        name: The script's name.
        description: What the job does.
        settings: What it can be told.
        words: The command line, without the script.

    Raises:
        ConfigurationError: An argument, or a line of the file, is unknown or malformed.
        SystemExit: ``--help`` was asked for, and has been printed.
    """
    parser = _parser(name, description, settings)
    options, others = parser.parse_known_args(list(words))
    if others:
        raise ConfigurationError(unknown(others[0], [setting.key for setting in settings], _PLACE))
    given = vars(options)
    path = given.pop("config", None)
    arguments = checked(_gathered(given, settings), settings, _PLACE)
    return arguments if path is None else layered(read_yaml(path, settings), arguments)


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of two layers; the upper one wins, also over what says the same in another way.

    >>> layered({"data": "/rows", "epochs": 3}, {"table": "rows"})
    {'epochs': 3, 'table': 'rows'}
    """
    replaced = {name for names in ALTERNATIVES if any(name in above for name in names) for name in names}
    return {**{name: value for name, value in below.items() if name not in replaced}, **above}


def require_one(settings: Mapping[str, Any], *names: str) -> None:
    """Raises ConfigurationError unless exactly one of the names is set."""
    given = [name for name in names if name in settings]
    if len(given) != 1:
        keys = [f"--{key_of(name)}" for name in names]
        received = f"both {' and '.join(keys)}" if given else "none"
        raise ConfigurationError(f"expected {' or '.join(keys)}. Received: {received}. See --help.")


def _parser(name: str, description: str, settings: Sequence[Setting]) -> argparse.ArgumentParser:
    parser = _Parser(prog=name, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings, by their names without dashes")
    for setting in settings:
        _add(parser, setting)
    if any(setting.name == "saveMode" for setting in settings):
        parser.add_argument(
            "--overwrite",
            dest="saveMode",
            action="store_const",
            const="overwrite",
            help="short for --save-mode overwrite",
        )
    return parser


def _add(parser: argparse.ArgumentParser, setting: Setting) -> None:
    flag, text = f"--{setting.key}", setting.help.replace("%", "%%")
    if setting.kind.is_switch:
        parser.add_argument(flag, dest=setting.name, action=argparse.BooleanOptionalAction, help=text)
    elif setting.kind.gather is not None:
        repeated = f"{text}; may be repeated"
        parser.add_argument(flag, dest=setting.name, action="append", metavar="VALUE", help=repeated)
    else:
        parser.add_argument(flag, dest=setting.name, metavar="VALUE", help=text)


def _gathered(given: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns the arguments by key, as a file would have them."""
    by_name = {setting.name: setting for setting in settings}
    content: dict[str, Any] = {}
    for name, value in given.items():
        setting = by_name[name]
        try:
            content[setting.key] = value if setting.kind.gather is None else setting.kind.gather(value)
        except ValueError as error:
            raise ConfigurationError(
                f"--{setting.key}: expected {setting.kind.expected}. Received: {value!r} in {_PLACE}."
            ) from error
    return content
