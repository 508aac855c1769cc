"""The title of a page of the guide: what it is about, in a sentence."""

from __future__ import annotations

from bench.advice.words import format_overrides, join_items
from bench.guide.case import GuideCase
from bench.guide.tree import adapt_to_device
from bench.models.blocks import CHECKPOINTING_MODES
from bench.reporting import labels

TITLE_KEYS = ("model", "hardware", "gpus", "precision", "sequence_length")
"""Settings that a title always names."""


def format_title(case: GuideCase) -> str:
    """Which strategy for what, and all that was asked of it besides."""
    config, device = case.config, case.config.hardware.device
    other_settings = {key: value for key, value in case.settings.items() if key not in TITLE_KEYS}
    if list(case.checkpointing_choices) != list(CHECKPOINTING_MODES):
        other_settings["activation_checkpointing"] = ",".join(case.checkpointing_choices)
    changed_text = f"; with {join_items(format_overrides(other_settings))}" if other_settings else ""
    return (
        f"Which strategy for {config.model.name} ({labels.format_count(config.model.num_parameters)} parameters) on "
        f"{labels.format_ranks(config.gpus, device)} {config.hardware.name}? "
        f"{config.precision.name}, {config.sequence_length} tokens per sequence, "
        f"{adapt_to_device(_format_batch(case), device)}{changed_text}."
    )


def _format_batch(case: GuideCase) -> str:
    if case.requested_batch is not None:
        return f"batch {case.requested_batch} per GPU"
    top_candidate = case.ranking.top_candidate
    if top_candidate.prediction.memory.capacity is None:
        return f"batch {top_candidate.config.batch_size_per_gpu} per GPU, since nobody knows how much memory there is"
    return "the largest batch that fits"
