"""The loss in chunks of a sequence, so that neither all logits nor their gradients are ever there together.

The head over the vocabulary is called with hidden states, as always, but returns the loss: it takes some positions of
every sequence at a time, and backward computes their logits again. torch's own `linear_cross_entropy` keeps the
gradients of hidden states and of the head's weight from forward to backward instead, and its chunks do not grow with
the batch, so that a prediction would need a trace per batch size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bench.core.errors import ImpossibleError
from bench.models.base import IGNORED_LABEL, Family
from bench.models.checkpointing import shorten_family

SHORTEST_SEQUENCE = 2
"""Tokens of a sequence that has a prediction."""


class ChunkedLoss:
    """What a model's head does in place of computing logits. The model's parameters and modules stay as they are."""

    def __init__(self, family: Family, model: nn.Module, num_chunks: int) -> None:
        head = find_head(family, model)
        self._num_chunks = num_chunks
        self._compute_logits = head.forward
        self._labels: torch.Tensor | None = None
        head.forward = self._compute_loss  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def provide_labels(self, labels: torch.Tensor) -> Iterator[None]:
        """Within, the model's forward pass returns the mean loss of these predictions in place of logits."""
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def _compute_loss(self, hidden: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy over all predictions, as `Family.compute_loss`.

        Parameters
        ----------
        hidden: torch.Tensor
            Of shape (sequences, predictions, width).
        """
        assert self._labels is not None, "there are labels within provide_labels alone"
        chunk_length = -(-hidden.shape[1] // self._num_chunks)
        chunk_losses = [
            checkpoint(self._sum_losses, hidden_chunk, labels_chunk, use_reentrant=False, preserve_rng_state=False)
            for hidden_chunk, labels_chunk in zip(
                hidden.split(chunk_length, dim=1), self._labels.split(chunk_length, dim=1), strict=True
            )
        ]
        return torch.stack(chunk_losses).sum() / (self._labels != IGNORED_LABEL).sum()

    def _sum_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._compute_logits(hidden)
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")


def find_head(family: Family, model: nn.Module) -> nn.Module:
    """The layer that makes logits of hidden states.

    Raises
    ------
    ImpossibleError
        If the model does not say.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise ImpossibleError(
            f"loss=chunked is not valid for model={family.name}, which has no head over a vocabulary that it names: "
            "choose loss=whole."
        )
    return head


def check_chunked_loss(family: Family) -> None:
    """Raise `ImpossibleError` where a family's loss cannot be computed in chunks, with the reason."""
    if type(family).compute_loss is not Family.compute_loss:
        raise ImpossibleError(
            f"loss=chunked is not valid for model.family={family.family}, which has a loss of its own: "
            "choose loss=whole."
        )
    if not _returns_heads_output(family):
        raise ImpossibleError(
            f"loss=chunked is not valid for model={family.name}, which changes logits after its head: "
            "choose loss=whole."
        )


@functools.lru_cache(maxsize=256)
def _returns_heads_output(family: Family) -> bool:
    """Whether a model's logits are what its head returns, from a forward pass on meta."""
    short_family = shorten_family(family, 1, family.block_period) or family
    model = short_family.build_model().to("meta")
    head_outputs: list[torch.Tensor] = []
    find_head(family, model).register_forward_hook(lambda _head, _inputs, output: head_outputs.append(output))
    batch = short_family.build_batch(1, SHORTEST_SEQUENCE, torch.Generator())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        logits = model(**{name: tensor.to("meta") for name, tensor in batch.inputs.items()})["logits"]
    return len(head_outputs) == 1 and logits is head_outputs[0]
