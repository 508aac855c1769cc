"""The title of a page of the guide: what it is about, in a sentence."""

from __future__ import annotations

from bench.advice.words import listing, overrides
from bench.guide.case import Case
from bench.guide.tree import worded
from bench.models.blocks import CHECKPOINTING
from bench.reporting import labels

SAID = ("model", "hardware", "gpus", "precision", "sequence_length")
"""Settings that a title always names."""


def title(case: Case) -> str:
    """Which strategy for what, and all that was asked of it besides."""
    config, device = case.config, case.config.hardware.device
    further = {key: value for key, value in case.settings.items() if key not in SAID}
    if list(case.checkpointing) != list(CHECKPOINTING):
        further["activation_checkpointing"] = ",".join(case.checkpointing)
    changed = f"; with {listing(overrides(further))}" if further else ""
    return (
        f"Which strategy for {config.model.name} ({labels.count(config.model.num_parameters)} parameters) on "
        f"{labels.ranks(config.gpus, device)} {config.hardware.name}? "
        f"{config.precision.name}, {config.sequence_length} tokens per sequence, "
        f"{worded(_batch(case), device)}{changed}."
    )


def _batch(case: Case) -> str:
    if case.batch is not None:
        return f"batch {case.batch} per GPU"
    first = case.ranking.first
    if first.prediction.memory.capacity is None:
        return f"batch {first.config.batch_size_per_gpu} per GPU, since nobody knows how much memory there is"
    return "the largest batch that fits"
