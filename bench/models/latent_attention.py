"""DeepSeek's attention divided over tensor-parallel ranks: by heads, but for what all heads share.

Queries are made of a latent, and keys and values of another one, each much narrower than all heads (DeepSeek-AI 2024,
arXiv:2405.04434, section 2.1). As in Megatron-LM, every rank has the matrices that make the latents, and with sequence
parallelism applies them to its own part of the sequence: latents are gathered instead of hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from bench.models.division import SEQUENCE_SHARD, LocalComputation


def is_latent_attention(module: nn.Module) -> bool:
    """Whether a module is attention whose keys and values are made of a latent."""
    return hasattr(module, "kv_b_proj")


def list_latent_attention_styles(attention: Any, *, sequence_parallel: bool) -> list[tuple[nn.Module, ParallelStyle]]:
    """Modules of one such attention, and how each is divided.

    Queries may be made of hidden states, without a latent (``q_proj``).
    """
    between_layers: Placement = SEQUENCE_SHARD if sequence_parallel else Replicate()
    queries = attention.q_proj if attention.q_b_proj is None else attention.q_b_proj
    styles: list[tuple[nn.Module, ParallelStyle]] = [
        (queries, ColwiseParallel(input_layouts=between_layers)),
        (attention.kv_a_proj_with_mqa, _SharedByHeads(attention.kv_lora_rank, between_layers)),
        (attention.kv_b_proj, ColwiseParallel()),
        (attention.o_proj, RowwiseParallel(output_layouts=between_layers)),
    ]
    if not sequence_parallel:
        return styles
    # As a DTensor a part of the hidden states has the shape of all of them, by which attention counts positions.
    parts = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": SEQUENCE_SHARD},
        desired_input_kwarg_layouts={"hidden_states": SEQUENCE_SHARD},
    )
    styles += [(attention, parts), (attention.kv_a_proj_with_mqa, LocalComputation())]
    if attention.q_b_proj is not None:
        styles += [(attention.q_a_proj, LocalComputation()), (attention.q_a_layernorm, SequenceParallel())]
    return styles


class _SharedByHeads(ParallelStyle):
    """The matrix of the latent and of the rotated part of keys, which all heads share: every rank returns both for the
    whole sequence.

    The layer that makes keys and values of the latent adds up the latent's gradients over ranks; those of the rotated
    part, which ranks have of their own heads, are added up here.

    Parameters
    ----------
    latent_size: int
    computed: Placement
        What a rank computes of the sequence.
    """

    def __init__(self, latent_size: int, computed: Placement) -> None:
        super().__init__()
        self._latent_size = latent_size
        self._computed = computed

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            whole = DTensor.from_local(output, device_mesh, [self._computed], run_check=False).redistribute(
                placements=[Replicate()]
            )
            latent, rotated = whole.split([self._latent_size, output.shape[-1] - self._latent_size], dim=-1)
            assert isinstance(latent, DTensor)
            assert isinstance(rotated, DTensor)
            return torch.cat((latent.to_local(), rotated.to_local(grad_placements=[Partial()])), dim=-1)

        module.register_forward_hook(gather)
        return module
