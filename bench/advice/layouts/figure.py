"""The map of the best layouts as a figure: models down, numbers of GPUs across, one colour per kind of layout."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from bench.advice.layouts.map import LayoutMap, MapPoint, format_gain
from bench.advice.layouts.sentence import ALONE, NOTHING_FITS
from bench.core.errors import UsageError
from bench.core.presentation import format_count
from bench.reporting.drawing import style
from bench.reporting.drawing.drawing import compute_header_height_in, create_figure, draw_header
from bench.reporting.drawing.lanes import compute_legend_height_in, draw_legend

CELL_WIDTH_IN, CELL_HEIGHT_IN = 0.95, 0.62
AXES_FRAME_IN = (1.5, 0.75)
"""Inches beside and below the cells."""

KIND_COLOURS = {
    ALONE: "#cfe3f5",
    "tensor": "#fbd9a6",
    "pipeline": "#cdebc9",
    "tensor x pipeline": "#f5b7a0",
    "context": "#e3d2f0",
    "tensor x context": "#d3b8e0",
    "pipeline x context": "#b9cfa8",
    "tensor x pipeline x context": "#dfa3b8",
    NOTHING_FITS: "#ffffff",
}
"""Light, so that the words in the cells can be read; any other kind has `OTHER_COLOUR`."""
OTHER_COLOUR = "#e8e2b8"


def write_map(layout_map: LayoutMap, path: Path) -> None:
    """Draw a map to a file.

    Raises
    ------
    UsageError
        If it cannot be written.
    """
    models = list(dict.fromkeys(point.model for point in sorted(layout_map.points, key=lambda point: point.parameters)))
    counts = sorted({point.gpus for point in layout_map.points})
    with style.apply_report_style():
        subtitle = "\n".join([layout_map.caption, *layout_map.sentences])
        kinds = list(dict.fromkeys(point.kind for point in sorted(layout_map.points, key=_find_kind_position)))
        legend = [(Patch(facecolor=_find_colour(kind), edgecolor=style.MUTED_COLOUR), kind) for kind in kinds]
        width_in = max(style.FIGURE_WIDTH_IN, AXES_FRAME_IN[0] + CELL_WIDTH_IN * len(counts))
        height_in = (
            compute_header_height_in(layout_map.title, subtitle, width_in)
            + AXES_FRAME_IN[1]
            + CELL_HEIGHT_IN * len(models)
            + compute_legend_height_in(legend)
        )
        figure = create_figure(width_in, height_in)
        draw_header(figure, layout_map.title, subtitle)
        axes = figure.add_subplot()
        for point in layout_map.points:
            _draw_cell(axes, point, counts.index(point.gpus), models.index(point.model))
        sizes = {point.model: format_count(point.parameters) for point in layout_map.points}
        axes.set_xlim(0, len(counts))
        axes.set_ylim(0, len(models))
        axes.set_xticks([column + 0.5 for column in range(len(counts))], [f"{count:,}" for count in counts])
        axes.set_yticks([row + 0.5 for row in range(len(models))], [f"{model}\n{sizes[model]}" for model in models])
        axes.set_xlabel("GPUs")
        axes.tick_params(length=0)
        draw_legend(figure, legend)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
        except OSError as error:
            raise UsageError(f"figure={path} cannot be written: {error.strerror}.") from error


def _find_kind_position(point: MapPoint) -> int:
    return list(KIND_COLOURS).index(point.kind) if point.kind in KIND_COLOURS else len(KIND_COLOURS)


def _find_colour(kind: str) -> str:
    return KIND_COLOURS.get(kind, OTHER_COLOUR)


def _draw_cell(axes: Axes, point: MapPoint, column: int, row: int) -> None:
    """The degrees, and how much faster than FSDP alone."""
    hatch = "///" if point.kind == NOTHING_FITS else None
    axes.add_patch(
        Rectangle((column, row), 1, 1, facecolor=_find_colour(point.kind), edgecolor="white", linewidth=2, hatch=hatch)
    )
    lines = [*format_degrees(point), format_gain(point)]
    axes.text(
        column + 0.5,
        row + 0.5,
        "\n".join(line for line in lines if line),
        ha="center",
        va="center",
        size=6.5,
        color=style.INK_COLOUR,
    )


def format_degrees(point: MapPoint) -> list[str]:
    """``TP8 PP4``, and the mode of checkpointing, as lines of a cell."""
    if point.kind == NOTHING_FITS:
        return [NOTHING_FITS]
    settings = dict(override.partition("=")[::2] for override in point.overrides.split())
    degrees = [f"{label}{settings[key]}" for key, label in DEGREE_LABELS.items() if key in settings]
    if point.kind == ALONE:
        factor = settings.get("strategy.sharding_factor")
        name = {"fsdp": "FSDP", "ddp": "DDP"}.get(settings["strategy"], settings["strategy"])
        degrees = [f"{name} F={factor}" if factor else name]
    else:
        degrees.append({"fsdp": "FSDP", "ddp": "DDP", "zero1": "ZeRO-1"}[settings["strategy.data"]])
    half = (len(degrees) + 1) // 2 if len(degrees) > 2 else len(degrees)
    lines = [" ".join(degrees[:half]), " ".join(degrees[half:])]
    return [*lines, f"ckpt {settings['activation_checkpointing']}"]


DEGREE_LABELS = {
    "strategy.tensor": "TP",
    "strategy.pipeline": "PP",
    "strategy.context": "CP",
    "strategy.expert": "EP",
}
