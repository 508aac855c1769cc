"""The typed run configuration: everything that can change a run's result, checked and resolved.

One `RunConfig` is one run. Hydra composes the raw values (`bench.config.compose`); here they get types, are checked
against each other, and are resolved to what will really run. The hash of the result names the run.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Annotated, Any

from bench.config.global_batch import MAX_ACCUMULATION, GlobalBatch, parse_global_batch, require_accumulation
from bench.config.measurement import Measurement, fill_measurement_defaults
from bench.config.rehearsal import Rehearsal
from bench.config.run_checks import check_run
from bench.config.run_id import (
    ADDED_FIELD_DEFAULTS,
    SharedSection,
    compute_run_id,
    convert_earlier_strategy,
    get_added_strategy_knobs,
    get_fields,
    list_hardware_values,
    to_plain_value,
)
from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.precision import Precision
from bench.core.typed_config import OneOf, Within, build_dataclass, get_field_types, validate_value
from bench.finetune import Finetune, FullFinetune, load_finetune
from bench.hardware import Hardware
from bench.hardware.hardware_file import convert_earlier_attention
from bench.models import Family, load_family
from bench.models.base import SEQUENCE_LENGTH_RANGE
from bench.models.checkpointing import VALID_CHECKPOINTING, needs_recorded_blocks
from bench.optimizers import OptimizerConfig, load_optimizer
from bench.strategies import Strategy, load_strategy, normalize_precision

EVIDENCE_BY_MODE = {"measure": "measured", "rehearse": "rehearsed", "predict": "predicted"}
"""Modes and the evidence their rows carry."""

SECTION_NAMES = ("model", "strategy", "precision", "optimizer", "hardware", "measurement", "finetune", "rehearse")
"""Fields of `RunConfig` with fields of their own."""

WHOLE_LOSS, CHUNKED_LOSS, COMPILED_LOSS = "whole", "chunked", "compiled"

DEFAULT_LOSS_CHUNKS = 8

LOSSES = (WHOLE_LOSS, CHUNKED_LOSS, COMPILED_LOSS)

UNRECORDED_FIELDS = ("requested", "global_batch")
"""Fields of `RunConfig` that say how others were asked for."""

RANK_COUNT_BOUNDS = Within(1, 2**17)
"""More than any cluster has: beyond it a plan takes more than seconds."""


@dataclass(frozen=True)
class RunConfig:
    mode: Annotated[str, OneOf(*EVIDENCE_BY_MODE)]
    model: Family
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerConfig
    hardware: Hardware
    measurement: Measurement
    gpus: Annotated[int, RANK_COUNT_BOUNDS]
    """World size: ranks, one per GPU (or CPU process)."""
    gpus_per_node: Annotated[int, RANK_COUNT_BOUNDS]
    """Ranks per machine; at world sizes below it all ranks share one."""
    batch_size_per_gpu: Annotated[int, Within(1, 10**6)]
    sequence_length: Annotated[int, SEQUENCE_LENGTH_RANGE]
    gradient_accumulation: Annotated[int, Within(1, MAX_ACCUMULATION)]
    gradient_accumulation_sync: bool
    """Communicate gradients after every micro-batch instead of after the last."""
    activation_checkpointing: Annotated[str, VALID_CHECKPOINTING]
    compile: bool
    seed: Annotated[int, Within(0, 2**63 - 1)]
    repeat: Annotated[int, Within(0, 10**6)]
    requested: dict[str, Any] = field(default_factory=dict, compare=False)
    """The strategy's knobs as they were asked for; no part of the run's identity."""
    finetune: Finetune = field(default_factory=lambda: FullFinetune("full"))
    loss: Annotated[str, OneOf(*LOSSES)] = WHOLE_LOSS
    """whole (of all logits at once), chunked (a part of every sequence at a time, its logits computed again in
    backward) or compiled (by torch.compile, without logits in fp32)."""
    loss_chunks: Annotated[int | None, Within(2, 2**16)] = None
    """Of `loss=chunked`; null for 8."""
    global_batch: GlobalBatch | None = field(default=None, compare=False)
    """What `gradient_accumulation` followed from, if it did; no part of the run's identity."""
    activation_offload: bool = False
    """What blocks keep for backward waits in the memory of the machine around the device."""
    gradient_clip_norm: Annotated[float | None, Within(0, 1e38, exclusive_minimum=True)] = None
    """Scale all gradients together so that their norm is at most this before the optimizer's step; null: leave them."""
    rehearse: Rehearsal = field(default_factory=Rehearsal)
    expandable_segments: bool = False
    """torch's caching allocator grows segments by pages (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``)."""
    gradient_accumulation_fusion: bool = False
    """The products that make gradients of weights add them to those of earlier micro-batches, as Megatron's kernels do;
    no run of the suite has them, and predicted memory is that without."""

    def __post_init__(self) -> None:
        check_run(self)

    @property
    def has_compiled_parts(self) -> bool:
        """Whether torch's compiler, which chooses kernels by the sizes of tensors, makes blocks or the loss."""
        return self.compiling_setting is not None

    @property
    def compiles_loss(self) -> bool:
        return self.loss == COMPILED_LOSS

    @property
    def compiling_setting(self) -> str | None:
        """The setting that asks for torch's compiler, as it is typed; None where none does."""
        return "compile=true" if self.compile else f"loss={COMPILED_LOSS}" if self.compiles_loss else None

    @property
    def hardware_flops_per_sequence(self) -> int:
        """FLOPs of a sequence's forward and backward pass, with what is computed again."""
        mode = self.activation_checkpointing
        return self.trained_model.count_flops_per_sequence(self.sequence_length).compute_hardware_flops(
            mode,
            loss_in_chunks=self.loss_chunks is not None,
            recorded_flops=self._count_recorded_flops() if needs_recorded_blocks(mode) else None,
        )

    def _count_recorded_flops(self) -> int | None:
        from bench.models.checkpointing_budget import count_recomputed_flops  # runs the model on meta

        return count_recomputed_flops(self.trained_model, self.sequence_length, self.activation_checkpointing)

    @property
    def effective_strategy(self) -> str:
        """What the strategy comes to, with what is trained unless it is everything: ``fsdp/full_shard_lora``."""
        strategy, name = self.strategy.describe_effective_strategy(self.gpus), self.finetune.name
        return strategy if name == "full" else f"{strategy}{'_' if '/' in strategy else '/'}{name}"

    @functools.cached_property
    def trained_model(self) -> Family:
        """The model as it is trained: with adapters, if it has some."""
        uses_autocast = self.strategy.uses_autocast(self.precision)
        handed_format = self.precision.parameters if uses_autocast else self.precision.compute
        return self.finetune.adapt_family(self.model, self.precision, handed_format)

    @property
    def trained_precision(self) -> Precision:
        """The formats of what is trained, its gradients and its optimizer state."""
        return self.finetune.find_trained_precision(self.precision)

    @property
    def operator_libraries(self) -> tuple[str, ...]:
        """Optional ones whose operators are part of the model as it is trained."""
        return (*self.finetune.required_packages, *(("torchao",) if self.precision.uses_torchao else ()))

    @property
    def modules_to_preload(self) -> tuple[str, ...]:
        """Modules worth importing once, before ranks are forked."""
        device = self.hardware.device
        return (
            *self.model.preload_modules,
            *self.finetune.list_preload_modules(device),
            *self.strategy.list_preload_modules(device),
        )

    @property
    def uses_host_memory(self) -> bool:
        """Whether something of a step is kept in the memory of the machine around the device."""
        return self.strategy.has_offloaded_state or self.activation_offload

    @property
    def nodes(self) -> int:
        """Machines the ranks are spread over."""
        return max(1, self.gpus // self.gpus_per_node)

    @property
    def sequences_per_rank(self) -> int:
        """Of a micro-batch, in one process: more than `batch_size_per_gpu` where several ranks work on the same
        sequences, or one rank drives several devices."""
        return self.batch_size_per_gpu * self.batch_groups // self.strategy.find_batch_share(0, self.gpus)[1]

    @property
    def batch_groups(self) -> int:
        """Groups of ranks that read `batch_size_per_gpu` sequences each: ranks, unless several read them together."""
        return self.gpus // self.strategy.num_ranks_per_batch

    @property
    def sequences_per_gpu(self) -> int | float:
        """Of an optimizer step, less than one where ranks share sequences."""
        sequences, ranks = self.batch_size_per_gpu * self.gradient_accumulation, self.strategy.num_ranks_per_batch
        return sequences // ranks if sequences % ranks == 0 else sequences / ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together read in one optimizer step."""
        tokens_per_sequence = self.model.count_tokens_per_sequence(self.sequence_length)
        return tokens_per_sequence * self.batch_size_per_gpu * self.batch_groups * self.gradient_accumulation

    @property
    def valid_batch_sizes(self) -> list[int] | None:
        """The values of `batch_size_per_gpu` that come to the global batch, None where none was asked for.

        Raises
        ------
        ImpossibleError
            If there is none.
        """
        if self.global_batch is None:
            return None
        sizes = self.global_batch.list_batch_sizes(
            self.batch_groups,
            self.model.count_tokens_per_sequence(self.sequence_length),
            self.strategy.batch_size_multiple,
        )
        valid_sizes, reason = [], ""
        for size in sizes:
            try:
                self.resize_batch(size)
            except ImpossibleError as error:
                reason = str(error)
            else:
                valid_sizes.append(size)
        if not valid_sizes:
            raise ImpossibleError(reason)
        return valid_sizes

    def resize_batch(self, batch_size_per_gpu: int) -> RunConfig:
        """The same run with micro-batches of another size; where a global batch was asked for, as many as come to it.

        Raises
        ------
        ImpossibleError
            If no number of them does, or the run takes none of that size.
        """
        if self.global_batch is None:
            return dataclasses.replace(self, batch_size_per_gpu=batch_size_per_gpu)
        accumulation = self.global_batch.compute_accumulation(
            batch_size_per_gpu, self.batch_groups, self.model.count_tokens_per_sequence(self.sequence_length)
        )
        strategy = _build_section("strategy", type(self.strategy), self.requested).resolve(
            self.gpus, self.gpus_per_node, accumulates=accumulation > 1 and not self.gradient_accumulation_sync
        )
        return dataclasses.replace(
            self, batch_size_per_gpu=batch_size_per_gpu, gradient_accumulation=accumulation, strategy=strategy
        )

    def fill_global_batch(self, global_batch: GlobalBatch) -> RunConfig:
        """The same run at a global batch, in the smallest micro-batches that come to it.

        Raises
        ------
        ImpossibleError
            If none do.
        """
        config = dataclasses.replace(self, global_batch=global_batch)
        sizes = config.valid_batch_sizes
        assert sizes is not None
        return config.resize_batch(sizes[0])

    @property
    def sequences_per_device(self) -> int:
        """Of those, what one device computes."""
        return self.sequences_per_rank // self.devices_per_process

    @property
    def evidence(self) -> str:
        """What kind of statement the run's row is."""
        return EVIDENCE_BY_MODE[self.mode]

    @property
    def rehearsed_rank(self) -> int:
        """The number of the rank that runs where one alone does."""
        return self.strategy.find_rehearsed_rank(self.rehearse.rank, self.gpus)

    @property
    def is_predicted(self) -> bool:
        return self.mode == "predict"

    @property
    def is_rehearsed(self) -> bool:
        """Whether rank 0 alone runs, and what the others would send is made up."""
        return self.mode == "rehearse"

    @property
    def devices_per_process(self) -> int:
        """Devices that one process drives."""
        return self.strategy.count_devices_per_process(self.gpus)

    @property
    def active_processes(self) -> int:
        """Processes that really run: ranks, one per device, unless one process drives several."""
        return 0 if self.is_predicted else 1 if self.is_rehearsed else self.gpus // self.devices_per_process

    @property
    def processes_per_node(self) -> int:
        """Processes that really run on each machine."""
        return max(1, self.active_processes // self.active_nodes)

    @property
    def active_devices(self) -> int:
        return self.active_processes * self.devices_per_process

    @property
    def active_nodes(self) -> int:
        """Machines whose devices really run, at least one."""
        return 1 if self.is_rehearsed else self.nodes

    @property
    def label(self) -> str:
        """The run in a few words, for progress and messages."""
        strategy = self.effective_strategy
        sharding_factor = f" F={self.strategy.resolved_sharding_factor}" if "hybrid" in strategy else ""
        limit = self.hardware.memory_limit_gib
        parts = [
            self.model.name,
            strategy + sharding_factor,
            self.precision.name,
            f"x{self.gpus}",
            f"b{self.batch_size_per_gpu}",
        ]
        parts += [f"<={limit:g}GiB"] if limit else []
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The complete resolved configuration as plain values; all runs on a kind of hardware share those of it."""
        return {
            name: list_hardware_values(value) if name == "hardware" else to_plain_value(value)
            for name, value in get_fields(self).items()
            if name not in UNRECORDED_FIELDS
        }

    @functools.cached_property
    def run_id(self) -> str:
        """Hash of the complete resolved configuration that can change the result: 16 hexadecimal digits."""
        return compute_run_id(self, self.mode, self.precision.peak, uses_host=self.uses_host_memory)


def build_run_config(raw: dict[str, Any]) -> RunConfig:
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
    is_recorded = "global_batch" not in raw  # which no row has
    raw = {
        "finetune": {"name": "full"},
        "rehearse": {"rank": None},
        **ADDED_FIELD_DEFAULTS,
        **raw,
    }  # rows of before there was a choice do not say
    section_classes: dict[str, type] = {
        "model": load_family(_get_plugin_name(raw, "model", "family")),
        "strategy": load_strategy(_get_plugin_name(raw, "strategy", "name")),
        "precision": Precision,
        "optimizer": load_optimizer(_get_plugin_name(raw, "optimizer", "name")),
        "hardware": Hardware,
        "measurement": Measurement,
        "finetune": load_finetune(str(raw["finetune"].get("name"))),
        "rehearse": Rehearsal,
    }
    raw["strategy"] = {
        **get_added_strategy_knobs(raw["strategy"]),
        **raw["strategy"],
    }  # nor how its knobs of later were
    if is_recorded:
        raw["strategy"] = convert_earlier_strategy(raw["strategy"])
    raw["hardware"] = convert_earlier_attention(raw["hardware"])
    raw["model"] = section_classes["model"].complete_fields(raw["model"])  # type: ignore[attr-defined]
    built_sections = {key: _build_section(key, section_classes[key], raw[key]) for key in SECTION_NAMES}
    built_sections["measurement"] = fill_measurement_defaults(
        built_sections["measurement"], built_sections["hardware"].device
    )
    scalars = _validate_scalars(raw)
    scalars["loss_chunks"] = _resolve_loss_chunks(scalars["loss"], scalars["loss_chunks"])
    if raw.get("global_batch") is not None:
        ranks_per_batch = built_sections["strategy"].num_ranks_per_batch
        scalars |= _follow_global_batch(raw, scalars, built_sections["model"], ranks_per_batch)
    built_sections["strategy"] = built_sections["strategy"].resolve(
        scalars["gpus"],
        scalars["gpus_per_node"],
        accumulates=scalars["gradient_accumulation"] > 1 and not scalars["gradient_accumulation_sync"],
    )
    built_sections["precision"] = normalize_precision(built_sections["strategy"], built_sections["precision"])
    return RunConfig(**built_sections, **scalars, requested=raw["strategy"])


def _resolve_loss_chunks(loss: str, loss_chunks: int | None) -> int | None:
    if loss == CHUNKED_LOSS:
        return loss_chunks or DEFAULT_LOSS_CHUNKS
    if loss_chunks is not None:
        raise invalid_value_error("loss_chunks", loss_chunks, f"null, since loss={loss}, or loss={CHUNKED_LOSS}")
    return None


def _get_plugin_name(raw: dict[str, Any], section: str, key: str) -> str:
    value = raw.get(section, {}).get(key)
    if not isinstance(value, str):
        raise invalid_value_error(
            f"{section}.{key}", value, f"the name of a file under bench/{section.replace('y', 'ie')}s"
        )
    return value


def _build_section(key: str, cls: type, values: dict[str, Any]) -> Any:
    """One section as its dataclass; sections repeat over a sweep, so each is built once."""
    cache_key = (cls, values if isinstance(values, SharedSection) else repr(values))
    if cache_key not in _section_cache:
        _section_cache[cache_key] = build_dataclass(key, cls, values)
    return _section_cache[cache_key]


_section_cache: dict[tuple[type, str | SharedSection], Any] = {}


def _validate_scalars(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of `RunConfig` that are no sections."""
    hints = get_field_types(RunConfig)
    values = {
        **raw,
        "gradient_accumulation": 1 if raw["gradient_accumulation"] is None else raw["gradient_accumulation"],
    }
    return {
        name: validate_value(name, hints[name], values[name])
        for name in hints
        if name not in (*SECTION_NAMES, *UNRECORDED_FIELDS)
    }


def _follow_global_batch(
    raw: dict[str, Any], scalars: dict[str, Any], model: Family, ranks_per_batch: int
) -> dict[str, Any]:
    """The fields of `RunConfig` that follow from ``global_batch``."""
    global_batch = parse_global_batch(raw["global_batch"])
    model.check_sequence_length(scalars["sequence_length"])
    accumulation = global_batch.compute_accumulation(
        scalars["batch_size_per_gpu"],
        max(1, scalars["gpus"] // ranks_per_batch),
        model.count_tokens_per_sequence(scalars["sequence_length"]),
    )
    require_accumulation(global_batch, raw.get("gradient_accumulation"), accumulation)
    return {"gradient_accumulation": accumulation, "global_batch": global_batch}
