"""What the guide says of a way to train: its names in the field, and the leaves of the decision tree that name it.

Strategies and ways to fine-tune state it as class attributes; `bench.advise` collects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

NODE_GPUS_PLACEHOLDER, NODES_PLACEHOLDER, GPUS_PLACEHOLDER = "{node}", "{nodes}", "{gpus}"
"""In a value: GPUs of a node, number of nodes, all GPUs."""

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage of a pipeline that is to be busy: idle (P - 1) / (4 P + P - 1) of a step, a fifth."""

GPU_MICRO_BATCHES_PLACEHOLDER, NODE_MICRO_BATCHES_PLACEHOLDER = "{micro-batches of gpus}", "{micro-batches of nodes}"
"""In a value: micro-batches that fill a pipeline of as many stages."""


@dataclass(frozen=True)
class TrainingTerm:
    """One name of the field. Several strategies may state the same one: their settings are then alternatives."""

    name: str
    typed_settings: tuple[str, ...]
    """What is typed for it here: alternatives, each one or more settings. Empty where the suite does not offer it."""
    when_to_use: str
    """When to take it."""
    missing_reason: str = ""
    """Why it is not offered."""
    divides: tuple[str, ...] = ()
    """What is divided among ranks: parameters, gradients, optimizer state, layers, activations … beside the batch."""

    @property
    def settings_text(self) -> str:
        """What is typed."""
        return ", or ".join(self.typed_settings)


@dataclass(frozen=True)
class TrainingOption:
    """One way to train that the decision tree ends at."""

    name: str
    """As the field calls it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What is typed for it; NODE, NODES and GPUS are filled in."""
    note: str = ""
    """What to know before taking it."""
    leaves: Mapping[str, int] = field(default_factory=dict)
    """Keys of the tree's leaves that name it (`bench.advice.tree.tree`), and its place among what each names."""

    @property
    def trains_adapters(self) -> bool:
        """Whether it leaves the model's weights as they are."""
        return "finetune" in self.settings

    def fill_settings(self, gpus: int, gpus_per_node: int, requested_batch: int | None) -> dict[str, str]:
        """The settings for some GPUs, and a batch of so many sequences per GPU; None for one that is to be searched."""
        nodes = -(-gpus // gpus_per_node)
        number_by_placeholder = {
            NODE_GPUS_PLACEHOLDER: min(gpus, gpus_per_node),
            NODES_PLACEHOLDER: nodes,
            GPUS_PLACEHOLDER: gpus,
        }
        number_by_placeholder |= {
            GPU_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(gpus, requested_batch),
            NODE_MICRO_BATCHES_PLACEHOLDER: _choose_micro_batches(nodes, requested_batch),
        }
        text_by_placeholder = {placeholder: str(number) for placeholder, number in number_by_placeholder.items()}
        return {key: text_by_placeholder.get(value, value) for key, value in self.settings.items()}


def _choose_micro_batches(stages: int, requested_batch: int | None) -> int:
    """Micro-batches of a pipeline: `MICRO_BATCHES_PER_STAGE` per stage, or as near to it as divides the sequences of
    one copy."""
    sequences = stages * (requested_batch or MICRO_BATCHES_PER_STAGE)
    return max(count for count in range(1, MICRO_BATCHES_PER_STAGE * stages + 1) if sequences % count == 0)
