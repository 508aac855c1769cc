"""``python -m bench.predict validate``: predict what others published, and write how far off that is."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.config.run_config import RunConfig
from bench.core.command_line import parse_path_argument
from bench.core.errors import UsageError
from bench.core.installation import DATA_FOLDER
from bench.prediction.prediction import Prediction
from bench.prediction.predictor import predict_runs
from bench.validation.figure import draw_accuracy_figure
from bench.validation.llama_runs import load_llama_cases
from bench.validation.measured import render_step_times
from bench.validation.page import CaseResult, build_result, render_accuracy_page
from bench.validation.runs import OVERRIDES_WITHOUT_SOURCE, SPEED, PublishedCase, build_published_config, load_cases
from bench.validation.shapes import compare_fsdp_paper
from bench.validation.strategies import compare_strategies

ACCURACY_PAGE = DATA_FOLDER / "results" / "predicted" / "ACCURACY.md"
FIGURE_FILE = "accuracy.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the accuracy page and its figure, and print what they come to.

    Returns
    -------
    int
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.predict validate", description=__doc__)
    parser.add_argument(
        "--output", type=parse_path_argument, default=ACCURACY_PAGE, help="the page to write; its figure lies beside it"
    )
    parser.add_argument(
        "--measured", type=parse_path_argument, metavar="STORE", help="compare with these rows' step times instead"
    )
    parser.add_argument(
        "--hardware",
        type=parse_path_argument,
        metavar="FILE",
        help="what --measured ran on, as bench.calibrate wrote it",
    )
    options = parser.parse_args(arguments)
    if options.measured is not None or options.hardware is not None:
        return _report_measured_step_times(parser, options)
    output: Path = options.output
    results = predict_cases(load_cases())
    page_text = build_accuracy_page(results)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page_text, encoding="utf-8")
    draw_accuracy_figure(results, output.with_name(FIGURE_FILE))
    print(page_text.partition("## Every row")[0])
    print(f"{len(results)} published numbers; the page with all of them: {output}")
    return 0


def _report_measured_step_times(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The table of measured and predicted step times, printed and, if asked for, written."""
    if options.measured is None or options.hardware is None:
        parser.error("--measured and --hardware go together")
    try:
        page_text = render_step_times(options.measured, options.hardware)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output != ACCURACY_PAGE:
        options.output.write_text(page_text, encoding="utf-8")
    print(page_text)
    return 0


def build_accuracy_page(results: Sequence[CaseResult]) -> str:
    """The page of these results."""
    other_results = {
        source: predict_cases(_build_cases_without(results, source)) for source in OVERRIDES_WITHOUT_SOURCE
    }
    return render_accuracy_page(
        results,
        other_results,
        [*compare_fsdp_paper(predict_runs), *compare_strategies(predict_runs)],
        predict_cases(load_llama_cases()),
        FIGURE_FILE,
    )


def predict_cases(cases: Sequence[PublishedCase]) -> list[CaseResult]:
    """Predict the run of every case, each run once."""
    configs: dict[tuple[tuple[str, str], ...], RunConfig] = {}
    for case in cases:
        configs.setdefault(case.settings, build_published_config(case.settings))
    predictions: dict[tuple[tuple[str, str], ...], Prediction] = dict(
        zip(configs, predict_runs(list(configs.values())), strict=True)
    )
    return [build_result(case, predictions[case.settings]) for case in cases]


def _build_cases_without(results: Sequence[CaseResult], source: str) -> list[PublishedCase]:
    """The speeds of one source, as runs on hardware whose constants were chosen without it."""
    changed_cases = []
    for result in results:
        case = result.case
        if case.source == source and case.is_counted and case.quantity == SPEED:
            constants = OVERRIDES_WITHOUT_SOURCE[source][result.hardware]
            changed_cases.append(
                dataclasses.replace(case, settings=tuple({**dict(case.settings), **constants}.items()))
            )
    return changed_cases
