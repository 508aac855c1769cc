"""DeepSpeed: ZeRO stages 0 to 3 as its own engine carries them out, with or without offloading."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import torch
from torch import nn

from bench.errors import ImpossibleError, bad_value, how_to_install
from bench.precision import PARAMETERS, Precision
from bench.strategies.base import BuildOptimizer, Job, Step, Strategy, require_factor, require_stored_format
from bench.strategies.deepspeed_offload import (
    OffloadedBf16Stage1Plan,
    OffloadedStage1And2Plan,
    OffloadedStage3Plan,
)
from bench.strategies.deepspeed_plan import Bf16Stage1Plan, Stage0Plan, Stage1And2Plan
from bench.strategies.deepspeed_stage3 import Knobs, Stage3Plan
from bench.strategies.plan import Plan, Setting
from bench.strategies.stepper import Stepper
from bench.typed import OneOf, Within

STAGES = (0, 1, 2, 3)
OFFLOADS = ("none", "cpu", "nvme")
ELEMENTS = Within(0, 10**15)

BY_STAGE = "stage"
"""The sharding factor that follows from the stage."""


@dataclass(frozen=True)
class DeepSpeed(Strategy):
    """ZeRO by the DeepSpeed library. Sizes are in elements; names are those of its configuration.

    Weights, data, optimizer and the division of the loss are those of every other strategy. In bf16 DeepSpeed rounds
    the weights first and makes its fp32 copies from that, so training starts from rounded weights. When a rank is
    rehearsed, the partitions that stages 1 and 2 gather after the update repeat the first rank's.
    """

    stage: Annotated[int, OneOf(*STAGES)]
    """0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too."""
    offload_optimizer: Annotated[str, OneOf(*OFFLOADS)]
    """Where optimizer state and fp32 parameters are kept and updated: none (on the device), cpu or nvme."""
    offload_parameters: Annotated[str, OneOf(*OFFLOADS)]
    """Where the shards of parameters are kept."""
    nvme_path: str | None
    """Folder for what is offloaded to NVMe."""
    overlap_comm: bool | None
    """Reduce gradients while backward runs. null: DeepSpeed's choice, which is true for stage 3 alone."""
    contiguous_gradients: bool
    """Copy gradients into one buffer as they are produced."""
    reduce_bucket_size: Annotated[int, Within(1, 10**15)]
    """Elements reduced at a time, and of the buffer for them."""
    prefetch_bucket_size: Annotated[int, ELEMENTS]
    """Elements gathered ahead of use in stage 3."""
    param_persistence_threshold: Annotated[int, ELEMENTS]
    """Parameters smaller than this stay whole in stage 3."""
    max_live_parameters: Annotated[int, ELEMENTS]
    """Elements that may be whole at a time in stage 3."""
    max_reuse_distance: Annotated[int, ELEMENTS]
    """Parameters used again within so many elements stay whole in stage 3."""

    mixings = (PARAMETERS,)
    other_mixing = "whose optimizer keeps narrow parameters in fp32 as well"

    def mixed_precision(self, precision: Precision) -> str:
        """Parameters are narrow, DeepSpeed's optimizer keeps them in fp32 as well."""
        return "deepspeed bf16"

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy; the stage decides how many ranks share parameters, and whether reduction overlaps."""
        factor = world_size if self.stage == 3 else 1
        because = f"strategy.stage={self.stage} of deepspeed spreads parameters"
        require_factor(self, BY_STAGE, factor, world_size, because)
        overlap = self.stage == 3 if self.overlap_comm is None else self.overlap_comm
        chosen = dataclasses.replace(self, sharding_factor=factor, overlap_comm=overlap)
        return super(DeepSpeed, chosen).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check(self, world_size: int) -> None:
        """Any world size; offloading where the stage has something to offload."""
        if self.offload_parameters != "none" and self.stage != 3:
            raise self._offload_needs("offload_parameters", "3: only there each rank has just a part of the parameters")
        if self.offload_optimizer == "cpu" and self.stage == 0:
            raise self._offload_needs("offload_optimizer", "1, 2 or 3: stage 0 leaves the optimizer to torch")
        if self.offload_optimizer == "nvme" and self.stage != 3:
            raise self._offload_needs("offload_optimizer", "3: stages 1 and 2 offload to the CPU alone")
        uses_nvme = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if uses_nvme and not self.nvme_path:
            valid = "the folder to offload to, on an NVMe device"
            raise bad_value("strategy.nvme_path", self.nvme_path, valid, ImpossibleError)
        if self.nvme_path and not uses_nvme:
            valid = "null, since nothing is offloaded to nvme"
            raise bad_value("strategy.nvme_path", self.nvme_path, valid, ImpossibleError)
        if self.overlap_comm and self.stage == 0:
            valid = "false or null: stage 0 reduces when backward is over"
            raise bad_value("strategy.overlap_comm", True, valid, ImpossibleError)

    def _offload_needs(self, name: str, stages: str) -> ImpossibleError:
        return ImpossibleError(
            f"strategy.{name}={getattr(self, name)} is not valid with strategy.stage={self.stage}: "
            f"choose stage {stages}."
        )

    def check_device(self, device: str) -> None:
        """Offloading needs a device to offload from."""
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) != "none" and device == "cpu":
                raise ImpossibleError(
                    f"strategy.{name}={getattr(self, name)} is not valid on a CPU, where there is no device to "
                    "offload from: choose none."
                )

    def check_precision(self, precision: Precision) -> None:
        """In fp32, or bf16 with fp32 master weights, optimizer state and reduction."""
        require_stored_format(f"strategy={self.name}", precision, ", or strategy ddp")
        if precision.compute == "fp32":
            return
        if (precision.parameters, precision.compute, precision.reduce) != ("fp32", "bf16", "fp32"):
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy=deepspeed, whose fp16 scales the loss its own "
                "way and whose master weights are fp32 without its CPU optimizer: choose fp32, tf32 or bf16."
            )
        if self.stage == 0:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy=deepspeed with strategy.stage=0, which does not "
                "reduce gradients in fp32: choose stage 1, 2 or 3, precision fp32 or tf32, or strategy ddp."
            )

    def check_step(self, step: Step) -> None:
        """DeepSpeed itself decides when gradients are reduced and freed."""
        if step.keep_gradients:
            raise ImpossibleError(
                "optimizer.keep_gradients=true is not valid for strategy=deepspeed, which frees gradients itself: "
                "choose false."
            )
        if step.compile:
            raise ImpossibleError(
                "compile=true is not valid for strategy=deepspeed, whose hooks run within blocks: choose false, or "
                "strategy ddp, fsdp or fsdp1."
            )
        if step.micro_batches > 1 and step.synchronize_every_micro_batch != (self.stage >= 2):
            needed, why = (
                ("true", "stages 2 and 3 reduce the gradients of every micro-batch")
                if self.stage >= 2
                else ("false", "stages 0 and 1 reduce gradients after the last micro-batch")
            )
            raise ImpossibleError(
                f"gradient_accumulation_sync={str(step.synchronize_every_micro_batch).lower()} is not valid for "
                f"strategy=deepspeed with strategy.stage={self.stage}: choose {needed}, since {why}."
            )

    def state_bytes(self, precision: Precision, states_per_parameter: int, world_size: int) -> float:
        """As torch's in stage 0. Else one copy of the states and of the parameters that the optimizer updates; and, as
        they are computed with, parameters (up to stage 2 every rank's) and gradients (in stage 1 every rank's)."""
        if self.stage == 0:
            return super().state_bytes(precision, states_per_parameter, world_size)
        whole = precision.compute_dtype.itemsize * world_size
        gradients = whole if self.stage == 1 else precision.compute_dtype.itemsize
        return whole / self.factor + gradients + precision.parameter_dtype.itemsize * (1 + states_per_parameter)

    def check_installed(self) -> None:
        """The library is an optional extra."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ImpossibleError(
                "strategy=deepspeed needs the library deepspeed, which is not installed: choose another strategy, or "
                f"install it with {how_to_install('deepspeed', options='--no-build-isolation ')}."
            )

    def imports(self, device: str) -> tuple[str, ...]:
        """What DeepSpeed imports of torch on the way, with its first gradients. Beside GPUs the rank does that."""
        return ("torch._inductor.compile_fx",) if device == "cpu" else ()

    @property
    def offloaded(self) -> str:
        """Parameters, the optimizer, or both."""
        places = {"parameters": self.offload_parameters, "optimizer": self.offload_optimizer}
        return " and ".join(what for what, place in places.items() if place != "none")

    def effective(self, world_size: int) -> str:
        """The stage, and whether anything is offloaded."""
        return f"deepspeed/stage_{self.stage}{'_offload' if self.uses_host else ''}"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """DeepSpeed's engine, around model and optimizer. In stage 3 no rank ever holds the whole model."""
        deepspeed = _library(job.device)
        config = self.configuration(job)
        if self.stage == 3:
            deepspeed.comm.init_distributed(dist_init_required=False)
            for module in reversed(list(model.modules())):  # children before what contains them
                job.materializer.module(module)
                own = list(module.parameters(recurse=False))
                for parameter in own:
                    parameter.data = parameter.data.to(job.precision.compute_dtype)
                if own:
                    deepspeed.zero.Init(module=module, config_dict_or_path=config, dtype=job.precision.compute_dtype)
        else:
            job.materializer.model(model)
        assert job.build_optimizer is not None
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=job.build_optimizer(model.parameters()),
            config=config,
            dist_init_required=False,
        )
        return engine  # type: ignore[no-any-return]

    def configuration(self, job: Job) -> dict[str, Any]:
        """What DeepSpeed is told, in its own words."""
        zero: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": self.overlap_comm,
            "contiguous_gradients": self.contiguous_gradients,
            "reduce_bucket_size": self.reduce_bucket_size,
            "stage3_prefetch_bucket_size": self.prefetch_bucket_size,
            "stage3_param_persistence_threshold": self.param_persistence_threshold,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_max_reuse_distance": self.max_reuse_distance,
        }
        for section, place in (
            ("offload_optimizer", self.offload_optimizer),
            ("offload_param", self.offload_parameters),
        ):
            if place != "none":
                zero[section] = {"device": place, "pin_memory": True}
                if place == "nvme":
                    zero[section]["nvme_path"] = self.nvme_path
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # for its log alone: batches come from outside
            "gradient_accumulation_steps": job.micro_batches,
            "gradient_clipping": 0.0,  # no other strategy clips; DeepSpeed's default is a norm of 1
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,  # torch's own, SGD among them
            "zero_force_ds_cpu_optimizer": False,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device after every step
        }
        if job.precision.mixed:
            config |= {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
            }
        return config

    def plan(self, setting: Setting) -> Plan:
        """What has been read and measured: of offloading that to the CPU, since nothing says how fast drives are.

        Raises
        ------
        ImpossibleError
            For everything else.
        """
        unknown = {
            "strategy.contiguous_gradients=false": not self.contiguous_gradients and self.stage > 0,
            "strategy.prefetch_bucket_size=0, which gathers module by module": self.stage == 3
            and self.prefetch_bucket_size == 0,
            "strategy.offload_optimizer=nvme": self.offload_optimizer == "nvme",
            "strategy.offload_parameters=nvme": self.offload_parameters == "nvme",
        }
        for what, is_unknown in unknown.items():
            if is_unknown:
                raise ImpossibleError(
                    f"strategy=deepspeed with {what} cannot be predicted: choose mode=measure or rehearse, or "
                    "contiguous gradients, a prefetch_bucket_size above 0 and cpu or none in place of nvme."
                )
        if self.stage == 0:
            return Stage0Plan(setting)
        if self.stage == 3:
            return self._plan_of_stage_3(setting)
        overlaps, bucket = bool(self.overlap_comm), self.reduce_bucket_size
        if self.stage == 1 and setting.precision.mixed:
            return (
                OffloadedBf16Stage1Plan(setting, overlaps=overlaps, bucket=bucket)
                if self.uses_host
                else Bf16Stage1Plan(setting)
            )
        kind = OffloadedStage1And2Plan if self.uses_host else Stage1And2Plan
        return kind(setting, partitions_gradients=self.stage == 2, overlaps=overlaps, bucket=bucket)

    def _plan_of_stage_3(self, setting: Setting) -> Plan:
        knobs = Knobs(
            bucket=self.reduce_bucket_size,
            prefetch=self.prefetch_bucket_size,
            persistent=self.param_persistence_threshold,
            live=self.max_live_parameters,
            reuse=self.max_reuse_distance,
            overlaps=bool(self.overlap_comm),
        )
        if not self.uses_host:
            return Stage3Plan(setting, knobs)
        return OffloadedStage3Plan(
            setting, knobs, optimizer=self.offload_optimizer != "none", parameters=self.offload_parameters != "none"
        )

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The one the engine was built with."""
        return module.optimizer  # type: ignore[return-value]

    def stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """By the engine."""
        return DeepSpeedStepper(module, optimizer, scaler)


class DeepSpeedStepper(Stepper):
    """Backward and update by DeepSpeed's engine, which counts micro-batches itself."""

    def __init__(self, engine: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optimizer, scaler, keep_gradients=False)
        self._engine = engine

    def backward(self, loss: torch.Tensor) -> None:
        """The loss is a micro-batch's share already, so it is not divided once more."""
        self._engine.backward(loss, scale_wrt_gas=False)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch, no more

    def update(self) -> None:
        """The engine steps and frees the gradients."""
        self._engine.step()


def _library(device: torch.device) -> ModuleType:
    """DeepSpeed, imported in the rank that uses it, for its device."""
    os.environ["DS_ACCELERATOR"] = device.type
    # It calls collectives by names that torch 2.13 says, at every call site, are the old ones.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # of the device, among those this process sees
    deepspeed = importlib.import_module("deepspeed")
    if device.type == "cpu":
        # All collectives of CPU processes go through gloo: its kernels for shared memory would be compiled first. (To
        # look at this table is to look for compilers and libraries for every kernel that DeepSpeed has.)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
