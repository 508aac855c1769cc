"""``python -m bench.predict validate``: predict what others published, and write how far off that is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.command_line import build_parser, parse_path_argument
from bench.core.errors import UsageError
from bench.core.installation import DATA_FOLDER
from bench.prediction.intervals import INTERVALS_FILE, load_interval_file
from bench.prediction.predictor import predict_runs
from bench.records.published import PUBLISHED_CSV, PublishedLine, read_published_lines
from bench.validation.figure import draw_accuracy_figure
from bench.validation.gate import MovedError, compare_errors, render_moved
from bench.validation.gpu_rows import list_measured_residuals, render_gpu_page
from bench.validation.interval_fit import fit_intervals, forget_source, write_intervals
from bench.validation.leave_out import score_left_out
from bench.validation.measured import render_step_times
from bench.validation.page import build_accuracy_summary, render_accuracy_page
from bench.validation.published_report import build_report_data, render_report
from bench.validation.published_table import read_published_table
from bench.validation.readings import read_lines
from bench.validation.scores import Score, score_readings
from bench.validation.shapes import compare_fsdp_paper
from bench.validation.strategies import compare_strategies

ACCURACY_PAGE = DATA_FOLDER / "results" / "predicted" / "ACCURACY.md"
FIGURE_FILE, SUMMARY_FILE = "accuracy.png", "accuracy.json"
MORE_PUBLISHED_CSV = PUBLISHED_CSV.with_name("published_more.csv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the accuracy page, its figure and summary; or score a table of one's own; returns the exit code."""
    parser = build_parser("predict validate", __doc__)
    parser.add_argument(
        "--published", type=parse_path_argument, metavar="FILE.csv", help="score the rows of this table instead"
    )
    parser.add_argument(
        "--json",
        type=parse_path_argument,
        metavar="OUT",
        help="with --published: also write every row and how it was read",
    )
    parser.add_argument(
        "--fit-intervals", action="store_true", help=f"fit the intervals of predictions again: {INTERVALS_FILE.name}"
    )
    parser.add_argument(
        "--output", type=parse_path_argument, default=ACCURACY_PAGE, help="the page to write; its figure lies beside it"
    )
    parser.add_argument("--measured", type=parse_path_argument, metavar="STORE", help="compare with these rows instead")
    parser.add_argument(
        "--hardware",
        type=parse_path_argument,
        metavar="FILE",
        help="what --measured ran on, as bench.calibrate wrote it; left out where that was a GPU",
    )
    options = parser.parse_args(arguments)
    if options.json is not None and options.published is None:
        parser.error("--json goes with --published")
    if options.published is not None and (options.measured is not None or options.fit_intervals):
        parser.error("--published goes with --json and --output alone")
    try:
        if options.published is not None:
            return _report_published_table(options.published, options.json, options.output)
        if options.measured is not None or options.hardware is not None:
            return _report_measured_step_times(parser, options)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    return _write_accuracy(options.output, fits_intervals=options.fit_intervals)


def _report_published_table(path: Path, json_path: Path | None, output: Path) -> int:
    """Score a table, print what it comes to and, if asked for, write that as a page, and every row."""
    readings = read_lines(read_published_table(path))
    scores, reasons = score_readings(readings)
    if json_path is not None:
        data = build_report_data(readings, scores, reasons)
        _write_file("json", json_path, json.dumps(data, indent=1) + "\n")
    report = render_report(readings, scores, reasons)
    if output != ACCURACY_PAGE:
        _write_file("output", output, f"# Predictions of {path.name}\n\n{report}")
    print(report, end="")
    return 0


def _write_file(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--{option}={path} cannot be written: {error.strerror}.") from None


def _report_measured_step_times(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The table of measured and predicted rows, printed and, if asked for, written."""
    if options.measured is None:
        parser.error("--hardware goes with --measured")
    page_text = (
        render_gpu_page(options.measured)
        if options.hardware is None
        else render_step_times(options.measured, options.hardware)
    )
    if options.output != ACCURACY_PAGE:
        options.output.write_text(page_text, encoding="utf-8")
    print(page_text)
    return 0


def list_published_lines() -> list[PublishedLine]:
    """All rows that the suite has, in the order of the files."""
    return [*read_published_lines(PUBLISHED_CSV), *read_published_lines(MORE_PUBLISHED_CSV)]


def _write_accuracy(output: Path, *, fits_intervals: bool) -> int:
    """Predict all published rows, and write the page, its figure and summary; before them, if asked, the intervals."""
    lines = list_published_lines()
    readings = read_lines(lines)
    scores, reasons = score_readings(readings)
    if fits_intervals:
        forgotten, _ = score_readings(read_lines([forget_source(line) for line in lines]))
        write_intervals(fit_intervals(scores, forgotten, list_measured_residuals()), INTERVALS_FILE)
        load_interval_file.cache_clear()
        scores, reasons = score_readings(readings)
    left_out = score_left_out(scores)
    comparisons = [*compare_fsdp_paper(predict_runs), *compare_strategies(predict_runs)]
    page_text = render_accuracy_page(
        readings, scores, reasons, left_out, comparisons, load_interval_file(), FIGURE_FILE
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page_text, encoding="utf-8")
    moved = _write_summary(output.with_name(SUMMARY_FILE), build_accuracy_summary(scores, left_out))
    draw_accuracy_figure(scores, output.with_name(FIGURE_FILE))
    print(page_text.partition("## Speed, complete rows")[0])
    if moved:
        print(f"Errors that moved since the last page:\n\n{render_moved(moved)}\n")
    print(f"{_count_expressed(scores)} of {len(readings)} published numbers; the page with all of them: {output}")
    return 0


def _write_summary(path: Path, summary: dict[str, Any]) -> list[MovedError]:
    """Replace the summary; returns what moved against the one that lay there."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else summary
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return compare_errors(before, summary)


def _count_expressed(scores: Sequence[Score]) -> int:
    return len({score.reading.row for score in scores})
