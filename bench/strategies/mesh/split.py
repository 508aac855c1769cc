"""What the ranks of a mesh that share sequences, experts or layers do to one model, and which part each has of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.core.precision import TRANSFORMER_ENGINE
from bench.models import Batch, Family
from bench.models.base import IGNORED_LABEL
from bench.strategies.mesh.knobs import ALL_TO_ALL, TORCH
from bench.strategies.mesh.layout import CONTEXT, EXPERT, SHARDS, TENSOR, MeshLayout, RankMesh
from bench.strategies.step_plan import CONTEXT_GROUP, EXPERT_GROUP, TENSOR_GROUP
from bench.strategies.tensor_parallel.split import TensorParallelSplit, divide_tensor_layers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle

    from bench.models.division import LayerDivision
    from bench.models.pipeline_stage import PipelineStageModule
    from bench.strategies.mesh.context import ContextSplit


@dataclass(frozen=True)
class DividedLayers:
    """A model whose layers, experts and sequences are divided, and nothing else yet."""

    mesh: RankMesh
    division: LayerDivision
    expert_ids: set[int]
    """Identities of the modules that hold experts."""
    context: ContextSplit | None
    sequence_splits: list[ParallelStyle] = field(default_factory=list)
    """With sequence parallelism: how each list's first block takes hidden states."""

    def prepare_stage(self, stage: PipelineStageModule, *, is_first: bool) -> None:
        """Have a stage take, and hand over, a rank's part of every sequence's hidden states, where layers divide them
        over the sequence. As a DTensor they have the whole sequence's shape, by which models count positions."""
        from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

        from bench.models.division import SEQUENCE_SHARD

        tensor_mesh = self.mesh.get_mesh(TENSOR)
        if not self.sequence_splits or tensor_mesh is None or is_first:
            return
        received = PrepareModuleInput(
            input_layouts=SEQUENCE_SHARD, desired_input_layouts=SEQUENCE_SHARD, use_local_output=False
        )
        parallelize_module(stage, tensor_mesh, received, src_data_rank=None)
        parallelize_module(stage.block_lists[0][0], tensor_mesh, self.sequence_splits[0], src_data_rank=None)


def overlap_products(mesh: RankMesh) -> None:
    """Let the compiler cut gathers and reductions beside products into parts that go on meanwhile (asynchronous tensor
    parallelism), through symmetric memory."""
    from torch._inductor import config as inductor_config  # brings the compiler along
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    tensor_mesh = mesh.get_mesh(TENSOR)
    assert tensor_mesh is not None
    inductor_config._micro_pipeline_tp = True
    enable_symm_mem_for_group(tensor_mesh.get_group().group_name)


def divide_layers(
    model: nn.Module, family: Family, mesh: RankMesh, *, context_form: str | None, sequence_parallel: bool
) -> DividedLayers:
    """Divide a model that is on meta over the dimensions tensor, expert and context of a mesh."""
    from bench.models.division import LayerDivision
    from bench.strategies.mesh.context import ContextSplit
    from bench.strategies.mesh.experts import divide_experts

    tensor_mesh, context_mesh = mesh.get_mesh(TENSOR), mesh.get_mesh(CONTEXT)
    division = LayerDivision()
    sequence_splits: list[ParallelStyle] = []
    if tensor_mesh is not None:
        division = divide_tensor_layers(family, model, tensor_mesh, sequence_parallel=sequence_parallel)
        if sequence_parallel:
            first_blocks = [blocks[0] for blocks in family.find_block_lists(model)]
            sequence_splits = [style for module, style in division.parallel_styles if module in first_blocks]
    expert_ids = divide_experts(model, family, mesh, sequence_parallel=sequence_parallel)
    context_split = None
    if context_mesh is not None:
        assert context_form is not None
        context_split = ContextSplit(context_mesh, context_form)
        context_split.apply_to_model(model)
    return DividedLayers(mesh, division, expert_ids, context_split, sequence_splits)


def build_mesh_loss(
    family: Family, context_degree: int, *, is_parallel: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The mean over the rank's own predictions, times their share of the sequences' predictions: the mean over
    context-parallel ranks is that of whole sequences.

    Parameters
    ----------
    is_parallel: bool
        Logits stay divided over the vocabulary.
    """
    from torch.distributed.tensor import DTensor

    def compute_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if isinstance(logits, DTensor) and not is_parallel:
            logits = logits.full_tensor()
        loss = family.compute_loss(logits, labels)
        if context_degree == 1:
            return loss
        predictions = labels.shape[0] * _count_predictions(family, labels.shape[1] * context_degree)
        return loss * ((labels != IGNORED_LABEL).sum() * (context_degree / predictions))

    return compute_loss


@functools.cache
def _count_predictions(family: Family, sequence_length: int) -> int:
    """Of one whole sequence, as many in every one."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # a trace has no values
        labels = family.build_batch(1, sequence_length, torch.Generator()).labels
        return int((labels != IGNORED_LABEL).sum())


@contextlib.contextmanager
def divide_loss(*, is_parallel: bool) -> Iterator[None]:
    """Around a step whose loss is computed on logits that are divided over the vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel() if is_parallel else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class MeshSplit(TensorParallelSplit):
    """How the ranks of a mesh share layers (`degree` of them), sequences and experts: what is traced of it.

    The rank that is traced is the first one. Of the others each has the same shapes: attention of every rank of a ring
    is as much, and tokens are taken to go to the experts of all ranks in equal numbers.
    """

    context: int = 1
    context_form: str = "none"
    expert: int = 1
    expert_tensor_parallel: bool = True
    loss_parallel: bool = True
    overlap_kernels: str | None = None
    """What overlaps exchanges and products; None where nothing does."""

    @property
    def overlaps_products(self) -> bool:  # type: ignore[override]
        return self.overlap_kernels == TORCH

    @property
    def overlaps_exchanges(self) -> bool:  # type: ignore[override]
        return self.overlap_kernels == TRANSFORMER_ENGINE

    @property
    def num_ranks(self) -> int:
        return self.degree * self.context * self.expert

    @property
    def expert_width_degree(self) -> int:
        return self.degree if self.expert_tensor_parallel else 1

    @property
    def breaks_graphs(self) -> bool:
        return self._sends_tokens or self._attends_to_others

    @property
    def _sends_tokens(self) -> bool:
        """Tokens are sent to the experts of other ranks."""
        return self.layout.get_degree(*self.layout.expert_dims) > 1

    @functools.cached_property
    def layout(self) -> MeshLayout:
        """The dimensions that share a part of the model or its sequences."""
        degrees = ((SHARDS, 1), (EXPERT, self.expert), (CONTEXT, self.context), (TENSOR, self.degree))
        return MeshLayout(degrees, self.expert_tensor_parallel)

    @property
    def _attends_to_others(self) -> bool:
        """Keys and values of other ranks come while attention is computed, or before."""
        return self.context > 1 and self.context_form != ALL_TO_ALL

    def find_graph_breaks(self, model: nn.Module) -> Collection[nn.Module]:
        """Experts that tokens are sent to, and attention whose keys and values come from other ranks."""
        from bench.models.experts import list_experts

        breaks: set[nn.Module] = set(list_experts(model)) if self._sends_tokens else set()
        if self._attends_to_others:
            breaks |= {module for module in model.modules() if hasattr(module, "is_causal")}  # transformers' attention
        return breaks

    @property
    def group_names(self) -> tuple[str, ...]:
        exchanges = {
            TENSOR_GROUP: self.degree > 1,
            CONTEXT_GROUP: self.context > 1,
            EXPERT_GROUP: self._sends_tokens,
        }
        return tuple(name for name, is_there in exchanges.items() if is_there)

    @property
    def context_degree(self) -> int:
        return self.context

    @property
    def expert_degree(self) -> int:
        return self.expert

    def divide_for_trace(self, family: Family, model: nn.Module) -> Mapping[str, str]:
        import torch

        mesh = RankMesh(self.layout, torch.device("cpu"))
        divided = divide_layers(
            model, family, mesh, context_form=self.context_form, sequence_parallel=self.sequence_parallel
        )
        for module in model.modules():
            if id(module) in divided.expert_ids:
                module._bench_division = module._bench_division.build_traced()  # type: ignore[assignment, operator, union-attr]
        model.__dict__["divided_layers"] = divided
        kinds = ((self.layout.expert_dims, EXPERT_GROUP), ((CONTEXT,), CONTEXT_GROUP))
        meshes = [(mesh.get_mesh(*names), kind) for names, kind in kinds]
        return {_find_group_name(dim): kind for dim, kind in meshes if dim is not None}

    def prepare_stage(self, model: nn.Module, stage: PipelineStageModule, *, is_first: bool) -> None:
        divided: DividedLayers = model.__dict__["divided_layers"]
        divided.prepare_stage(stage, is_first=is_first)

    def select_tokens(self, model: nn.Module, batch: Batch) -> Batch:
        divided: DividedLayers = model.__dict__["divided_layers"]
        return batch if divided.context is None else divided.context.select_tokens(batch)

    def build_loss(self, family: Family) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return build_mesh_loss(family, self.context, is_parallel=self.loss_parallel)

    def divide_loss(self) -> contextlib.AbstractContextManager[None]:
        return divide_loss(is_parallel=self.loss_parallel and self.degree > 1)


def _find_group_name(mesh: DeviceMesh) -> str:
    return str(mesh.get_group().group_name)
