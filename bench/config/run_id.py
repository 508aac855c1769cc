"""Which run is which: the hash of everything in a configuration that can change the result.

What was measured before a knob existed is still the same run: at what was done before there was a choice, a knob is
left out of the hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from bench.hardware import Hardware
from bench.hardware.attention_kernels import SDPA
from bench.hardware.speeds import AttentionSpeed

FIELDS_NOT_HASHED = (
    ("requested",),
    ("global_batch",),
    ("hardware", "sources"),
    ("hardware", "interconnect"),
    ("hardware", "power_w"),
)
"""What is no part of a run's identity: how its strategy's knobs and its accumulation were asked for, where its numbers
were read, how its links are called, what power it takes."""

IRRELEVANT_FIELDS_BY_MODE = {
    "measure": (("hardware", "speeds"), ("hardware", "host")),
    "rehearse": (("hardware", "speeds"), ("hardware", "host")),
    "predict": (("measurement",), ("seed",), ("repeat",)),
}
"""What cannot change the result either: of what really runs what is believed of the hardware's speed, of a prediction
how a run would be timed."""

DEFAULT_SETTLING_S = {
    "min_warmup_s": {"cuda": 3.0, "rocm": 3.0},
    "min_timed_s": {"cuda": 5.0, "rocm": 5.0},
}
"""Seconds to warm up and to time where nothing is said: clocks and power of a GPU settle in seconds. A processor's step
is timed by the number of steps alone."""

SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})
"""Types of values that nobody can change."""

ADDED_KNOB_DEFAULTS: dict[str, dict[str, object]] = {
    "optimizer": {"keep_gradients": False},
    "precision": {"float8": "none", "float8_emulated": False, "mixing": None},
    "model": {
        "activation": "gelu_new",
        "feed_forward": "relu",
        "tie_embeddings": True,
        "query_rank": None,
        "expert_groups": 1,
        "causal_masks": False,
    },
    "strategy": {
        "communication_hook": "none",
        "matrix_approximation_rank": 1,
        "start_powerSGD_iter": 2,
        "optimizer_on_device": False,
    },
    "finetune": {"name": "full", "dropout": 0.0, "fp32_adapters": False},
    "measurement": {"min_warmup_s": 0.0, "min_timed_s": 0.0},
    "rehearse": {"rank": None},
}
"""Knobs that came later, and what was done before there was a choice: at that they are left out of a run's identity, so
that what was measured before is still the same run. A section of which nothing is left is left out as well."""


ADDED_FIELD_DEFAULTS: dict[str, object] = {
    "gradient_clip_norm": None,
    "loss": "whole",
    "loss_chunks": None,
    "activation_offload": False,
    "expandable_segments": False,
    "gradient_accumulation_fusion": False,
}
"""The same of fields that are no sections."""


def get_added_strategy_knobs(strategy: Mapping[str, Any]) -> dict[str, object]:
    """The same where it depends on the strategy: its knobs that came later, at what it did before.

    Parameters
    ----------
    strategy: mapping
        The section of a configuration, its knobs as they are or as values were found for them.
    """
    knobs_by_strategy: dict[str, dict[str, object]] = {
        "fsdp": {"mesh_2d": True},
        "deepspeed": {"sub_group_size": 10**9},
        "mesh": {
            "expert_tensor_parallel": True,
            "ranks_per_batch": 1,
            "first_stage_less_blocks": 0,
            "last_stage_less_blocks": 0,
            "overlap_kernels": "torch",
            "overlap_experts": False,
            "token_dispatcher": "all_to_all",
        },
        "pipeline": {"first_stage_less_blocks": 0, "last_stage_less_blocks": 0},
        "lightning": {"mesh_2d": True if strategy.get("backend") == "fsdp" else None},
        "tensor_parallel": {
            "mesh_2d": True if strategy.get("data_parallel") == "fsdp" else None,
            "bucket_cap_mb": 25 if strategy.get("data_parallel") == "ddp" else None,
        },
    }
    return knobs_by_strategy.get(str(strategy.get("name")), {})


def convert_earlier_strategy(strategy: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a recorded configuration as it is typed today: of ZeRO-1 rows say 1 where optimizer state is
    divided among all ranks."""
    is_full = (strategy.get("name"), strategy.get("sharding_factor")) == ("zero1", 1)
    return {**strategy, "sharding_factor": "full"} if is_full else dict(strategy)


FORMATS_ADDED_LATER = {"fp8"}
"""Formats that GPUs were described for later: what is known of them is part of the identity of runs that compute in
them alone."""


def compute_run_id(config: Any, mode: str, peak: str, *, uses_host: bool) -> str:
    """Hash of a resolved configuration: 16 hexadecimal digits.

    Parameters
    ----------
    config: dataclass
        Its sections, which are dataclasses, and plain values.
    peak: str
        The format that is computed in.
    uses_host: bool
        Whether something is kept in the memory of the machine around the device.
    """
    excluded_names = {
        path[0] for path in (*FIELDS_NOT_HASHED, *IRRELEVANT_FIELDS_BY_MODE.get(mode, ())) if len(path) == 1
    }
    values = get_fields(config)
    values["hardware"] = _drop_unused_formats(values["hardware"], peak)
    texts = {
        name: _encode_json(value)
        if type(value) in (int, float, str, bool)
        else _encode_section(value, name, mode, uses_host)
        for name, value in values.items()
        if name not in excluded_names and not (name in ADDED_FIELD_DEFAULTS and value == ADDED_FIELD_DEFAULTS[name])
    }
    included_names = sorted(name for name, text in texts.items() if text != "{}")
    text = "{" + ",".join(f'"{name}":{texts[name]}' for name in included_names) + "}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


Result = TypeVar("Result")


def _remember_by_identity(function: Callable[..., Result]) -> Callable[..., Result]:
    """Call a function once for each first argument, which is not hashable, and what comes with it. Such an argument is
    kept: its identity cannot become another one's."""
    results: dict[tuple[Any, ...], tuple[Any, Result]] = {}

    @functools.wraps(function)
    def remember(section: Any, *others: Any) -> Result:
        key = (id(section), *others)
        if key not in results:
            results[key] = section, function(section, *others)
        return results[key][1]

    return remember


def _drop_unused_formats(hardware: Hardware, peak: str) -> Hardware:
    """Hardware without what is known of later formats, unless a run computes in one: the same object every time."""
    if peak in FORMATS_ADDED_LATER or not FORMATS_ADDED_LATER & hardware.peak_tflops.keys():
        return hardware
    return _drop_later_formats(hardware)


@_remember_by_identity
def _drop_later_formats(hardware: Hardware) -> Hardware:
    peaks = {name: value for name, value in hardware.peak_tflops.items() if name not in FORMATS_ADDED_LATER}
    speeds = hardware.speeds
    if speeds is not None and speeds.matmul is not None:
        efficiency, sustained = (
            {name: share for name, share in shares.items() if name not in FORMATS_ADDED_LATER}
            for shares in (speeds.matmul.efficiency, speeds.matmul.sustained_share)
        )
        matmul = dataclasses.replace(speeds.matmul, efficiency=efficiency, sustained_share=sustained)
        speeds = dataclasses.replace(speeds, matmul=matmul)
    return dataclasses.replace(hardware, peak_tflops=peaks, speeds=speeds)


@_remember_by_identity
def _encode_section(section: Any, name: str, mode: str, uses_host: bool) -> str:
    """A section as JSON, without what is no part of a run's identity; sections repeat over a sweep, so each once.

    The machine around the device is such a part only where something is kept there, and described.
    """
    values = get_fields(section)
    for path in (*FIELDS_NOT_HASHED, *IRRELEVANT_FIELDS_BY_MODE.get(mode, ())):
        if path[0] == name:
            values.pop(path[-1], None)
    if name == "hardware" and not (uses_host and values.get("host")):
        values.pop("host", None)
    added_strategy_knobs = get_added_strategy_knobs(values) if name == "strategy" else {}
    for knob, default_value in {**ADDED_KNOB_DEFAULTS.get(name, {}), **added_strategy_knobs}.items():
        if knob in values and values[knob] == default_value:
            del values[knob]
    return _encode_json(values)


def _encode_json(value: Any) -> str:
    """As JSON, in one way only."""
    if type(value) is int:
        return str(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_get_non_default_fields)


def _get_non_default_fields(section: Any) -> dict[str, Any]:
    """Fields of a dataclass inside a section that are not at their default: one that has a default came later."""
    if isinstance(section, AttentionSpeed) and section.kernels.keys() == {SDPA}:
        section = section.kernels[SDPA]  # as it was said before kernels had names
    return {
        field.name: value
        for field in dataclasses.fields(section)
        if (value := getattr(section, field.name)) != field.default
        and (field.default_factory is dataclasses.MISSING or value != field.default_factory())
    }


class SharedSection(dict[str, Any]):
    """Plain values of a section that many configurations have in common. Never changed, so that it can be told from
    others by which object it is."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def get_fields(section: Any) -> dict[str, Any]:
    """Fields of a dataclass as they are: `dataclasses.asdict` copies every value, which takes as long as all else."""
    return {name: getattr(section, name) for name in _list_field_names(type(section))}  # type: ignore[arg-type]


@functools.cache
def _list_field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@_remember_by_identity
def list_hardware_values(hardware: Hardware) -> dict[str, Any]:
    """The description as plain values: one mapping for all runs of a sweep, which nobody changes."""
    values: dict[str, Any] = to_plain_value(hardware)
    return values


def to_plain_value(value: Any) -> Any:
    """What `dataclasses.asdict` comes to, in a fifth of its time: only containers are copied."""
    if isinstance(value, dict):
        return {key: inner if type(inner) in SCALAR_TYPES else to_plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [inner if type(inner) in SCALAR_TYPES else to_plain_value(inner) for inner in value]
    return to_plain_value(get_fields(value)) if dataclasses.is_dataclass(value) else value
