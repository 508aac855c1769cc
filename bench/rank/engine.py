"""A model, wrapped and ready, and the one optimizer step that is measured."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.core.precision import Precision
from bench.models import Batch, Family, float8
from bench.models.activation_offload import PinnedTransfer, offload_activations
from bench.models.block_checkpointing import checkpoint_blocks
from bench.models.blocks import compile_blocks
from bench.models.chunked_loss import ChunkedLoss
from bench.models.compiled_loss import compile_loss
from bench.models.materialize import Materializer
from bench.optimizers import OptimizerConfig, find_hidden_matrices
from bench.strategies import Stepper, Strategy, WrapContext

EnterPhase = Callable[[str], None]

LOSS_SCALE_GROWTH_INTERVAL = 2**31 - 1
"""Steps until a loss scale doubles, which would hide a step that was skipped: torch's default is 2,000."""


@dataclass
class Engine:
    """Everything one step needs.

    `enter_phase` is told which part of the step begins: what an out-of-memory error is attributed to.
    """

    module: nn.Module
    stepper: Stepper
    strategy: Strategy
    precision: Precision
    device: torch.device
    synchronize_every_micro_batch: bool
    enter_phase: EnterPhase
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of logits and labels, as the strategy has it."""
    chunked_loss: ChunkedLoss | None = None
    """Where the model returns a loss in place of logits."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.stepper.optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return self.stepper.scaler

    def step(self, micro_batches: Sequence[Batch]) -> torch.Tensor | None:
        """One optimizer step over the micro-batches.

        Returns
        -------
        torch.Tensor or None
            Mean loss of the micro-batches on this rank: a scalar on the device, not waited for. None where only other
            ranks know it.
        """
        return self.stepper.step(self, micro_batches)

    def run_micro_batches(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """A step that runs forward and backward of each micro-batch in turn; their mean loss."""
        losses = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.strategy.control_gradient_sync(
                self.module, synchronize=is_last or self.synchronize_every_micro_batch
            ):
                losses.append(self._forward_backward(batch, len(micro_batches)))
        self.enter_phase("optimizer")
        self.stepper.update()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _forward_backward(self, batch: Batch, num_micro_batches: int) -> torch.Tensor:
        """Both passes of one of several micro-batches. Returns its share of the loss alone, so that neither the logits
        nor the loss's graph live on while the next one is computed or parameters are updated."""
        self.enter_phase("forward")
        if self.chunked_loss is None:
            with self.autocast():
                logits = self.module(**batch.inputs)["logits"]
            loss = self.loss(logits, batch.labels) / num_micro_batches
        else:
            with self.autocast(), self.chunked_loss.provide_labels(batch.labels):
                loss = self.module(**batch.inputs)["logits"] / num_micro_batches
        self.enter_phase("backward")
        self.stepper.backward(loss)
        return loss.detach()

    def count_skipped_steps(self, scale_before: float) -> int:
        """Steps since the loss scale was `scale_before` in which gradients overflowed, each of which halves it."""
        scale = self.scaler.get_scale()
        return round(math.log2(scale_before / scale)) if scale < scale_before else 0

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around what computes narrower than parameters are stored, where that is autocast's task."""
        if self.precision.is_mixed and self.strategy.uses_autocast(self.precision):
            cache_enabled = self.strategy.has_autocast_cache
            return torch.autocast(self.device.type, self.precision.compute_dtype, cache_enabled=cache_enabled)
        return contextlib.nullcontext()


def build_engine(
    family: Family,
    strategy: Strategy,
    precision: Precision,
    optimizer: OptimizerConfig,
    *,
    device: torch.device,
    world_size: int = 1,
    activation_checkpointing: str = "none",
    sequence_length: int | None = None,
    loss_chunks: int | None = None,
    compiles_loss: bool = False,
    activation_offload: bool = False,
    compile: bool = False,
    synchronize_every_micro_batch: bool = False,
    seed: int = 0,
    enter_phase: EnterPhase = lambda phase: None,
    rehearsed: bool = False,
    num_micro_batches: int = 1,
    gradient_clip_norm: float | None = None,
) -> Engine:
    """Build the model on meta, prepare its blocks, wrap and fill it, then build the optimizer on what it became.

    The loss is computed in `loss_chunks`, unless that is None.
    `world_size` ranks call this together, or the first of them alone if it is `rehearsed`."""
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    model = family.build_model().to(precision.parameter_dtype)
    for layer in family.list_layers_stored_in_fp32(model):
        layer.float()
    model.train()
    if precision.uses_float8:
        float8.convert_to_float8(family, model, precision)
    materializer = Materializer(model, family, device, seed)
    if precision.scales_loss and strategy.uses_autocast(precision):
        disable_autocast(family.find_fp32_modules(model), device)
    checkpoint_blocks(family, model, activation_checkpointing, sequence_length=sequence_length)
    if activation_offload:
        offload_activations(family, model, PinnedTransfer())
    if compile:
        split = strategy.build_tensor_parallel_split()
        graph_breaks = () if split is None else split.find_graph_breaks(model)
        compile_blocks(family, model, are_divided=split is not None, graph_breaks=graph_breaks)
    chunked_loss = None if loss_chunks is None else ChunkedLoss(family, model, loss_chunks)

    def build_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        hidden_matrix_ids = {id(matrix) for matrix in find_hidden_matrices(family.find_block_lists(model))}
        return optimizer.build(parameters, lambda parameter: id(parameter) in hidden_matrix_ids)

    job = WrapContext(
        family,
        precision,
        device,
        world_size,
        materializer,
        rehearsed,
        build_optimizer,
        num_micro_batches,
        gradient_clip_norm=gradient_clip_norm,
    )
    module = strategy.wrap(model, job)
    scaler = (
        strategy.build_grad_scaler(device)
        if precision.scales_loss
        else torch.amp.GradScaler(device.type, enabled=False)
    )
    scaler.set_growth_interval(LOSS_SCALE_GROWTH_INTERVAL)
    torch_optimizer = strategy.build_optimizer(module, build_optimizer)
    stepper = strategy.build_stepper(module, torch_optimizer, scaler, optimizer.keep_gradients)
    if gradient_clip_norm is not None:
        stepper.clip_gradients = functools.partial(strategy.clip_gradients, module, torch_optimizer, gradient_clip_norm)
    loss = strategy.build_loss(family)
    return Engine(
        module,
        stepper,
        strategy,
        precision,
        device,
        synchronize_every_micro_batch,
        enter_phase,
        compile_loss(loss) if compiles_loss else loss,
        chunked_loss,
    )


def build_micro_batches(
    family: Family,
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device,
    num_micro_batches: int = 1,
    share_index: int = 0,
    num_shares: int = 1,
    seed: int = 0,
) -> list[Batch]:
    """One of `num_shares` equal parts of a synthetic global batch that depends on the seed alone.

    One process with `num_shares` times the batch size sees the same sequences as all num_shares together.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_micro_batches):
        global_batch = family.build_batch(num_shares * batch_size, sequence_length, generator)
        batches.append(
            global_batch.select_sequences(slice(share_index * batch_size, (share_index + 1) * batch_size), device)
        )
    return batches


def disable_autocast(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Make each linear layer compute in its weights' fp32 even under autocast."""
    for module in modules:
        original_forward = module.forward

        def forward(
            hidden: torch.Tensor, original_forward: Callable[[torch.Tensor], torch.Tensor] = original_forward
        ) -> torch.Tensor:
            with torch.autocast(device.type, enabled=False):
                return original_forward(hidden.float())

        module.forward = forward  # type: ignore[method-assign]
