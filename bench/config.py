"""The typed run configuration: everything that can change a run's result, checked and resolved.

One `RunConfig` is one run. Hydra composes the raw values (`bench.planning.compose`); here they get types, are checked
against each other, and are resolved to what will really run. The hash of the result names the run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from bench.errors import ImpossibleError, bad_value, require_at_least, require_choice
from bench.finetune import Finetune, Full, load_finetune
from bench.hardware import Hardware
from bench.models import Family, float8, load_family
from bench.models.blocks import CHECKPOINTING
from bench.precision import Precision
from bench.strategies import Step, Strategy, load_strategy
from bench.training.optimizer import OptimizerConfig
from bench.typed import kind_of, type_hints, typed

MODES = {"measure": "measured", "rehearse": "rehearsed", "predict": "predicted"}
"""Modes and the evidence their rows carry."""

NO_IDENTITY = (("requested",), ("hardware", "sources"))
"""What is no part of a run's identity: how its strategy's knobs were asked for, where its numbers were read."""

CANNOT_CHANGE = {
    "measure": (("hardware", "speeds"), ("hardware", "host")),
    "rehearse": (("hardware", "speeds"), ("hardware", "host")),
    "predict": (("measurement",), ("seed",), ("repeat",)),
}
"""What cannot change the result either: of what really runs what is believed of the hardware's speed, of a prediction
how a run would be timed."""


ADDED: dict[str, dict[str, object]] = {
    "optimizer": {"keep_gradients": False},
    "precision": {"float8": "none", "float8_emulated": False},
    "model": {"activation": "gelu_new"},
    "strategy": {
        "communication_hook": "none",
        "matrix_approximation_rank": 1,
        "start_powerSGD_iter": 2,
        "optimizer_on_device": False,
    },
    "finetune": {"name": "full"},
}
"""Knobs that came later, and what was done before there was a choice: at that they are left out of a run's identity, so
that what was measured before is still the same run. A section of which nothing is left is left out as well."""


LATER_FORMATS = {"fp8"}
"""Formats that GPUs were described for later: what is known of them is part of the identity of runs that compute in
them alone."""


@dataclass(frozen=True)
class Measurement:
    """How a run is timed."""

    warmup_steps: int
    """Optimizer steps before timing starts: at least 2, for the allocator and DDP's bucket rebuild."""
    steps: int
    """Optimizer steps that are timed."""
    profile: bool
    """Add a profiled pass after the timed one: writes a trace and the share of exposed communication."""

    def __post_init__(self) -> None:
        require_at_least("measurement.warmup_steps", self.warmup_steps, 2)
        require_at_least("measurement.steps", self.steps, 1)


@dataclass(frozen=True)
class RunConfig:
    """One run, completely."""

    mode: str
    model: Family
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerConfig
    hardware: Hardware
    measurement: Measurement
    gpus: int
    """World size: ranks, one per GPU (or CPU process)."""
    gpus_per_node: int
    """Ranks per machine; at world sizes below it all ranks share one."""
    batch_size_per_gpu: int
    sequence_length: int
    gradient_accumulation: int
    gradient_accumulation_sync: bool
    """Communicate gradients after every micro-batch instead of after the last."""
    activation_checkpointing: str
    compile: bool
    seed: int
    repeat: int
    requested: dict[str, Any] = field(default_factory=dict, compare=False)
    """The strategy's knobs as they were asked for; no part of the run's identity."""
    finetune: Finetune = field(default_factory=lambda: Full("full"))

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        for name in ("batch_size_per_gpu", "gradient_accumulation"):
            require_at_least(name, getattr(self, name), 1)
        if not 0 <= self.seed < 2**63:
            raise bad_value("seed", self.seed, "a whole number from 0 to 2**63 - 1")
        require_at_least("repeat", self.repeat, 0)
        require_choice("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)
        if self.rehearsed and self.devices_per_process > 1:
            raise ImpossibleError(
                f"mode=rehearse is not valid for strategy={self.strategy.name}, which drives all devices from one "
                "process, so that the first cannot run alone: choose mode=predict or measure."
            )
        differing = self.strategy.settling_steps - 1
        if not self.predicted and self.measurement.warmup_steps < differing:
            valid = f"at least {differing}, since so many steps of strategy={self.strategy.name} are not like the later"
            raise bad_value("measurement.warmup_steps", self.measurement.warmup_steps, valid)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            valid = f"a multiple of gpus_per_node={self.gpus_per_node}, or fewer"
            raise bad_value("gpus", self.gpus, valid, ImpossibleError)
        self.model.check_sequence_length(self.sequence_length)
        self.strategy.check_model(self.model, self.batch_size_per_gpu, self.sequence_length)
        self.strategy.check_device(self.hardware.device)
        if self.precision.in_float8 and not self.strategy.takes_float8:
            raise ImpossibleError(
                f"precision={self.precision.name} is not valid for strategy={self.strategy.name}: choose bf16, or "
                "strategy single, ddp, zero1, fsdp or fsdp1."
            )
        float8.refuse_without_library(self.precision)
        self.strategy.check_precision(self.precision)
        self.strategy.check_optimizer(self.optimizer.name, self.optimizer.implementation)
        self.strategy.check_finetune(self.finetune.name)
        self.finetune.check_installed()
        self.finetune.check(self.model, self.precision, self.hardware.device)
        self.strategy.check_step(
            Step(
                self.gradient_accumulation, self.gradient_accumulation_sync, self.optimizer.keep_gradients, self.compile
            )
        )

    @property
    def effective_strategy(self) -> str:
        """What the strategy comes to, with what is trained unless it is everything: ``fsdp/full_shard_lora``."""
        strategy, name = self.strategy.effective(self.gpus), self.finetune.name
        return strategy if name == "full" else f"{strategy}{'_' if '/' in strategy else '/'}{name}"

    @functools.cached_property
    def trained(self) -> Family:
        """The model as it is trained: with adapters, if it has some."""
        return self.finetune.of(self.model, self.precision)

    @property
    def nodes(self) -> int:
        """Machines the ranks are spread over."""
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def sequences_per_rank(self) -> int:
        """Of a micro-batch, in one process: more than `batch_size_per_gpu` where several ranks work on the same
        sequences, or one rank drives several devices."""
        return self.batch_size_per_gpu * self.gpus // self.strategy.batch_share(0, self.gpus)[1]

    @property
    def sequences_per_device(self) -> int:
        """Of those, what one device computes."""
        return self.sequences_per_rank // self.devices_per_process

    @property
    def evidence(self) -> str:
        """What kind of statement the run's row is."""
        return MODES[self.mode]

    @property
    def predicted(self) -> bool:
        """Whether nothing runs."""
        return self.mode == "predict"

    @property
    def rehearsed(self) -> bool:
        """Whether rank 0 alone runs, and what the others would send is made up."""
        return self.mode == "rehearse"

    @property
    def devices_per_process(self) -> int:
        """Devices that one process drives."""
        return self.strategy.devices_per_process(self.gpus)

    @property
    def processes(self) -> int:
        """Processes that really run: ranks, one per device, unless one process drives several."""
        return 0 if self.predicted else 1 if self.rehearsed else self.gpus // self.devices_per_process

    @property
    def devices(self) -> int:
        """Devices that really work."""
        return self.processes * self.devices_per_process

    @property
    def machines(self) -> int:
        """Machines whose devices really run, at least one."""
        return 1 if self.rehearsed else self.nodes

    @property
    def label(self) -> str:
        """The run in a few words, for progress and messages."""
        strategy = self.effective_strategy
        factor = f" F={self.strategy.factor}" if "hybrid" in strategy else ""
        limit = self.hardware.memory_limit_gib
        words = [
            self.model.name,
            strategy + factor,
            self.precision.name,
            f"x{self.gpus}",
            f"b{self.batch_size_per_gpu}",
        ]
        words += [f"<={limit:g}GiB"] if limit else []
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """The complete resolved configuration as plain values."""
        return {name: _plain(value) for name, value in _fields(self).items() if name != "requested"}

    @functools.cached_property
    def run_id(self) -> str:
        """Hash of the complete resolved configuration that can change the result: 16 hexadecimal digits."""
        left_out = {path[0] for path in (*NO_IDENTITY, *CANNOT_CHANGE.get(self.mode, ())) if len(path) == 1}
        values = _fields(self) | {"hardware": _as_computed_with(self.hardware, self.precision.peak)}
        texts = {
            name: _text(value)
            if type(value) in (int, str, bool)
            else _section_text(name, value, self.mode, uses_host=self.strategy.uses_host)
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
        values = _fields(section)
        for path in (*NO_IDENTITY, *CANNOT_CHANGE.get(mode, ())):
            if path[0] == name:
                values.pop(path[-1], None)
        if name == "hardware" and not (uses_host and values.get("host")):
            values.pop("host", None)
        for knob, before in ADDED.get(name, {}).items():
            if values.get(knob) == before:
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
    return {name: value for name, value in _fields(section).items() if value != defaults[name]}


def _fields(section: Any) -> dict[str, Any]:
    """Fields of a dataclass as they are: `dataclasses.asdict` copies every value, which takes as long as all else."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def _plain(value: Any) -> Any:
    """What `dataclasses.asdict` comes to, in a third of its time: only containers are copied."""
    if dataclasses.is_dataclass(value):
        return {name: _plain(inner) for name, inner in _fields(value).items()}
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def run_config(raw: dict[str, Any]) -> RunConfig:
    """Check and resolve composed values.

    Parameters
    ----------
    raw: dict
        The fields of `RunConfig` as plain values; other keys are ignored (they belong to the sweep, not the run).

    Raises
    ------
    UsageError
        Naming the field, the value and the valid choices.
    """
    raw = {"finetune": {"name": "full"}, **raw}  # rows of before there was a choice do not say
    sections: dict[str, type] = {
        "model": load_family(_name(raw, "model", "family")),
        "strategy": load_strategy(_name(raw, "strategy", "name")),
        "precision": Precision,
        "optimizer": OptimizerConfig,
        "hardware": Hardware,
        "measurement": Measurement,
        "finetune": load_finetune(str(raw["finetune"].get("name"))),
    }
    built = {key: _section(key, cls, raw[key]) for key, cls in sections.items()}
    scalars = _scalars(raw)
    for name in ("gpus", "gpus_per_node"):  # before anything divides by them
        require_at_least(name, scalars[name], 1)
    built["strategy"] = built["strategy"].resolve(
        scalars["gpus"],
        scalars["gpus_per_node"],
        accumulates=scalars["gradient_accumulation"] > 1 and not scalars["gradient_accumulation_sync"],
    )
    return RunConfig(**built, **scalars, requested=raw["strategy"])


def _name(raw: dict[str, Any], section: str, key: str) -> str:
    value = raw.get(section, {}).get(key)
    if not isinstance(value, str):
        raise bad_value(f"{section}.{key}", value, f"the name of a file under bench/{section.replace('y', 'ie')}s")
    return value


def _section(key: str, cls: type, values: dict[str, Any]) -> Any:
    """One section as its dataclass; sections repeat over a sweep, so each is built once."""
    known = (cls, repr(values))
    if known not in _SECTIONS:
        _SECTIONS[known] = typed(key, cls, values)
    return _SECTIONS[known]


_SECTIONS: dict[tuple[type, str], Any] = {}


def _scalars(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of `RunConfig` that are no sections, each of exactly its type."""
    checked: dict[str, Any] = {}
    for name, kind in type_hints(RunConfig).items():
        if kind in (bool, int, str):
            if type(raw[name]) is not kind:
                raise bad_value(name, raw[name], kind_of(kind))
            checked[name] = raw[name]
    return checked
