"""A model's layers split over ranks: what tensor parallelism does to a model before anything else wraps it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.core.precision import Precision
from bench.models import Batch, Family
from bench.strategies.step_plan import TENSOR_GROUP

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule


def divide_tensor_layers(
    family: Family, model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
) -> LayerDivision:
    """Divide the layers of a model that is on meta over a mesh of one dimension, as its family states it."""
    from bench.models.float8 import exchange_in_float8

    division = family.build_layer_division(model, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        exchange_in_float8(division)
    division.apply_to_model(model, mesh)
    return division


@dataclass(frozen=True)
class TensorParallelSplit:
    """Over how many ranks every layer is split, and how."""

    degree: int
    sequence_parallel: bool
    """What lies between the layers is divided over the sequence."""
    keeps_dtensors: bool = False
    """Parameters stay DTensors, as FSDP2 has them; else each rank has plain ones, its part."""

    overlaps_products = False
    """The compiler has collectives go on beside the products whose operands or results they are."""
    overlaps_exchanges = False
    """Products themselves do, as TransformerEngine's."""

    @property
    def expert_width_degree(self) -> int:
        """Ranks that the width of every expert is divided over."""
        return self.degree

    @property
    def breaks_graphs(self) -> bool:
        """Whether a block has `find_graph_breaks`."""
        return False

    def exchanges_float8(self, precision: Precision) -> bool:
        """Whether hidden states are exchanged in FP8 (`exchange_in_float8`)."""
        return self.degree > 1 and self.sequence_parallel and precision.float8 == "tensorwise"

    def find_graph_breaks(self, model: nn.Module) -> Collection[nn.Module]:
        """Modules at which torch's compiler breaks the graph of a block, since what they exchange it does not know."""
        return ()

    def divide_model(self, family: Family, model: nn.Module, mesh: DeviceMesh) -> LayerDivision:
        """Divide a model that is on meta: its layers' parameters become DTensors on the mesh of their ranks."""
        return divide_tensor_layers(family, model, mesh, sequence_parallel=self.sequence_parallel)

    # What a trace of one rank's part asks, in a process group of as many ranks as share it.

    @property
    def num_ranks(self) -> int:
        """Ranks that work on the same part of the model or of its sequences."""
        return self.degree

    @property
    def group_names(self) -> tuple[str, ...]:
        """Of these, the groups of a plan that exchange something within layers."""
        return (TENSOR_GROUP,)

    @property
    def context_degree(self) -> int:
        """Ranks that every sequence is divided over."""
        return 1

    @property
    def expert_degree(self) -> int:
        """Ranks that the experts of every layer are spread over."""
        return 1

    def divide_for_trace(self, family: Family, model: nn.Module) -> Mapping[str, str]:
        """Divide a model that is on meta; returns which group of a plan each process group is, by its name."""
        from torch.distributed.device_mesh import init_device_mesh

        self.divide_model(family, model, init_device_mesh("cpu", (self.degree,)))
        return {}

    @property
    def handover_parts(self) -> int:
        """Ranks that what stages hand over of a sequence is divided over."""
        return self.context_degree * (self.degree if self.sequence_parallel else 1)

    def prepare_stage(self, model: nn.Module, stage: PipelineStageModule, *, is_first: bool) -> None:
        """Have a stage of the divided model take and hand over hidden states as its layers divide them."""

    def select_tokens(self, model: nn.Module, batch: Batch) -> Batch:
        """This rank's part of every sequence."""
        return batch

    def build_loss(self, family: Family) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return family.compute_loss

    def divide_loss(self) -> contextlib.AbstractContextManager[None]:
        """Around a step."""
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


def localize_parameters(model: nn.Module) -> None:
    """Turn parameters that are DTensors into plain ones, each rank's part, which layers see as DTensors still.

    So that what knows nothing of DTensors can own them: DDP's buckets, any optimizer. Their gradients are complete:
    where ranks have the same parameter and different gradients, these are added up in backward. Tied ones stay tied.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import parametrize

    from bench.strategies.tensor_parallel.dtensors import DTensorParametrization

    local_parameters: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                local_tensor = parameter.to_local().detach()
                local_parameter = local_parameters.setdefault(
                    id(parameter), nn.Parameter(local_tensor, requires_grad=parameter.requires_grad)
                )
                module.register_parameter(name, local_parameter)
                parametrize.register_parametrization(module, name, DTensorParametrization(parameter._spec), unsafe=True)


def list_local_parameters(model: nn.Module) -> list[tuple[nn.Parameter, DTensorSpec | None]]:
    """Each parameter of a model after `localize_parameters`, with what it is a part of; None where it was plain."""
    from torch.nn.utils import parametrize

    from bench.strategies.tensor_parallel.dtensors import DTensorParametrization

    specs = {
        id(module.original): module[0]._spec
        for module in model.modules()
        if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], DTensorParametrization)
    }
    return [(parameter, specs.get(id(parameter))) for parameter in model.parameters()]


def find_local_shape(tensor: torch.Tensor) -> torch.Size:
    """Shape of what this rank has of a tensor, which may be whole."""
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor.shape if isinstance(tensor, DTensor) else tensor.shape


def wrap_like_dtensor(full_tensor: torch.Tensor, local_tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part as what it is a part of: a DTensor like `full_tensor`, if that is one."""
    from torch.distributed.tensor import DTensor

    from bench.strategies.tensor_parallel.dtensors import build_dtensor

    return build_dtensor(local_tensor, full_tensor._spec) if isinstance(full_tensor, DTensor) else local_tensor
