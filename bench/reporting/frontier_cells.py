"""From rows to the cells of the OOM frontier: which configurations share one, and what each is called."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from bench.records.matching import identity
from bench.reporting import labels
from bench.reporting.answers import COLUMNS as ANSWERED
from bench.reporting.answers import answer
from bench.reporting.cells import grouped, known
from bench.reporting.style import evidence_in_order
from bench.reporting.table import SETTINGS

BATCH, RANKS = "batch_size_per_gpu", "gpus"

COLUMNS = [
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
]

TOLD = {
    BATCH,
    RANKS,
    "gpus_per_node",
    "device",
    "memory_gib",
    "strategy.name",
    "strategy.sharding_factor",
    "model.name",
}
"""Parts of a question that a cell's place in its figure tells, or its name; precision apart from its name is not."""


def on_the_frontier(table: pd.DataFrame) -> pd.Series:
    """Which rows the frontier shows, True or False for each.

    Those that say whether something fits, where it is known how much memory there is, if among all that is asked of
    one kind of device with as much memory and in one precision there is more than one number of ranks for a model and
    strategy, more than one batch size of one configuration, or more than one kind of evidence of one configuration.
    """
    asked = table["fit_question"].notna() & table["status"].isin(["ok", "oom"])
    result = pd.Series(False, index=table.index)
    rows = table[asked]
    if not len(rows):
        return result
    questions = rows["fit_question"]
    keys = rows.assign(
        _device=[question["device"] for question in questions],
        _memory=[question["memory_gib"] for question in questions],
        _cell=[identity(question, BATCH) for question in questions],
        _line=[identity(question, BATCH, RANKS, "strategy.sharding_factor") for question in questions],
    )
    for _, group in keys.groupby(["_device", "_memory", "precision"], sort=False):
        cells = group.groupby("_cell")
        several = max(
            int(cells[BATCH].nunique().max()),
            int(cells["evidence"].nunique().max()),
            int(group.groupby(["_line", "strategy"])["world_size"].nunique().max()),
        )
        result[group.index] = several > 1
    return result


def without_tries(table: pd.DataFrame) -> pd.DataFrame:
    """The table without what a search for the largest batch tried on its way: figures of speed and memory show its end.

    A search is known by its end: of three batch sizes or more of one configuration one does not fit, and the next
    smaller does. Of its rows those of the largest batch that fits are kept, or may fit where nothing surely does.
    """
    asked = table[table["fit_question"].notna() & table["status"].isin(["ok", "oom"])]
    tries: list[Any] = []
    for rows in grouped(_identified(asked), ("evidence", "_cell"), (*ANSWERED, "_index")):
        one = answer(str(rows[0]["evidence"]), rows)
        largest = max((size for size in (one.most, one.perhaps) if size is not None), default=None)
        if len(one.tried) > 2 and largest is not None and one.least == largest + 1:
            tries += [row["_index"] for row in rows if row[BATCH] != (one.perhaps if one.most is None else one.most)]
    return table.drop(index=tries)


def frontier_cells(table: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration but for its batch size, with the answers of every kind of evidence.

    Returns
    -------
    DataFrame
        ``device``, ``memory_gib`` and ``precision`` say which figure, ``heading`` (strategy and settings) which block
        of it, ``lane`` (model) which line, ``world_size`` which column; ``shared`` is what all cells of the figure
        have in common in words; ``answers`` is a list of `Answer`, from what is most real to what nothing ran for.
        Blocks are ordered from replicated to sharded, lines by the number of parameters.
    """
    rows = table[on_the_frontier(table)]
    if not len(rows):
        return pd.DataFrame(columns=COLUMNS)
    named = ("strategy", "effective_strategy", "sharding_factor", "world_size", "model", "parameters", "precision")
    needed = ("fit_question", "evidence", *named, *ANSWERED)
    found = [_cell(group) for group in grouped(_identified(rows), ("_cell",), needed)]
    figures: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in found:
        figures.setdefault((cell["device"], cell["memory_gib"], cell["precision"]), []).append(cell)
    for cells in figures.values():
        _name(cells)
    frame = pd.DataFrame([cell for key in sorted(figures) for cell in figures[key]])
    order = ["device", "memory_gib", "precision", "variant_key", "heading", "parameters", "lane", "world_size"]
    return frame.sort_values(order, kind="stable").reset_index(drop=True)[COLUMNS]


def _identified(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with their index, and the identity of their question but for the batch."""
    return rows.assign(_cell=[identity(question, BATCH) for question in rows["fit_question"]], _index=rows.index)


def _cell(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    question = first["fit_question"]
    strategy = [first[name] for name in ("strategy", "effective_strategy", "sharding_factor", "world_size")]
    if first["world_size"] == 1 and first["strategy"] in ("fsdp", "fsdp1"):  # where what shards fully begins
        strategy = [first["strategy"], f"{first['strategy']}/full_shard", None, None]
    parameters = known(rows, "parameters")
    return {
        "question": question,
        "device": question["device"],
        "memory_gib": question["memory_gib"],
        "precision": first["precision"],
        "variant_key": labels.variant(*(None if pd.isna(value) else value for value in strategy)),
        "world_size": int(first["world_size"]),
        "model": first["model"],
        "parameters": int(parameters[0]) if parameters else 0,
        "batches": {row[BATCH] for row in rows},
        "answers": [
            answer(kind, [row for row in rows if row["evidence"] == kind])
            for kind in evidence_in_order({row["evidence"] for row in rows})
        ],
    }


def _name(cells: list[dict[str, Any]]) -> None:
    """Give the cells of one figure their ``heading``, ``lane`` and ``shared``.

    What differs between them is named in the heading, or beside the model where it belongs to the model or its input;
    what all have in common, in ``shared``. A knob of a strategy counts as differing only where one strategy was tried
    with several values of it, the shape of a model only where models of one name differ in it.
    """
    searched = any(len(cell["batches"]) > 1 for cell in cells)
    paths = list(dict.fromkeys(path for cell in cells for path in cell["question"] if path not in TOLD))
    inputs = ["sequence_length"] if searched else [BATCH, "sequence_length"]
    differing = {path for path in (*paths, *inputs) if _differs(cells, path)}
    for cell in cells:
        question, size = cell["question"], labels.count(cell["parameters"]) if cell["parameters"] else ""
        beside = [_phrase(path, question.get(path)) for path in (*inputs, *paths) if path in differing]
        own = {_phrase(path, question.get(path)) for path in differing if path in inputs or path.startswith("model.")}
        lane = [f"{cell['model']} {size}".strip(), *(text for text in dict.fromkeys(beside) if text in own)]
        lane = [" ".join(lane[:2]), *lane[2:]] if lane[1:] and lane[1].startswith("×") else lane
        heading = [cell["variant_key"].label, *(text for text in dict.fromkeys(beside) if text not in own)]
        cell["lane"], cell["heading"] = " · ".join(lane), " · ".join(heading)
        common = [_phrase(path, question.get(path)) for path in (*inputs, *SHARED) if path not in differing]
        cell["shared"] = ", ".join(common).replace(", ×", " ×")


SHARED = ("activation_checkpointing",)
"""Settings that are named even if they are the same in the whole figure: memory depends on them."""


def _differs(cells: list[dict[str, Any]], path: str) -> bool:
    """Whether a part of the question has several values among cells that could be confused with each other."""
    scope = {"strategy": "variant_key", "model": "model"}.get(path.partition(".")[0])
    values: dict[Any, set[Any]] = {}
    for cell in cells:
        if path in cell["question"]:
            values.setdefault(cell[scope] if scope else None, set()).add(cell["question"][path])
    return any(len(found) > 1 for found in values.values())


def _phrase(path: str, value: Any) -> str:
    """A setting in words."""
    name = path.rpartition(".")[2]
    words = {BATCH: f"batch {value}", "sequence_length": f"× {value}"}
    return words.get(path) or (SETTINGS[name](value) if name in SETTINGS else f"{name}={_as_typed(value)}")


def _as_typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)
