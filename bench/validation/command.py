"""``python -m bench.predict validate``: predict what others published, and write how far off that is."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.config import RunConfig
from bench.errors import UsageError
from bench.paths import path
from bench.simulate.predict import predict_all
from bench.simulate.prediction import Prediction
from bench.validation.figure import draw
from bench.validation.measured import step_times
from bench.validation.page import page
from bench.validation.runs import SPEED, Case, cases, configured
from bench.validation.shapes import shapes
from bench.validation.statistics import Result, result
from bench.validation.strategies import strategy_shapes
from bench.validation.tuning import CHOSEN_WITHOUT

ACCURACY = Path(__file__).resolve().parents[2] / "results" / "predicted" / "ACCURACY.md"
FIGURE = "accuracy.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the accuracy page and its figure, and print what they come to.

    Returns
    -------
    int
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.predict validate", description=__doc__)
    parser.add_argument("--output", type=path, default=ACCURACY, help="the page to write; its figure lies beside it")
    parser.add_argument("--measured", type=path, metavar="STORE", help="compare with these rows' step times instead")
    parser.add_argument(
        "--hardware", type=path, metavar="FILE", help="what --measured ran on, as bench.calibrate wrote it"
    )
    options = parser.parse_args(arguments)
    if options.measured is not None or options.hardware is not None:
        return _compare_with_rows(parser, options)
    output: Path = options.output
    results = compare(cases())
    text = accuracy(results)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    draw(results, output.with_name(FIGURE))
    print(text.partition("## Every row")[0])
    print(f"{len(results)} published numbers; the page with all of them: {output}")
    return 0


def _compare_with_rows(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The table of measured and predicted step times, printed and, if asked for, written."""
    if options.measured is None or options.hardware is None:
        parser.error("--measured and --hardware go together")
    try:
        text = step_times(options.measured, options.hardware)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if options.output != ACCURACY:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0


def accuracy(results: Sequence[Result]) -> str:
    """The page of these results."""
    others = {source: compare(_without(results, source)) for source in CHOSEN_WITHOUT}
    return page(results, others, [*shapes(predict_all), *strategy_shapes(predict_all)], FIGURE)


def compare(found: Sequence[Case]) -> list[Result]:
    """Predict the run of every case, each run once."""
    configs: dict[tuple[tuple[str, str], ...], RunConfig] = {}
    for case in found:
        configs.setdefault(case.settings, configured(case.settings))
    predictions: dict[tuple[tuple[str, str], ...], Prediction] = dict(
        zip(configs, predict_all(list(configs.values())), strict=True)
    )
    return [result(case, predictions[case.settings]) for case in found]


def _without(results: Sequence[Result], source: str) -> list[Case]:
    """The speeds of one source, as runs on hardware whose constants were chosen without it."""
    changed = []
    for each in results:
        case = each.case
        if case.source == source and case.counted and case.quantity == SPEED:
            constants = CHOSEN_WITHOUT[source][each.hardware]
            changed.append(dataclasses.replace(case, settings=tuple({**dict(case.settings), **constants}.items())))
    return changed
