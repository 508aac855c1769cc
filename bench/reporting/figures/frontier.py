"""Where memory runs out: model size down, GPUs across, one block per strategy, all kinds of evidence in one cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from bench.reporting import labels, lanes, marks, style
from bench.reporting.answers import CLOSE, FITS, MIXED, OOM, Answer, agreement, disagreement
from bench.reporting.cells import by
from bench.reporting.drawing import Drawing, Listing, Section
from bench.reporting.frontier_cells import frontier_cells
from bench.reporting.labels import MISSING, counted, memory_unit, number, rank_noun, rank_nouns, slug

TITLE = "The OOM frontier"
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
NOTHING = (
    "No configuration was tried at several numbers of ranks, at several batch sizes or with several kinds of evidence "
    "where it is known how much memory there is."
)
ON_CPU = (
    "On a CPU the limit holds for all memory of a process. Where processes really communicate, gloo's buffers and "
    "threads count; a rehearsal has neither. What libraries work in counts wherever something ran, but a prediction "
    "counts tensors only. So near the limit a prediction, and sometimes a rehearsal, fits where the run does not."
)
ON_GPU = (
    "A limit holds for the caching allocator. CUDA's context and NCCL's buffers lie outside it, so a GPU really of "
    "that size leaves the allocator one or two GiB less than the same limit on a larger one."
)

STRIP_IN, GAP_IN = 0.155, 0.05
CELL_IN, LABELS_IN = 0.56, 1.75
MOST_COLUMNS = 12
DOTTED = (CLOSE, MIXED)
COLOURS = {FITS: "#3b7fb5", OOM: style.OOM_COLOUR, CLOSE: "#8a6d00", MIXED: "#8a6d00"}


def select(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell: see `frontier_cells`."""
    return frontier_cells(table)


def section(table: pd.DataFrame, palette: dict[str, style.Mark]) -> Section:
    """Figures per kind of device with so much memory, and precision; a table of the same."""
    result = Section("frontier", TITLE, HOW_TO_READ)
    selected = select(table)
    if not len(selected):
        result.nothing = NOTHING
        return result
    for _, cells in by(selected, "device", "memory_gib", "precision"):
        across = sorted(cells["world_size"].unique())
        parts = [
            (columns, groups)
            for columns in (across[at : at + MOST_COLUMNS] for at in range(0, len(across), MOST_COLUMNS))
            for groups in _pages(cells)
        ]
        for number_, (columns, groups) in enumerate(parts, 1):
            part = f" ({number_} of {len(parts)})" if len(parts) > 1 else ""
            result.plan(_draw, groups, cells, columns, part)
        result.listings.append(_listing(cells))
    return result


def _pages(cells: pd.DataFrame) -> list[list[lanes.Group]]:
    lines = cells.drop_duplicates(["heading", "lane"])
    return list(lanes.paginate(lines, lambda row: row["lane"], lane_in=_lane_in(cells)))


def _kinds(cells: pd.DataFrame) -> Sequence[str]:
    return style.evidence_in_order(one.evidence for answers in cells["answers"] for one in answers)


def _lane_in(cells: pd.DataFrame) -> float:
    return len(_kinds(cells)) * STRIP_IN + GAP_IN


def _searched(cells: pd.DataFrame) -> bool:
    """Whether any configuration was tried at several batch sizes: the figure then shows the largest that fits."""
    return any(len(one.tried) > 1 for answers in cells["answers"] for one in answers)


def _subject(cells: pd.DataFrame) -> str:
    first = cells.iloc[0]
    noun = rank_noun(first["device"])
    return f"{first['memory_gib']:.3g} GiB per {noun}, {first['precision']}"


def _draw(groups: list[lanes.Group], cells: pd.DataFrame, columns: Sequence[int], part: str) -> Drawing | None:
    """One figure; None if none of its cells was asked about."""
    lines = {(lane.row["heading"], lane.row["lane"]): lane for group in groups for lane in group.lanes}
    here = [(heading, lane) in lines for heading, lane in zip(cells["heading"], cells["lane"], strict=True)]
    shown = cells[pd.Series(here, index=cells.index) & cells["world_size"].isin(columns)]
    if not len(shown):
        return None
    device, kinds, searched = str(cells["device"].iloc[0]), _kinds(cells), _searched(cells)
    noun, subject = rank_noun(device), _subject(cells)
    peaks = [one.peak_bytes for answers in cells["answers"] for one in answers if not pd.isna(one.peak_bytes)]
    unit, size = memory_unit(max(peaks, default=0) / 10)  # a tenth of the largest is to read well, too
    title = ("Largest batch that fits" if searched else "What fits") + f": {subject}{part}"
    shared = cells["shared"].iloc[0]
    subtitle = "\n".join(text for text in (shared, f"Evidence: {', '.join(kinds)}") if text)
    meaning = f"largest batch per {noun} that fits" if searched else f"fits: peak in {unit} per {noun}"
    key = _key(shown, kinds, meaning)
    width = max(style.WIDTH_IN, LABELS_IN + CELL_IN * len(columns))
    figure, axes = lanes.axes_for(groups, title, subtitle, key, width_in=width, labels_in=0.45)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(-0.5, max(len(columns), 4) - 0.5)
    axes.set_xticks(range(len(columns)), [str(count) for count in columns])
    axes.xaxis.set_label_position("top")
    axes.set_xlabel(f"{rank_nouns(device)} (world size)", fontsize=8)
    axes.tick_params(axis="x", length=0, labeltop=True, labelbottom=False, labelsize=8)
    apart = {}
    for cell in shown.to_dict("records"):
        lane = lines[cell["heading"], cell["lane"]]
        words = disagreement(cell["answers"])
        ranks = labels.ranks(cell["world_size"], device)
        _cell(axes, columns.index(cell["world_size"]), lane.y, cell["answers"], kinds, size, searched)
        if words:
            apart[lane.y, columns.index(cell["world_size"])] = (
                f"{cell['lane']}, {cell['heading']}, {ranks} of {cell['memory_gib']:.3g} GiB: {words}."
            )
            _apart(axes, columns.index(cell["world_size"]), lane.y, len(kinds))
    told = agreement(list(shown["answers"]))
    caption = f"{title}. Evidence: {', '.join(kinds)}. {counted(len(shown), 'configuration')}"
    caption += f", {told}" if told else "."
    if apart:
        caption += f" {ON_CPU if device == 'cpu' else ON_GPU}"
    alt = (
        f"Map of {len(lines)} models and strategies against {len(columns)} numbers of {rank_nouns(device)}, {subject}: "
    )
    alt += "; ".join(f"{kind}: {_counts(shown, kind)}" for kind in kinds) + f". Disagreements: {len(apart)}."
    notes = [apart[place] for place in sorted(apart)]
    name = slug("frontier", subject, part)
    return Drawing(name, title, figure, caption, alt, wide=width > style.WIDTH_IN, notes=notes)


def _counts(shown: pd.DataFrame, kind: str) -> str:
    outcomes = [one.outcome for answers in shown["answers"] for one in answers if one.evidence == kind]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in COLOURS if outcome in outcomes)


def _cell(
    axes: Axes, x: int, y: float, answers: Sequence[Answer], kinds: Sequence[str], size: int, searched: bool
) -> None:
    """One strip per kind of evidence, from top to bottom."""
    given = {one.evidence: one for one in answers}
    for position, kind in enumerate(kinds):
        top = y + (position - len(kinds) / 2) * STRIP_IN
        one = given.get(kind)
        look = {"facecolor": "white", "edgecolor": "#c4c4c4", "linewidth": 0.4} if one is None else _look(one)
        axes.add_patch(Rectangle((x - 0.46, top + 0.008), 0.92, STRIP_IN - 0.016, zorder=2, **look))
        if one is None:
            continue
        words = one.batch if searched else _peak(one, size)
        if one.degraded:
            middle = top + STRIP_IN / 2
            axes.plot(
                x - 0.4, middle, "<", markersize=3.5, markerfacecolor="white", markeredgecolor=style.INK, zorder=3
            )
        solid = style.EVIDENCE_STYLES[kind].filled and one.outcome == OOM
        behind = None if solid else {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 0.5}
        axes.text(
            x, top + STRIP_IN / 2, words, ha="center", va="center_baseline", fontsize=6.6, zorder=3, bbox=behind,
            color="white" if solid else style.INK, fontweight="bold" if one.outcome == OOM else "normal",
        )  # fmt: skip


def _look(one: Answer) -> dict[str, Any]:
    """Outcome in colour, evidence in fill, hatch and line; light where something fits, so that it can be read."""
    look = style.bar_style(COLOURS[one.outcome], one.evidence)
    if style.EVIDENCE_STYLES[one.evidence].filled and one.outcome != OOM:
        look["facecolor"] = style.lighter(COLOURS[one.outcome], 0.55)
    if one.outcome in DOTTED:
        look["hatch"] = "..."
    return {**look, "linewidth": 0.7}


def _peak(one: Answer, size: int) -> str:
    if one.outcome == OOM:
        return "OOM"
    value = "fits" if pd.isna(one.peak_bytes) else number(one.peak_bytes / size, 2)
    return {CLOSE: f"{value}?", MIXED: "mixed"}.get(one.outcome, value)


def _apart(axes: Axes, x: int, y: float, strips: int) -> None:
    """Mark a cell whose kinds of evidence contradict each other."""
    half = strips * STRIP_IN / 2
    axes.add_patch(
        Rectangle(
            (x - 0.48, y - half - 0.012), 0.96, 2 * half + 0.024, fill=False, edgecolor=style.INK, lw=1.8, zorder=4
        )
    )
    axes.text(
        x + 0.47, y, "≠", ha="center", va="center", fontsize=9, fontweight="bold", zorder=6,
        bbox={"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": style.INK, "linewidth": 0.9},
    )  # fmt: skip


def _key(shown: pd.DataFrame, kinds: Sequence[str], meaning: str) -> list[tuple[Artist, str]]:
    answers = [one for some in shown["answers"] for one in some]
    between = {2: [], 3: [" (middle)"], 4: [" (second)", " (third)"]}
    places = [" (top)", *between[len(kinds)], " (bottom)"] if len(kinds) > 1 else [""]
    entries: list[tuple[Artist, str]] = [
        (Patch(**{**style.bar_style(style.MUTED, kind), "linewidth": 0.7}), kind + place)
        for kind, place in zip(kinds, places, strict=True)
    ]
    names = {FITS: meaning, OOM: "OOM: out of memory", CLOSE: CLOSE, MIXED: "repeats differ"}
    for outcome, name in names.items():
        if any(one.outcome == outcome for one in answers):
            look = style.bar_style(COLOURS[outcome], "measured")
            if outcome != OOM:
                look["facecolor"] = style.lighter(COLOURS[outcome], 0.55)
            if outcome in DOTTED:
                look["hatch"] = "..."
            entries.append((Patch(**look), name))
    if any(one.degraded for one in answers):
        entries.append(marks.DEGRADED)
    if any(disagreement(some) for some in shown["answers"]):
        entries.append((Patch(fill=False, edgecolor=style.INK, linewidth=1.8), "≠ kinds of evidence disagree"))
    return entries


def _listing(cells: pd.DataFrame) -> Listing:
    """The cells of one device, memory and precision as a table."""
    kinds = _kinds(cells)
    nouns = rank_nouns(str(cells["device"].iloc[0]))
    rows = []
    for cell in cells.to_dict("records"):
        given = {one.evidence: one.words for one in cell["answers"]}
        rows.append(
            [
                cell["heading"],
                cell["lane"],
                str(cell["world_size"]),
                *(given.get(kind, MISSING) for kind in kinds),
                *(["disagree" if disagreement(cell["answers"]) else ""] if len(kinds) > 1 else []),
            ]
        )
    head = nouns[0].upper() + nouns[1:]
    columns = ["Strategy", "Model", head, *(kind.capitalize() for kind in kinds)]
    columns += ["Agreement"] if len(kinds) > 1 else []
    return Listing(f"The frontier as a table: {_subject(cells)}", columns, rows, frozenset({head}))
