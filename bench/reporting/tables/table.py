"""Records as the table every figure selects from: the schema's columns, and the few that say what may share a mark.

Nothing is ever averaged over a setting. A setting that differs between runs is either part of the heading a run is
drawn under (`workload`, `limit`, `settings`) or, where one variant was tried in several ways, of the variant's name.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import yaml

from bench.config.flop_conventions import ConvertedSpeeds, convert_speeds
from bench.core import presentation
from bench.core.option_files import CONF_FOLDER
from bench.records import Record, matching, to_frame

CELL_COLUMNS = [
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

SETTING_FORMATTERS: dict[str, Callable[[Any], str]] = {
    "gradient_accumulation": lambda value: f"accumulation {value}",
    "activation_checkpointing": lambda value: f"checkpointing {value}",
    "compile": lambda value: "compiled" if value else "not compiled",
    "attention": lambda value: f"attention {value}",
    "optimizer": str,
    **{
        column: functools.partial(presentation.format_optional_setting, column)
        for column in presentation.OPTIONAL_SETTING_FORMATTERS
    },
    "optimizer_implementation": lambda value: f"optimizer {value}",
    "parameter_dtype": lambda value: f"parameters {value}",
    "compute_dtype": lambda value: f"compute {value}",
    "reduce_dtype": lambda value: f"reduce {value}",
    "nodes": lambda value: f"{value} node" + ("" if value == 1 else "s"),
}
EXTRA_SCOPE_COLUMNS = {
    "parameter_dtype": ["precision"],
    "compute_dtype": ["precision"],
    "reduce_dtype": ["precision"],
    "nodes": ["world_size"],
}
"""Settings that differ by nature between precisions or world sizes, and count as differing only within one."""

IGNORED_CONFIG_FIELDS = {"repeat", "seed", "sweep", "sources", "sharding_factor", "name"}
"""Parts of a configuration that make no other run of it, or are told by the row's own columns."""

COMPLETED_STATUSES = ("ok", "oom")
"""Of rows that answer what was asked: it fitted, or memory ran out."""


@dataclass(frozen=True)
class RowNeeds:
    """Rows that a table must hold for something to be made of them: without these there is nothing, with them there may
    be.

    So it is known from the table alone whether a figure can be empty, before anything of the figure runs.
    """

    allowed_values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By column, the values one of which a row must have to count."""
    present: tuple[str, ...] = ()
    """Columns in which it must have a value: not a missing one, nor an empty list or array."""
    min_rows: int = 1
    """How many rows must count."""
    min_distinct: Mapping[str, int] = field(default_factory=dict)
    """By column, how many different values they must have in it together."""

    def are_met_by(self, table: pd.DataFrame) -> bool:
        """Whether a table of `prepare_table` holds such rows."""
        counts = pd.Series(True, index=table.index)
        for column, values in self.allowed_values.items():
            counts &= table[column].isin(values).fillna(False).astype(bool)
        for column in self.present:
            counts &= pd.Series([_has_value(value) for value in table[column]], index=table.index, dtype=bool)
        rows = table[counts]
        return len(rows) >= self.min_rows and all(
            rows[column].nunique() >= number for column, number in self.min_distinct.items()
        )


def _has_value(value: Any) -> bool:
    return len(value) > 0 if hasattr(value, "__len__") else bool(pd.notna(value))


VERSION_COLUMNS = ("torch_version", "git_sha")
"""Columns that are named of a row only where nothing else tells it apart."""


def prepare_table(records: Sequence[Record], speeds: ConvertedSpeeds | None = None) -> pd.DataFrame:
    """One row per record with the schema's columns and, beside them, the ones figures group by.

    Speeds are shown as `speeds` have them, None for the model's own FLOPs: ``counted_tflops`` per rank, their share of
    the peak ``counted_mfu``, and ``flop_convention``, which says what they count.

    ``precision`` says how what is mixed is mixed, so that figures, each of one precision, compare one way of it.
    Added: ``place`` (device and hardware: rows of two places never share axes), ``workload`` (batch and sequence),
    ``limit`` (memory limit, "" for none), ``settings`` (other settings that differ), ``variant`` (label),
    ``variant_key`` (`presentation.Variant`), ``heading`` (all of a group in words), ``steps`` (seconds per timed step,
    the maximum over ranks; an empty array where the run kept none), ``busy`` (what `list_busy_spans` gives), ``link``
    (the row's anchor on a page), and what the row answers, by which rows of different evidence are told to belong
    together: ``fit_question`` and ``time_question`` (None where it answers none).
    """
    frame = to_frame(list(records))
    speeds = speeds or convert_speeds("model", records)
    frame["counted_tflops"] = pd.array(speeds.tflops, dtype="Float64")
    frame["counted_mfu"] = pd.array(speeds.peak_shares, dtype="Float64")
    frame["flop_convention"] = speeds.convention
    for column in ("model", "precision"):
        frame[column] = frame[column].fillna(f"{column} not stated")
    frame["precision"] = [
        presentation.format_precision(*values) for values in _iterate_values(frame, "precision", "mixed_precision")
    ]
    frame["place"] = _format_places(frame)
    frame["device"] = frame["device"].fillna("")
    frame["parameters"] = _fill_parameters(frame, records)
    frame["workload"] = [
        _format_workload(*values) for values in _iterate_values(frame, "batch_size_per_gpu", "sequence_length")
    ]
    limits = _iterate_values(frame, "memory_limit_bytes")
    frame["limit"] = ["" if limit is None else f"limit {limit / presentation.GIB:.3g} GiB" for (limit,) in limits]
    frame["settings"] = _format_settings(frame)
    variants = [
        presentation.build_variant(*values)
        for values in _iterate_values(frame, "strategy", "effective_strategy", "sharding_factor", "world_size")
    ]
    frame["variant"] = [variant.label for variant in variants]
    suffixes = _build_variant_suffixes(frame, records)
    variants = [
        replace(variant, label=variant.label + suffix, order=(*variant.order[:3], variant.order[3] + suffix))
        for variant, suffix in zip(variants, suffixes, strict=True)
    ]
    frame["variant"] = [variant.label for variant in variants]
    frame["variant_key"] = pd.Series(variants, index=frame.index, dtype=object)
    frame["heading"] = [_format_heading(row) for row in frame[HEADING_COLUMNS].to_dict("records")]
    frame["link"] = _build_anchors(frame["run_id"])
    for name, compute_value in NESTED_COLUMNS.items():
        frame[name] = pd.Series([compute_value(record) for record in records], index=frame.index, dtype=object)
    return frame


def _build_anchors(run_ids: pd.Series) -> list[str]:
    """The anchor of every row on a page: two stores may hold one run."""
    earlier_counts = run_ids.groupby(run_ids).cumcount()
    return [
        f"run-{run_id}" + (f"-{earlier_count + 1}" if earlier_count else "")
        for run_id, earlier_count in zip(run_ids, earlier_counts, strict=True)
    ]


def compute_step_times_s(record: Record) -> np.ndarray:
    """Seconds of every timed step: the slowest rank's, as the others wait for it."""
    times_by_rank = [rank.get("step_times_s") or [] for rank in record.get("ranks") or []]
    step_count = min((len(times) for times in times_by_rank), default=0)
    return np.max([times[:step_count] for times in times_by_rank], axis=0) if step_count else np.empty(0)


def list_busy_spans(record: Record) -> list[tuple[list[list[float]], float]]:
    """Of every rank that took note: when it computed in its first timed step, and how long that took; in seconds."""
    return [
        (rank["busy_spans_s"], rank["step_times_s"][0])
        for rank in record.get("ranks") or []
        if rank.get("busy_spans_s") and rank.get("step_times_s")
    ]


NESTED_COLUMNS: dict[str, Callable[[Record], Any]] = {
    "steps": compute_step_times_s,
    "busy": list_busy_spans,
    "fit_question": matching.build_fit_key,
    "time_question": matching.build_step_time_key,
}
"""Columns that hold more than one value each."""


def _iterate_values(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The columns' values row by row, with None for what is missing."""
    for values in zip(*(frame[column] for column in columns), strict=True):
        yield tuple(None if pd.isna(value) else value for value in values)


def _fill_parameters(frame: pd.DataFrame, records: Sequence[Record]) -> pd.Series:
    """Parameter counts; a run that ended before it counted gets those of a run of exactly the same model."""
    model_keys = [json.dumps((record.get("config") or {}).get("model"), sort_keys=True) for record in records]
    known_counts = {
        model: parameter_count
        for model, parameter_count in zip(model_keys, frame["parameters"], strict=True)
        if pd.notna(parameter_count)
    }
    known_counts.pop("null", None)
    filled_counts = pd.Series(
        [known_counts.get(model, pd.NA) for model in model_keys], index=frame.index, dtype="Int64"
    )
    return frame["parameters"].fillna(filled_counts)


def _format_places(frame: pd.DataFrame) -> list[str]:
    """Device, hardware description and device name; a row without a device name joins the only one there is."""
    device_names: dict[tuple[Any, ...], list[str]] = {}
    for device, hardware, name in _iterate_values(frame, "device", "hardware", "gpu_name"):
        if name and name not in device_names.setdefault((device, hardware), []):
            device_names[device, hardware].append(name)
    places = []
    for device, hardware, name in _iterate_values(frame, "device", "hardware", "gpu_name"):
        known_names = device_names.get((device, hardware), [])
        name = name or (known_names[0] if len(known_names) == 1 else None)
        device_kind = {"cpu": "CPU", "cuda": "GPU", "rocm": "GPU"}.get(device, device)
        parts = [device_kind, hardware if hardware != device else None, name]
        places.append(" · ".join(part for part in parts if part) or "device not stated")
    return places


def _format_workload(batch: int | None, sequence: int | None) -> str:
    """Sequences per rank and micro-batch, and tokens per sequence: ``batch 4 × 128``."""
    if batch is None:
        return "" if sequence is None else f"{sequence} tokens"
    return f"batch {batch}" if sequence is None else f"batch {batch} × {sequence}"


def _format_settings(frame: pd.DataFrame) -> list[str]:
    """Per row, those of `SETTING_FORMATTERS` that differ between runs of the same model in the same place."""
    phrases: dict[Any, list[str]] = {index: [] for index in frame.index}
    for column in SETTING_FORMATTERS:
        scope_columns = ["place", "model", *EXTRA_SCOPE_COLUMNS.get(column, [])]
        for _, group in frame.groupby(scope_columns, dropna=False, sort=False):
            if group[column].nunique(dropna=False) > 1:
                for index, value in group[column].items():
                    phrases[index].append(_format_setting(column, value))
    return [" · ".join(phrase for phrase in phrases[index] if phrase) for index in frame.index]


def _format_setting(column: str, value: Any) -> str:
    """What a heading says of a setting; empty where nothing is to be said."""
    if column in presentation.OPTIONAL_SETTING_FORMATTERS:
        return SETTING_FORMATTERS[column](None if pd.isna(value) else value)
    return f"{column} not stated" if pd.isna(value) else SETTING_FORMATTERS[column](value)


def _build_variant_suffixes(frame: pd.DataFrame, records: Sequence[Record]) -> list[str]:
    """Per row, what else must be said so that two different configurations never carry one name.

    A strategy's own knob (bucket size, prefetch, ...) is named where one variant was run with several values of it
    on one model, unless it is at the default of its option's file; anything else
    in the configuration, and after it the versions and the commit, where the rows would still be taken for repeats with
    what is named already.
    """
    knobs = pd.DataFrame([_flatten_config(record) for record in records], index=frame.index, dtype=object)
    strategy_knobs = [knob for knob in knobs.columns if knob.startswith("strategy.")]
    version_knobs = [knob for knob in VERSION_COLUMNS if knob in knobs.columns]
    other_knobs = [knob for knob in knobs.columns if knob not in (*strategy_knobs, *version_knobs)]
    suffixes = pd.Series("", index=frame.index)
    for knob in (*strategy_knobs, *other_knobs, *version_knobs):
        if knobs[knob].nunique() < 2:
            continue
        earlier_suffixes = pd.Series("", index=frame.index) if knob in strategy_knobs else suffixes
        scope_columns = ["place", "model", "variant"] if knob in strategy_knobs else CELL_COLUMNS
        group_keys = [*(frame[column] for column in scope_columns), earlier_suffixes]
        is_different = knobs[knob].groupby(group_keys, dropna=False).transform("nunique") > 1
        row_names = list(zip(frame["place"], frame["variant"], earlier_suffixes, strict=True))
        differing_names = set(itertools.compress(row_names, is_different))
        default_values = _list_default_values(records, knob, row_names) if knob in strategy_knobs else {}
        suffixes = suffixes + [
            f" · {knob.rpartition('.')[2]}={value[:16]}"
            if name in differing_names and isinstance(value, str) and default_values.get(name) != {value}
            else ""
            for name, value in zip(row_names, knobs[knob], strict=True)
        ]
    return list(suffixes)


def _list_default_values(records: Sequence[Record], knob: str, row_names: Sequence[Any]) -> dict[Any, set[str]]:
    """By name, the values that a strategy's knob has in rows that left it as its option's file says."""
    knob_name = knob.rpartition(".")[2]
    default_values: dict[Any, set[str]] = {}
    for record, row_name in zip(records, row_names, strict=True):
        section = (record.get("config") or {}).get("strategy") or {}
        default = _load_strategy_option(str(section.get("name"))).get(knob_name, MISSING_DEFAULT)
        requested = (record.get("requested") or {}).get(knob_name, section.get(knob_name))
        if default in (section.get(knob_name), requested):
            value = section.get(knob_name)
            default_values.setdefault(row_name, set()).add(value if isinstance(value, str) else json.dumps(value))
    return default_values


MISSING_DEFAULT = object()
"""Equal to no value: of a knob that no file has."""


@functools.cache
def _load_strategy_option(name: str) -> dict[str, Any]:
    """What the option file of a strategy says; empty where there is none of this name."""
    file = CONF_FOLDER / "strategy" / f"{name}.yaml"
    is_name = re.fullmatch(r"[\w.-]{1,100}", name) is not None  # a row may say anything
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if is_name and file.is_file() else {}


def _flatten_config(record: Record) -> dict[str, str]:
    """The configuration as path -> value, and the versions."""
    version_values = {name: str(record[name]) for name in VERSION_COLUMNS if record.get(name)}
    config_values = matching.flatten_config(record.get("config") or {}, IGNORED_CONFIG_FIELDS)
    return version_values | {
        path: value if isinstance(value, str) else json.dumps(value) for path, value in config_values.items()
    }


HEADING_COLUMNS = ["model", "parameters", "world_size", "device", "workload", "limit", "settings"]


def _format_heading(row: dict[Any, Any]) -> str:
    size_text = "" if pd.isna(row["parameters"]) else f"{presentation.format_count(row['parameters'])} params"
    world_size = None if pd.isna(row["world_size"]) else int(row["world_size"])
    parts = [
        row["model"],
        size_text,
        presentation.format_ranks(world_size, row["device"]),
        row["workload"],
        row["limit"],
        row["settings"],
    ]
    return " · ".join(part for part in parts if part)
