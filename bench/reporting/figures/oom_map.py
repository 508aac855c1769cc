"""What fits: model and batch across, strategy and sharding factor down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from bench.reporting import lanes, marks, style
from bench.reporting.answers import CLOSE, FAILED, FITS, MIXED, OOM, SKIPPED, outcome_of
from bench.reporting.answers import COLUMNS as ANSWERED
from bench.reporting.cells import by, first_known, grouped, in_order, known
from bench.reporting.drawing import Drawing, Section
from bench.reporting.frontier_cells import on_the_frontier
from bench.reporting.labels import listing, memory_unit, number, rank_noun, ranks, slug

TITLE = "What fits: the OOM map"
HOW_TO_READ = (
    "Read a row from left to right: the models (and batches) grow, until the strategy of that row runs out of memory. "
    "The further right the first OOM is, the larger the model that this strategy can train. Rows under one heading "
    "have the same precision and number of ranks. Under an OOM stands the phase of the step it struck in: init (the "
    "model alone does not fit), forward (activations), backward (gradients) or optimizer (its state, which first "
    "appears in the first step). A dotted cell is a prediction too close to the limit to call. A hatched cell was not "
    "run and says nothing."
)
FEWEST_COLUMNS, MOST_COLUMNS = 3, 12

NOT_RUN = "not run"
OUTCOME = (*ANSWERED, "peak_allocated_overall_bytes")
"""What of a row its cell tells."""
LOOKS: dict[str, dict[str, Any]] = {
    FITS: {"facecolor": "#cfe3f3", "edgecolor": "#4a7ba6"},
    OOM: {"facecolor": style.OOM_COLOUR, "edgecolor": style.OOM_COLOUR},
    MIXED: {"facecolor": "#f2cf66", "edgecolor": "#8a6d00"},
    CLOSE: {"facecolor": "#fbeecb", "edgecolor": "#8a6d00", "hatch": "...", "linewidth": 0.5},
    FAILED: {"facecolor": "#bdbdbd", "edgecolor": style.MUTED},
    SKIPPED: {"facecolor": "#ececec", "edgecolor": style.MUTED},
    NOT_RUN: {"facecolor": "white", "edgecolor": "#c4c4c4", "hatch": "////", "linewidth": 0.5},
}
"""Light, dark and hatched, so that the three that matter differ without colour."""


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell of every map, cells that were not run included.

    Returns
    -------
    DataFrame
        ``place``, ``evidence``, ``limit`` and ``settings`` say which map; ``heading`` (precision and ranks) and
        ``variant`` which line of it; ``column`` (model and workload) which column, with ``position`` its place from
        the left; ``outcome`` is one of the words of `LOOKS`; ``peak_bytes`` the highest allocated peak of the
        repeats that fitted (NaN for none), ``phase`` where memory ran out, ``degraded`` whether any that fitted was.
    """
    ordered = in_order(table)
    columns = zip(ordered["model"], ordered["workload"], strict=True)
    lines = zip(ordered["precision"], ordered["world_size"], ordered["device"], strict=True)
    named = ordered.assign(
        column=[f"{model} · {workload}".removesuffix(" · ") for model, workload in columns],
        heading=[f"{name} · {ranks(None if pd.isna(size) else int(size), device)}" for name, size, device in lines],
    )
    found = []
    for key, rows in by(named, "place", "evidence", "limit", "settings"):
        sizes = rows.sort_values(["parameters", "model", "batch_size_per_gpu", "sequence_length"], kind="stable")
        across = list(dict.fromkeys(sizes["column"]))
        ordered = rows.assign(_order=[variant.order for variant in rows["variant_key"]])
        ordered = ordered.sort_values(["precision", "world_size", "_order"], kind="stable")
        down = ordered.drop_duplicates(["heading", "variant"])[["heading", "variant", "device"]]
        lines_ = ("heading", "variant", "column")
        cells = {tuple(runs[0][name] for name in lines_): runs for runs in grouped(rows, lines_, OUTCOME)}
        for line, (position, column) in itertools.product(down.to_dict("records"), enumerate(across)):
            runs = cells.get((line["heading"], line["variant"], column))
            place = dict(zip(("place", "evidence", "limit", "settings"), key, strict=True))
            found.append({**place, **line, "column": column, "position": position, **_outcome(runs)})
    return pd.DataFrame(found)


def _outcome(runs: list[dict[str, Any]] | None) -> dict[str, object]:
    if runs is None:
        return {"outcome": NOT_RUN, "peak_bytes": float("nan"), "phase": None, "degraded": False}
    fitted, out_of_memory = ([run for run in runs if run["status"] == status] for status in ("ok", "oom"))
    peaks = first_known(fitted, "peak_allocated_overall_bytes", "peak_allocated_bytes")
    phases = known(out_of_memory, "oom_phase")
    return {
        "outcome": outcome_of(runs),
        "peak_bytes": float(max(peaks)) if peaks else float("nan"),
        "phase": phases[0] if phases else None,
        "degraded": any(known(fitted, "degraded")),
    }


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """A map per place, kind of evidence, memory limit and set of settings, of what the frontier does not show."""
    result = Section("oom-map", TITLE, HOW_TO_READ)
    elsewhere = on_the_frontier(table)
    if elsewhere.all():
        result.nothing = "All runs are in the figures of the OOM frontier."
        return result
    selected = select(table[~elsewhere])
    for (place, evidence, limit, settings), rows in by(selected, "place", "evidence", "limit", "settings"):
        parts = [
            (page, columns)
            for columns in _batches(list(rows["column"].unique()), MOST_COLUMNS)
            for page in lanes.paginate(
                rows.drop_duplicates(["heading", "variant"]), lambda row: row["variant"], lane_in=0.3
            )
        ]
        words = [limit or "no memory limit set", settings, "" if evidence == "measured" else evidence]
        subject = " · ".join(word for word in words if word)
        for number_, (page, columns) in enumerate(parts, 1):
            part = f" ({number_} of {len(parts)})" if len(parts) > 1 else ""
            result.plan(_draw, page, rows, columns, str(place), str(evidence), subject, part)
    return result


def _batches(items: list[str], most: int) -> list[list[str]]:
    return [items[start : start + most] for start in range(0, len(items), most)]


def _draw(
    groups: list[lanes.Group], rows: pd.DataFrame, columns: Sequence[str], place: str, evidence: str, subject: str,
    part: str,
) -> Drawing:  # fmt: skip
    shown = rows[rows["column"].isin(columns)]
    width = max(style.WIDTH_IN, 1.8 + 0.58 * len(columns))
    unit, size = memory_unit(shown["peak_bytes"].max() if shown["peak_bytes"].notna().any() else 2**30)
    title = f"What fits: {subject}{part}"
    cell_in = (width - 1.6) / max(len(columns), FEWEST_COLUMNS)
    upright = cell_in < 0.75
    chars = 26 if upright else int(cell_in / 0.068)
    names = ["\n".join(lanes.wrap(part, chars) for part in name.split(" · ")) for name in columns]
    longest = max(len(line) for name in names for line in name.splitlines())
    labels_in = 0.2 + (0.075 * longest if upright else 0.14 * max(name.count("\n") + 1 for name in names))
    key = _key(shown, unit, rank_noun(str(shown["device"].iloc[0])))
    subtitle = f"{place}\nEvidence: {evidence}"
    figure, axes = lanes.axes_for(groups, title, subtitle, key, width_in=width, labels_in=labels_in)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(-0.5, max(len(columns), FEWEST_COLUMNS) - 0.5)
    axes.set_xticks(range(len(columns)), names, rotation=90 if upright else 0)
    axes.tick_params(axis="x", length=0, labeltop=True, labelbottom=False, labelsize=7.5)
    cells = {(cell["heading"], cell["variant"], cell["column"]): cell for cell in shown.to_dict("records")}
    for group in groups:
        for lane in group.lanes:
            for x, column in enumerate(columns):
                _cell(axes, x, lane.y, pd.Series(cells[lane.row["heading"], lane.row["variant"], column]), size)
    outcomes = shown["outcome"].value_counts()
    alt = (
        f"Map of {len(columns)} models and batches ({listing(list(columns), 4)}) against "
        f"{len(shown.drop_duplicates(['heading', 'variant']))} strategies on {place}, {subject}: "
        + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        + "."
    )
    caption = f"Evidence: {evidence}. {subject[0].upper()}{subject[1:]} on {place}."
    return Drawing(slug("oom-map", subject, part, place), title, figure, caption, alt, wide=width > style.WIDTH_IN)


def _cell(axes: Axes, x: float, y: float, cell: pd.Series, size: int) -> None:
    axes.add_patch(Rectangle((x - 0.47, y - 0.135), 0.94, 0.27, zorder=2, **LOOKS[cell["outcome"]]))
    words = {
        FITS: number(cell["peak_bytes"] / size, 2) if not pd.isna(cell["peak_bytes"]) else "fits",
        CLOSE: f"{number(cell['peak_bytes'] / size, 2)}?" if not pd.isna(cell["peak_bytes"]) else "?",
        OOM: "OOM" if pd.isna(cell["phase"]) else f"OOM\n{cell['phase']}",
        MIXED: "mixed",
        FAILED: "failed",
        SKIPPED: "skipped",
        NOT_RUN: "",
    }[cell["outcome"]]
    if cell["degraded"]:
        axes.plot(x - 0.4, y, "<", markersize=4.5, markerfacecolor="white", markeredgecolor=style.INK, zorder=3)
    dark = cell["outcome"] == OOM
    axes.text(
        x, y, words, ha="center", va="center", fontsize=6.8, linespacing=1.0, zorder=3,
        color="white" if dark else style.INK, fontweight="bold" if dark else "normal",
    )  # fmt: skip


def _key(shown: pd.DataFrame, unit: str, noun: str) -> list[tuple[Artist, str]]:
    names = {FITS: f"fits (peak in {unit} per {noun})", OOM: "out of memory (phase)"}
    present = set(shown["outcome"])
    entries: list[tuple[Artist, str]] = [
        (Patch(**look), names.get(outcome, outcome)) for outcome, look in LOOKS.items() if outcome in present
    ]
    return [*entries, marks.DEGRADED] if shown["degraded"].any() else entries
