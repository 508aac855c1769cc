"""From rows to marks: one entry per configuration, with the median over its repeats and what became of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from bench.core.presentation import TOO_CLOSE, format_list, format_memory
from bench.reporting.drawing.style import EVIDENCE_STYLES
from bench.reporting.tables.table import CELL_COLUMNS

NUMBER_COLUMNS = ["parameters", "batch_size_per_gpu", "sequence_length", "memory_limit_bytes"]
SORT_COLUMNS = [
    "place",
    "precision",
    "memory_limit_bytes",
    "settings",
    "parameters",
    "model",
    "world_size",
    *NUMBER_COLUMNS[1:3],
]
"""Figures list runs in this order (no limit first), then by variant and by kind of evidence."""


def sort_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows (or cells) in the order figures list them: sizes ascending, variants from replicated to sharded."""
    evidence_positions = {kind: position for position, kind in enumerate(EVIDENCE_STYLES)}
    sort_frame = frame.assign(
        _variant=[variant.order for variant in frame["variant_key"]],
        _evidence=frame["evidence"].map(evidence_positions),
    )
    repeat_columns = [name for name in ("repeat",) if name in frame]
    return frame.loc[
        sort_frame.sort_values(
            [*SORT_COLUMNS, "_variant", "_evidence", *repeat_columns], kind="stable", na_position="first"
        ).index
    ]


def build_cells(table: pd.DataFrame, value_column: str, *extra_columns: str) -> pd.DataFrame:
    """One row per configuration that ran to an end: fitted (``ok``) or ran out of memory (``oom``).

    Returns
    -------
    DataFrame
        The columns of `CELL_COLUMNS`, ``heading``, ``device``, ``flop_convention``, ``variant_key``, and: ``median``,
        ``low``, ``high`` and ``points`` of column `value_column` over the repeats that have it (NaN and empty if none
        has); the median of each column in `extra_columns`, under its name; ``fitted`` and ``out_of_memory``, numbers of
        repeats; ``oom_phase`` and ``oom_bytes`` of the first that ran out; ``degraded``, whether any was not
        representative.
    """
    completed_rows = table[table["status"].isin(["ok", "oom"])]
    needed_columns = [
        *NUMBER_COLUMNS,
        "heading",
        "device",
        "flop_convention",
        "variant_key",
        "status",
        "oom_phase",
        "oom_bytes",
        "degraded",
    ]
    cell_rows = [
        _build_cell(rows, value_column, extra_columns)
        for rows in group_rows(completed_rows, CELL_COLUMNS, [*needed_columns, value_column, *extra_columns])
    ]
    if not cell_rows:
        return pd.DataFrame(columns=[*CELL_COLUMNS, "heading", "median", "out_of_memory"])
    return sort_rows(pd.DataFrame(cell_rows)).reset_index(drop=True)


def group_rows(frame: pd.DataFrame, keys: Sequence[str], columns: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Some columns of the rows of every group, as dictionaries, in the order of the groups' first rows.

    Missing values (pandas' NA) are None, and equal as keys. Slicing a frame of a hundred columns for each of thousands
    of groups would take a hundred times as long.
    """
    names = list(dict.fromkeys((*keys, *columns)))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for values in zip(*(frame[name].astype(object) for name in names), strict=True):
        key = tuple(None if pd.isna(value) else value for value in values[: len(keys)])
        row = {name: None if value is pd.NA else value for name, value in zip(names, values, strict=True)}
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def list_known_values(rows: Iterable[Mapping[Any, Any]], column: str) -> list[Any]:
    """The values of a column that are there."""
    return [row[column] for row in rows if not pd.isna(row[column])]


def list_first_known_values(rows: Iterable[Mapping[Any, Any]], *columns: str) -> list[Any]:
    """Of every row the first of some columns that is there, where one is."""
    return [values[0] for row in rows if (values := [row[column] for column in columns if not pd.isna(row[column])])]


def _build_cell(rows: list[dict[str, Any]], value_column: str, extra_columns: tuple[str, ...]) -> dict[str, Any]:
    first_row = rows[0]
    fitted_rows, oom_rows = ([row for row in rows if row["status"] == status] for status in ("ok", "oom"))
    points = sorted(float(point) for point in list_known_values(fitted_rows, value_column))
    first_oom_row = oom_rows[0] if oom_rows else None
    return {
        **{
            name: first_row[name]
            for name in dict.fromkeys(
                (*CELL_COLUMNS, *NUMBER_COLUMNS, "heading", "device", "flop_convention", "variant_key")
            )
        },
        "median": compute_median(points),
        "low": points[0] if points else float("nan"),
        "high": points[-1] if points else float("nan"),
        "points": points,
        **{name: compute_median(list_known_values(fitted_rows, name)) for name in extra_columns},
        "fitted": len(fitted_rows),
        "out_of_memory": len(oom_rows),
        "oom_phase": None if first_oom_row is None else first_oom_row["oom_phase"],
        "oom_bytes": None
        if first_oom_row is None or pd.isna(first_oom_row["oom_bytes"])
        else int(first_oom_row["oom_bytes"]),
        "degraded": any(list_known_values(fitted_rows, "degraded")),
    }


def compute_median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return float(np.median(np.asarray(values, dtype=float))) if len(values) else float("nan")


def select_drawable_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells with something to draw: a value, or the fact that memory ran out."""
    return cells[cells["median"].notna() | (cells["out_of_memory"] > 0)]


def iterate_groups(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Groups in the order their first rows have."""
    yield from frame.groupby(list(columns), dropna=False, sort=False)


# --- What rows say about whether something fits: of repeats, of several batch sizes, of several kinds of evidence.

FITS, OOM, MIXED_REPEATS, FAILED, SKIPPED = "fits", "out of memory", "some repeats fit", "failed", "skipped"
CLOSE_CALL = TOO_CLOSE


FitRow = Mapping[str, Any]

FIT_COLUMNS = (
    *("status", "fit", "batch_size_per_gpu", "oom_phase", "degraded"),
    *("peak_allocated_bytes", "peak_reserved_bytes"),
)
"""What of a row an answer is made of."""


def classify_outcome(repeats: Sequence[FitRow]) -> str:
    """What became of the repeats of one run, in a word."""
    fitted_rows, oom_rows = ([row for row in repeats if row["status"] == status] for status in ("ok", "oom"))
    if fitted_rows and oom_rows:
        return MIXED_REPEATS
    if fitted_rows:
        return CLOSE_CALL if CLOSE_CALL in list_known_values(fitted_rows, "fit") else FITS
    if oom_rows:
        return OOM
    return SKIPPED if all(row["status"] == "skipped" for row in repeats) else FAILED


@dataclass(frozen=True)
class FitAnswer:
    """What one kind of evidence says about one configuration, over all the batch sizes it was asked about."""

    evidence: str
    batch_sizes: tuple[int, ...]
    """Batch sizes, ascending."""
    max_fitting_batch: int | None
    """The largest batch that fits."""
    close_call_batch: int | None
    """A larger one that is predicted too close to the limit to call."""
    min_oom_batch: int | None
    """The smallest batch that runs out of memory."""
    peak_bytes: float
    """Memory reserved at `max_fitting_batch`, or at `close_call_batch` where nothing surely fits; NaN if unknown."""
    needed_bytes: float
    """Memory that `min_oom_batch` is predicted to need; NaN where it ran (and nobody knows) or nothing runs out of
    memory."""
    oom_phase: str | None
    """Where memory runs out at `min_oom_batch`."""
    is_degraded: bool = False
    """Whether the largest batch that fits does so at a time that does not represent its speed."""

    @property
    def is_contradictory(self) -> bool:
        """Whether the rows contradict one another: some repeats fit, or a larger batch than one that does not."""
        return (
            self.max_fitting_batch is not None
            and self.min_oom_batch is not None
            and self.min_oom_batch <= self.max_fitting_batch
        )

    @property
    def outcome(self) -> str:
        """In a word, whether anything that was tried fits."""
        if self.is_contradictory:
            return MIXED_REPEATS
        if self.max_fitting_batch is not None:
            return FITS
        return CLOSE_CALL if self.close_call_batch is not None else OOM

    @property
    def batch_label(self) -> str:
        """The largest batch that fits: ``148``, ``≥8`` where no larger one was tried, ``0-3`` where nobody can tell."""
        if self.max_fitting_batch is None and self.close_call_batch is None:
            smallest_batch = self.batch_sizes[0]
            return "OOM" if smallest_batch == 1 else f"<{smallest_batch}"
        largest_fitting = self.max_fitting_batch or 0
        if self.close_call_batch is not None:
            return f"{largest_fitting}–{self.close_call_batch}"
        return (
            f"{largest_fitting}"
            if self.min_oom_batch is not None and self.min_oom_batch <= largest_fitting + 1
            else f"≥{largest_fitting}"
        )

    @property
    def description(self) -> str:
        """In words and numbers: ``batch 4 fits (peak 250 MiB), batch 5 runs out of memory in forward``."""
        peak_text = f"peak {format_memory(self.peak_bytes)}"
        parts = []
        if self.max_fitting_batch is not None:
            parts.append(f"batch {self.max_fitting_batch} fits ({peak_text})")
        if self.close_call_batch is not None:
            parts.append(
                f"batch {self.close_call_batch} is {CLOSE_CALL}"
                + ("" if self.max_fitting_batch is not None else f" ({peak_text})")
            )
        if self.min_oom_batch is not None:
            needed_text = "" if pd.isna(self.needed_bytes) else f" (needs {format_memory(self.needed_bytes)})"
            parts.append(
                f"batch {self.min_oom_batch} runs out of memory in "
                f"{self.oom_phase or 'a phase not stated'}{needed_text}"
            )
        return ", ".join(parts)


def build_fit_answer(evidence: str, rows: Sequence[FitRow]) -> FitAnswer:
    """The answer of some rows (``ok`` or ``oom``, with `FIT_COLUMNS`) of one kind of evidence and one configuration but
    for the batch."""
    rows_by_batch: dict[int, list[FitRow]] = {}
    for row in rows:
        rows_by_batch.setdefault(int(row["batch_size_per_gpu"]), []).append(row)
    batch_sizes = sorted(rows_by_batch)
    outcomes = {size: classify_outcome(rows_by_batch[size]) for size in batch_sizes}
    fitting_sizes = [size for size, outcome in outcomes.items() if outcome in (FITS, MIXED_REPEATS)]
    close_call_sizes = [size for size, outcome in outcomes.items() if outcome == CLOSE_CALL]
    oom_sizes = [size for size, outcome in outcomes.items() if outcome in (OOM, MIXED_REPEATS)]
    max_fitting, min_oom = max(fitting_sizes, default=None), min(oom_sizes, default=None)
    close_call = max((size for size in close_call_sizes if max_fitting is None or size > max_fitting), default=None)
    largest_batch = close_call if max_fitting is None else max_fitting
    fitted_rows = [row for row in rows_by_batch.get(largest_batch or 0, []) if row["status"] == "ok"]
    oom_rows = [row for row in rows_by_batch.get(min_oom or 0, []) if row["status"] == "oom"]
    oom_phases = list_known_values(oom_rows, "oom_phase")
    return FitAnswer(
        evidence=evidence,
        batch_sizes=tuple(batch_sizes),
        max_fitting_batch=max_fitting,
        close_call_batch=close_call,
        min_oom_batch=min_oom,
        peak_bytes=_find_max_memory(fitted_rows),
        needed_bytes=_find_max_memory(oom_rows),
        oom_phase=oom_phases[0] if oom_phases else None,
        is_degraded=any(list_known_values(fitted_rows, "degraded")),
    )


def _find_max_memory(rows: Sequence[FitRow]) -> float:
    """The largest memory reserved, or allocated where that is all that is known."""
    peaks = list_first_known_values(rows, "peak_reserved_bytes", "peak_allocated_bytes")
    return float(max(peaks)) if peaks else float("nan")


def is_disagreement(first: FitAnswer, second: FitAnswer) -> bool:
    """Whether what one says fits is at least as large as what the other says does not.

    What fits at some batch fits at every smaller one, so answers about different batches can contradict each other,
    too. A prediction that is too close to call contradicts nothing, nor do repeats that contradict each other.
    """
    return any(
        fitting_answer.max_fitting_batch is not None
        and oom_answer.min_oom_batch is not None
        and fitting_answer.max_fitting_batch >= oom_answer.min_oom_batch
        for fitting_answer, oom_answer in ((first, second), (second, first))
    ) and not (first.is_contradictory or second.is_contradictory)


def describe_disagreement(answers: Sequence[FitAnswer]) -> str:
    """What different kinds of evidence contradict each other in, in words and numbers; empty if they do not."""
    disagreeing_pairs = [pair for pair in itertools.combinations(answers, 2) if is_disagreement(*pair)]
    involved_answers = [answer for answer in answers if any(answer in pair for pair in disagreeing_pairs)]
    return "; ".join(f"{answer.evidence}: {answer.description}" for answer in involved_answers)


def describe_agreement(cells: Sequence[Sequence[FitAnswer]]) -> str:
    """How many configurations have several kinds of evidence, and how many of these contradict each other."""
    compared_cells = [answers for answers in cells if len(answers) > 1]
    if not compared_cells:
        return ""
    evidence_kinds = list(dict.fromkeys(answer.evidence for answers in compared_cells for answer in answers))
    disagreement_count = sum(bool(describe_disagreement(answers)) for answers in compared_cells)
    conclusion = "all agree" if not disagreement_count else f"{disagreement_count} of them disagree"
    return f"{len(compared_cells)} with several kinds of evidence ({format_list(evidence_kinds)}): {conclusion}."
