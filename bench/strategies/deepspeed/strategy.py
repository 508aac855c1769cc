"""DeepSpeed: ZeRO stages 0 to 3 as its own engine carries them out, with or without offloading."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.installation import format_install_command
from bench.core.precision import PARAMETER_MIXING, Precision
from bench.core.presentation import Presentation, TrainingOption, TrainingTerm
from bench.core.typed_config import OneOf, Within
from bench.optimizers.updated_tensor import FLAT_TENSORS, WHOLE_TENSORS
from bench.strategies.base import BuildOptimizer, StepSettings, Strategy, WrapContext
from bench.strategies.deepspeed.offload import (
    DeepSpeedOffloadBf16Stage1Plan,
    DeepSpeedOffloadStage1And2Plan,
    DeepSpeedOffloadStage3Plan,
)
from bench.strategies.deepspeed.stage_3 import DeepSpeedStage3Plan, Stage3Knobs
from bench.strategies.deepspeed.stages_0_to_2 import (
    DeepSpeedBf16Stage1Plan,
    DeepSpeedStage0Plan,
    DeepSpeedStage1And2Plan,
)
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import require_packed_bits, require_sharding_factor, require_stored_reduce_dtype
from bench.strategies.step_plan import StepPlan
from bench.strategies.stepper import Stepper

if TYPE_CHECKING:
    import torch
    from torch import nn

STAGES = (0, 1, 2, 3)
OFFLOAD_TARGETS = ("none", "cpu", "nvme")
NUMEL_RANGE = Within(0, 10**15)
DEFAULT_SUB_GROUP_SIZE = 10**9

SHARDING_FACTOR_BY_STAGE = "stage"
"""The sharding factor that follows from the stage."""


@dataclass(frozen=True)
class DeepSpeedStrategy(Strategy):
    """ZeRO by the DeepSpeed library. Sizes are in elements; names are those of its configuration.

    Weights, data, optimizer and the division of the loss are those of every other strategy. In bf16 DeepSpeed rounds
    the weights first and makes its fp32 copies from that, so training starts from rounded weights. When a rank is
    rehearsed, the partitions that stages 1 and 2 gather after the update repeat the first rank's.
    """

    presentation = Presentation(
        label="DeepSpeed",
        position=60,
        kinds={
            "stage_0": ("stage 0", "#9a5b2e"),
            "stage_1": ("stage 1", "#a29300"),
            "stage_2": ("stage 2", "#4b8f6b"),
            "stage_3": ("stage 3", "#4b60c0"),
        },
        mixed_precision={"deepspeed bf16": "parameters"},
        markers={"stage_0": "*", "stage_1": "P", "stage_2": "v", "stage_3": "d"},
    )
    training_terms = (
        TrainingTerm(
            "DeepSpeed ZeRO 0 to 3",
            ("strategy=deepspeed strategy.stage=N",),
            "DeepSpeed's own library is wanted",
        ),
        TrainingTerm(
            "CPU offload",
            ("strategy=deepspeed strategy.offload_optimizer=cpu",),
            "the GPUs together are too small, and time matters less",
        ),
    )
    training_options = (
        TrainingOption(
            "DeepSpeed ZeRO-3 with parameters and optimizer on the CPU",
            {
                "strategy": "deepspeed",
                "strategy.sharding_factor": "stage",
                "strategy.stage": "3",
                "strategy.offload_parameters": "cpu",
                "strategy.offload_optimizer": "cpu",
            },
            "offload_parameters=nvme and strategy.nvme_path=FOLDER where the CPU's memory is too small as well",
            leaves={"too few GPUs": 2, "offload": 2},
        ),
    )

    stage: Annotated[int, OneOf(*STAGES)]
    """0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too."""
    offload_optimizer: Annotated[str, OneOf(*OFFLOAD_TARGETS)]
    """Where optimizer state and fp32 parameters are kept and updated: none (on the device), cpu or nvme."""
    offload_parameters: Annotated[str, OneOf(*OFFLOAD_TARGETS)]
    """Where the shards of parameters are kept."""
    nvme_path: str | None
    """Folder for what is offloaded to NVMe."""
    overlap_comm: bool | None
    """Reduce gradients while backward runs. null: DeepSpeed's choice, which is true for stage 3 alone."""
    contiguous_gradients: bool
    """Copy gradients into one buffer as they are produced."""
    reduce_bucket_size: Annotated[int, Within(1, 10**15)]
    """Elements reduced at a time, and of the buffer for them."""
    prefetch_bucket_size: Annotated[int, NUMEL_RANGE]
    """Elements gathered ahead of use in stage 3."""
    param_persistence_threshold: Annotated[int, NUMEL_RANGE]
    """Parameters smaller than this stay whole in stage 3."""
    max_live_parameters: Annotated[int, NUMEL_RANGE]
    """Elements that may be whole at a time in stage 3."""
    max_reuse_distance: Annotated[int, NUMEL_RANGE]
    """Parameters used again within so many elements stay whole in stage 3."""
    sub_group_size: Annotated[int, Within(1, 10**15)] = DEFAULT_SUB_GROUP_SIZE
    """Elements of its part that a rank updates at a time in stage 3, with a copy of their gradients."""

    supported_finetunes = ("full", "lora", "qlora")
    supported_mixings = (PARAMETER_MIXING,)
    single_mixing_reason = "whose optimizer keeps narrow parameters in fp32 as well"

    def describe_mixed_precision(self, precision: Precision) -> str:
        """Parameters are narrow, DeepSpeed's optimizer keeps them in fp32 as well."""
        return "deepspeed bf16"

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy; the stage decides how many ranks share parameters, and whether reduction overlaps."""
        factor = world_size if self.stage == 3 else 1
        reason = f"strategy.stage={self.stage} of deepspeed spreads parameters"
        require_sharding_factor(self, SHARDING_FACTOR_BY_STAGE, factor, world_size, reason)
        overlaps = self.stage == 3 if self.overlap_comm is None else self.overlap_comm
        strategy = dataclasses.replace(self, sharding_factor=factor, overlap_comm=overlaps)
        return super(DeepSpeedStrategy, strategy).resolve(world_size, ranks_per_node, accumulates=accumulates)

    def check(self, world_size: int) -> None:
        """Any world size; offloading where the stage has something to offload."""
        if self.offload_parameters != "none" and self.stage != 3:
            raise self._build_offload_error(
                "offload_parameters", "3: only there each rank has just a part of the parameters"
            )
        if self.offload_optimizer == "cpu" and self.stage == 0:
            raise self._build_offload_error("offload_optimizer", "1, 2 or 3: stage 0 leaves the optimizer to torch")
        if self.offload_optimizer == "nvme" and self.stage != 3:
            raise self._build_offload_error("offload_optimizer", "3: stages 1 and 2 offload to the CPU alone")
        uses_nvme = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if uses_nvme and not self.nvme_path:
            valid = "the folder to offload to, on an NVMe device"
            raise invalid_value_error("strategy.nvme_path", self.nvme_path, valid, ImpossibleError)
        if self.nvme_path and not uses_nvme:
            valid = "null, since nothing is offloaded to nvme"
            raise invalid_value_error("strategy.nvme_path", self.nvme_path, valid, ImpossibleError)
        if self.overlap_comm and self.stage == 0:
            valid = "false or null: stage 0 reduces when backward is over"
            raise invalid_value_error("strategy.overlap_comm", True, valid, ImpossibleError)

    def _build_offload_error(self, name: str, valid_stages: str) -> ImpossibleError:
        return ImpossibleError(
            f"strategy.{name}={getattr(self, name)} is not valid with strategy.stage={self.stage}: "
            f"choose stage {valid_stages}."
        )

    def check_device(self, device: str) -> None:
        """Offloading needs a device to offload from."""
        for name in ("offload_optimizer", "offload_parameters"):
            if getattr(self, name) != "none" and device == "cpu":
                raise ImpossibleError(
                    f"strategy.{name}={getattr(self, name)} is not valid on a CPU, where there is no device to "
                    "offload from: choose none."
                )

    def check_finetune(self, quantised_bits: int | None, adapter_dropout: float) -> None:
        """Quantised weights of 4 bits are parameters like others."""
        require_packed_bits(self.name, quantised_bits)

    def check_precision(self, precision: Precision) -> None:
        """In fp32, or bf16 with fp32 master weights, optimizer state and reduction."""
        require_stored_reduce_dtype(f"strategy={self.name}", precision, ", or strategy ddp")
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

    @property
    def updated_tensor_kind(self) -> str:
        """Stage 0 leaves the optimizer to torch."""
        return FLAT_TENSORS if self.stage else WHOLE_TENSORS

    def check_step(self, settings: StepSettings) -> None:
        """DeepSpeed itself decides when gradients are reduced and freed."""
        if settings.offloads_activations:
            raise ImpossibleError(
                f"activation_offload=true is not valid for strategy={self.name}, "
                "which has an offload of its own: choose false."
            )
        if settings.has_chunked_loss and self.stage == 3:
            raise ImpossibleError(
                f"loss=chunked is not valid for strategy={self.name}, "
                "whose stage 3 has the head's weight whole within the head's own passes alone: "
                "choose loss=whole."
            )
        if settings.keep_gradients:
            raise ImpossibleError(
                "optimizer.keep_gradients=true is not valid for strategy=deepspeed, which frees gradients itself: "
                "choose false."
            )
        if settings.compile:
            raise ImpossibleError(
                "compile=true is not valid for strategy=deepspeed, whose hooks run within blocks: choose false, or "
                "strategy ddp, fsdp or fsdp1."
            )
        if settings.num_micro_batches > 1 and settings.synchronize_every_micro_batch != (self.stage >= 2):
            needed_value, reason = (
                ("true", "stages 2 and 3 reduce the gradients of every micro-batch")
                if self.stage >= 2
                else ("false", "stages 0 and 1 reduce gradients after the last micro-batch")
            )
            raise ImpossibleError(
                f"gradient_accumulation_sync={str(settings.synchronize_every_micro_batch).lower()} is not valid for "
                f"strategy=deepspeed with strategy.stage={self.stage}: choose {needed_value}, since {reason}."
            )

    def compute_state_bytes_per_parameter(
        self, precision: Precision, states_per_parameter: float, world_size: int
    ) -> float:
        """As torch's in stage 0. Else one copy of the states and of the parameters that the optimizer updates; and, as
        they are computed with, parameters (up to stage 2 every rank's) and gradients (in stage 1 every rank's)."""
        if self.stage == 0:
            return super().compute_state_bytes_per_parameter(precision, states_per_parameter, world_size)
        replicated_bytes = precision.compute_itemsize * world_size
        gradient_bytes = replicated_bytes if self.stage == 1 else precision.compute_itemsize
        return (
            replicated_bytes / self.resolved_sharding_factor
            + gradient_bytes
            + precision.parameter_itemsize * (1 + states_per_parameter)
        )

    def check_installed(self) -> None:
        """The library is an optional extra."""
        if importlib.util.find_spec("deepspeed") is None:
            raise ImpossibleError(
                "strategy=deepspeed needs the library deepspeed, which is not installed: choose another strategy, or "
                f"install it with {format_install_command('deepspeed', options='--no-build-isolation ')}."
            )

    def list_preload_modules(self, device: str) -> tuple[str, ...]:
        """What DeepSpeed imports of torch on the way, with its first gradients. Beside GPUs the rank does that."""
        return ("torch._inductor.compile_fx",) if device == "cpu" else ()

    @property
    def offloaded_state(self) -> str:
        """Parameters, the optimizer, or both."""
        offload_targets = {"parameters": self.offload_parameters, "optimizer": self.offload_optimizer}
        return " and ".join(state for state, target in offload_targets.items() if target != "none")

    def describe_effective_strategy(self, world_size: int) -> str:
        """The stage, and whether anything is offloaded."""
        return f"deepspeed/stage_{self.stage}{'_offload' if self.has_offloaded_state else ''}"

    def wrap(self, model: nn.Module, context: WrapContext) -> nn.Module:
        """DeepSpeed's engine, around model and optimizer. In stage 3 no rank ever holds the whole model."""
        deepspeed = _import_deepspeed(context.device)
        config = self.build_configuration(context)
        if self.stage == 3:
            deepspeed.comm.init_distributed(dist_init_required=False)
            for module in reversed(list(model.modules())):  # children before what contains them
                context.materializer.fill_module(module)
                own_parameters = list(module.parameters(recurse=False))
                for parameter in own_parameters:
                    parameter.data = parameter.data.to(context.precision.compute_dtype)
                if own_parameters:
                    deepspeed.zero.Init(
                        module=module, config_dict_or_path=config, dtype=context.precision.compute_dtype
                    )
        else:
            context.materializer.fill_model(model)
        assert context.build_optimizer is not None
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=context.build_optimizer(model.parameters()),
            config=config,
            dist_init_required=False,
        )
        return engine  # type: ignore[no-any-return]

    def build_configuration(self, context: WrapContext) -> dict[str, Any]:
        """What DeepSpeed is told, in its own words."""
        zero_options: dict[str, Any] = {
            "stage": self.stage,
            "overlap_comm": self.overlap_comm,
            "contiguous_gradients": self.contiguous_gradients,
            "reduce_bucket_size": self.reduce_bucket_size,
            "stage3_prefetch_bucket_size": self.prefetch_bucket_size,
            "stage3_param_persistence_threshold": self.param_persistence_threshold,
            "stage3_max_live_parameters": self.max_live_parameters,
            "stage3_max_reuse_distance": self.max_reuse_distance,
            "sub_group_size": self.sub_group_size,
        }
        for section, target in (
            ("offload_optimizer", self.offload_optimizer),
            ("offload_param", self.offload_parameters),
        ):
            if target != "none":
                zero_options[section] = {"device": target, "pin_memory": True}
                if target == "nvme":
                    zero_options[section]["nvme_path"] = self.nvme_path
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # for its log alone: batches come from outside
            "gradient_accumulation_steps": context.num_micro_batches,
            "gradient_clipping": context.gradient_clip_norm or 0.0,  # DeepSpeed's default is a norm of 1
            "zero_optimization": zero_options,
            "zero_allow_untested_optimizer": True,  # torch's own, SGD among them
            "zero_force_ds_cpu_optimizer": False,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device after every step
        }
        if context.precision.is_mixed:
            config |= {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "communication_data_type": "fp32",
            }
        return config

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """What has been read and measured: of offloading that to the CPU, since nothing says how fast drives are.

        Raises
        ------
        ImpossibleError
            For everything else.
        """
        unpredictable_settings = {
            "strategy.contiguous_gradients=false": not self.contiguous_gradients and self.stage > 0,
            "strategy.prefetch_bucket_size=0, which gathers module by module": self.stage == 3
            and self.prefetch_bucket_size == 0,
            "offloading beside frozen parameters": self.has_offloaded_state
            and any(not parameter.is_trained for unit in inputs.units for parameter in unit.parameters),
            "strategy.offload_optimizer=nvme": self.offload_optimizer == "nvme",
            "strategy.offload_parameters=nvme": self.offload_parameters == "nvme",
        }
        for setting_text, is_set in unpredictable_settings.items():
            if is_set:
                raise ImpossibleError(
                    f"strategy=deepspeed with {setting_text} cannot be predicted: choose mode=measure or rehearse, or "
                    "contiguous gradients, a prefetch_bucket_size above 0 and cpu or none in place of nvme."
                )
        if self.stage == 0:
            return DeepSpeedStage0Plan(inputs)
        if self.stage == 3:
            return self._plan_stage_3(inputs)
        overlaps, bucket_numel = bool(self.overlap_comm), self.reduce_bucket_size
        if self.stage == 1 and inputs.precision.is_mixed:
            return (
                DeepSpeedOffloadBf16Stage1Plan(inputs, overlaps=overlaps, bucket_numel=bucket_numel)
                if self.has_offloaded_state
                else DeepSpeedBf16Stage1Plan(inputs)
            )
        plan_class = DeepSpeedOffloadStage1And2Plan if self.has_offloaded_state else DeepSpeedStage1And2Plan
        return plan_class(inputs, partitions_gradients=self.stage == 2, overlaps=overlaps, bucket_numel=bucket_numel)

    def _plan_stage_3(self, inputs: PlanInputs) -> StepPlan:
        knobs = Stage3Knobs(
            bucket_numel=self.reduce_bucket_size,
            prefetch_numel=self.prefetch_bucket_size,
            persistence_threshold=self.param_persistence_threshold,
            max_live_numel=self.max_live_parameters,
            max_reuse_numel=self.max_reuse_distance,
            sub_group_numel=self.sub_group_size,
            overlaps_reduction=bool(self.overlap_comm),
        )
        if not self.has_offloaded_state:
            return DeepSpeedStage3Plan(inputs, knobs)
        return DeepSpeedOffloadStage3Plan(
            inputs,
            knobs,
            offloads_optimizer=self.offload_optimizer != "none",
            offloads_parameters=self.offload_parameters != "none",
        )

    def build_optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The one the engine was built with."""
        return module.optimizer  # type: ignore[return-value]

    def build_stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
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


def _import_deepspeed(device: torch.device) -> ModuleType:
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
