"""Model TFLOP/s per rank by strategy and model size."""

from __future__ import annotations

import pandas as pd

from bench.reporting import lanes, marks, style
from bench.reporting.cells import by, cells, drawable
from bench.reporting.drawing import Drawing, Section
from bench.reporting.labels import CPU_NOTE, number, rank_noun, slug

TITLE = "Throughput"
HOW_TO_READ = (
    "Longer is faster. A bar is the model FLOPs of one training step (forward and backward, nothing counted twice "
    "for recomputation) divided by the median step time and by the number of ranks, so it says how well each device "
    "is used, whatever the size of the model. Compare bars under one heading: they differ only in how the model is "
    "spread. DDP keeps a whole copy of parameters, gradients and optimizer state on every rank and sends gradients; "
    "FSDP keeps a shard of each and gathers a block's parameters when it needs them. With a sharding factor F, a "
    "copy is spread over F ranks: F = 1 is full replication, F = number of ranks is full shard, and hybrid is in "
    "between. A cross at the start of a lane is a run that ran out of memory: a result, not a gap. "
    "Headings say the model, the number of ranks, and the batch: 4 × 128 is 4 sequences of 128 tokens on every rank."
)


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per configuration: TFLOP/s per rank (``median``, ``low``, ``high``, ``points``) or out of memory."""
    return drawable(cells(table, "tflops_per_gpu"))


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per place, precision and memory limit."""
    result = Section("throughput", TITLE, HOW_TO_READ)
    selected = select(table)
    if selected["median"].notna().sum() == 0:
        result.nothing = "No run in this store has a throughput."
    for (place,), here in by(selected, "place"):
        limit = max(here["high"].max() * 1.3, 0) if here["high"].notna().any() else 1.0
        for subject, groups in lanes.pages(here, marks.label):
            result.plan(_draw, groups, str(place), subject, limit, palette)
    return result


def _draw(groups: list[lanes.Group], place: str, subject: str, limit: float, palette: dict[str, style.Mark]) -> Drawing:
    shown = pd.DataFrame([lane.row for group in groups for lane in group.lanes])
    device = shown["device"].iloc[0]
    noun = rank_noun(device)
    note = CPU_NOTE if device == "cpu" else ""
    title = f"TFLOP/s per {noun}, {subject}"
    figure, axes = lanes.axes_for(groups, title, f"{place}\n{note}", marks.key(shown))
    axes.set_xlim(0, limit)
    for group in groups:
        for lane in group.lanes:
            _lane(axes, lane, palette[lane.row["variant"]])
    axes.set_xlabel(f"model TFLOP/s per {noun}")
    fastest = shown.sort_values("median", na_position="first").iloc[-1] if shown["median"].notna().any() else None
    alt = f"Bar chart of model TFLOP/s per {noun} for {len(shown)} configurations in {subject} on {place}."
    if fastest is not None:
        alt += f" Highest: {marks.label(fastest)}, {fastest['heading']}, {number(fastest['median'])} TFLOP/s."
    alt += f" Out of memory: {int((shown['out_of_memory'] > 0).sum())}."
    caption = f"Model TFLOP/s per {noun} in {subject} on {place}. " + (f"{note}. " if note else "")
    return Drawing(slug("throughput", subject, place), title, figure, caption.strip(), alt)


def _lane(axes: marks.Axes, lane: lanes.Lane, mark: style.Mark) -> None:
    row = lane.row
    if pd.isna(row["median"]):
        marks.out_of_memory(axes, lane)
        return
    marks.bar(axes, lane, row["median"], mark)
    marks.repeats(axes, lane)
    words = number(row["median"]) + marks.partly_oom(row)
    if row["degraded"]:
        marks.degraded(axes, lane, row["high"])
        words = f" {words} degraded"
    marks.note(axes, lane, row["high"], words)
