"""Writing what comes of a comparison, over nothing that was measured."""

from __future__ import annotations

from pathlib import Path

from bench.core.errors import UsageError
from bench.records.packed_rows import ROWS_FILE
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN


def write_texts(texts: dict[Path, str]) -> None:
    """Write texts to files; folders are made.

    Raises
    ------
    UsageError
        If a file would replace a row, or cannot be written.
    """
    for path in texts:
        is_row = ATTEMPT_FILE_PATTERN.match(path.name) and RUN_ID_PATTERN.match(path.absolute().parent.name)
        if is_row or path.name == ROWS_FILE:
            raise UsageError(f"{path} is not valid: choose a file that is not the row of a run.")
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose another file.") from None
