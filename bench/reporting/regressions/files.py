"""Writing what comes of a comparison, over nothing that was measured."""

from __future__ import annotations

from pathlib import Path

from bench.comparison import RunComparison
from bench.core.errors import UsageError
from bench.records.packed_rows import ROWS_FILE
from bench.records.store import ATTEMPT_FILE_PATTERN, RUN_ID_PATTERN
from bench.reporting.regressions.data import format_comparison_json
from bench.reporting.regressions.junit import format_junit_xml
from bench.reporting.regressions.markdown import format_markdown


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


def write_comparison(
    comparison: RunComparison,
    base_name: str,
    candidate_name: str,
    *,
    markdown_path: Path | None,
    json_path: Path | None,
    junit_path: Path | None,
) -> None:
    """Write a comparison in every form that a file was given for.

    Raises
    ------
    UsageError
        If a file cannot be written.
    """
    formatters = (
        (markdown_path, format_markdown),
        (json_path, format_comparison_json),
        (junit_path, format_junit_xml),
    )
    texts = {path: format_text(comparison, base_name, candidate_name) for path, format_text in formatters if path}
    write_texts(texts)
