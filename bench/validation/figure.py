"""Predicted against published, with the line on which they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.reporting import style
from bench.validation.runs import SPEED
from bench.validation.statistics import Result

COLOURS = {"fsdp_paper": "#0072b2", "llm_foundry": "#d55e00"}  # Okabe & Ito, as everywhere
MARKERS = {"a100_40gb": "^", "a100_80gb": "o", "h100_80gb": "s"}
NAMES = {
    "fsdp_paper": "FSDP paper",
    "llm_foundry": "llm-foundry",
    "a100_40gb": "A100 40 GB",
    "a100_80gb": "A100 80 GB",
    "h100_80gb": "H100 80 GB",
}
BAND = 0.15


def draw(results: Sequence[Result], path: Path) -> None:
    """Speeds on the left, memory on the right; filled marks are rows nothing was chosen on."""
    with style.context():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(2 * style.WIDTH_IN, 1.1 * style.WIDTH_IN), layout="constrained"
        )
        counted = [each for each in results if each.case.counted]
        _panel(left, [each for each in counted if each.case.quantity == SPEED], "TFLOPS per GPU, with recomputation")
        _panel(right, [each for each in counted if each.case.quantity != SPEED], "peak memory, GB")
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)


def _panel(axes: Axes, results: Sequence[Result], quantity: str) -> None:
    values = [value for each in results for value in (each.predicted, each.case.published)]
    ends = [0.9 * min(values), 1.1 * max(values)]
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(title=quantity, xlabel="published", ylabel="predicted")
    low, high = ([share * end for end in ends] for share in (1 - BAND, 1 + BAND))
    axes.fill_between(ends, low, high, color=style.GRID, linewidth=0, zorder=1)
    axes.plot(ends, ends, color=style.INK, linewidth=0.8, zorder=2)
    for ticks in (axes.xaxis, axes.yaxis):
        ticks.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        ticks.set_major_formatter("{x:g}")
        ticks.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for each in results:
        colour = COLOURS[each.case.source]
        axes.plot(
            each.case.published,
            each.predicted,
            marker=MARKERS[each.hardware],
            markersize=5,
            markeredgecolor=colour,
            markerfacecolor="white" if each.case.tuned else colour,
            linestyle="none",
            zorder=3,
        )
    kinds = dict.fromkeys((each.case.source, each.hardware) for each in results)
    for source, hardware in kinds:
        label = f"{NAMES[source]}, {NAMES[hardware]}"
        axes.plot([], [], marker=MARKERS[hardware], color=COLOURS[source], linestyle="none", label=label)
    if any(each.case.tuned for each in results):
        axes.plot([], [], marker="o", color=style.MUTED, markerfacecolor="white", linestyle="none", label="tuned on")
    axes.plot([], [], color=style.GRID, linewidth=6, label=f"within {BAND:.0%}")
    axes.legend(loc="upper left")
