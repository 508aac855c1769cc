"""The ways a leaf names, predicted for the case: whether each fits, at which batch, how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.advice.candidates import build_candidates
from bench.advice.ranking import RankedCandidate, rank_candidates
from bench.advice.sentence import format_overrides
from bench.advice.tree.case import GuideCase
from bench.advice.tree.tree import TreeLeaf
from bench.config.compose import compose_config, list_config_groups
from bench.config.grid import RunSettings
from bench.config.run_config import build_run_config
from bench.core.errors import UsageError
from bench.core.training_guide import MICRO_BATCHES_PER_STAGE, TrainingOption


@dataclass(frozen=True)
class RankedOption:
    """A way with its best candidate."""

    training_option: TrainingOption
    settings: RunSettings
    """What is typed for it beside the case, or in place of what the case says."""
    candidate: RankedCandidate | None
    """The best: fastest of those that fit, else what is nearest to fitting. None where there is no prediction."""
    missing_reason: str
    """Why there is none, in a sentence; empty where there is one."""
    can_run: bool = True
    """Whether it can be asked for: not where the suite refuses it in this case."""

    @property
    def does_fit(self) -> bool:
        """Whether it is predicted to fit."""
        return self.candidate is not None and self.candidate.can_fit and self.candidate.does_fit

    def format_sweep_command(self, case: GuideCase) -> str | None:
        """The command that runs it."""
        if not self.can_run:
            return None
        best_settings = self.candidate.settings if self.candidate is not None else _merge_settings(case, self.settings)
        return " ".join(["python -m bench.sweep", *format_overrides(best_settings)])

    def format_predict_command(self, case: GuideCase) -> str | None:
        """The command that predicts it, at every batch and checkpointing that the case leaves open."""
        if self.candidate is None:
            return None
        batch_setting = {} if case.requested_batch is None else {"batch_size_per_gpu": str(case.requested_batch)}
        return " ".join(
            ["python -m bench.predict", *format_overrides({**_merge_settings(case, self.settings), **batch_setting})]
        )


def rank_options(case: GuideCase, leaf: TreeLeaf, on_progress: Callable[[str], None]) -> list[RankedOption]:
    """Predict all ways of a leaf, in its order."""
    ranked_options = []
    for option in leaf.options:
        on_progress(f"predicting {option.name}")
        ranked_options.append(_rank_option(case, option))
    return ranked_options


def _rank_option(case: GuideCase, option: TrainingOption) -> RankedOption:
    """In the precision of the case; in others, too, where the user chose none and it is refused or does not fit.

    Some ways refuse to scale the loss, which fp32 does not need; and weights that stay as they are may be in bf16.
    """
    settings = option.fill_settings(case.config.gpus, case.gpus_on_node, case.requested_batch)
    default_attempt = _rank_with_settings(case, option, settings)
    if default_attempt.does_fit or case.has_requested_precision:
        return default_attempt
    other_precisions = [
        *(["bf16_pure"] if option.trains_adapters else []),
        *(["fp32"] if default_attempt.candidate is None else []),
    ]
    attempts = [
        _rank_with_settings(case, option, {**settings, "precision": precision}) for precision in other_precisions
    ]
    return min(
        [default_attempt, *attempts],
        key=lambda attempt: (not attempt.does_fit, attempt.candidate is None, not attempt.can_run),
    )


def _rank_with_settings(case: GuideCase, option: TrainingOption, settings: RunSettings) -> RankedOption:
    strategy_knobs = {key: [value] for key, value in settings.items() if key.partition(".")[0] == "strategy"}
    other_settings = {key: value for key, value in settings.items() if key not in strategy_knobs}
    knobs = {**case.build_knobs(), "precision": [settings.get("precision", case.settings["precision"])]}
    try:
        ranking = rank_candidates(
            build_candidates(_merge_settings(case, other_settings), {**knobs, **strategy_knobs}).to_predict
        )
    except UsageError as error:
        return RankedOption(option, settings, None, str(error), can_run=_is_runnable(case, settings))
    fitting_candidates = [candidate for candidate in ranking.possible if candidate.does_fit]
    if fitting_candidates and fitting_candidates[0].prediction.time is None:
        fitting_candidates.sort(key=_compute_untimed_key)
    return RankedOption(option, settings, (fitting_candidates or [ranking.top_candidate])[0], "")


def _compute_untimed_key(candidate: RankedCandidate) -> tuple[int, float]:
    """What comes first where no time is predicted: a larger batch moves less per token; then what computes least."""
    config = candidate.config
    flops_per_sequence = config.trained_model.count_flops_per_sequence(config.sequence_length).compute_hardware_flops(
        config.activation_checkpointing
    )
    return -config.batch_size_per_gpu, flops_per_sequence


def _merge_settings(case: GuideCase, option_settings: RunSettings) -> RunSettings:
    """What is typed for the case and a way, without fields of the case that what a way chooses does not have."""
    chosen_fields = {
        group: compose_config({group: value})[group]
        for group, value in option_settings.items()
        if group in list_config_groups()
    }
    kept_settings = {}
    for key, value in case.settings.items():
        group, _, name = key.partition(".")
        if not name or group not in chosen_fields or name.partition(".")[0] in chosen_fields[group]:
            kept_settings[key] = value
    return {**kept_settings, **option_settings}


def _is_runnable(case: GuideCase, settings: RunSettings) -> bool:
    """Whether a way that is not predicted can be run: some is only not predicted."""
    batch_setting = {"batch_size_per_gpu": str(case.requested_batch or MICRO_BATCHES_PER_STAGE)}
    try:
        build_run_config(compose_config({**_merge_settings(case, settings), **batch_setting}))
    except UsageError:
        return False
    return True
