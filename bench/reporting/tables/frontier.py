"""From rows to the cells of the OOM frontier: which configurations share one, and what each is called."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from bench.core import presentation
from bench.records.matching import encode_config_key
from bench.reporting.drawing.style import sort_evidence
from bench.reporting.tables.cells import FIT_COLUMNS, build_fit_answer, group_rows, list_known_values
from bench.reporting.tables.table import COMPLETED_STATUSES, SETTING_FORMATTERS, RowNeeds

BATCH_FIELD, GPUS_FIELD = "batch_size_per_gpu", "gpus"

MIN_TRIED_BATCHES = 3
"""Batch sizes of one configuration by which a search for the largest is known."""

FRONTIER_NEEDS = RowNeeds({"status": COMPLETED_STATUSES}, present=("fit_question",), min_rows=2)

FRONTIER_COLUMNS = [
    "device",
    "memory_gib",
    "precision",
    "shared",
    "heading",
    "lane",
    "world_size",
    "model",
    "parameters",
    "answers",
    "links",
]

EXPLICIT_FIELDS = {
    BATCH_FIELD,
    GPUS_FIELD,
    "gpus_per_node",
    "device",
    "memory_gib",
    "strategy.name",
    "strategy.sharding_factor",
    "model.name",
}
"""Parts of a question that a cell's place in its figure tells, or its name; precision apart from its name is not."""


def find_frontier_rows(table: pd.DataFrame) -> pd.Series:
    """Which rows the frontier shows, True or False for each.

    Those that say whether something fits, where it is known how much memory there is, if among all that is asked of
    one kind of device with as much memory and in one precision there is more than one number of ranks for a model and
    strategy, more than one batch size of one configuration, or more than one kind of evidence of one configuration.
    """
    has_question = table["fit_question"].notna() & table["status"].isin(COMPLETED_STATUSES)
    is_on_frontier = pd.Series(False, index=table.index)
    rows = table[has_question]
    if not len(rows):
        return is_on_frontier
    questions = rows["fit_question"]
    question_frame = rows.assign(
        _device=[question["device"] for question in questions],
        _memory=[question["memory_gib"] for question in questions],
        _cell=[encode_config_key(question, BATCH_FIELD) for question in questions],
        _line=[
            encode_config_key(question, BATCH_FIELD, GPUS_FIELD, "strategy.sharding_factor") for question in questions
        ],
    )
    for _, group in question_frame.groupby(["_device", "_memory", "precision"], sort=False):
        cells = group.groupby("_cell")
        max_distinct_count = max(
            int(cells[BATCH_FIELD].nunique().max()),
            int(cells["evidence"].nunique().max()),
            int(group.groupby(["_line", "strategy"])["world_size"].nunique().max()),
        )
        is_on_frontier[group.index] = max_distinct_count > 1
    return is_on_frontier


def drop_batch_search_tries(table: pd.DataFrame) -> pd.DataFrame:
    """The table without what a search for the largest batch tried on its way: figures of speed and memory show its end.

    A search is known by its end: of three batch sizes or more of one configuration one does not fit, and the next
    smaller does. Of its rows those of the largest batch that fits are kept, or may fit where nothing surely does.
    """
    rows_with_question = table[table["fit_question"].notna() & table["status"].isin(COMPLETED_STATUSES)]
    try_indices: list[Any] = []
    for rows in group_rows(_add_identity(rows_with_question), ("evidence", "_cell"), (*FIT_COLUMNS, "_index")):
        answer = build_fit_answer(str(rows[0]["evidence"]), rows)
        largest_batch = max(
            (size for size in (answer.max_fitting_batch, answer.close_call_batch) if size is not None), default=None
        )
        if (
            len(answer.batch_sizes) >= MIN_TRIED_BATCHES
            and largest_batch is not None
            and answer.min_oom_batch == largest_batch + 1
        ):
            try_indices += [
                row["_index"]
                for row in rows
                if row[BATCH_FIELD]
                != (answer.close_call_batch if answer.max_fitting_batch is None else answer.max_fitting_batch)
            ]
    return table.drop(index=try_indices)


def build_frontier_cells(table: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration but for its batch size, with the answers of every kind of evidence.

    Returns
    -------
    DataFrame
        ``device``, ``memory_gib`` and ``precision`` say which figure, ``heading`` (strategy and settings) which block
        of it, ``lane`` (model) which line, ``world_size`` which column; ``shared`` is what all cells of the figure
        have in common in words; ``links`` are the anchors of its runs; ``answers`` is a list
        of `FitAnswer`, from what is most real to what nothing ran for.
        Blocks are ordered from replicated to sharded, lines by the number of parameters.
    """
    rows = table[find_frontier_rows(table)]
    if not len(rows):
        return pd.DataFrame(columns=FRONTIER_COLUMNS)
    name_columns = (
        "strategy",
        "effective_strategy",
        "sharding_factor",
        "world_size",
        "model",
        "parameters",
        "precision",
    )
    needed_columns = ("fit_question", "evidence", "link", *name_columns, *FIT_COLUMNS)
    all_cells = [_build_cell(group) for group in group_rows(_add_identity(rows), ("_cell",), needed_columns)]
    cells_by_figure: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in all_cells:
        cells_by_figure.setdefault((cell["device"], cell["memory_gib"], cell["precision"]), []).append(cell)
    for cells in cells_by_figure.values():
        _name_cells(cells)
    frame = pd.DataFrame([cell for key in sorted(cells_by_figure) for cell in cells_by_figure[key]])
    sort_columns = ["device", "memory_gib", "precision", "variant_key", "heading", "parameters", "lane", "world_size"]
    return frame.sort_values(sort_columns, kind="stable").reset_index(drop=True)[FRONTIER_COLUMNS]


def _add_identity(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their index, and the identity of their question but for the batch."""
    return rows.assign(
        _cell=[encode_config_key(question, BATCH_FIELD) for question in rows["fit_question"]], _index=rows.index
    )


def _build_cell(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first_row = rows[0]
    question = first_row["fit_question"]
    strategy_values = [first_row[name] for name in ("strategy", "effective_strategy", "sharding_factor", "world_size")]
    is_sharded_by_factor = presentation.get_strategy_presentation(str(first_row["strategy"])).is_sharded_by_factor
    if first_row["world_size"] == 1 and is_sharded_by_factor:  # where what shards fully begins
        strategy_values = [first_row["strategy"], f"{first_row['strategy']}/full_shard", None, None]
    parameters = list_known_values(rows, "parameters")
    return {
        "question": question,
        "device": question["device"],
        "memory_gib": question["memory_gib"],
        "precision": first_row["precision"],
        "variant_key": presentation.build_variant(*(None if pd.isna(value) else value for value in strategy_values)),
        "world_size": int(first_row["world_size"]),
        "model": first_row["model"],
        "parameters": int(parameters[0]) if parameters else 0,
        "batches": {row[BATCH_FIELD] for row in rows},
        "links": tuple(row["link"] for row in rows),
        "answers": [
            build_fit_answer(evidence, [row for row in rows if row["evidence"] == evidence])
            for evidence in sort_evidence({row["evidence"] for row in rows})
        ],
    }


def _name_cells(cells: list[dict[str, Any]]) -> None:
    """Give the cells of one figure their ``heading``, ``lane`` and ``shared``.

    What differs between them is named in the heading, or beside the model where it belongs to the model or its input;
    what all have in common, in ``shared``. A knob of a strategy counts as differing only where one strategy was tried
    with several values of it, the shape of a model only where models of one name differ in it.
    """
    is_batch_search = any(len(cell["batches"]) > 1 for cell in cells)
    field_paths = list(
        dict.fromkeys(path for cell in cells for path in cell["question"] if path not in EXPLICIT_FIELDS)
    )
    input_fields = ["sequence_length"] if is_batch_search else [BATCH_FIELD, "sequence_length"]
    differing_fields = {path for path in (*field_paths, *input_fields) if _has_several_values(cells, path)}
    for cell in cells:
        question, size_text = (
            cell["question"],
            presentation.format_count(cell["parameters"]) if cell["parameters"] else "",
        )
        cell_phrases = [
            _format_setting(path, question.get(path))
            for path in (*input_fields, *field_paths)
            if path in differing_fields
        ]
        model_phrases = {
            _format_setting(path, question.get(path))
            for path in differing_fields
            if path in input_fields or path.startswith("model.")
        }
        lane_parts = [
            f"{cell['model']} {size_text}".strip(),
            *(phrase for phrase in dict.fromkeys(cell_phrases) if phrase in model_phrases),
        ]
        lane_parts = (
            [" ".join(lane_parts[:2]), *lane_parts[2:]]
            if lane_parts[1:] and lane_parts[1].startswith("×")
            else lane_parts
        )
        heading_parts = [
            cell["variant_key"].label,
            *(phrase for phrase in dict.fromkeys(cell_phrases) if phrase not in model_phrases),
        ]
        cell["lane"], cell["heading"] = (" · ".join(filter(None, parts)) for parts in (lane_parts, heading_parts))
        common_phrases = [
            _format_setting(path, question.get(path))
            for path in (*input_fields, *ALWAYS_NAMED_SETTINGS)
            if path not in differing_fields
        ]
        cell["shared"] = ", ".join(filter(None, common_phrases)).replace(", ×", " ×")


ALWAYS_NAMED_SETTINGS = ("activation_checkpointing",)
"""Settings that are named even if they are the same in the whole figure: memory depends on them."""


def _has_several_values(cells: list[dict[str, Any]], path: str) -> bool:
    """Whether a part of the question has several values among cells that could be confused with each other."""
    scope_column = {"strategy": "variant_key", "model": "model"}.get(path.partition(".")[0])
    values: dict[Any, set[Any]] = {}
    for cell in cells:
        if path in cell["question"]:
            values.setdefault(cell[scope_column] if scope_column else None, set()).add(cell["question"][path])
    return any(len(distinct_values) > 1 for distinct_values in values.values())


def _format_setting(path: str, value: Any) -> str:
    """What a name says of a part of a question; empty where another column says it, or there is nothing to say."""
    name = path.rpartition(".")[2]
    phrases = {
        BATCH_FIELD: f"batch {value}",
        "sequence_length": f"× {value}",
        "loss": SETTING_FORMATTERS["compiled_loss"](value == "compiled"),
    }
    if path in phrases:
        return phrases[path]
    return SETTING_FORMATTERS[name](value) if name in SETTING_FORMATTERS else f"{name}={_format_value(value)}"


def _format_value(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
