"""``python -m bench.predict map``: the best layout by model size and number of GPUs, for a device and a network."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.advice.answer import AdviceAnswer, answer_question
from bench.advice.layouts.comparison import LayoutComparison
from bench.advice.layouts.sentence import (
    ALONE,
    NOTHING_FITS,
    describe_layout,
    describe_thresholds,
    do_intervals_overlap,
    name_layout_kind,
)
from bench.advice.question import OUTPUT_FORMATS, answer_with_progress, read_question
from bench.advice.sentence import describe_assumed_network
from bench.advice.wording import format_overrides
from bench.core.command_line import build_parser, open_stdout_console, require_path
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.core.presentation import format_count, format_number, format_percent
from bench.hardware import detect_device

MAP_EPILOG = """\
examples:
  python -m bench.predict map model=llama3_8b,llama3_70b,llama3_405b gpus=8,64,512,4096 hardware=h100_80gb
  python -m bench.predict map model=gpt_6b7,gpt_30b gpus=8,16,32 hardware=a100_80gb network=aws_p4d figure=map.png

model and gpus take several values, all else one. Without global_batch every point is at 4M tokens, or a whole number of
sequences per GPU that comes close to it. Every point is a search of layouts: see docs/guides/mesh.

exit code: 0 something may fit, 1 nothing does, 2 bad input.
"""

FIGURE_SUFFIXES = (".png", ".svg")
WIDTH_WITHOUT_TERMINAL = 160


@dataclass(frozen=True)
class MapPoint:
    """The best way to train one model on one number of GPUs."""

    model: str
    parameters: int
    gpus: int
    kind: str
    """What is divided beside parameters, `ALONE`, or `NOTHING_FITS`."""
    layout: str
    """In words; empty where nothing fits."""
    step_s: float | None
    step_low_s: float | None
    step_high_s: float | None
    mfu: float | None
    alone_step_s: float | None
    """Of FSDP alone at the same global batch; None where it does not fit, or cannot have it."""
    is_within_uncertainty: bool | None
    """Whether the intervals of the two overlap; None where there is one alone."""
    global_sequences: int
    overrides: str
    """What is typed for it."""

    @property
    def gain(self) -> float | None:
        """How much faster than FSDP alone, as a share; None where that is no way to train."""
        if self.step_s is None or self.alone_step_s is None:
            return None
        return self.alone_step_s / self.step_s - 1


@dataclass(frozen=True)
class LayoutMap:
    """All points, with what holds for all."""

    points: list[MapPoint]
    title: str
    caption: str
    """Device, network, global batch, where the numbers come from."""
    sentences: list[str]
    """From where on FSDP alone is no longer the best."""


def main(arguments: Sequence[str]) -> int:
    """Draw or print a map; returns the exit code of `bench.predict`."""
    parser = build_parser("predict map", __doc__, MAP_EPILOG)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=llama3_8b,llama3_70b")
    parser.add_argument("--figure", metavar="FILE", help="draw it: .png or .svg")
    parser.add_argument("--format", metavar="|".join(OUTPUT_FORMATS), help="default: table")
    options = parser.parse_intermixed_args(arguments)
    given = dict(override.partition("=")[::2] for override in options.overrides if override.startswith(MAP_OPTIONS))
    output_format = given.get("format") or options.format or OUTPUT_FORMATS[0]
    require_choice("format", output_format, OUTPUT_FORMATS)
    figure = _parse_figure(given.get("figure") or options.figure)
    overrides = [override for override in options.overrides if not override.startswith(MAP_OPTIONS)]
    question = read_question(overrides, {"layouts": "all"}, detect_device)
    unmapped = [key for key in question.section_axes if key not in ("model", "gpus")]
    if unmapped:
        raise invalid_value_error(unmapped[0], ",".join(question.section_axes[unmapped[0]]), "one value for a map")
    layout_map = build_map(answer_with_progress(answer_question, question))
    if figure is not None:
        from bench.advice.layouts.figure import write_map  # takes matplotlib, and seconds

        write_map(layout_map, figure)
    if output_format == "table":
        _print_map(layout_map)
    else:
        print((format_map_json if output_format == "json" else format_map_csv)(layout_map))
    return 0 if any(point.kind != NOTHING_FITS for point in layout_map.points) else 1


MAP_OPTIONS = ("format=", "figure=")


def _parse_figure(text: str | None) -> Path | None:
    if text is None:
        return None
    path = require_path("figure", text)
    if path.suffix not in FIGURE_SUFFIXES or not path.parent.is_dir():
        raise invalid_value_error(
            "figure", text, f"a file in a folder that exists, ending in {', '.join(FIGURE_SUFFIXES)}"
        )
    return path


def build_map(answer: AdviceAnswer) -> LayoutMap:
    """The map that sections of an answer make, each with a search of layouts.

    Raises
    ------
    UsageError
        If layouts were searched for none.
    """
    compared = [(section, section.layouts) for section in answer.sections if section.layouts is not None]
    if not compared:
        raise UsageError("a map needs at least one point at which layouts can be searched.")
    points = [_build_point(comparison) for _, comparison in compared]
    subject = compared[0][1].search.question.subject
    batches = sorted({_count_tokens(comparison) for _, comparison in compared})
    batch_text = format_count(batches[0])
    if len(batches) > 1:
        batch_text += f" to {format_count(batches[-1])}"
    largest = max((comparison.search.question.subject for _, comparison in compared), key=lambda config: config.gpus)
    is_uncertain = any(point.is_within_uncertainty for point in points)
    note = f"{UNCERTAIN.strip()}: faster by less than the predictor's uncertainty." if is_uncertain else ""
    network = describe_assumed_network(largest, compared[0][0].settings)
    return LayoutMap(
        points,
        f"Best layout by model and number of GPUs, {subject.hardware.name}",
        f"{network}\nGlobal batch {batch_text} tokens, {subject.sequence_length:,} per sequence; "
        f"{compared[0][1].search.question.settings['precision']}. Predicted: none of it was measured. {note}".rstrip(),
        describe_thresholds([(section.settings, comparison) for section, comparison in compared], ["gpus"]),
    )


def _count_tokens(comparison: LayoutComparison) -> int:
    question = comparison.search.question
    return question.global_sequences * question.model.count_tokens_per_sequence(question.sequence_length)


def _build_point(comparison: LayoutComparison) -> MapPoint:
    question, alone = comparison.search.question, comparison.best_alone
    best = comparison.best_layout if comparison.is_layout_best else alone
    time = None if best is None else best.prediction.time
    return MapPoint(
        question.model.name,
        question.model.num_parameters,
        question.gpus,
        NOTHING_FITS if best is None else name_layout_kind(best.config),
        "" if best is None else describe_layout(best),
        None if time is None else time.step_s.value,
        None if time is None else time.step_s.low,
        None if time is None else time.step_s.high,
        None if best is None else best.mfu,
        None if alone is None else alone.step_s,
        None if best is None or alone is None or best is alone else do_intervals_overlap(best, alone),
        question.global_sequences,
        "" if best is None else " ".join(format_overrides(best.settings)),
    )


# --- The table, and the forms for scripts.

COLUMNS = (
    *("model", "parameters", "gpus", "kind", "layout", "step_s", "step_low_s", "step_high_s", "mfu"),
    *("alone_step_s", "gain", "is_within_uncertainty", "global_sequences", "overrides"),
)
"""Of CSV and of the points of JSON."""


def format_map_json(layout_map: LayoutMap) -> str:
    points = [{name: getattr(point, name) for name in COLUMNS} for point in layout_map.points]
    values = {"format": 1, "title": layout_map.title, "caption": layout_map.caption}
    return json.dumps({**values, "sentences": layout_map.sentences, "points": points}, indent=2, allow_nan=False)


def format_map_csv(layout_map: LayoutMap) -> str:
    """A line per point; what is unknown is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(point, name) for name in COLUMNS] for point in layout_map.points)
    return buffer.getvalue().rstrip("\n")


def format_gain(point: MapPoint) -> str:
    """Against FSDP alone: ``+12 %``, with `UNCERTAIN`; empty where it is FSDP alone, words where that cannot train."""
    if point.kind in (ALONE, NOTHING_FITS):
        return ""
    if point.gain is None:
        return f"{ALONE} cannot"
    return format_percent(point.gain, signed=True) + (UNCERTAIN if point.is_within_uncertainty else "")


UNCERTAIN = " (?)"


def _print_map(layout_map: LayoutMap) -> None:
    table = Table(box=None, pad_edge=False)
    for heading, justify in MAP_HEADINGS:
        table.add_column(heading, justify=justify, no_wrap=True)
    for point in layout_map.points:
        table.add_row(
            point.model,
            f"{point.gpus:,}",
            point.layout or NOTHING_FITS,
            "" if point.step_s is None else format_number(1e3 * point.step_s),
            "" if point.mfu is None else f"{point.mfu:.1%}",
            format_gain(point),
        )
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    console.print(
        Text(layout_map.title, style="bold"), Text(layout_map.caption), Text(), table, sep="\n", highlight=False
    )
    for sentence in layout_map.sentences:
        console.print(Text(sentence), highlight=False)


MAP_HEADINGS: tuple[tuple[str, Any], ...] = (
    ("model", "left"),
    ("GPUs", "right"),
    ("best", "left"),
    ("ms/step", "right"),
    ("MFU", "right"),
    ("against FSDP alone", "right"),
)
