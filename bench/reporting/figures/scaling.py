"""TFLOP/s per rank against the number of ranks."""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.config.flop_conventions import format_tflops_label
from bench.core.presentation import CPU_NOTE, build_slug, format_list, format_world_sizes, get_rank_noun, get_rank_nouns
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.direct_labels import (
    MAX_LEGEND_ENTRIES,
    WIDE_FIGURE_IN,
    DirectLabel,
    compute_labels_height_in,
    draw_direct_labels,
)
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection, create_figure, draw_header
from bench.reporting.tables.cells import build_cells, iterate_groups, select_drawable_cells
from bench.reporting.tables.table import COMPLETED_STATUSES, RowNeeds

HOW_TO_READ = (
    "Each rank keeps the same batch while ranks are added (weak scaling), so a strategy that scales perfectly is a "
    "level line: every device stays as busy as it was alone. The fall from the first point is what communication "
    "that is not hidden behind computation costs (and, where processes of one machine stand in for GPUs, the cores "
    "they share). A full-shard line starts at one rank, where there is nothing to shard; lines meet where two "
    "strategies are the same run. A cross at the bottom is a run that ran out of memory."
)
FIGURE = ReportFigure(
    name="scaling",
    page_position=110,
    title="Scaling",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": COMPLETED_STATUSES}, min_distinct={"world_size": 2}),
    empty_message="No model was run on more than one number of ranks{world_size}, so there is no scaling to show.",
)
FACET_COLUMNS = ["place", "model", "parameters", "precision", "workload", "limit", "settings"]


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per point: the cells of `throughput`, with ``series``, the line it belongs to.

    Only groups (`FACET_COLUMNS`) with more than one world size are kept. A run of one rank has nothing to shard; it is
    the start of its implementation's full-shard line (F = world size = 1) if there is one, and of full replication
    (F = 1) likewise, and then stands in both.
    """
    drawable_cells = select_drawable_cells(build_cells(table, "counted_tflops"))
    kept_points = []
    for _, facet in iterate_groups(drawable_cells[drawable_cells["world_size"].notna()], *FACET_COLUMNS):
        if facet["world_size"].nunique() < 2 or facet["median"].notna().sum() == 0:
            continue
        for _, point in facet.iterrows():
            kept_points += [{**point, "series": series} for series in _list_series(point, facet)]
    points = pd.DataFrame(kept_points, columns=[*drawable_cells.columns, "series"])
    variant_order = {key.label: key.order for key in drawable_cells["variant_key"]} if kept_points else {}
    return points.sort_values("series", key=lambda names: names.map(variant_order), kind="stable")


def _list_series(point: pd.Series, facet: pd.DataFrame) -> list[str]:
    family, _, sharding = point["variant_key"].kind.partition("/")
    if sharding == "" or point["world_size"] > 1:
        return [point["variant"]]
    extreme_kinds = {
        f"{family}/full_shard",
        f"{family}/full_replication",
        f"{family}/shard_grad_op",
        f"{family}/no_shard",
    }
    same_evidence = facet[facet["evidence"] == point["evidence"]]
    continued_series = [key.label for key in same_evidence["variant_key"] if key.kind in extreme_kinds]
    return list(dict.fromkeys(continued_series)) or [point["variant"]]


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """A figure per place, model, precision and set of settings."""
    points = select(table)
    if points.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for _, facet in iterate_groups(points, *FACET_COLUMNS):
        section.plan_figure(_draw_scaling, facet, palette)
    return section


def _draw_scaling(facet: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> Drawing:
    first_row = facet.iloc[0]
    noun = get_rank_noun(first_row["device"])
    speed_label = format_tflops_label(first_row["flop_convention"], noun)
    cpu_note = CPU_NOTE if first_row["device"] == "cpu" else ""
    title = f"Scaling: {first_row['model']}, {first_row['precision']}"
    detail = " · ".join(part for part in (first_row["workload"], first_row["limit"], first_row["settings"]) if part)
    series_lines = list(iterate_groups(facet, "series", "evidence"))
    legend_entries = [*_build_legend(facet, palette), *lanes.build_legend_entries(facet.assign(evidence="measured"))]
    labels: list[DirectLabel] = []
    if len(legend_entries) > MAX_LEGEND_ENTRIES:
        labels = _list_labels(facet, palette)
        legend_entries = legend_entries[len(labels) :]
    axes_height_in = max(2.2, compute_labels_height_in(len(labels)))
    width_in = WIDE_FIGURE_IN if labels else style.FIGURE_WIDTH_IN
    figure = create_figure(width_in, axes_height_in + 0.9 + lanes.compute_legend_height_in(legend_entries))
    axes = figure.add_subplot()
    world_sizes = sorted(int(world_size) for world_size in facet["world_size"].unique())
    for position, ((series, evidence), points) in enumerate(series_lines):
        _draw_line(axes, points, palette[str(series)], str(evidence), position, len(series_lines))
    axes.set_xscale("log", base=2)
    axes.set_xticks(world_sizes, [str(world_size) for world_size in world_sizes])
    axes.minorticks_off()
    axes.set_xlim(world_sizes[0] / 1.25, world_sizes[-1] * 1.25)
    axes.set_ylim(0, facet["high"].max() * 1.15)
    axes.grid(axis="y")
    axes.set_xlabel(f"{get_rank_nouns(first_row['device'])} (world size, logarithmic)")
    axes.set_ylabel(speed_label.removeprefix("model "))
    draw_header(figure, title, "\n".join(part for part in (detail, first_row["place"], cpu_note) if part))
    draw_direct_labels(axes, labels, axes_height_in)
    lanes.draw_legend(figure, legend_entries)
    alt_text = (
        f"Line chart of {speed_label} of {first_row['model']} in {first_row['precision']} on "
        f"{first_row['place']} at "
        f"{format_world_sizes(world_sizes, first_row['device'])} for "
        f"{format_list(list(facet['series'].unique()), 12)}."
    )
    model = first_row["heading"].split(" · ")[0]
    caption = f"{model}, {first_row['precision']}, {detail or 'batch not stated'}. {cpu_note}".strip()
    name = build_slug(
        "scaling",
        first_row["model"],
        first_row["precision"],
        first_row["workload"],
        first_row["limit"],
        first_row["settings"],
    )
    return Drawing(name, title, figure, caption + ("." if cpu_note else ""), alt_text, wide=bool(labels))


def _list_labels(facet: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> list[DirectLabel]:
    """The name of every line, at its last point; of one that is out of memory everywhere, at its last cross."""
    labels = []
    for (series,), points in iterate_groups(facet, "series"):
        completed = points[points["median"].notna()].sort_values("world_size")
        last = completed.iloc[-1] if len(completed) else points.sort_values("world_size").iloc[-1]
        height = 0.0 if pd.isna(last["median"]) else float(last["median"])
        labels.append(DirectLabel(str(series), float(last["world_size"]), height, palette[str(series)].colour))
    return labels


def _build_legend(facet: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> list[tuple[Artist, str]]:
    """Colour and marker name the variant; where there are several kinds of evidence, the line style names the kind."""
    evidence_kinds = list(style.sort_evidence(facet["evidence"]))
    legend_entries: list[tuple[Artist, str]] = [
        (_build_legend_handle(palette[series], evidence_kinds[0] if len(evidence_kinds) == 1 else "measured"), series)
        for series in facet["series"].unique()
    ]
    if evidence_kinds != ["measured"]:
        legend_entries += [
            (_build_legend_handle(style.VariantStyle(style.MUTED_COLOUR, "o"), evidence), evidence)
            for evidence in evidence_kinds
        ]
    return legend_entries


def _build_legend_handle(mark: style.VariantStyle, evidence: str) -> Line2D:
    evidence_style = style.EVIDENCE_STYLES.get(evidence, style.EVIDENCE_STYLES["measured"])
    return Line2D(
        [], [], color=mark.colour, marker=mark.marker, linestyle=evidence_style.linestyle, markersize=5.5,
        linewidth=1.5,
        **style.build_marker_style(mark.colour, evidence),
    )  # fmt: skip


def _draw_line(
    axes: Axes, points: pd.DataFrame, mark: style.VariantStyle, evidence: str, position: int, num_lines: int
) -> None:
    """One line. Later lines have smaller marks and their crosses stand further right, so equal ones stay visible."""
    x_factor = 2 ** ((position - (num_lines - 1) / 2) * 0.06)
    points = points.sort_values("world_size")
    completed_points = points[points["median"].notna()]
    world_sizes = completed_points["world_size"].astype(float)
    axes.plot(
        world_sizes, completed_points["median"], color=mark.colour, marker=mark.marker,
        linestyle=style.EVIDENCE_STYLES.get(evidence, style.EVIDENCE_STYLES["measured"]).linestyle, zorder=3,
        markersize=max(9 - 1.2 * position, 4), linewidth=1.5, **style.build_marker_style(mark.colour, evidence),
    )  # fmt: skip
    for world_size, row in zip(world_sizes, completed_points.to_dict("records"), strict=True):
        if len(row["points"]) > 1:
            axes.plot([world_size] * 2, [row["low"], row["high"]], color=style.INK_COLOUR, linewidth=1, zorder=2)
            axes.plot(
                [world_size] * len(row["points"]), row["points"], "_", color=style.INK_COLOUR, markersize=6, zorder=2
            )
        if row["degraded"]:
            axes.plot(
                world_size, row["median"], "<", markersize=10, markerfacecolor="none", markeredgecolor=style.INK_COLOUR
            )
    oom_points = points[points["out_of_memory"] > 0]
    for world_size in oom_points["world_size"].astype(float):
        lanes.draw_oom_cross(axes, world_size * x_factor, 0, mark.colour, evidence)
