"""Mixture of experts: which experts a token goes to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

ROUTINGS = ("router", "balanced", "skewed")
"""How tokens are sent to experts: as the model's router says, evenly, or at random with some experts more popular."""


@dataclass
class Routing:
    """The experts of each position of a sequence: the same for every sequence, layer and strategy, and in every step.

    A router with random weights would send similar tokens to the same few experts; one that was trained is held to an
    even load by its loss.
    """

    kind: str
    """Of `ROUTINGS`."""
    skew: float
    """Exponent of Zipf's law for ``skewed``: the popularity of the n-th expert is proportional to ``n**-skew``."""
    sequence_length: int = 0
    """Of the batch that the model reads."""
    positions: torch.Tensor | None = None
    """Of the tokens of each sequence, where they are not all of them; shape (`sequence_length`,)."""
    num_parts: int = 1
    """That every sequence is divided into, each in another place."""

    def note_sequence_length(self, _model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the decoder."""
        tokens = kwargs.get("input_ids")
        self.sequence_length = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
        self.positions = None if kwargs.get("position_ids") is None else kwargs["position_ids"][0]

    def choose_experts(
        self, routed_experts: torch.Tensor, num_experts: int, sequence_part: tuple[int, int] = (0, 1)
    ) -> torch.Tensor:
        """The experts instead of those that the router chose; shape (tokens, experts per token).

        Parameters
        ----------
        sequence_part: tuple of int
            Which part of every sequence the tokens are, and of how many.
        """
        import torch

        num_tokens, num_choices = routed_experts.shape
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.sequence_length, device=routed_experts.device)
        if self.kind == "balanced":
            first_choices = positions[:, None] * num_choices
            experts = (first_choices + torch.arange(num_choices, device=positions.device)) % num_experts
        else:
            # The largest of logarithms of shares plus Gumbel noise: drawn without replacement (Kool et al. 2019,
            # arXiv:1903.06059).
            generator = None if positions.is_meta else torch.Generator(positions.device).manual_seed(0)
            num_positions = self.sequence_length * self.num_parts
            uniform = torch.rand(num_positions, num_experts, device=positions.device, generator=generator)
            log_shares = -self.skew * torch.arange(1, num_experts + 1, device=positions.device).log()
            experts = (log_shares - (-uniform.log()).log()).topk(num_choices).indices
            if self.positions is not None:
                experts = experts[positions]
        part, num_sequence_parts = sequence_part
        experts = experts.chunk(num_sequence_parts)[part]
        return experts.repeat(num_tokens // len(experts), 1)


@functools.lru_cache(maxsize=64)
def count_expert_tokens(
    kind: str, skew: float, num_experts: int, experts_per_token: int, sequence_length: int
) -> tuple[int, ...]:
    """Tokens of a sequence that each expert takes, as a CPU draws them.

    Of ``router`` it is expected, not known, that random weights send every token to experts drawn with equal chances.
    """
    import torch

    routing = Routing("skewed", 0.0) if kind == "router" else Routing(kind, skew)
    routing.sequence_length = sequence_length
    experts = routing.choose_experts(torch.zeros(sequence_length, experts_per_token, dtype=torch.long), num_experts)
    return tuple(experts.flatten().bincount(minlength=num_experts).tolist())
