"""The names that readers of course notes meet, each in a line: what it is called here, and when to take it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from bench.core.training_guide import TrainingTerm
from bench.finetune import list_finetunes
from bench.strategies import Strategy, list_strategies

GENERAL_TERMS = (
    TrainingTerm("FP16, BF16, FP8", ("precision=fp16", "precision=bf16", "precision=fp8"), "BF16 where the GPU has it"),
    TrainingTerm(
        "INT8 training",
        (),
        "FP8 is the 8-bit format for training; INT8 is for frozen weights (finetune=qlora finetune.bits=8)",
        "not offered: 256 evenly spaced values do not span the range of gradients, and FP8 is as fast where both exist",
    ),
    TrainingTerm(
        "SyncBatchNorm",
        (),
        "batch normalisation (vision models) with few samples per rank: takes statistics over all ranks",
        "does not matter here: T5 and GPT normalise every token by itself, so ranks share no statistics",
    ),
    TrainingTerm(
        "activation checkpointing", ("activation_checkpointing=full",), "activations do not fit; a third more FLOPs"
    ),
    TrainingTerm("gradient accumulation", ("gradient_accumulation=N",), "a larger batch than fits, or fewer exchanges"),
)
"""Names that belong to no strategy and no way to fine-tune."""


TERMS_FIELD = "training_terms"


@functools.cache
def list_training_terms() -> tuple[TrainingTerm, ...]:
    """What the strategies and the ways to fine-tune state, in their order, and `GENERAL_TERMS`.

    A name that several state is one line, with the settings of all: the shortest first.
    """
    stated_terms = [
        term
        for name, strategy_class in list_strategies().items()
        for term in _list_strategy_terms(name, strategy_class)
    ]
    stated_terms += [term for finetune_class in list_finetunes() for term in vars(finetune_class).get(TERMS_FIELD, ())]
    terms: dict[str, TrainingTerm] = {}
    for term in stated_terms:
        known_term = terms.get(term.name, term)
        settings = {*known_term.typed_settings, *term.typed_settings}
        typed_settings = tuple(sorted(settings, key=lambda text: (len(text), text)))
        terms[term.name] = dataclasses.replace(known_term, typed_settings=typed_settings)
    return (*terms.values(), *GENERAL_TERMS)


def _list_strategy_terms(name: str, strategy_class: type[Strategy]) -> Sequence[TrainingTerm]:
    """What a strategy states itself, not a class that it extends; else its label and the first line about it."""
    summary = (strategy_class.__doc__ or "").strip().partition("\n")[0]
    default_term = TrainingTerm(strategy_class.presentation.label or name, (f"strategy={name}",), summary)
    terms: Sequence[TrainingTerm] = vars(strategy_class).get(TERMS_FIELD, (default_term,))
    return terms
