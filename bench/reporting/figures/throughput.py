"""TFLOP/s per rank by strategy and model size."""

from __future__ import annotations

import pandas as pd

from bench.config.flop_conventions import format_tflops_label
from bench.core.presentation import CPU_NOTE, build_slug, format_number, get_rank_noun
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, ReportFigure, ReportSection
from bench.reporting.tables.cells import build_cells, iterate_groups, select_drawable_cells
from bench.reporting.tables.table import COMPLETED_STATUSES, RowNeeds

HOW_TO_READ = (
    "Longer is faster. A bar is the FLOPs of one training step, counted as the axis says (model: forward and backward, "
    "nothing counted twice for recomputation), divided by the median step time and by the number of ranks, so it says "
    "how well each device is used, whatever the size of the model. Compare bars under one heading: they differ only in "
    "how the model is spread. DDP keeps a whole copy of parameters, gradients and optimizer state on every rank and "
    "sends gradients; FSDP keeps a shard of each and gathers a block's parameters when it needs them. With a sharding "
    "factor F, a copy is spread over F ranks: F = 1 is full replication, F = number of ranks is full shard, and hybrid "
    "is in between. A cross at the start of a lane is a run that ran out of memory: a result, not a gap. "
    "Headings say the model, the number of ranks, and the batch: 4 × 128 is 4 sequences of 128 tokens on every rank."
)
FIGURE = ReportFigure(
    name="throughput",
    page_position=20,
    title="Throughput",
    how_to_read=HOW_TO_READ,
    needs=RowNeeds(allowed_values={"status": COMPLETED_STATUSES}),
    empty_message="No run in this store has a throughput.",
)


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration: TFLOP/s per rank (``median``, ``low``, ``high``, ``points``) or out of memory."""
    return select_drawable_cells(build_cells(table, "counted_tflops"))


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per place, precision and memory limit."""
    section = FIGURE.create_section()
    all_cells = select(table)
    if all_cells["median"].notna().sum() == 0:
        section.notice = FIGURE.empty_message
    for (place,), place_cells in iterate_groups(all_cells, "place"):
        x_limit = max(place_cells["high"].max() * 1.3, 0) if place_cells["high"].notna().any() else 1.0
        for subject, groups in lanes.paginate_by_precision(place_cells, lanes.format_lane_label):
            section.plan_figure(_draw_throughput, groups, str(place), subject, x_limit, palette)
    return section


def _draw_throughput(
    groups: list[lanes.LaneGroup], place: str, subject: str, x_limit: float, palette: dict[str, style.VariantStyle]
) -> Drawing:
    shown_cells = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    device = shown_cells["device"].iloc[0]
    noun = get_rank_noun(device)
    speed_label = format_tflops_label(shown_cells["flop_convention"].iloc[0], noun)
    cpu_note = CPU_NOTE if device == "cpu" else ""
    title = f"TFLOP/s per {noun}, {subject}"
    figure, axes = lanes.build_lane_axes(groups, title, f"{place}\n{cpu_note}", lanes.build_legend_entries(shown_cells))
    axes.set_xlim(0, x_limit)
    for group in groups:
        for lane in group.lanes:
            _draw_lane(axes, lane, palette[lane.row["variant"]])
    axes.set_xlabel(speed_label)
    fastest_cell = (
        shown_cells.sort_values("median", na_position="first").iloc[-1] if shown_cells["median"].notna().any() else None
    )
    alt_text = f"Bar chart of {speed_label} for {len(shown_cells)} configurations in {subject} on {place}."
    if fastest_cell is not None:
        alt_text += (
            f" Highest: {lanes.format_lane_label(fastest_cell)}, {fastest_cell['heading']}, "
            f"{format_number(fastest_cell['median'])} TFLOP/s."
        )
    alt_text += f" Out of memory: {int((shown_cells['out_of_memory'] > 0).sum())}."
    caption = f"{speed_label[0].upper()}{speed_label[1:]} in {subject} on {place}. " + (
        f"{cpu_note}. " if cpu_note else ""
    )
    return Drawing(build_slug("throughput", subject, place), title, figure, caption.strip(), alt_text)


def _draw_lane(axes: lanes.Axes, lane: lanes.Lane, mark: style.VariantStyle) -> None:
    row = lane.row
    if pd.isna(row["median"]):
        lanes.draw_oom_lane(axes, lane)
        return
    lanes.draw_bar(axes, lane, row["median"], mark)
    lanes.draw_repeats(axes, lane)
    note_text = format_number(row["median"]) + lanes.format_partial_oom(row)
    if row["degraded"]:
        lanes.draw_degraded_marker(axes, lane, row["high"])
        note_text = f" {note_text} degraded"
    lanes.draw_note(axes, lane, row["high"], note_text)
