"""Whole answers of ``bench.predict`` and ``bench.advise`` by question: asked again, what was printed is printed again.

Nothing that takes long is imported here: neither torch nor anything that a prediction needs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from bench.core.installation import DATA_FOLDER, PACKAGE_FOLDER
from bench.core.plugins import ENTRY_POINT_GROUPS, list_entry_points
from bench.core.processes import collect_garbage_rarely
from bench.prediction.cache import compute_code_hash, find_cache_folder, read_entries, write_entries

ENTRY_KIND = "answer"

OWN_CONF_VARIABLE = "BENCH_CONF"

TERMINAL_VARIABLES = ("TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
"""What the look of an answer depends on."""

PLAIN_VALUE = re.compile(r"[\w+-]*|[-+]?[\d.]+([eE][-+]?\d+)?")
"""A name or a number: no path, module or interpolation, behind which something may change."""

UNREMEMBERED_OPTIONS = ("timeline", "--timeline", "figure", "--figure", "validate", "device", "hardware=auto")

SOURCE_FOLDERS = (PACKAGE_FOLDER, DATA_FOLDER / "conf", DATA_FOLDER / "results" / "predicted")
"""All code and data that an answer may follow from."""

MAX_ANSWER_CHARACTERS = 10**7


def answer_or_remember(command: str, main: Callable[[], int]) -> int:
    """Print the remembered answer to this process's question, or answer it, and remember what was printed.

    Parameters
    ----------
    command: str
        Whose arguments those of the process are.
    main: callable
        Answers and prints; returns the exit code. 0 and 1 are answers.
    """
    collect_garbage_rarely()
    key = _build_key(command, sys.argv[1:])
    if key is None:
        return main()
    entry = read_entries(ENTRY_KIND, [key]).get(key)
    if entry is not None:
        sys.stdout.write(entry["text"])
        return int(entry["code"])
    recorder = _RecordedOutput(sys.stdout)
    sys.stdout = recorder
    try:
        code = main()
    finally:
        sys.stdout = recorder.output
    text = "".join(recorder.parts)
    if code in (0, 1) and len(text) <= MAX_ANSWER_CHARACTERS:
        write_entries(ENTRY_KIND, {key: {"code": code, "text": text}})
    return code


class _RecordedOutput(io.TextIOBase):
    """A standard output that keeps what is written to it."""

    def __init__(self, output: TextIO) -> None:
        self.output = output
        self.parts: list[str] = []

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.output.encoding

    def write(self, text: str) -> int:
        self.parts.append(text)
        return self.output.write(text)

    def flush(self) -> None:
        self.output.flush()

    def isatty(self) -> bool:
        return self.output.isatty()

    def fileno(self) -> int:
        return self.output.fileno()


def _build_key(command: str, arguments: Sequence[str]) -> str | None:
    """A hash of all that an answer follows from; None where it may follow from anything else: files and modules of the
    user's, installed plug-ins, the device of this machine."""
    if find_cache_folder() is None or os.environ.get(OWN_CONF_VARIABLE) or not _is_plain_question(arguments):
        return None
    if any(list_entry_points(package_name) for package_name in ENTRY_POINT_GROUPS):
        return None
    look = {
        "terminal": tuple(shutil.get_terminal_size()) if sys.stdout.isatty() else None,
        "encoding": sys.stdout.encoding,
        **{name: os.environ.get(name) for name in TERMINAL_VARIABLES},
    }
    digest = hashlib.sha256(json.dumps([command, *arguments, look, compute_code_hash(), sys.version]).encode())
    for folder in SOURCE_FOLDERS:
        for file in _list_files(folder):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


def _is_plain_question(arguments: Sequence[str]) -> bool:
    """Whether nothing but names and numbers is asked for, of hardware that is named."""
    if not any(argument.startswith("hardware=") for argument in arguments):
        return False
    for argument in arguments:
        key, _, text = argument.partition("=")
        values = text.strip("[]").split(",")
        if argument in UNREMEMBERED_OPTIONS or key in UNREMEMBERED_OPTIONS or (key == "hardware" and "auto" in values):
            return False
        if not all(PLAIN_VALUE.fullmatch(value) for value in values):
            return False
    return True


def _list_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*.*") if file.suffix != ".pyc" and file.is_file())
