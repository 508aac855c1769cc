"""The fields of the files under ``conf``, with the comments beside them. Imports nothing that takes long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bench.core.option_files import CONF_FOLDER
from bench.core.typed_config import read_plain_yaml

MAIN_FILE = CONF_FOLDER / "config.yaml"

FIELD_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?: (?P<value>[^#]*?))? *(?:# (?P<comment>.*))?$")
COMMENT_LINE = re.compile(r"^ {12,}# (?P<comment>.*)$")

HIDDEN_KEYS = ("defaults", "hydra")


def list_documented_fields(file: Path) -> Iterator[tuple[str, str, str]]:
    """Of every field of a file under ``conf``: its key with dots, its value, and the comment beside it."""
    section, field = "", None
    for line in file.read_text(encoding="utf-8").splitlines():
        more = COMMENT_LINE.match(line)
        if more and field is not None:
            field = (field[0], field[1], f"{field[2]} {more['comment']}")
            continue
        if field is not None:
            yield field
            field = None
        match = FIELD_LINE.match(line)
        if match is None:
            continue
        section = (section if match["indent"] else "") if match["value"] else match["key"]
        if match["value"] and section not in HIDDEN_KEYS and match["key"] not in HIDDEN_KEYS:
            key = f"{section}.{match['key']}" if section else match["key"]
            field = (key, match["value"].strip(), match["comment"] or "")
    if field is not None:
        yield field


def read_group_defaults() -> dict[str, str]:
    """The option of each group that ``conf/config.yaml`` chooses."""
    chosen = read_plain_yaml("config", MAIN_FILE)["defaults"]
    return {name: option for entry in chosen if isinstance(entry, dict) for name, option in entry.items()}
