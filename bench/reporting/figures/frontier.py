"""Where memory runs out: model size down, GPUs across, one block per strategy, all kinds of evidence in one cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from bench.core import presentation
from bench.core.presentation import (
    MISSING,
    build_slug,
    choose_memory_unit,
    format_number,
    format_plural,
    get_rank_noun,
    get_rank_nouns,
)
from bench.reporting.drawing import lanes, style
from bench.reporting.drawing.drawing import Drawing, FigureTable, ReportFigure, ReportSection
from bench.reporting.tables.cells import (
    CLOSE_CALL,
    FITS,
    MIXED_REPEATS,
    OOM,
    FitAnswer,
    describe_agreement,
    describe_disagreement,
    iterate_groups,
)
from bench.reporting.tables.frontier import FRONTIER_NEEDS, build_frontier_cells

HOW_TO_READ = (
    "Each block is one strategy: models grow downwards, the number of ranks grows to the right, and the frontier runs "
    "where OOM begins. A cell has one strip for every kind of evidence in the figure, from what is most real (top) to "
    "what nothing ran for (bottom); an empty strip is a question this kind was not asked. Kinds of evidence stand in "
    "one cell if they were asked the same: the same model, strategy, precision, batch and settings on a device of the "
    "same kind with as much memory (a limit of 80 GiB on a larger GPU counts as a GPU of 80 GB). A thick outline and ≠ "
    "mark a cell where one kind says that something fits which another says does not; every such cell is listed below "
    "its figure with the numbers. A prediction too close to the limit to call (dotted) contradicts nothing. Where "
    "batch sizes were searched, a strip says the largest that fits; 140–155 is predicted to fit up to 140 and surely "
    "not beyond 155, and ≥8 means that nothing larger was tried. × 512 is the number of tokens of a sequence. Of a "
    "search the other figures show its end."
)
FIGURE = ReportFigure(
    name="frontier",
    page_position=50,
    title="The OOM frontier",
    how_to_read=HOW_TO_READ,
    needs=FRONTIER_NEEDS,
    empty_message=(
        "No configuration was tried at several numbers of ranks, at several batch sizes or with several kinds of "
        "evidence where it is known how much memory there is."
    ),
    shows_all_trials=True,
)
CPU_CAVEAT = (
    "On a CPU the limit holds for all memory of a process. Where processes really communicate, gloo's buffers and "
    "threads count; a rehearsal has neither. What libraries work in counts wherever something ran, but a prediction "
    "counts tensors only. So near the limit a prediction, and sometimes a rehearsal, fits where the run does not."
)
GPU_CAVEAT = (
    "A limit holds for the caching allocator. CUDA's context and NCCL's buffers lie outside it, so a GPU really of "
    "that size leaves the allocator one or two GiB less than the same limit on a larger one."
)

STRIP_HEIGHT_IN, CELL_GAP_IN = 0.155, 0.05
CELL_WIDTH_IN, LABELS_WIDTH_IN = 0.56, 1.75
MAX_COLUMNS = 12
DOTTED_OUTCOMES = (CLOSE_CALL, MIXED_REPEATS)
OUTCOME_COLOURS = {FITS: "#3b7fb5", OOM: style.OOM_COLOUR, CLOSE_CALL: "#8a6d00", MIXED_REPEATS: "#8a6d00"}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell: see `build_frontier_cells`."""
    return build_frontier_cells(table)


def build_section(table: pd.DataFrame, palette: dict[str, style.VariantStyle]) -> ReportSection:
    """Figures per kind of device with so much memory, and precision; a table of the same."""
    all_cells = select(table)
    if all_cells.empty:
        return FIGURE.create_empty_section(table)
    section = FIGURE.create_section()
    for _, cells in iterate_groups(all_cells, "device", "memory_gib", "precision"):
        world_sizes = sorted(cells["world_size"].unique())
        pages = [
            (page_world_sizes, groups)
            for page_world_sizes in (
                world_sizes[start : start + MAX_COLUMNS] for start in range(0, len(world_sizes), MAX_COLUMNS)
            )
            for groups in _paginate_cells(cells)
        ]
        for page_number, (page_world_sizes, groups) in enumerate(pages, 1):
            page_suffix = f" ({page_number} of {len(pages)})" if len(pages) > 1 else ""
            section.plan_figure(_draw_frontier, groups, cells, page_world_sizes, page_suffix)
        section.tables.append(_build_listing(cells))
    return section


def _paginate_cells(cells: pd.DataFrame) -> list[list[lanes.LaneGroup]]:
    lane_rows = cells.drop_duplicates(["heading", "lane"])
    return list(
        lanes.paginate_lanes(lane_rows, lambda row: row["lane"], min_lane_height_in=_compute_lane_height(cells))
    )


def _list_evidence_kinds(cells: pd.DataFrame) -> Sequence[str]:
    return style.sort_evidence(answer.evidence for answers in cells["answers"] for answer in answers)


def _compute_lane_height(cells: pd.DataFrame) -> float:
    return len(_list_evidence_kinds(cells)) * STRIP_HEIGHT_IN + CELL_GAP_IN


def _has_batch_search(cells: pd.DataFrame) -> bool:
    """Whether any configuration was tried at several batch sizes: the figure then shows the largest that fits."""
    return any(len(answer.batch_sizes) > 1 for answers in cells["answers"] for answer in answers)


def _describe_subject(cells: pd.DataFrame) -> str:
    first_cell = cells.iloc[0]
    noun = get_rank_noun(first_cell["device"])
    return f"{first_cell['memory_gib']:.3g} GiB per {noun}, {first_cell['precision']}"


def _draw_frontier(
    groups: list[lanes.LaneGroup], cells: pd.DataFrame, world_sizes: Sequence[int], page_suffix: str
) -> Drawing | None:
    """One figure; None if none of its cells was asked about."""
    lanes_by_name = {(lane.row["heading"], lane.row["lane"]): lane for group in groups for lane in group.lanes}
    is_on_page = [
        (heading, lane) in lanes_by_name for heading, lane in zip(cells["heading"], cells["lane"], strict=True)
    ]
    shown_cells = cells[pd.Series(is_on_page, index=cells.index) & cells["world_size"].isin(world_sizes)]
    if not len(shown_cells):
        return None
    device, evidence_kinds, has_batch_search = (
        str(cells["device"].iloc[0]),
        _list_evidence_kinds(cells),
        _has_batch_search(cells),
    )
    noun, subject = get_rank_noun(device), _describe_subject(cells)
    peaks_bytes = [
        answer.peak_bytes for answers in cells["answers"] for answer in answers if not pd.isna(answer.peak_bytes)
    ]
    unit, unit_bytes = choose_memory_unit(
        max(peaks_bytes, default=0) / 10
    )  # a tenth of the largest is to read well, too
    title = ("Largest batch that fits" if has_batch_search else "What fits") + f": {subject}{page_suffix}"
    shared_settings = cells["shared"].iloc[0]
    subtitle = "\n".join(text for text in (shared_settings, f"Evidence: {', '.join(evidence_kinds)}") if text)
    fits_label = f"largest batch per {noun} that fits" if has_batch_search else f"fits: peak in {unit} per {noun}"
    legend_entries = _build_legend(shown_cells, evidence_kinds, fits_label)
    width_in = max(style.FIGURE_WIDTH_IN, LABELS_WIDTH_IN + CELL_WIDTH_IN * len(world_sizes))
    figure, axes = lanes.build_lane_axes(
        groups, title, subtitle, legend_entries, width_in=width_in, axis_height_in=0.45
    )
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(-0.5, max(len(world_sizes), 4) - 0.5)
    axes.set_xticks(range(len(world_sizes)), [str(world_size) for world_size in world_sizes])
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(f"{get_rank_nouns(device)} (world size)", fontsize=8)
    axes.tick_params(axis="x", length=0, labeltop=True, labelbottom=False, labelsize=8)
    disagreements = {}
    for cell in shown_cells.to_dict("records"):
        lane = lanes_by_name[cell["heading"], cell["lane"]]
        disagreement_text = describe_disagreement(cell["answers"])
        ranks_label = presentation.format_ranks(cell["world_size"], device)
        _draw_cell(
            axes,
            world_sizes.index(cell["world_size"]),
            lane.y,
            cell["answers"],
            evidence_kinds,
            unit_bytes,
            has_batch_search,
        )
        if disagreement_text:
            disagreements[lane.y, world_sizes.index(cell["world_size"])] = (
                f"{cell['lane']}, {cell['heading']}, {ranks_label} of {cell['memory_gib']:.3g} GiB: "
                f"{disagreement_text}."
            )
            _mark_disagreement(axes, world_sizes.index(cell["world_size"]), lane.y, len(evidence_kinds))
    agreement_text = describe_agreement(list(shown_cells["answers"]))
    caption = f"{title}. Evidence: {', '.join(evidence_kinds)}. {format_plural(len(shown_cells), 'configuration')}"
    caption += f", {agreement_text}" if agreement_text else "."
    if disagreements:
        caption += f" {CPU_CAVEAT if device == 'cpu' else GPU_CAVEAT}"
    alt_text = (
        f"Map of models and strategies ({len(lanes_by_name)}) against "
        f"{presentation.format_world_sizes(world_sizes, device)}, {subject}: "
    )
    alt_text += (
        "; ".join(f"{evidence}: {_format_outcome_counts(shown_cells, evidence)}" for evidence in evidence_kinds)
        + f". Disagreements: {len(disagreements)}."
    )
    notes = [disagreements[position] for position in sorted(disagreements)]
    name = build_slug("frontier", subject, page_suffix)
    return Drawing(name, title, figure, caption, alt_text, wide=width_in > style.FIGURE_WIDTH_IN, notes=notes)


def _format_outcome_counts(shown_cells: pd.DataFrame, evidence: str) -> str:
    outcomes = [
        answer.outcome for answers in shown_cells["answers"] for answer in answers if answer.evidence == evidence
    ]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in OUTCOME_COLOURS if outcome in outcomes)


def _draw_cell(
    axes: Axes,
    x: int,
    y: float,
    answers: Sequence[FitAnswer],
    evidence_kinds: Sequence[str],
    unit_bytes: int,
    has_batch_search: bool,
) -> None:
    """One strip per kind of evidence, from top to bottom."""
    answers_by_evidence = {answer.evidence: answer for answer in answers}
    for position, evidence in enumerate(evidence_kinds):
        strip_top = y + (position - len(evidence_kinds) / 2) * STRIP_HEIGHT_IN
        answer = answers_by_evidence.get(evidence)
        patch_style = (
            {"facecolor": "white", "edgecolor": "#c4c4c4", "linewidth": 0.4}
            if answer is None
            else _build_strip_style(answer)
        )
        axes.add_patch(Rectangle((x - 0.46, strip_top + 0.008), 0.92, STRIP_HEIGHT_IN - 0.016, zorder=2, **patch_style))
        if answer is None:
            continue
        strip_text = answer.batch_label if has_batch_search else _format_peak(answer, unit_bytes)
        if answer.is_degraded:
            strip_middle = strip_top + STRIP_HEIGHT_IN / 2
            axes.plot(
                x - 0.4,
                strip_middle,
                "<",
                markersize=3.5,
                markerfacecolor="white",
                markeredgecolor=style.INK_COLOUR,
                zorder=3,
            )
        is_solid = style.EVIDENCE_STYLES[evidence].is_filled and answer.outcome == OOM
        text_background = None if is_solid else {"facecolor": patch_style["facecolor"], "edgecolor": "none", "pad": 0.5}
        axes.text(
            x, strip_top + STRIP_HEIGHT_IN / 2, strip_text, ha="center", va="center_baseline", fontsize=6.6, zorder=3,
            bbox=text_background,
            color="white" if is_solid else style.INK_COLOUR, fontweight="bold" if answer.outcome == OOM else "normal",
        )  # fmt: skip


def _build_strip_style(answer: FitAnswer) -> dict[str, Any]:
    """Outcome in colour, evidence in fill, hatch and line; light where something fits, so that it can be read."""
    patch_style = style.build_bar_style(OUTCOME_COLOURS[answer.outcome], answer.evidence)
    if style.EVIDENCE_STYLES[answer.evidence].is_filled and answer.outcome != OOM:
        patch_style["facecolor"] = style.lighten_colour(OUTCOME_COLOURS[answer.outcome], 0.55)
    if answer.outcome in DOTTED_OUTCOMES:
        patch_style["hatch"] = "..."
    return {**patch_style, "linewidth": 0.7}


def _format_peak(answer: FitAnswer, unit_bytes: int) -> str:
    if answer.outcome == OOM:
        return "OOM"
    value = "fits" if pd.isna(answer.peak_bytes) else format_number(answer.peak_bytes / unit_bytes, 2)
    return {CLOSE_CALL: f"{value}?", MIXED_REPEATS: "mixed"}.get(answer.outcome, value)


def _mark_disagreement(axes: Axes, x: int, y: float, num_strips: int) -> None:
    """Mark a cell whose kinds of evidence contradict each other."""
    half_height = num_strips * STRIP_HEIGHT_IN / 2
    axes.add_patch(
        Rectangle(
            (x - 0.48, y - half_height - 0.012),
            0.96,
            2 * half_height + 0.024,
            fill=False,
            edgecolor=style.INK_COLOUR,
            lw=1.8,
            zorder=4,
        )
    )
    axes.text(
        x + 0.47, y, "≠", ha="center", va="center", fontsize=9, fontweight="bold", zorder=6,
        bbox={"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": style.INK_COLOUR, "linewidth": 0.9},
    )  # fmt: skip


def _build_legend(
    shown_cells: pd.DataFrame, evidence_kinds: Sequence[str], fits_label: str
) -> list[tuple[Artist, str]]:
    answers = [answer for cell_answers in shown_cells["answers"] for answer in cell_answers]
    middle_labels = {2: [], 3: [" (middle)"], 4: [" (second)", " (third)"]}
    position_labels = [" (top)", *middle_labels[len(evidence_kinds)], " (bottom)"] if len(evidence_kinds) > 1 else [""]
    legend_entries: list[tuple[Artist, str]] = [
        (Patch(**{**style.build_bar_style(style.MUTED_COLOUR, evidence), "linewidth": 0.7}), evidence + position_label)
        for evidence, position_label in zip(evidence_kinds, position_labels, strict=True)
    ]
    outcome_labels = {
        FITS: fits_label,
        OOM: "OOM: out of memory",
        CLOSE_CALL: CLOSE_CALL,
        MIXED_REPEATS: "repeats differ",
    }
    for outcome, label in outcome_labels.items():
        if any(answer.outcome == outcome for answer in answers):
            patch_style = style.build_bar_style(OUTCOME_COLOURS[outcome], "measured")
            if outcome != OOM:
                patch_style["facecolor"] = style.lighten_colour(OUTCOME_COLOURS[outcome], 0.55)
            if outcome in DOTTED_OUTCOMES:
                patch_style["hatch"] = "..."
            legend_entries.append((Patch(**patch_style), label))
    if any(answer.is_degraded for answer in answers):
        legend_entries.append(lanes.DEGRADED_LEGEND_ENTRY)
    if any(describe_disagreement(cell_answers) for cell_answers in shown_cells["answers"]):
        legend_entries.append(
            (Patch(fill=False, edgecolor=style.INK_COLOUR, linewidth=1.8), "≠ kinds of evidence disagree")
        )
    return legend_entries


def _build_listing(cells: pd.DataFrame) -> FigureTable:
    """The cells of one device, memory and precision as a table."""
    evidence_kinds = _list_evidence_kinds(cells)
    plural_noun = get_rank_nouns(str(cells["device"].iloc[0]))
    rows = []
    for cell in cells.to_dict("records"):
        texts_by_evidence = {answer.evidence: answer.description for answer in cell["answers"]}
        rows.append(
            [
                cell["heading"],
                cell["lane"],
                str(cell["world_size"]),
                *(texts_by_evidence.get(evidence, MISSING) for evidence in evidence_kinds),
                *(["disagree" if describe_disagreement(cell["answers"]) else ""] if len(evidence_kinds) > 1 else []),
            ]
        )
    ranks_heading = plural_noun[0].upper() + plural_noun[1:]
    columns = ["Strategy", "Model", ranks_heading, *(evidence.capitalize() for evidence in evidence_kinds)]
    columns += ["Agreement"] if len(evidence_kinds) > 1 else []
    return FigureTable(
        f"The frontier as a table: {_describe_subject(cells)}", columns, rows, frozenset({ranks_heading})
    )
