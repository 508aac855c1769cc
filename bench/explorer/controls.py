"""The controls of the page: each is one setting of the command line, with the values that it offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.config.groups import list_config_groups, list_presets
from bench.config.price import PRICE_GROUP
from bench.models.checkpointing import CHECKPOINTING_MODES

MODEL, GPUS, BATCH, STRATEGY = "model", "gpus", "batch_size_per_gpu", "strategy"
SHARDING_FACTOR, CHECKPOINTING, PRECISION = "strategy.sharding_factor", "activation_checkpointing", "precision"
PRICE, TOKENS = "price", "tokens"

FURTHER_SETTINGS = "further"
"""Name of the field for settings that have no control of their own."""

COST_OPTIONS = (TOKENS, PRICE, "pue", "power_share")
"""Settings that say how to answer; all others say what is asked."""

UNOFFERED_HARDWARE = ("auto", "gpu", "gpu_rocm")
"""Descriptions that name no device."""


@dataclass(frozen=True)
class ExplorerControl:
    """A control and the setting that it changes."""

    key: str
    """What is typed before ``=``; an empty value leaves the setting out."""
    label: str
    hint: str = ""
    empty_label: str = ""
    """Of a control that may be left open: what happens then. Empty where a value is needed."""
    list_choices: Callable[[], Sequence[str]] | None = None
    """Values to choose from, in order; None for a text that is typed."""
    suggests: bool = False
    """Choices are suggestions beside which anything may be typed."""
    is_number: bool = False


def _list_group(name: str, *left_out: str) -> Callable[[], list[str]]:
    return lambda: [option for option in list_config_groups()[name] if option not in left_out]


CONTROLS = (
    ExplorerControl(MODEL, "Model", list_choices=_list_group("model")),
    ExplorerControl("hardware", "Device", list_choices=_list_group("hardware", *UNOFFERED_HARDWARE)),
    ExplorerControl(GPUS, "GPUs", is_number=True),
    ExplorerControl(
        "network",
        "Network",
        "What joins nodes, and on some machines the GPUs of a node.",
        "assumed for the device",
        _list_group("network", "reference"),
    ),
    ExplorerControl("sequence_length", "Sequence length", "Tokens per sequence.", is_number=True),
    ExplorerControl(
        BATCH,
        "Batch per GPU",
        "Sequences per GPU; empty: the largest that fits.",
        "the largest that fits",
        is_number=True,
    ),
    ExplorerControl(
        PRECISION, "Precision", empty_label="the usual one of the device", list_choices=_list_group("precision")
    ),
    ExplorerControl(STRATEGY, "Strategy", empty_label="compare DDP and FSDP2", list_choices=_list_group("strategy")),
    ExplorerControl(
        SHARDING_FACTOR,
        "Sharding factor",
        "Ranks that share one copy of the model: a number, or full; empty: compare all.",
        "compare all",
        is_number=True,
    ),
    ExplorerControl(
        CHECKPOINTING, "Activation checkpointing", empty_label="compare all", list_choices=lambda: CHECKPOINTING_MODES
    ),
    ExplorerControl(TOKENS, "Tokens to train on", "For example 300e9.", "none", is_number=True),
    ExplorerControl(
        PRICE,
        "Price",
        "Dollars per GPU-hour, or an offer.",
        "none",
        lambda: list_presets(PRICE_GROUP),
        suggests=True,
    ),
)

CONTROL_KEYS = tuple(control.key for control in CONTROLS)

DEFAULT_SETTINGS: Mapping[str, str] = {
    MODEL: "llama3_8b",
    "hardware": "h100_80gb",
    GPUS: "8",
    "sequence_length": "4096",
}
"""The question of an address that says nothing, and what others leave open."""
