"""The typed run configuration: everything that can change a run's result, checked and resolved.

One `RunConfig` is one run. Hydra composes the raw values (`bench.planning.compose`); here they get types, are checked
against each other, and are resolved to what will really run. The hash of the result names the run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any

from bench import identity
from bench.errors import ImpossibleError, bad_value
from bench.finetune import Finetune, Full, load_finetune
from bench.hardware import Hardware
from bench.models import Family, float8, load_family
from bench.models.base import LENGTH
from bench.models.blocks import CHECKPOINTING
from bench.precision import Precision
from bench.strategies import Step, Strategy, load_strategy, that_take_float8
from bench.training.optimizer import OptimizerConfig
from bench.typed import OneOf, Within, checked, type_hints, typed

MODES = {"measure": "measured", "rehearse": "rehearsed", "predict": "predicted"}
"""Modes and the evidence their rows carry."""

SECTIONS = ("model", "strategy", "precision", "optimizer", "hardware", "measurement", "finetune")
"""Fields of `RunConfig` with fields of their own."""

RANKS = Within(1, 2**17)
"""More than any cluster has: beyond it a plan takes more than seconds."""

MOST_TOKENS = 2**27
"""Of one micro-batch in one process."""


@dataclass(frozen=True)
class Measurement:
    """How a run is timed."""

    warmup_steps: Annotated[int, Within(2, 10**6)]
    """Optimizer steps before timing starts: at least 2, for the allocator and DDP's bucket rebuild."""
    steps: Annotated[int, Within(1, 10**6)]
    """Optimizer steps that are timed."""
    profile: bool
    """Add a profiled pass after the timed one: writes a trace and the share of exposed communication."""
    min_warmup_s: Annotated[float | None, Within(0, 3600, unit="seconds")] = 0.0
    """Seconds of steps before timing, at least, after the first `warmup_steps`; null for what the device needs."""
    min_timed_s: Annotated[float | None, Within(0, 3600, unit="seconds")] = 0.0
    """Seconds of steps that are timed, at least; null for what the device needs."""


@functools.cache  # the same object for the same values, which `bench.identity` relies on to be quick
def settled(measurement: Measurement, device: str) -> Measurement:
    """The same with every null filled in for a kind of device."""
    values = identity.fields(measurement)
    empty = [name for name in identity.SETTLING_S if values[name] is None]
    return Measurement(**{**values, **{name: identity.SETTLING_S[name].get(device, 0.0) for name in empty}})


@dataclass(frozen=True)
class RunConfig:
    """One run, completely."""

    mode: Annotated[str, OneOf(*MODES)]
    model: Family
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerConfig
    hardware: Hardware
    measurement: Measurement
    gpus: Annotated[int, RANKS]
    """World size: ranks, one per GPU (or CPU process)."""
    gpus_per_node: Annotated[int, RANKS]
    """Ranks per machine; at world sizes below it all ranks share one."""
    batch_size_per_gpu: Annotated[int, Within(1, 10**6)]
    sequence_length: Annotated[int, LENGTH]
    gradient_accumulation: Annotated[int, Within(1, 1024)]
    gradient_accumulation_sync: bool
    """Communicate gradients after every micro-batch instead of after the last."""
    activation_checkpointing: Annotated[str, OneOf(*CHECKPOINTING)]
    compile: bool
    seed: Annotated[int, Within(0, 2**63 - 1)]
    repeat: Annotated[int, Within(0, 10**6)]
    requested: dict[str, Any] = field(default_factory=dict, compare=False)
    """The strategy's knobs as they were asked for; no part of the run's identity."""
    finetune: Finetune = field(default_factory=lambda: Full("full"))

    def __post_init__(self) -> None:
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
        if self.sequences_per_rank * self.sequence_length > MOST_TOKENS:
            valid = f"fewer sequences, or shorter ones: at most {MOST_TOKENS} tokens in one process"
            raise bad_value("batch_size_per_gpu", self.batch_size_per_gpu, valid, ImpossibleError)
        self.model.check_sequence_length(self.sequence_length)
        self.strategy.check_model(self.model, self.batch_size_per_gpu, self.sequence_length)
        self.strategy.check_device(self.hardware.device)
        if self.precision.in_float8 and not self.strategy.takes_float8:
            raise ImpossibleError(
                f"precision={self.precision.name} is not valid for strategy={self.strategy.name}: choose bf16, or "
                f"strategy {that_take_float8()}."
            )
        float8.refuse_without_library(self.precision)
        self.strategy.check_precision(self.precision)
        self.strategy.check_optimizer(self.optimizer.name, self.optimizer.implementation)
        self.strategy.check_finetune(self.finetune.name)
        self.finetune.check_installed()
        self.finetune.check(self.model, self.precision, self.hardware.device)
        self.strategy.check_step(
            Step(
                self.gradient_accumulation,
                self.gradient_accumulation_sync,
                self.optimizer.keep_gradients,
                self.compile,
                self.precision,
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
    def libraries(self) -> tuple[str, ...]:
        """Optional ones whose operators are part of the model as it is trained."""
        return (*self.finetune.packages, *(("torchao",) if self.precision.in_float8 else ()))

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules worth importing once, before ranks are forked."""
        device = self.hardware.device
        return (*self.model.imports, *self.finetune.imports(device), *self.strategy.imports(device))

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
    def processes_per_node(self) -> int:
        """Processes that really run on each machine."""
        return max(1, self.processes // self.machines)

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
        return {name: identity.plain(value) for name, value in identity.fields(self).items() if name != "requested"}

    @functools.cached_property
    def run_id(self) -> str:
        """Hash of the complete resolved configuration that can change the result: 16 hexadecimal digits."""
        return identity.run_id(self, self.mode, self.precision.peak, uses_host=self.strategy.uses_host)


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
    raw["strategy"] = {**identity.done_before(raw["strategy"]), **raw["strategy"]}  # nor how its knobs of later were
    built = {key: _section(key, sections[key], raw[key]) for key in SECTIONS}
    built["measurement"] = settled(built["measurement"], built["hardware"].device)
    scalars = _scalars(raw)
    built["strategy"] = built["strategy"].resolve(
        scalars["gpus"],
        scalars["gpus_per_node"],
        accumulates=scalars["gradient_accumulation"] > 1 and not scalars["gradient_accumulation_sync"],
    )
    built["precision"] = built["strategy"].settled(built["precision"])
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
    """The fields of `RunConfig` that are no sections."""
    hints = type_hints(RunConfig)
    return {name: checked(name, hints[name], raw[name]) for name in hints if name not in (*SECTIONS, "requested")}
