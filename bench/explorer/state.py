"""The state of the page: the settings of one question, as an address and as a command line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from bench.core.errors import UsageError, invalid_value_error, shorten_text
from bench.explorer.controls import CONTROL_KEYS, COST_OPTIONS, DEFAULT_SETTINGS, FURTHER_SETTINGS, MODEL
from bench.models.hf import IGNORED_KEYS, OPTION_NAME
from bench.records.matching import flatten_config
from bench.reporting.page.rerun_command import format_override_value

MAX_ADDRESS_CHARACTERS = 16_000
"""Of an address: servers and browsers take no more."""

SETTING_KEY = re.compile(r"\+?[A-Za-z][\w.]*")

CODE_SETTINGS = (f"{MODEL}.family", "strategy.name")
"""Settings whose value may name a module of Python's: whoever follows an address does not want to import one."""

ANSWER_OPTIONS = ("top", "details", "format", "timeline", "flops", "rank")
"""What ``bench.predict`` takes that says how a terminal shows an answer."""


@dataclass(frozen=True)
class ExplorerState:
    """The settings of one question, in the order of the controls, then further ones as they were typed."""

    settings: tuple[tuple[str, str], ...]
    """Pairs of key and text; none is empty."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> ExplorerState:
        """Complete settings by those of `DEFAULT_SETTINGS`, and leave out what is empty.

        Raises
        ------
        UsageError
            If a setting cannot be asked for in a browser.
        """
        values = {**DEFAULT_SETTINGS, **settings}
        for key, value in values.items():
            _check_setting(key, value)
        ordered_keys = [key for key in CONTROL_KEYS if values.get(key)]
        ordered_keys += [key for key in values if key not in CONTROL_KEYS and values[key]]
        return cls(tuple((key, values[key]) for key in ordered_keys))

    @classmethod
    def from_address(cls, query: str) -> ExplorerState:
        """Read the part of an address after ``?``.

        Raises
        ------
        UsageError
            If it is too long, or a setting cannot be asked for.
        """
        if len(query) > MAX_ADDRESS_CHARACTERS:
            raise invalid_value_error("address", query, f"at most {MAX_ADDRESS_CHARACTERS} characters")
        settings: dict[str, str] = {}
        for key, value in parse_qsl(query.removeprefix("?"), keep_blank_values=True):
            settings |= parse_further_settings(value) if key == FURTHER_SETTINGS else {key: value.strip()}
        return cls.from_settings(settings)

    @property
    def address(self) -> str:
        """The part of an address that says the whole state: ``?model=llama3_8b&gpus=8``."""
        return f"?{urlencode(self.settings, safe=',:/')}"

    @property
    def overrides(self) -> list[str]:
        """What is typed after ``python -m bench.predict``."""
        return [f"{key}={value}" for key, value in self.settings]

    @property
    def command(self) -> str:
        """The command that gives the same answer in a terminal."""
        return shlex.join(["python", "-m", "bench.predict", *self.overrides])

    def get(self, key: str) -> str | None:
        return dict(self.settings).get(key)

    def change(self, changes: Mapping[str, str]) -> ExplorerState:
        """The state with other settings; an empty text leaves one out, where it has no default."""
        return ExplorerState.from_settings({**dict(self.settings), **changes})

    def replace_run_settings(self, settings: Mapping[str, str]) -> ExplorerState:
        """The state that asks for one run: its settings, and this state's options of cost."""
        cost_settings = {key: value for key, value in self.settings if key in COST_OPTIONS}
        return ExplorerState.from_settings({**settings, **cost_settings})


def parse_further_settings(text: str) -> dict[str, str]:
    """Read ``key=value key=value``, quoted as in a shell.

    Raises
    ------
    UsageError
        If a part is no setting.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{FURTHER_SETTINGS} is not valid: {error}.") from None
    settings = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator:
            raise invalid_value_error(FURTHER_SETTINGS, word, "key=value, as model.num_layers=16")
        settings[key] = value
    return settings


def _check_setting(key: str, value: str) -> None:
    if not SETTING_KEY.fullmatch(key) or key in ANSWER_OPTIONS or key == "mode":
        raise UsageError(f"{shorten_text(key)} is not a setting of the page: choose what bench.predict asks about.")
    if key.lstrip("+") in CODE_SETTINGS and "." in value:
        raise invalid_value_error(key, value, "a module of the suite's; others can be asked for in a terminal")


def find_refused_key(message: str, settings: Iterable[tuple[str, str]]) -> str:
    """The setting that a sentence refuses: the control it is shown beside.

    Parameters
    ----------
    message: str
        Of a `UsageError`, which begins with the name of the field.
    """
    field = re.split(r"[= ]", message, maxsplit=1)[0]
    keys = [key for key, _ in settings]
    if field in CONTROL_KEYS:
        return field
    if field in keys or field.partition(".")[0] not in CONTROL_KEYS:
        return FURTHER_SETTINGS
    return field.partition(".")[0]


def read_model_file(name: str, text: str) -> dict[str, str]:
    """The settings of a model that is described by a ``config.json``: they stand for the file, which is not kept.

    Parameters
    ----------
    name: str
        Of the file, which names the model.
    text: str
        What it holds.

    Raises
    ------
    UsageError
        If it is no configuration of a model.
    """
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"model={name} is not valid: choose a config.json ({error}).") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"model={name} is not valid: choose a config.json with a model_type, as transformers writes it."
        )
    shape = {key: value for key, value in config.items() if key not in IGNORED_KEYS and value is not None}
    model_name = re.sub(r"\W+", "_", name.removesuffix(".json")).strip("_") or OPTION_NAME
    settings = {MODEL: OPTION_NAME, f"{MODEL}.name": model_name}
    return settings | {f"{MODEL}.{path}": format_override_value(value) for path, value in flatten_config(shape).items()}
