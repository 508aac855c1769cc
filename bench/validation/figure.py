"""Predicted against published, with the line on which they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.reporting.drawing import style
from bench.validation.page import CaseResult
from bench.validation.runs import SPEED

SOURCE_COLOURS = {"fsdp_paper": "#0072b2", "llm_foundry": "#d55e00"}  # Okabe & Ito, as everywhere
HARDWARE_MARKERS = {"a100_40gb": "^", "a100_80gb": "o", "h100_80gb": "s"}
LEGEND_LABELS = {
    "fsdp_paper": "FSDP paper",
    "llm_foundry": "llm-foundry",
    "a100_40gb": "A100 40 GB",
    "a100_80gb": "A100 80 GB",
    "h100_80gb": "H100 80 GB",
}
ERROR_BAND = 0.15


def draw_accuracy_figure(results: Sequence[CaseResult], path: Path) -> None:
    """Speeds on the left, memory on the right; filled marks are rows nothing was chosen on."""
    with style.apply_report_style():
        figure, (speed_axes, memory_axes) = plt.subplots(
            1, 2, figsize=(2 * style.FIGURE_WIDTH_IN, 1.1 * style.FIGURE_WIDTH_IN), layout="constrained"
        )
        counted_results = [result for result in results if result.case.is_counted]
        _draw_panel(
            speed_axes,
            [result for result in counted_results if result.case.quantity == SPEED],
            "TFLOPS per GPU, with recomputation",
        )
        _draw_panel(
            memory_axes, [result for result in counted_results if result.case.quantity != SPEED], "peak memory, GB"
        )
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _draw_panel(axes: Axes, results: Sequence[CaseResult], quantity: str) -> None:
    values = [value for result in results for value in (result.predicted_value, result.case.published_value)]
    limits = [0.9 * min(values), 1.1 * max(values)]
    axes.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
    axes.set(title=quantity, xlabel="published", ylabel="predicted")
    low, high = ([share * limit for limit in limits] for share in (1 - ERROR_BAND, 1 + ERROR_BAND))
    axes.fill_between(limits, low, high, color=style.GRID_COLOUR, linewidth=0, zorder=1)
    axes.plot(limits, limits, color=style.INK_COLOUR, linewidth=0.8, zorder=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for result in results:
        colour = SOURCE_COLOURS[result.case.source]
        axes.plot(
            result.case.published_value,
            result.predicted_value,
            marker=HARDWARE_MARKERS[result.hardware],
            markersize=5,
            markeredgecolor=colour,
            markerfacecolor="white" if result.case.is_tuned else colour,
            linestyle="none",
            zorder=3,
        )
    source_hardware_pairs = dict.fromkeys((result.case.source, result.hardware) for result in results)
    for source, hardware in source_hardware_pairs:
        label = f"{LEGEND_LABELS[source]}, {LEGEND_LABELS[hardware]}"
        axes.plot(
            [], [], marker=HARDWARE_MARKERS[hardware], color=SOURCE_COLOURS[source], linestyle="none", label=label
        )
    if any(result.case.is_tuned for result in results):
        axes.plot(
            [], [], marker="o", color=style.MUTED_COLOUR, markerfacecolor="white", linestyle="none", label="tuned on"
        )
    axes.plot([], [], color=style.GRID_COLOUR, linewidth=6, label=f"within {ERROR_BAND:.0%}")
    axes.legend(loc="upper left")
