"""The sharding factor: memory against speed and communication for F = 1 ... W, everything else equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, first_known, grouped, known, median
from bench.reporting.drawing import Drawing, Listing, Section, header, header_height_in, new_figure
from bench.reporting.labels import CPU_NOTE, FAMILIES, MISSING, listing, memory_unit, number, rank_noun, ranks, slug
from bench.reporting.table import CELL

TITLE = "The sharding factor"
HOW_TO_READ = (
    "A copy of the model's parameters, gradients and optimizer state is spread over F ranks: to the left everybody "
    "keeps a whole copy, as DDP does, to the right one copy is spread over all. Going right, memory falls towards "
    "what cannot be sharded (activations, and the block that is gathered at the moment); what has to be sent grows, "
    "and beyond the vertical line it leaves the machine. A bar is the range of repeats, or the interval that holds "
    "19 of 20 for a prediction. A cross is a run out of memory: at the foot of the axis, and where it is known also at "
    "the memory that would have been needed."
)
NOTHING = "No configuration in this store was run at three sharding factors or more."
FACET = ["place", "model", "parameters", "precision", "workload", "limit", "settings", "world_size"]
"""Columns that all points of one figure share."""

COLOURS = {name: style.COLOURS[kind] for name, kind in
           {"ddp": "ddp", "fsdp": "fsdp/full_shard", "fsdp1": "fsdp1/full_shard"}.items()}  # fmt: skip
MARKERS = {"ddp": "D", "fsdp": "o", "fsdp1": "s"}
ASIDE = {"ddp": -0.12, "fsdp": -0.04, "fsdp1": 0.06}
"""How far, in powers of two, the points of a strategy stand beside their factor, so that equal ones are all seen."""
ADAM_BYTES = 16
"""Per parameter with Adam in FP32: 4 for it, 4 for its gradient and 8 for two moments. ZeRO counts as many with 16-bit
weights (arXiv:1910.02054, section 3.1)."""
PANELS_IN = {"memory": 1.85, "tflops": 1.7, "exposed": 1.25}

VALUES = ["tflops", "tflops_low", "tflops_high", "memory", "memory_low", "memory_high", "exposed"]


USED = (
    *("tflops_per_gpu", "exposed_communication", "peak_reserved_bytes", "peak_allocated_bytes"),
    *("step_time_median_s", "step_time_ci_low_s", "step_time_ci_high_s"),
    *("peak_reserved_low_bytes", "peak_reserved_high_bytes"),
)
"""Columns that a point is made of."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration and sharding factor, of groups (`FACET`) with at least three factors of one strategy.

    Returns
    -------
    DataFrame
        The columns of `FACET`, ``device``, ``evidence``, ``strategy``, ``series`` (the line), ``sharding_factor``,
        ``nodes``; median model TFLOP/s per rank (``tflops``), peak memory in bytes (``memory``: reserved, or allocated
        where that is all that is known; of a predicted run out of memory what it would need), each with ``_low`` and
        ``_high``; ``exposed``, the share of the step in exposed communication; ``out_of_memory`` and ``degraded``;
        ``states``, the bytes of one copy's parameters, gradients and Adam state where they follow; ``capacity``, the
        bytes of the device. What is unknown is NaN.
    """
    usable = table["status"].isin(["ok", "oom"]) & table["strategy"].isin(list(COLOURS))
    rows = table[usable & table["sharding_factor"].notna() & table["world_size"].notna()]
    keys = [*CELL, "strategy", "sharding_factor"]
    needed = ["status", "device", "fit_question", "optimizer", "parameter_dtype", "nodes", "degraded", *USED]
    points = [_point(group) for group in grouped(rows, keys, [*FACET, *needed])]
    if not points:
        return pd.DataFrame(columns=[*FACET, "sharding_factor"])
    found = pd.DataFrame(points)
    kept = [facet for _, facet in by(found, *FACET) if _factors(facet) >= 3]
    if not kept:
        return found.iloc[:0]
    order = ["place", "parameters", "model", "precision", "settings", "series", "evidence", "sharding_factor"]
    return pd.concat(kept).sort_values(order, kind="stable").reset_index(drop=True)


def _factors(facet: pd.DataFrame) -> int:
    return int(facet.groupby(["series", "evidence"])["sharding_factor"].nunique().max())


def _point(rows: list[dict[str, Any]]) -> dict[str, Any]:
    fitted = [row for row in rows if row["status"] == "ok"]
    row = (fitted or rows)[0]
    predicted = row["evidence"] == "predicted"
    question = row["fit_question"]
    adam = row["optimizer"] == "adamw" and row["parameter_dtype"] == "fp32" and pd.notna(row["parameters"])
    tflops = _spread(known(fitted, "tflops_per_gpu"))
    if predicted and pd.notna(row["step_time_ci_high_s"]):
        step = row["step_time_median_s"]
        tflops = (tflops[0], *(tflops[0] * step / row[f"step_time_ci_{end}_s"] for end in ("high", "low")))
    memory = _spread(first_known(rows, "peak_reserved_bytes", "peak_allocated_bytes"))
    if predicted and pd.notna(row["peak_reserved_low_bytes"]):
        memory = (memory[0], float(row["peak_reserved_low_bytes"]), float(row["peak_reserved_high_bytes"]))
    return {
        **{name: row[name] for name in (*FACET, "device", "evidence", "strategy")},
        "series": FAMILIES[row["strategy"]] + row["variant"].partition(" · ")[1] + row["variant"].partition(" · ")[2],
        "sharding_factor": int(row["sharding_factor"]),
        "nodes": float("nan") if pd.isna(row["nodes"]) else float(row["nodes"]),
        **dict(zip(VALUES, [*tflops, *memory, _spread(known(fitted, "exposed_communication"))[0]], strict=True)),
        "out_of_memory": len(fitted) < len(rows),
        "degraded": any(known(fitted, "degraded")),
        "states": float(ADAM_BYTES * row["parameters"]) if adam else float("nan"),
        "capacity": float("nan") if question is None else question["memory_gib"] * 2**30,
    }


def _spread(values: list[Any]) -> tuple[float, float, float]:
    """Median, least and most."""
    if not values:
        return (float("nan"),) * 3
    return median(values), float(min(values)), float(max(values))


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """A figure and a table per place, model, precision, set of settings and number of ranks."""
    result = Section("sharding-factor", TITLE, HOW_TO_READ)
    selected = select(table)
    if selected.empty:
        result.nothing = NOTHING
    for _, facet in by(selected, *FACET):
        result.plan(_draw, facet)
        result.listings.append(_listing(facet))
    return result


def subject(facet: pd.DataFrame) -> str:
    """Model, precision and ranks of a figure, in words."""
    first = facet.iloc[0]
    return f"{first['model']}, {first['precision']}, {ranks(int(first['world_size']), first['device'])}"


def _draw(facet: pd.DataFrame) -> Drawing:
    first = facet.iloc[0]
    noun = rank_noun(first["device"])
    note = CPU_NOTE if first["device"] == "cpu" else ""
    title = f"Sharding factor: {subject(facet)}"
    detail = " · ".join(part for part in (first["workload"], first["limit"], first["settings"]) if part)
    subtitle = "\n".join(part for part in (detail, first["place"], note) if part)
    panels = [name for name in PANELS_IN if name != "exposed" or facet["exposed"].notna().any()]
    key = _key(facet)
    heights = [PANELS_IN[name] for name in panels]
    head = header_height_in(title, subtitle, style.WIDTH_IN)
    figure = new_figure(style.WIDTH_IN, sum(heights) + 0.5 + head + lanes.legend_in(key))
    header(figure, title, subtitle)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    unit, size = memory_unit(float(facet["memory"].max()) if facet["memory"].notna().any() else 0.0)
    words = {
        "memory": f"peak memory per {noun} ({unit})",
        "tflops": f"model TFLOP/s per {noun}",
        "exposed": "communication not hidden (% of the step)",
    }
    for axes, name in zip(grid, panels, strict=True):
        scale = {"memory": 1 / size, "tflops": 1.0, "exposed": 100.0}[name]
        for (strategy, _, kind), line in facet.groupby(["strategy", "series", "evidence"], sort=False):
            _line(axes, line, name, scale, str(strategy), str(kind))
        if name == "memory":
            _references(axes, facet, size)
        axes.set_title(words[name], size=8.5, weight="normal")
        axes.set_ylim(0, _top(axes) * (1.25 if name == "memory" else 1.1))
        axes.grid(axis="y")
    _across_machines(grid, facet)
    factors = sorted(set(facet["sharding_factor"]))
    grid[-1].set_xscale("log", base=2)
    grid[-1].set_xticks(factors, [str(factor) for factor in factors])
    grid[-1].minorticks_off()
    grid[-1].set_xlim(factors[0] / 1.35, factors[-1] * 1.35)
    grid[-1].set_xlabel("sharding factor F (ranks that share one copy, logarithmic)", loc="left")
    lanes.legend(figure, key)
    caption = f"{subject(facet)}, {detail or 'batch not stated'}, on {first['place']}. {_told(facet)}"
    name = slug("sharding-factor", first["model"], first["precision"], first["world_size"])
    return Drawing(name, title, figure, f"{caption} {note}".strip() + ("." if note else ""), _alt(facet))


def _top(axes: Axes) -> float:
    """The highest point that was drawn."""
    return float(axes.dataLim.y1) if np.isfinite(axes.dataLim.y1) else 1.0


def _line(axes: Axes, line: pd.DataFrame, name: str, scale: float, strategy: str, kind: str) -> None:
    """One strategy's points of one kind of evidence, and its runs out of memory."""
    line = line.sort_values("sharding_factor")
    look, colour = style.EVIDENCE_STYLES[kind], COLOURS[strategy]
    x = line["sharding_factor"].astype(float) * 2 ** ASIDE[strategy]
    if f"{name}_low" in line:
        axes.vlines(x, line[f"{name}_low"] * scale, line[f"{name}_high"] * scale, color=style.lighter(colour, 0.35),
                    linewidth=1, zorder=2)  # fmt: skip
    axes.plot(
        x, line[name] * scale, color=colour, linestyle=look.line, marker=MARKERS[strategy], linewidth=1.3, markersize=5,
        markerfacecolor=colour if look.filled else "white", zorder=3,
    )  # fmt: skip
    lost = line[line["out_of_memory"] & (name != "exposed")]
    for at, needed in zip(lost["sharding_factor"] * 2 ** ASIDE[strategy], lost[name] * scale, strict=True):
        for height in {0.0} | ({float(needed)} if name == "memory" and np.isfinite(needed) else set()):
            marks.cross(axes, at, height, colour, kind)
    if name == "tflops":
        marked = line[line["degraded"]]
        axes.plot(marked["sharding_factor"] * 2 ** ASIDE[strategy], marked[name], "<", markersize=10,
                  markerfacecolor="none", markeredgecolor=style.INK, zorder=4)  # fmt: skip


def _references(axes: Axes, facet: pd.DataFrame, size: int) -> None:
    """What could be sharded of one copy over F, and the memory of the device if the points come near it."""
    factors = np.array(sorted(set(facet["sharding_factor"])), dtype=float)
    states = facet["states"].iloc[0]
    if np.isfinite(states):
        axes.plot(factors, states / size / factors, color=style.MUTED, linestyle=(0, (1, 1)), linewidth=1.4, zorder=1)
    capacity = facet["capacity"].iloc[0]
    if np.isfinite(capacity) and facet["memory"].max() > 0.5 * capacity:
        axes.axhline(capacity / size, color=style.LIMIT_COLOUR, linestyle="--", linewidth=1.4, zorder=1)


def per_node(facet: pd.DataFrame) -> int | None:
    """Ranks of one machine, where there are several machines and it is known."""
    nodes = facet["nodes"].dropna()
    if nodes.empty or nodes.iloc[0] <= 1:
        return None
    return int(facet["world_size"].iloc[0] // nodes.iloc[0])


def _across_machines(grid: np.ndarray, facet: pd.DataFrame) -> None:
    inside = per_node(facet)
    factors = sorted(set(facet["sharding_factor"]))
    if inside is None or not factors[0] <= inside < factors[-1]:
        return
    at = inside * 2**0.5
    for axes in grid:
        axes.axvline(at, color=style.MUTED, linewidth=0.9, zorder=1)
    top = grid[0]
    for words, side, align in (("within a machine", -4, "right"), ("across machines", 4, "left")):
        top.annotate(
            words, (at, 1), xycoords=("data", "axes fraction"), xytext=(side, -2), textcoords="offset points",
            ha=align, va="top", fontsize=7.5, color=style.MUTED,
        )  # fmt: skip


def _key(facet: pd.DataFrame) -> list[tuple[Artist, str]]:
    kinds = style.evidence_in_order(facet["evidence"])
    entries: list[tuple[Artist, str]] = []
    for (strategy, series), _ in facet.groupby(["strategy", "series"], sort=False):
        colour = COLOURS[str(strategy)]
        entries.append((Line2D([], [], color=colour, marker=MARKERS[str(strategy)], markersize=5), str(series)))
    for kind in kinds:
        look = style.EVIDENCE_STYLES[kind]
        handle = Line2D(
            [], [], color=style.MUTED, linestyle=look.line, marker="o", markersize=5,
            markerfacecolor=style.MUTED if look.filled else "white",
        )  # fmt: skip
        entries.append((handle, kind + (", 95 % interval" if kind == "predicted" else "")))
    if facet["states"].notna().any():
        line = Line2D([], [], color=style.MUTED, linestyle=(0, (1, 1)), linewidth=1.4)
        entries.append((line, f"{ADAM_BYTES} bytes per parameter / F"))
    capacity = facet["capacity"].iloc[0]
    if np.isfinite(capacity) and facet["memory"].max() > 0.5 * capacity:
        entries.append((Line2D([], [], color=style.LIMIT_COLOUR, linestyle="--"), "memory of the device"))
    if facet["out_of_memory"].any():
        entries.append((Line2D([], [], color=style.MUTED, marker="X", linestyle="", markersize=8), "out of memory"))
    if facet["degraded"].any():
        triangle = Line2D([], [], color=style.INK, marker="<", linestyle="", markerfacecolor="white", markersize=8)
        entries.append((triangle, "degraded: not representative"))
    return entries


def _told(facet: pd.DataFrame) -> str:
    """The ends of every line in words."""
    parts = []
    for (series, kind), line in facet.groupby(["series", "evidence"], sort=False):
        ran = line[line["tflops"].notna()].sort_values("sharding_factor")
        if len(ran) > 1:
            first, last = ran.iloc[0], ran.iloc[-1]
            parts.append(
                f"{series} ({kind}) from F = {first['sharding_factor']} to {last['sharding_factor']}: "
                f"{_gib(first['memory'])} to {_gib(last['memory'])}, "
                f"{number(first['tflops'])} to {number(last['tflops'])} TFLOP/s"
            )
    return "; ".join(parts) + "." if parts else ""


def _alt(facet: pd.DataFrame) -> str:
    parts = []
    for (series, kind), line in facet.groupby(["series", "evidence"], sort=False):
        values = [
            f"F={row['sharding_factor']} " + ("out of memory" if row["out_of_memory"] else _gib(row["memory"]))
            + ("" if pd.isna(row["tflops"]) else f" {number(row['tflops'])} TFLOP/s")
            for row in line.sort_values("sharding_factor").to_dict("records")
        ]  # fmt: skip
        parts.append(f"{series}, {kind}: {listing(values, 12)}")
    return f"Memory and speed over the sharding factor, {subject(facet)}. " + "; ".join(parts) + "."


def _gib(value: float) -> str:
    unit, size = memory_unit(value)
    return MISSING if pd.isna(value) else f"{number(value / size)} {unit}"


def _listing(facet: pd.DataFrame) -> Listing:
    noun = rank_noun(facet["device"].iloc[0])
    columns = ["Strategy", "F", "Evidence", f"Peak memory per {noun}", f"TFLOP/s per {noun}", "Not hidden", ""]
    rows = [
        [
            str(row["series"]),
            str(row["sharding_factor"]),
            str(row["evidence"]),
            _gib(row["memory"]),
            number(row["tflops"]),
            MISSING if pd.isna(row["exposed"]) else f"{number(100 * row['exposed'], 2)} %",
            "out of memory" if row["out_of_memory"] else "degraded" if row["degraded"] else "",
        ]
        for row in facet.to_dict("records")
    ]
    return Listing(f"As a table: {subject(facet)}", columns, rows, frozenset(columns[1:2] + columns[3:6]))
