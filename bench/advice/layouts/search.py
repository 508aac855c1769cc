"""The search: layouts are predicted in ascending order of their bounds, until no other can be among the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.advice.layouts.bounds import LayoutBounder
from bench.advice.layouts.layouts import Layout, LayoutQuestion, list_layouts
from bench.advice.ranking import RankedCandidate
from bench.config.compose import compose_config
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError
from bench.planning.run_predictions import Unpredictable, predict_configs
from bench.prediction.intervals import ALLOCATED, classify_hardware, find_factors
from bench.prediction.prediction import Prediction

KEPT_SLOWDOWN = 0.01
"""Layouts that may be within this share of the fastest that fits are all predicted."""

LAYOUTS_PER_ROUND = 16
"""Predicted before bounds are compared again."""


@dataclass
class LayoutSearch:
    """What a search came to."""

    question: LayoutQuestion
    num_layouts: int = 0
    predicted: list[RankedCandidate] = field(default_factory=list)
    num_too_large: int = 0
    """Whose states and activations alone are more than there is."""
    num_too_slow: int = 0
    """Whose step takes longer than the fastest that fits, at least."""
    impossible_reasons: dict[str, int] = field(default_factory=dict)

    layouts: dict[str, Layout] = field(default_factory=dict)
    """Of what was predicted, by the run's id."""

    @property
    def fastest(self) -> list[Layout]:
        """Predicted layouts that fit, fastest first."""
        fitting = [candidate for candidate in self.predicted if candidate.does_fit]
        return [
            self.layouts[candidate.config.run_id]
            for candidate in sorted(fitting, key=lambda candidate: candidate.step_s)
        ]

    @property
    def best(self) -> RankedCandidate | None:
        """The fastest that is predicted to fit."""
        fitting = [candidate for candidate in self.predicted if candidate.does_fit]
        return min(fitting, key=lambda candidate: candidate.step_s, default=None)


class LayoutPredictor:
    """Builds and predicts the runs of layouts of one question."""

    def __init__(self, question: LayoutQuestion) -> None:
        self.question = question
        self._settings = {**question.settings, "mode": "predict"}
        self._raw = compose_config({**self._settings, "strategy": "mesh"})

    def build_reference(self, mode: str) -> RunConfig:
        """The undivided model's run with FSDP in a mode of checkpointing."""
        settings = {key: value for key, value in self._settings.items() if key != "global_batch"}
        return build_run_config(
            compose_config(
                {
                    **settings,
                    "strategy": "fsdp",
                    "gpus": str(self.question.gpus),
                    "activation_checkpointing": mode,
                    "batch_size_per_gpu": "1",
                }
            )
        )

    def build_config(self, layout: Layout) -> RunConfig:
        """The run of a layout; `compose_config` of its settings comes to the same.

        Raises
        ------
        ImpossibleError
            If it cannot be.
        """
        settings = layout.list_settings()
        strategy = {
            key.partition(".")[2]: _read_value(value) for key, value in settings.items() if key.startswith("strategy.")
        }
        scalars = {key: _read_value(value) for key, value in settings.items() if not key.startswith("strategy")}
        return build_run_config({**self._raw, **scalars, "strategy": {**self._raw["strategy"], **strategy}})

    def predict(self, layouts: Sequence[Layout], search: LayoutSearch) -> list[RankedCandidate | None]:
        """Predict layouts and note them in a search; None for those that cannot be."""
        configs: dict[int, RunConfig] = {}
        for index, layout in enumerate(layouts):
            try:
                configs[index] = self.build_config(layout)
            except ImpossibleError as error:
                _count(search.impossible_reasons, str(error))
        results: list[RankedCandidate | None] = [None] * len(layouts)
        for (index, config), prediction in zip(configs.items(), predict_configs(list(configs.values())), strict=True):
            if isinstance(prediction, Unpredictable):
                _count(search.impossible_reasons, prediction.reason)
                continue
            results[index] = self._rank(layouts[index], config, prediction)
            search.layouts[config.run_id] = layouts[index]
        search.predicted += [result for result in results if result is not None]
        return results

    def _rank(self, layout: Layout, config: RunConfig, prediction: Prediction) -> RankedCandidate:
        return RankedCandidate({**self.question.settings, **layout.list_settings()}, config, prediction, None)


def _read_value(text: str) -> str | int | bool:
    return {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)


def _count(reasons: dict[str, int], reason: str) -> None:
    reasons[reason] = reasons.get(reason, 0) + 1


def search_layouts(
    question: LayoutQuestion, fastest_step_s: float = math.inf, layouts: Sequence[Layout] | None = None
) -> LayoutSearch:
    """Predict every layout that may be within `KEPT_SLOWDOWN` of the fastest that fits.

    Branch and bound: what takes longer by its lower bound than the fastest predicted so far is left out. As soon as one
    pipeline of a `Layout.trace_group` is predicted, how long its ranks compute replaces the estimate in the bounds of
    those of the group that have as many stages or more: nothing slows passes through stages down, and each begins with
    kernels that wait to be launched.

    Parameters
    ----------
    fastest_step_s: float
        Of what else is compared at the same global batch, infinite where there is nothing.
    layouts: sequence or None
        Those to choose from; None for all of the question.
    """
    search, predictor = LayoutSearch(question), LayoutPredictor(question)
    layouts = list(list_layouts(question)) if layouts is None else layouts
    search.num_layouts = len(layouts)
    if not layouts:
        return search
    references = {mode: predictor.build_reference(mode) for mode in question.checkpointing_modes}
    predict_configs(
        [dataclasses.replace(config, batch_size_per_gpu=2) for config in references.values()], replay_allocator=False
    )
    bounder = LayoutBounder(question, references)
    capacity = find_capacity_bytes(next(iter(references.values())))
    bounds = {layout: bounder.compute(layout) for layout in layouts}
    open_layouts = {layout: bounds[layout].step_s for layout in layouts if bounds[layout].memory_bytes <= capacity}
    search.num_too_large = len(layouts) - len(open_layouts)
    known_groups: set[tuple[object, ...]] = set()
    fewest_stages: dict[tuple[object, ...], int] = {}
    while open_layouts:
        limit_s = fastest_step_s * (1 + KEPT_SLOWDOWN)
        slow_layouts = [layout for layout, step_s in open_layouts.items() if step_s > limit_s]
        search.num_too_slow += len(slow_layouts)
        for layout in slow_layouts:
            del open_layouts[layout]
        chosen = _choose_round(open_layouts, known_groups)
        for layout, candidate in zip(chosen, predictor.predict(chosen, search), strict=True):
            del open_layouts[layout]
            if candidate is None:
                continue
            if candidate.does_fit:
                fastest_step_s = min(fastest_step_s, candidate.step_s)
            group = layout.trace_group
            known_groups.add(group)
            if 1 < layout.num_stages < fewest_stages.get(group, MAX_STAGES):  # where each is a pass by itself
                fewest_stages[group] = layout.num_stages
                computed_s = ROUNDING_SLACK * candidate.compute_s
                for other in open_layouts:
                    if other.trace_group == group and other.num_stages >= layout.num_stages:
                        open_layouts[other] = max(open_layouts[other], bounder.compute_step_bound_s(other, computed_s))
    return search


MAX_STAGES = 10**6

ROUNDING_SLACK = 0.99
"""Of what one layout of a group computes, what others compute at least: heads and embeddings are stages' own."""


def _choose_round(open_layouts: dict[Layout, float], known_groups: set[tuple[object, ...]]) -> list[Layout]:
    """The next to predict: lowest bounds first, of a group that nothing is known of yet one."""
    chosen: list[Layout] = []
    new_groups: set[tuple[object, ...]] = set()
    for layout in sorted(open_layouts, key=open_layouts.__getitem__):
        if layout.trace_group not in known_groups:
            if layout.trace_group in new_groups:
                continue
            new_groups.add(layout.trace_group)
        chosen.append(layout)
        if len(chosen) == LAYOUTS_PER_ROUND or len(new_groups) == NEW_GROUPS_PER_ROUND:
            break
    return chosen


NEW_GROUPS_PER_ROUND = 4
"""Whose traces have to be made."""


def find_capacity_bytes(config: RunConfig) -> float:
    """Allocated bytes, as predicted, beyond which a layout surely does not fit; infinite where memory is unknown.

    What lies outside the allocator depends on the layout; it is left out, so that none is too many.
    """
    hardware = config.hardware
    if hardware.memory_limit_bytes is not None:
        capacity = float(hardware.memory_limit_bytes)
    elif hardware.speeds is not None:
        capacity = hardware.speeds.outside.device_gib * 2**30
    else:
        return math.inf
    return capacity / find_factors(ALLOCATED, classify_hardware(hardware), is_layout=True).low
