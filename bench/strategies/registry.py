"""The strategies there are, and sentences that offer those which can do what another cannot."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

from bench.core import plugins
from bench.core.errors import ImpossibleError
from bench.core.precision import Precision
from bench.core.presentation import remember_presentation
from bench.models import Family
from bench.strategies.base import Strategy


def load_strategy(name: str) -> type[Strategy]:
    """The strategy class that ``bench/strategies/<name>.py``, or the module with that path, defines."""
    strategy_class: type[Strategy] = plugins.find_plugin_class(
        "strategy.name", name, sys.modules[__package__], Strategy
    )
    if "." in name:
        remember_presentation(name.lstrip("."), strategy_class.presentation)
    return strategy_class


@functools.cache
def list_strategies() -> dict[str, type[Strategy]]:
    """The suite's strategies and those of installed packages, from whole models on every rank to the most divided."""
    names = plugins.list_plugin_names(sys.modules[__package__], Strategy)
    strategy_classes = {name: load_strategy(name) for name in names}
    return dict(sorted(strategy_classes.items(), key=lambda item: item[1].presentation.position))


def normalize_precision(strategy: Strategy, precision: Precision) -> Precision:
    """The precision with one name for each thing: `mixing` is null where nothing is mixed, or in the strategy's usual
    way.

    Raises
    ------
    ImpossibleError
        If the strategy does not have the way of mixed precision that was asked for.
    """
    requested_mixing = precision.mixing
    if requested_mixing is None:
        return precision
    if precision.is_mixed and requested_mixing not in strategy.supported_mixings:
        other_strategies = _format_matching_strategies(
            lambda candidate: (
                isinstance(candidate.supported_mixings, tuple) and requested_mixing in candidate.supported_mixings
            )
        )
        raise ImpossibleError(
            f"precision.mixing={requested_mixing} is not valid for strategy={strategy.name}, "
            f"{strategy.single_mixing_reason}: choose "
            f"{strategy.supported_mixings[0]}, or strategy {other_strategies}."
        )
    is_usual_mixing = requested_mixing == strategy.supported_mixings[0] or not precision.is_mixed
    return _drop_mixing(precision) if is_usual_mixing else precision


@functools.cache
def _drop_mixing(precision: Precision) -> Precision:
    """Without a way of mixing: the same object every time."""
    return dataclasses.replace(precision, mixing=None)


def require_finetune(strategy: Strategy, finetune: str) -> None:
    """Raise `ImpossibleError` where a strategy trains no part of a model in that way."""
    if finetune not in strategy.supported_finetunes:
        untrained_kind = "quantised weights" if finetune == "qlora" else "frozen parameters"
        other_strategies = _format_matching_strategies(lambda candidate: finetune in candidate.supported_finetunes)
        raise ImpossibleError(
            f"finetune={finetune} is not valid with strategy={strategy.name}, which is not made to keep "
            f"{untrained_kind} beside others: choose finetune={' or '.join(strategy.supported_finetunes)}, or strategy "
            f"{other_strategies}."
        )


def require_fp32_adapters(strategy: Strategy) -> None:
    """Raise `ImpossibleError` where a strategy takes all parameters to have one format."""
    if not strategy.takes_fp32_adapters:
        other_strategies = _format_matching_strategies(lambda candidate: candidate.takes_fp32_adapters)
        raise ImpossibleError(
            f"finetune.fp32_adapters=true is not valid with strategy={strategy.name}, whose parameters all have one "
            f"format: choose false, or strategy {other_strategies}."
        )


def require_float8(strategy: Strategy, precision: Precision) -> None:
    """Raise `ImpossibleError` where a strategy was not shown to train a model whose linear layers compute in FP8."""
    if not strategy.takes_float8:
        raise ImpossibleError(
            f"precision={precision.name} is not valid for strategy={strategy.name}: choose bf16, or strategy "
            f"{_format_matching_strategies(lambda candidate: candidate.takes_float8)}."
        )


def require_whole_replicas(strategy: Strategy, family: Family) -> None:
    """Raise `ImpossibleError` where a strategy cannot train a model that itself exchanges something among all ranks."""
    if not strategy.takes_communicating_models:
        raise ImpossibleError(
            f"strategy={strategy.name} is not valid for model={family.name}, which divides tables among all ranks "
            "itself: choose strategy "
            f"{_format_matching_strategies(lambda candidate: candidate.takes_communicating_models)}."
        )


def _format_matching_strategies(is_match: Callable[[type[Strategy]], bool]) -> str:
    package = sys.modules[__package__]
    *names, last = [name for name in plugins.list_plugin_names(package, Strategy) if is_match(load_strategy(name))]
    return f"{', '.join(names)} or {last}"
