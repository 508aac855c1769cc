"""Tensor parallelism: every layer split over neighbouring ranks, alone or with FSDP2 or DDP among such groups."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from bench.errors import ImpossibleError, bad_value
from bench.models import Family
from bench.models.base import dividing_families
from bench.precision import AUTOCAST, PARAMETERS, Precision
from bench.strategies.base import BuildOptimizer, Job, Step, Strategy, ranks_asked_for, require_stored_format
from bench.strategies.ddp import BUCKET_MB, DDP
from bench.strategies.fsdp import FSDP2
from bench.strategies.plan import Plan, Setting, WholePlan
from bench.strategies.split import Split, localize
from bench.typed import OneOf

FSDP, DATA, NONE = "fsdp", "ddp", "none"

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"
"""Dimensions of the mesh, from the one whose ranks are farthest apart to that of neighbours."""


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Megatron's split of attention and feed-forward layers (Shoeybi et al. 2019, arXiv:1909.08053), by torch's styles.

    Ranks whose numbers are neighbours share layers and sequences. The vocabulary is divided, too: each rank computes
    its part of the logits, and the loss is computed without ever putting them together.
    """

    degree: int | str
    """Ranks a layer is split over: a whole number, `node` for the ranks of one machine, `full` for all."""
    sequence_parallel: bool
    """Divide what lies between the layers over the sequence (Korthikanti et al. 2022, arXiv:2205.05198)."""
    data_parallel: Annotated[str, OneOf(FSDP, DATA, NONE)]
    """Among groups that share layers: fsdp or ddp; none, whatever was asked for, where there is one group alone."""
    reshard_after_forward: bool | None
    """With fsdp: free gathered parameters after forward (ZeRO-3, also if null), or keep them until backward is done
    (ZeRO-2)."""
    mesh_2d: bool | None = None
    """With fsdp: replicas are a dimension of its mesh even where there is one. null: only where there are several."""
    bucket_cap_mb: Annotated[int | None, BUCKET_MB] = None
    """With ddp: size of a gradient bucket in MiB. null: torch's default, 25 and the first one 1."""

    other_mixing = "which does it as its data parallelism does"

    @property
    def mixings(self) -> tuple[str, ...]:  # type: ignore[override]
        """FSDP casts parameters by its policy. Without it autocast does, and what layer norms hand out is fp32: the
        gathers of sequence parallelism are then twice as large."""
        return (PARAMETERS,) if self.data_parallel == FSDP else (AUTOCAST,)

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """As every strategy, with degree and data parallelism as they come to at this world size."""
        degree = ranks_asked_for("strategy.degree", self.degree, world_size, ranks_per_node, least=2)
        kind = self.data_parallel if degree < world_size else NONE
        if degree < world_size and kind == NONE:
            valid = f"fsdp or ddp with strategy.degree={degree} of gpus={world_size}"
            raise bad_value("strategy.data_parallel", NONE, valid, ImpossibleError)
        reshard = self.reshard_after_forward
        of_the_other = {DATA: ("reshard_after_forward", "mesh_2d"), FSDP: ("bucket_cap_mb",)}
        for knob in of_the_other.get(self.data_parallel, ()):
            if getattr(self, knob) is not None:
                valid = f"null with strategy.data_parallel={self.data_parallel}"
                raise bad_value(f"strategy.{knob}", getattr(self, knob), valid, ImpossibleError)
        factor: int | str = self.sharding_factor
        if factor == "auto":
            factor = world_size if kind == FSDP else degree
        chosen = dataclasses.replace(
            self,
            degree=degree,
            data_parallel=kind,
            sharding_factor=factor,
            reshard_after_forward=None if kind != FSDP else True if reshard is None else reshard,
            bucket_cap_mb=self.bucket_cap_mb if kind == DATA else None,
        )
        resolved = super(TensorParallel, chosen).resolve(world_size, ranks_per_node, accumulates=accumulates)
        assert isinstance(resolved, TensorParallel)
        mesh_2d = bool(self.mesh_2d) or resolved.factor < world_size
        return dataclasses.replace(resolved, mesh_2d=mesh_2d if kind == FSDP else None)

    def check(self, world_size: int) -> None:
        """A copy of the model is spread over whole groups, and DDP spreads it no further."""
        degree = self.split().degree
        if self.factor % degree:
            raise ImpossibleError(
                f"strategy.sharding_factor={self.factor} is not valid with strategy.degree={degree}, since a copy of "
                f"the model is spread over whole groups of that many ranks: choose auto or a multiple of {degree}."
            )
        if self.data_parallel != FSDP and self.factor != degree:
            raise ImpossibleError(
                f"strategy.sharding_factor={self.factor} is not valid with strategy.degree={degree} and "
                f"strategy.data_parallel={self.data_parallel}, which shards nothing further: choose auto or {degree}, "
                "or strategy.data_parallel=fsdp."
            )

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """The degree divides whatever the family says must be divided evenly."""
        degree = self.split().degree
        if not family.divides:
            raise ImpossibleError(
                f"model.family={family.family} is not valid for strategy={self.name}, which must know how layers are "
                f"divided: choose a model of family {', '.join(dividing_families())}."
            )
        if getattr(family, "dropout", 0.0):
            raise bad_value(
                "model.dropout",
                family.dropout,  # type: ignore[attr-defined]
                f"0.0 with strategy={self.name}, whose ranks would have to drop out the same where they have the same",
                ImpossibleError,
            )
        sizes = family.divisible(sequence_length, sequence_parallel=self.sequence_parallel)
        for name, size in sizes.items():
            if size % degree:
                common = math.gcd(*sizes.values())
                divisors = [str(number) for number in range(2, common + 1) if common % number == 0]
                raise ImpossibleError(
                    f"strategy.degree={degree} is not valid with {name}={size}, which it must divide: choose "
                    f"{', '.join(divisors) or 'another strategy: no degree divides all that is split'}."
                )

    def check_precision(self, precision: Precision) -> None:
        """Nothing that would have to be agreed upon among the ranks of a layer and is not."""
        if precision.scales_loss:
            raise ImpossibleError(
                f"precision={precision.name} is not valid for strategy={self.name}: ranks that share layers would have "
                "to agree on the loss scale and on the steps that are left out, which torch's gradient scaler does not "
                "see to. Choose bf16 or fp32."
            )
        if self.data_parallel == DATA:
            require_stored_format(f"strategy={self.name} with strategy.data_parallel=ddp", precision, ", or fsdp")

    def check_optimizer(self, name: str, implementation: str) -> None:
        """With fsdp parameters are DTensors, as FSDP2's are."""
        if self.data_parallel == FSDP:
            self._fsdp().check_optimizer(name, implementation)

    @property
    def settling_steps(self) -> int:
        """As the data parallelism's."""
        return self._ddp().settling_steps if self.data_parallel == DATA else super().settling_steps

    def check_step(self, step: Step) -> None:
        """Blocks are not compiled: torch 2.13 compiled a small GPT's, but not a small T5's within two minutes."""
        if step.compile:
            raise ImpossibleError(
                f"compile=true is not valid for strategy={self.name}: torch's compiler does not get through every kind "
                "of block that is split. Choose false."
            )

    def split(self) -> Split:
        """How layers are split, of a resolved strategy."""
        assert isinstance(self.degree, int), "resolve the strategy first"
        return Split(self.degree, self.sequence_parallel, keeps_dtensors=self.data_parallel == FSDP)

    def batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """One share per group."""
        return rank // self.split().degree, world_size // self.split().degree

    def effective(self, world_size: int) -> str:
        """Degree x groups, and what goes on among the groups."""
        degree = self.split().degree
        sequence = "+sequence" if self.sequence_parallel else ""
        if self.data_parallel == NONE:
            return f"{self.name}/{degree}{sequence}"
        return f"{self.name}/{degree}x{world_size // degree}{sequence}+{self._data_kind(world_size)}"

    def _data_kind(self, world_size: int) -> str:
        if self.data_parallel == DATA:
            return DATA
        zero2 = "" if self.reshard_after_forward else "_grad_op"
        return f"{FSDP}{zero2}" if self.factor == world_size else f"{FSDP}_hybrid{zero2}"

    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Split the layers, then shard or replicate what each rank has of them."""
        mesh = self._mesh(job)
        division = self.split().divide(job.family, model, mesh[TENSOR])
        degree = self.split().degree
        job.materializer.arrange = lambda name, whole: division.arranged(name, whole, degree)
        if self.data_parallel == FSDP:
            # T5's position biases leave their block as views, to which nobody adds in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            own = mesh[REPLICATE, SHARD] if self.mesh_2d else mesh[SHARD]
            return self._fsdp().wrap(model, dataclasses.replace(job, mesh=own))
        job.materializer.model(model)
        localize(model)
        if self.data_parallel == NONE:
            return model
        return self._ddp().wrap(model, dataclasses.replace(job, mesh=mesh[REPLICATE]))

    def _fsdp(self) -> FSDP2:
        """What shards each rank's part of the model further."""
        return FSDP2(
            name=FSDP,
            sharding_factor=self.factor // self.split().degree,
            reshard_after_forward=self.reshard_after_forward is not False,
            forward_prefetch=False,
            blocks_per_unit=1,
            cpu_offload=False,
            backward_prefetch=True,
            mesh_2d=bool(self.mesh_2d),
        )

    def _ddp(self) -> DDP:
        """What averages the gradients of each rank's part of the model."""
        return DDP(
            name=DATA,
            sharding_factor=1,
            bucket_cap_mb=self.bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=False,
        )

    def _mesh(self, job: Job) -> DeviceMesh:
        shape = (job.world_size // self.factor, self.factor // self.split().degree, self.split().degree)
        return init_device_mesh(job.device.type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """One group of parameters per mesh: torch's kernels over many tensors take DTensors of one mesh only."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return build([{"params": members} for members in groups.values()])  # type: ignore[misc]

    def plan(self, setting: Setting) -> Plan:
        """That of the data parallelism, over what each rank has of the layers."""
        if self.data_parallel == FSDP:
            groups = setting.world_size // self.split().degree
            return self._fsdp().plan(dataclasses.replace(setting, world_size=groups))
        return self._ddp().plan(setting) if self.data_parallel == DATA else WholePlan(setting)

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """The loss is computed on divided logits; without synchronisation gradients stay as the data parallelism has
        them."""
        with loss_parallel():
            if isinstance(wrapped, FSDPModule):
                wrapped.set_requires_gradient_sync(synchronize)
            if isinstance(wrapped, DistributedDataParallel) and not synchronize:
                with wrapped.no_sync():
                    yield
            else:
                yield
