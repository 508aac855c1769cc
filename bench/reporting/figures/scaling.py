"""Model TFLOP/s per rank against the number of ranks."""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, cells, drawable
from bench.reporting.drawing import Drawing, Section, header, new_figure
from bench.reporting.labels import CPU_NOTE, listing, rank_noun, rank_nouns, slug

TITLE = "Scaling"
HOW_TO_READ = (
    "Each rank keeps the same batch while ranks are added (weak scaling), so a strategy that scales perfectly is a "
    "level line: every device stays as busy as it was alone. The fall from the first point is what communication "
    "that is not hidden behind computation costs (and, where processes of one machine stand in for GPUs, the cores "
    "they share). A full-shard line starts at one rank, where there is nothing to shard; lines meet where two "
    "strategies are the same run. A cross at the bottom is a run that ran out of memory."
)
FACET = ["place", "model", "parameters", "precision", "workload", "limit", "settings"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per point: the cells of `throughput`, with ``series``, the line it belongs to.

    Only groups (`FACET`) with more than one world size are kept. A run of one rank has nothing to shard; it is the
    start of its implementation's full-shard line (F = world size = 1) if there is one, and of full replication
    (F = 1) likewise, and then stands in both.
    """
    found = drawable(cells(table, "tflops_per_gpu"))
    kept = []
    for _, facet in by(found[found["world_size"].notna()], *FACET):
        if facet["world_size"].nunique() < 2 or facet["median"].notna().sum() == 0:
            continue
        for _, point in facet.iterrows():
            kept += [{**point, "series": series} for series in _series(point, facet)]
    points = pd.DataFrame(kept, columns=[*found.columns, "series"])
    order = {key.label: key.order for key in found["variant_key"]} if kept else {}
    return points.sort_values("series", key=lambda names: names.map(order), kind="stable")


def _series(point: pd.Series, facet: pd.DataFrame) -> list[str]:
    family, _, how = point["variant_key"].kind.partition("/")
    if how == "" or point["world_size"] > 1:
        return [point["variant"]]
    limits = {f"{family}/full_shard", f"{family}/full_replication", f"{family}/shard_grad_op", f"{family}/no_shard"}
    same = facet[facet["evidence"] == point["evidence"]]
    continued = [key.label for key in same["variant_key"] if key.kind in limits]
    return list(dict.fromkeys(continued)) or [point["variant"]]


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """A figure per place, model, precision and set of settings."""
    result = Section("scaling", TITLE, HOW_TO_READ)
    selected = select(table)
    sizes = sorted(table["world_size"].dropna().unique())
    if selected.empty:
        which = f" (all have {listing([str(size) for size in sizes])})" if len(sizes) == 1 else ""
        result.nothing = f"No model was run on more than one number of ranks{which}, so there is no scaling to show."
    for _, facet in by(selected, *FACET):
        result.plan(_draw, facet, palette)
    return result


def _draw(facet: pd.DataFrame, palette: dict[str, style.Mark]) -> Drawing:
    first = facet.iloc[0]
    noun = rank_noun(first["device"])
    note = CPU_NOTE if first["device"] == "cpu" else ""
    title = f"Scaling: {first['model']}, {first['precision']}"
    detail = " · ".join(part for part in (first["workload"], first["limit"], first["settings"]) if part)
    lines = list(by(facet, "series", "evidence"))
    entries = [*_key(facet, palette), *marks.key(facet.assign(evidence="measured"))]
    figure = new_figure(style.WIDTH_IN, 3.1 + lanes.legend_in(entries))
    axes = figure.add_subplot()
    sizes = sorted(int(size) for size in facet["world_size"].unique())
    for position, ((series, evidence), points) in enumerate(lines):
        _line(axes, points, palette[str(series)], str(evidence), position, len(lines))
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)
    axes.set_ylim(0, facet["high"].max() * 1.15)
    axes.grid(axis="y")
    axes.set_xlabel(f"{rank_nouns(first['device'])} (world size, logarithmic)")
    axes.set_ylabel(f"TFLOP/s per {noun}")
    header(figure, title, "\n".join(part for part in (detail, first["place"], note) if part))
    lanes.legend(figure, entries)
    alt = (
        f"Line chart of model TFLOP/s per {noun} of {first['model']} in {first['precision']} on {first['place']} at "
        f"{listing([str(size) for size in sizes])} ranks for {listing(list(facet['series'].unique()), 12)}."
    )
    caption = (
        f"{first['heading'].split(' · ')[0]}, {first['precision']}, {detail or 'batch not stated'}. {note}".strip()
    )
    name = slug("scaling", first["model"], first["precision"], first["workload"], first["limit"], first["settings"])
    return Drawing(name, title, figure, caption + ("." if note else ""), alt)


def _key(facet: pd.DataFrame, palette: dict[str, style.Mark]) -> list[tuple[Artist, str]]:
    """Colour and marker name the variant; where there are several kinds of evidence, the line style names the kind."""
    kinds = list(style.evidence_in_order(facet["evidence"]))
    entries: list[tuple[Artist, str]] = [
        (_handle(palette[series], kinds[0] if len(kinds) == 1 else "measured"), series)
        for series in facet["series"].unique()
    ]
    if kinds != ["measured"]:
        entries += [(_handle(style.Mark(style.MUTED, "o"), kind), kind) for kind in kinds]
    return entries


def _handle(mark: style.Mark, evidence: str) -> Line2D:
    look = style.EVIDENCE_STYLES.get(evidence, style.EVIDENCE_STYLES["measured"])
    return Line2D(
        [], [], color=mark.colour, marker=mark.marker, linestyle=look.line, markersize=5.5, linewidth=1.5,
        **style.marker_style(mark.colour, evidence),
    )  # fmt: skip


def _line(axes: Axes, points: pd.DataFrame, mark: style.Mark, evidence: str, position: int, lines: int) -> None:
    """One line. Later lines have smaller marks and their crosses stand further right, so equal ones stay visible."""
    dodge = 2 ** ((position - (lines - 1) / 2) * 0.06)
    points = points.sort_values("world_size")
    measured = points[points["median"].notna()]
    sizes = measured["world_size"].astype(float)
    axes.plot(
        sizes, measured["median"], color=mark.colour, marker=mark.marker,
        linestyle=style.EVIDENCE_STYLES.get(evidence, style.EVIDENCE_STYLES["measured"]).line, zorder=3,
        markersize=max(9 - 1.2 * position, 4), linewidth=1.5, **style.marker_style(mark.colour, evidence),
    )  # fmt: skip
    for size, row in zip(sizes, measured.to_dict("records"), strict=True):
        if len(row["points"]) > 1:
            axes.plot([size] * 2, [row["low"], row["high"]], color=style.INK, linewidth=1, zorder=2)
            axes.plot([size] * len(row["points"]), row["points"], "_", color=style.INK, markersize=6, zorder=2)
        if row["degraded"]:
            axes.plot(size, row["median"], "<", markersize=10, markerfacecolor="none", markeredgecolor=style.INK)
    lost = points[points["out_of_memory"] > 0]
    for size in lost["world_size"].astype(float):
        marks.cross(axes, size * dodge, 0, mark.colour, evidence)
