"""Records as the table every figure selects from: the schema's columns, and the few that say what may share a mark.

Nothing is ever averaged over a setting. A setting that differs between runs is either part of the heading a run is
drawn under (`workload`, `limit`, `settings`) or, where one variant was tried in several ways, of the variant's name.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from bench.records import Record, matching, to_frame
from bench.reporting import labels

CELL = [
    "place",
    "evidence",
    "model",
    "parameters",
    "workload",
    "limit",
    "settings",
    "precision",
    "world_size",
    "variant",
]
"""Columns that identify what is drawn as one mark: rows equal in all of them are repeats of one configuration."""

SETTINGS: dict[str, Callable[[Any], str]] = {
    "gradient_accumulation": lambda value: f"accumulation {value}",
    "activation_checkpointing": lambda value: f"checkpointing {value}",
    "compile": lambda value: "compiled" if value else "not compiled",
    "attention": lambda value: f"attention {value}",
    "optimizer": str,
    "optimizer_implementation": lambda value: f"optimizer {value}",
    "parameter_dtype": lambda value: f"parameters {value}",
    "compute_dtype": lambda value: f"compute {value}",
    "reduce_dtype": lambda value: f"reduce {value}",
    "nodes": lambda value: f"{value} node" + ("" if value == 1 else "s"),
}
NARROWER = {
    "parameter_dtype": ["precision"],
    "compute_dtype": ["precision"],
    "reduce_dtype": ["precision"],
    "nodes": ["world_size"],
}
"""Settings that differ by nature between precisions or world sizes, and count as differing only within one."""

NOT_KNOBS = {"repeat", "seed", "sweep", "sources", "sharding_factor", "name"}
"""Parts of a configuration that make no other run of it, or are told by the row's own columns."""

VERSIONS = ("torch_version", "git_sha")
"""Columns that are named of a row only where nothing else tells it apart."""


def prepare(records: Sequence[Record]) -> pd.DataFrame:
    """One row per record with the schema's columns and, beside them, the ones figures group by.

    ``precision`` says how what is mixed is mixed, so that figures, each of one precision, compare one way of it.
    Added: ``place`` (device and hardware: rows of two places never share axes), ``workload`` (batch and sequence),
    ``limit`` (memory limit, "" for none), ``settings`` (other settings that differ), ``variant`` (label),
    ``variant_key`` (`labels.Variant`), ``heading`` (all of a group in words), ``steps`` (seconds per timed step,
    the maximum over ranks; an empty array where the run kept none), ``busy`` (what `busy_spans` gives), ``link`` (the
    row's anchor on a page), and what the row answers, by which rows of different evidence are told to belong together:
    ``fit_question`` and ``time_question`` (None where it answers none).
    """
    frame = to_frame(list(records))
    for column in ("model", "precision"):
        frame[column] = frame[column].fillna(f"{column} not stated")
    frame["precision"] = [labels.precision(*pair) for pair in _rows(frame, "precision", "mixed_precision")]
    frame["place"] = _places(frame)
    frame["device"] = frame["device"].fillna("")
    frame["parameters"] = _parameters(frame, records)
    frame["workload"] = [_workload(*pair) for pair in _rows(frame, "batch_size_per_gpu", "sequence_length")]
    limits = _rows(frame, "memory_limit_bytes")
    frame["limit"] = ["" if limit is None else f"limit {limit / labels.GIB:.3g} GiB" for (limit,) in limits]
    frame["settings"] = _settings(frame)
    keys = [
        labels.variant(*asked)
        for asked in _rows(frame, "strategy", "effective_strategy", "sharding_factor", "world_size")
    ]
    frame["variant"] = [key.label for key in keys]
    suffixes = _knobs(frame, records)
    keys = [
        replace(key, label=key.label + suffix, order=(*key.order[:3], key.order[3] + suffix))
        for key, suffix in zip(keys, suffixes, strict=True)
    ]
    frame["variant"] = [key.label for key in keys]
    frame["variant_key"] = pd.Series(keys, index=frame.index, dtype=object)
    frame["heading"] = [_heading(row) for row in frame[HEADING].to_dict("records")]
    frame["link"] = _links(frame["run_id"])
    for name, of in NESTED.items():
        frame[name] = pd.Series([of(record) for record in records], index=frame.index, dtype=object)
    return frame


def _links(run_ids: pd.Series) -> list[str]:
    """The anchor of every row on a page: two stores may hold one run."""
    again = run_ids.groupby(run_ids).cumcount()
    return [
        f"run-{run_id}" + (f"-{number + 1}" if number else "") for run_id, number in zip(run_ids, again, strict=True)
    ]


def step_times_s(record: Record) -> np.ndarray:
    """Seconds of every timed step: the slowest rank's, as the others wait for it."""
    samples = [rank.get("step_times_s") or [] for rank in record.get("ranks") or []]
    steps = min((len(times) for times in samples), default=0)
    return np.max([times[:steps] for times in samples], axis=0) if steps else np.empty(0)


def busy_spans(record: Record) -> list[tuple[list[list[float]], float]]:
    """Of every rank that took note: when it computed in its first timed step, and how long that took; in seconds."""
    return [
        (rank["busy_spans_s"], rank["step_times_s"][0])
        for rank in record.get("ranks") or []
        if rank.get("busy_spans_s") and rank.get("step_times_s")
    ]


NESTED: dict[str, Callable[[Record], Any]] = {
    "steps": step_times_s,
    "busy": busy_spans,
    "fit_question": matching.fit_question,
    "time_question": matching.time_question,
}
"""Columns that hold more than one value each."""


def _rows(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The columns' values row by row, with None for what is missing."""
    for values in zip(*(frame[column] for column in columns), strict=True):
        yield tuple(None if pd.isna(value) else value for value in values)


def _parameters(frame: pd.DataFrame, records: Sequence[Record]) -> pd.Series:
    """Parameter counts; a run that ended before it counted gets those of a run of exactly the same model."""
    models = [json.dumps((record.get("config") or {}).get("model"), sort_keys=True) for record in records]
    known = {model: size for model, size in zip(models, frame["parameters"], strict=True) if pd.notna(size)}
    known.pop("null", None)
    found = pd.Series([known.get(model, pd.NA) for model in models], index=frame.index, dtype="Int64")
    return frame["parameters"].fillna(found)


def _places(frame: pd.DataFrame) -> list[str]:
    """Device, hardware description and device name; a row without a device name joins the only one there is."""
    named: dict[tuple[Any, ...], list[str]] = {}
    for device, hardware, name in _rows(frame, "device", "hardware", "gpu_name"):
        if name and name not in named.setdefault((device, hardware), []):
            named[device, hardware].append(name)
    places = []
    for device, hardware, name in _rows(frame, "device", "hardware", "gpu_name"):
        others = named.get((device, hardware), [])
        name = name or (others[0] if len(others) == 1 else None)
        kind = {"cpu": "CPU", "cuda": "GPU"}.get(device, device)
        parts = [kind, hardware if hardware != device else None, name]
        places.append(" · ".join(part for part in parts if part) or "device not stated")
    return places


def _workload(batch: int | None, sequence: int | None) -> str:
    """Sequences per rank and micro-batch, and tokens per sequence: ``batch 4 × 128``."""
    if batch is None:
        return "" if sequence is None else f"{sequence} tokens"
    return f"batch {batch}" if sequence is None else f"batch {batch} × {sequence}"


def _settings(frame: pd.DataFrame) -> list[str]:
    """Per row, those of `SETTINGS` that differ between runs of the same model in the same place."""
    phrases: dict[Any, list[str]] = {index: [] for index in frame.index}
    for column, phrase in SETTINGS.items():
        scope = ["place", "model", *NARROWER.get(column, [])]
        for _, group in frame.groupby(scope, dropna=False, sort=False):
            if group[column].nunique(dropna=False) > 1:
                for index, value in group[column].items():
                    phrases[index].append(f"{column} not stated" if pd.isna(value) else phrase(value))
    return [" · ".join(phrases[index]) for index in frame.index]


def _knobs(frame: pd.DataFrame, records: Sequence[Record]) -> list[str]:
    """Per row, what else must be said so that two different configurations never carry one name.

    A strategy's own knob (bucket size, prefetch, ...) is named where one variant was run with several values of it
    on one model; anything else in the configuration, and after it the versions and the commit, where the rows would
    still be taken for repeats with what is named already.
    """
    knobs = pd.DataFrame([_leaves(record) for record in records], index=frame.index, dtype=object)
    own = [knob for knob in knobs.columns if knob.startswith("strategy.")]
    versions = [knob for knob in VERSIONS if knob in knobs.columns]
    others = [knob for knob in knobs.columns if knob not in (*own, *versions)]
    suffixes = pd.Series("", index=frame.index)
    for knob in (*own, *others, *versions):
        if knobs[knob].nunique() < 2:
            continue
        so_far = pd.Series("", index=frame.index) if knob in own else suffixes
        scope = ["place", "model", "variant"] if knob in own else CELL
        groups = [*(frame[column] for column in scope), so_far]
        differs = knobs[knob].groupby(groups, dropna=False).transform("nunique") > 1
        names = list(zip(frame["place"], frame["variant"], so_far, strict=True))
        told = set(itertools.compress(names, differs))
        suffixes = suffixes + [
            f" · {knob.rpartition('.')[2]}={value[:16]}" if name in told and isinstance(value, str) else ""
            for name, value in zip(names, knobs[knob], strict=True)
        ]
    return list(suffixes)


def _leaves(record: Record) -> dict[str, str]:
    """The configuration as path -> value, and the versions."""
    versions = {name: str(record[name]) for name in VERSIONS if record.get(name)}
    config = matching.leaves(record.get("config") or {}, NOT_KNOBS)
    return versions | {path: value if isinstance(value, str) else json.dumps(value) for path, value in config.items()}


HEADING = ["model", "parameters", "world_size", "device", "workload", "limit", "settings"]


def _heading(row: dict[Any, Any]) -> str:
    size = "" if pd.isna(row["parameters"]) else f"{labels.count(row['parameters'])} params"
    world_size = None if pd.isna(row["world_size"]) else int(row["world_size"])
    parts = [
        row["model"],
        size,
        labels.ranks(world_size, row["device"]),
        row["workload"],
        row["limit"],
        row["settings"],
    ]
    return " · ".join(part for part in parts if part)
