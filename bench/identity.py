"""Which run is which: the hash of everything in a configuration that can change the result.

What was measured before a knob existed is still the same run: at what was done before there was a choice, a knob is
left out of the hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from bench.hardware import Hardware

NO_IDENTITY = (("requested",), ("hardware", "sources"))
"""What is no part of a run's identity: how its strategy's knobs were asked for, where its numbers were read."""

CANNOT_CHANGE = {
    "measure": (("hardware", "speeds"), ("hardware", "host")),
    "rehearse": (("hardware", "speeds"), ("hardware", "host")),
    "predict": (("measurement",), ("seed",), ("repeat",)),
}
"""What cannot change the result either: of what really runs what is believed of the hardware's speed, of a prediction
how a run would be timed."""

SETTLING_S = {"min_warmup_s": {"cuda": 3.0}, "min_timed_s": {"cuda": 5.0}}
"""Seconds to warm up and to time where nothing is said: clocks and power of a GPU settle in seconds. A processor's step
is timed by the number of steps alone."""

ADDED: dict[str, dict[str, object]] = {
    "optimizer": {"keep_gradients": False},
    "precision": {"float8": "none", "float8_emulated": False, "mixing": None},
    "model": {"activation": "gelu_new"},
    "strategy": {
        "communication_hook": "none",
        "matrix_approximation_rank": 1,
        "start_powerSGD_iter": 2,
        "optimizer_on_device": False,
    },
    "finetune": {"name": "full"},
    "measurement": {"min_warmup_s": 0.0, "min_timed_s": 0.0},
}
"""Knobs that came later, and what was done before there was a choice: at that they are left out of a run's identity, so
that what was measured before is still the same run. A section of which nothing is left is left out as well."""


def done_before(strategy: Mapping[str, Any]) -> dict[str, object]:
    """The same where it depends on the strategy: its knobs that came later, at what it did before.

    Parameters
    ----------
    strategy: mapping
        The section of a configuration, its knobs as they are or as values were found for them.
    """
    kinds: dict[str, dict[str, object]] = {
        "fsdp": {"mesh_2d": True},
        "lightning": {"mesh_2d": True if strategy.get("backend") == "fsdp" else None},
        "tensor_parallel": {
            "mesh_2d": True if strategy.get("data_parallel") == "fsdp" else None,
            "bucket_cap_mb": 25 if strategy.get("data_parallel") == "ddp" else None,
        },
    }
    return kinds.get(str(strategy.get("name")), {})


LATER_FORMATS = {"fp8"}
"""Formats that GPUs were described for later: what is known of them is part of the identity of runs that compute in
them alone."""


def run_id(config: Any, mode: str, peak: str, *, uses_host: bool) -> str:
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
    left_out = {path[0] for path in (*NO_IDENTITY, *CANNOT_CHANGE.get(mode, ())) if len(path) == 1}
    values = fields(config)
    values["hardware"] = _as_computed_with(values["hardware"], peak)
    texts = {
        name: _text(value) if type(value) in (int, str, bool) else _section_text(name, value, mode, uses_host=uses_host)
        for name, value in values.items()
        if name not in left_out
    }
    said = sorted(name for name, text in texts.items() if text != "{}")
    text = "{" + ",".join(f'"{name}":{texts[name]}' for name in said) + "}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_computed_with(hardware: Hardware, peak: str) -> Hardware:
    """Hardware without what is known of later formats, unless a run computes in one: the same object every time."""
    if peak in LATER_FORMATS or not LATER_FORMATS & hardware.peak_tflops.keys():
        return hardware
    if id(hardware) not in _WITHOUT_LATER_FORMATS:
        peaks = {name: value for name, value in hardware.peak_tflops.items() if name not in LATER_FORMATS}
        speeds = hardware.speeds
        if speeds is not None and speeds.matmul is not None:
            shares = {name: value for name, value in speeds.matmul.efficiency.items() if name not in LATER_FORMATS}
            speeds = dataclasses.replace(speeds, matmul=dataclasses.replace(speeds.matmul, efficiency=shares))
        without = dataclasses.replace(hardware, peak_tflops=peaks, speeds=speeds)
        _WITHOUT_LATER_FORMATS[id(hardware)] = hardware, without
    return _WITHOUT_LATER_FORMATS[id(hardware)][1]


_WITHOUT_LATER_FORMATS: dict[int, tuple[Hardware, Hardware]] = {}
"""By identity, which the hardware that is kept here cannot lose to another one."""


def _section_text(name: str, section: Any, mode: str, *, uses_host: bool) -> str:
    """A section as JSON, without what is no part of a run's identity; sections repeat over a sweep, so each once.

    The machine around the device is such a part only where something is kept there, and described.
    """
    key = (id(section), mode, uses_host)
    if key not in _SECTION_TEXTS:
        values = fields(section)
        for path in (*NO_IDENTITY, *CANNOT_CHANGE.get(mode, ())):
            if path[0] == name:
                values.pop(path[-1], None)
        if name == "hardware" and not (uses_host and values.get("host")):
            values.pop("host", None)
        by_strategy = done_before(values) if name == "strategy" else {}
        for knob, before in {**ADDED.get(name, {}), **by_strategy}.items():
            if knob in values and values[knob] == before:
                del values[knob]
        _SECTION_TEXTS[key] = section, _text(values)
    return _SECTION_TEXTS[key][1]


_SECTION_TEXTS: dict[tuple[int, str, bool], tuple[Any, str]] = {}
"""By identity, which the section that is kept here cannot lose to another one."""


def _text(value: Any) -> str:
    """As JSON, in one way only."""
    if type(value) is int:
        return str(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_set_fields)


def _set_fields(section: Any) -> dict[str, Any]:
    """Fields of a dataclass inside a section that are not at their default: one that has a default came later."""
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    return {name: value for name, value in fields(section).items() if value != defaults[name]}


def fields(section: Any) -> dict[str, Any]:
    """Fields of a dataclass as they are: `dataclasses.asdict` copies every value, which takes as long as all else."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def plain(value: Any) -> Any:
    """What `dataclasses.asdict` comes to, in a third of its time: only containers are copied."""
    if dataclasses.is_dataclass(value):
        return {name: plain(inner) for name, inner in fields(value).items()}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value
