"""What strategies have in common that leave a plain strategy's work to a training framework."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bench.core.errors import ImpossibleError, invalid_value_error
from bench.core.installation import format_install_command
from bench.core.precision import Precision
from bench.core.typed_config import OneOf
from bench.strategies.base import Strategy
from bench.strategies.ddp import BUCKET_MB_RANGE, DDPStrategy
from bench.strategies.fsdp.strategy import FSDP2Strategy
from bench.strategies.fsdp1.strategy import BACKWARD_PREFETCH_NAMES, FSDP1Strategy
from bench.strategies.plan_inputs import PlanInputs
from bench.strategies.requirements import require_stored_reduce_dtype
from bench.strategies.sharding import BLOCKS_PER_UNIT_RANGE
from bench.strategies.step_plan import StepPlan
from bench.strategies.stepper import Stepper

if TYPE_CHECKING:
    import torch
    from torch import nn

PLAIN_STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDPStrategy, "fsdp": FSDP2Strategy, "fsdp1": FSDP1Strategy}
"""What a framework may wrap a model in, by the name of the plain strategy."""

BACKEND_KNOB_DEFAULTS: dict[str, dict[str, Any]] = {
    "ddp": {"bucket_cap_mb": None, "gradient_as_bucket_view": True, "static_graph": None},
    "fsdp": {"reshard_after_forward": True, "blocks_per_unit": 1},
    "fsdp1": {
        "reshard_after_forward": True,
        "forward_prefetch": False,
        "backward_prefetch": "pre",
        "limit_all_gathers": True,
        "blocks_per_unit": 1,
    },
}
"""Knobs of each that a framework passes on, and what null stands for: as in the plain strategy's own YAML."""

FIXED_BACKEND_KNOBS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"forward_prefetch": False, "backward_prefetch": True, "cpu_offload": False},
    "fsdp1": {"cpu_offload": False},
}
"""Knobs of each that stay as they are in the plain strategy's own YAML."""


@dataclass(frozen=True)
class FrameworkStrategy(Strategy):
    """A plain strategy, wrapped and stepped by a framework. `plan` and refusals are those of the plain one.

    A knob that `backend` has no use for is null, and refused if it is not.
    """

    backend: Annotated[str, OneOf(*PLAIN_STRATEGIES)]
    """ddp, fsdp (FSDP2) or fsdp1."""
    bucket_cap_mb: Annotated[int | None, BUCKET_MB_RANGE]
    """Of ddp: size of a gradient bucket in MiB; null: torch's default."""
    gradient_as_bucket_view: bool | None
    """Of ddp: gradients are views into the buckets."""
    static_graph: bool | None
    """Of ddp: promise that every step uses the same parameters in the same order."""
    reshard_after_forward: bool | None
    """Of fsdp and fsdp1: free a unit's gathered parameters after its forward (ZeRO-3), or keep them (ZeRO-2)."""
    blocks_per_unit: Annotated[int | None, BLOCKS_PER_UNIT_RANGE]
    """Of fsdp and fsdp1: transformer blocks whose parameters are gathered as one."""
    forward_prefetch: bool | None
    """Of fsdp1: issue the next unit's all-gather before the current unit's forward."""
    backward_prefetch: Annotated[str | None, OneOf(*BACKWARD_PREFETCH_NAMES)]
    """Of fsdp1: when to gather the next unit in backward: pre, post or none."""
    limit_all_gathers: bool | None
    """Of fsdp1: at most two all-gathers in flight."""

    library: ClassVar[str]
    """Package that is imported, and extra of this package that installs it."""

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As the plain strategy does, every knob that the backend has as a value."""
        knob_defaults = BACKEND_KNOB_DEFAULTS[self.backend]
        for knob in sorted({knob for knobs in BACKEND_KNOB_DEFAULTS.values() for knob in knobs} - set(knob_defaults)):
            if getattr(self, knob) is not None:
                raise invalid_value_error(
                    f"strategy.{knob}",
                    getattr(self, knob),
                    f"null: strategy.backend={self.backend} of strategy={self.name} has no such knob",
                    ImpossibleError,
                )
        knob_values = {
            knob: default if getattr(self, knob) is None else getattr(self, knob)
            for knob, default in knob_defaults.items()
        }
        factor: int | str = self.sharding_factor
        if factor == "auto":
            factor = 1 if self.backend == "ddp" else "full"
        strategy = dataclasses.replace(self, sharding_factor=factor, **knob_values)
        plain_strategy = dataclasses.replace(
            strategy.plain_strategy, name=f"{self.name} with strategy.backend={self.backend}"
        )
        resolved_plain_strategy = plain_strategy.resolve(world_size, ranks_per_node, accumulates=accumulates)
        values = {knob: getattr(resolved_plain_strategy, knob) for knob in ("sharding_factor", *knob_defaults)}
        resolved = dataclasses.replace(self, **values)
        resolved.check(world_size)
        return resolved

    @property
    def plain_strategy(self) -> Any:
        """The plain strategy with the same knobs."""
        knobs = {knob: getattr(self, knob) for knob in ("sharding_factor", *BACKEND_KNOB_DEFAULTS[self.backend])}
        return PLAIN_STRATEGIES[self.backend](
            name=self.backend, **knobs, **FIXED_BACKEND_KNOBS[self.backend], **self.plain_mesh_knobs
        )

    @property
    def plain_mesh_knobs(self) -> dict[str, bool]:
        """How the plain strategy's mesh is asked for, where the framework leaves that to its user."""
        return {}

    single_mixing_reason = "whose framework does it in its own way"

    @property
    def supported_mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The plain strategy's usual one."""
        return PLAIN_STRATEGIES[self.backend].supported_mixings[:1]

    def check_precision(self, precision: Precision) -> None:
        """Losses are not scaled here, and gradients are reduced as they are stored."""
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy={self.name}, whose scaling of losses knows no "
                f"layers that stay in fp32, which T5 needs: choose bf16, or strategy {self.backend}."
            )
        if self.backend == "ddp":
            require_stored_reduce_dtype(
                f"strategy={self.name} with strategy.backend=ddp", precision, ", or strategy ddp"
            )

    @property
    def updated_tensor_kind(self) -> str:
        return str(self.plain_strategy.updated_tensor_kind)

    def check_optimizer(self, name: str, implementation: str) -> None:
        self.plain_strategy.check_optimizer(name, implementation)

    @property
    def first_steady_step(self) -> int:
        return int(self.plain_strategy.first_steady_step)

    @property
    def steps_before_steady(self) -> int:
        return int(self.plain_strategy.steps_before_steady)

    def check_installed(self) -> None:
        """The framework is an optional extra."""
        if importlib.util.find_spec(self.library) is None:
            raise ImpossibleError(
                f"strategy={self.name} needs the package {self.library}, which is not installed: "
                f"{format_install_command(self.library)}, or choose strategy {self.backend}."
            )

    def describe_effective_strategy(self, world_size: int) -> str:
        """What the plain strategy comes to, under the framework's name; FSDP1 is named, FSDP2 is not."""
        kind = self.plain_strategy.describe_effective_strategy(world_size).removeprefix("fsdp/").replace("/", "_")
        return f"{self.name}/{kind}"

    def build_ddp_options(self) -> dict[str, Any]:
        """Arguments of DDP, which the framework passes on."""
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "init_sync": False,  # every rank has filled its copy with the same values
        }

    def plan(self, inputs: PlanInputs) -> StepPlan:
        """The plain strategy's: a framework stores and sends nothing of its own."""
        return self.plain_strategy.plan(inputs)  # type: ignore[no-any-return]


@contextlib.contextmanager
def isolate_environment(removed_prefixes: tuple[str, ...], **variables: str) -> Iterator[None]:
    """Within, the environment says where this rank stands, and nothing of how to train; threads are kept.

    Frameworks are imported and set up within: importing Lightning 2.6 alone raises torch's number of threads.

    Parameters
    ----------
    removed_prefixes: tuple of str
        Beginnings of the names of variables from which a framework takes what it is not told.
    variables: str
        Variables to set.
    """
    import torch

    original_environment, num_threads = dict(os.environ), torch.get_num_threads()
    for name in original_environment:
        if name.startswith(removed_prefixes):
            del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(original_environment)
        torch.set_num_threads(num_threads)


class PreparedModules:
    """Which framework object prepared which module: strategies keep nothing themselves."""

    def __init__(self) -> None:
        self._framework_of_module: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

    def remember_framework(self, module: nn.Module, framework: Any) -> nn.Module:
        """Remember it for as long as the module lives."""
        self._framework_of_module[module] = framework
        return module

    def find_framework(self, module: nn.Module) -> Any:
        return self._framework_of_module[module]


class FrameworkStepper(Stepper):
    """Backward through a framework and update through the optimizer it prepared, as its users write them.

    Parameters
    ----------
    framework: Any
        What has a ``backward(loss)`` of its own: Accelerate's accelerator, Lightning's fabric.
    """

    def __init__(
        self, framework: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> None:
        super().__init__(optimizer, scaler, keep_gradients)
        self._framework = framework

    def backward(self, loss: torch.Tensor) -> None:
        self._framework.backward(loss)

    def update(self) -> None:
        """The prepared optimizer's step: scaling losses, if at all, is the framework's affair."""
        if self.clip_gradients is not None:
            self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._keep_gradients)
