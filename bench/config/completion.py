"""Completion in a shell: commands, fields and options of ``fsdp-bench``. Imports nothing that takes long.

``eval "$(register-python-argcomplete fsdp-bench)"`` in bash or zsh turns it on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

import argcomplete
from argcomplete.completers import FilesCompleter

from bench.config.documented_fields import MAIN_FILE, list_documented_fields, read_group_defaults
from bench.config.groups import list_config_groups, list_presets
from bench.core.errors import UsageError
from bench.core.option_files import find_option_file
from bench.core.typed_config import read_plain_yaml

SETTINGS_COMMANDS = ("sweep", "run", "predict", "advise", "calibrate")
"""Commands that take ``key=value`` and no files."""


def complete_command_line(commands: Iterable[str]) -> None:
    """Print what the shell asks for, if it asks, and end the process."""
    parser = argparse.ArgumentParser("fsdp-bench")
    parser.add_argument("command", choices=list(commands))
    words = parser.add_argument("words", nargs="*")
    words.completer = _complete_word  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _complete_word(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    words = [word for word in getattr(parsed_args, "words", None) or [] if isinstance(word, str)]
    completions = [word for word in list_completions(prefix, words) if word.startswith(prefix)]
    is_file_wanted = parsed_args.command not in SETTINGS_COMMANDS and "=" not in prefix
    return completions + (list(FilesCompleter()(prefix)) if is_file_wanted else [])


def list_completions(prefix: str, words: Sequence[str]) -> Iterator[str]:
    """What a word that begins with `prefix` can become, behind other words: ``key=``, or ``key=value``."""
    key, has_value, typed = prefix.partition("=")
    if has_value:
        before = typed[: typed.rfind(",") + 1]
        yield from (f"{key}={before}{value}" for value in _list_values(key))
        return
    chosen = dict(word.split("=", 1) for word in words if "=" in word)
    for group, default in read_group_defaults().items():
        yield f"{group}="
        try:
            fields = read_plain_yaml(group, find_option_file(group, chosen.get(group, default)))
        except UsageError:  # nothing that is
            continue
        yield from (f"{group}.{name}=" for name in fields if name != "name")
    yield from (f"{name}=" for name, _, _ in list_documented_fields(MAIN_FILE))


def _list_values(key: str) -> list[str]:
    if key in list_config_groups():
        return list_config_groups()[key]
    if key == "price":
        return list_presets("price")
    defaults = {name: value for name, value, _ in list_documented_fields(MAIN_FILE)}
    group, _, field = key.partition(".")
    if field and group in read_group_defaults():
        values = read_plain_yaml(group, find_option_file(group, read_group_defaults()[group]))
        defaults[key] = str(values.get(field)).lower()
    return ["true", "false"] if defaults.get(key) in ("true", "false") else []
