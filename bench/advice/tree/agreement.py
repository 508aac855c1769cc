"""Whether the tree and the ranked prediction agree; if not, which step's general advice which number contradicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.advice.candidates import build_candidates
from bench.advice.ranking import RankedCandidate, rank_candidates
from bench.advice.sentence import (
    MIN_VISIBLE_DIFFERENCE,
    choose_recommended,
    describe_candidate,
    describe_speed_difference,
    has_overlapping_speeds,
)
from bench.advice.tree.answers import DecisionStep
from bench.advice.tree.options import GuideCase
from bench.advice.tree.tree import TreeLeaf, TreeNode
from bench.advice.wording import format_overrides, join_items
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.groups import list_config_groups
from bench.config.run_config import build_run_config
from bench.core import presentation
from bench.core.errors import UsageError
from bench.core.presentation import MICRO_BATCHES_PER_STAGE, TrainingOption, format_plural


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
    return -config.batch_size_per_gpu, config.hardware_flops_per_sequence


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
        build_run_config(compose_config({**_merge_settings(case, settings), **batch_setting, "global_batch": "null"}))
    except UsageError:
        return False
    return True


# --- Whether the tree and the ranked prediction agree; if not, which step's general advice which number contradicts.

OVER_ALL_GPUS, WITHIN_NODE, ACROSS_NODES = "over all GPUs", "within a node", "across nodes"

ShardingKind = tuple[str, str]
"""Strategy, and how far it shards where that is a choice."""


def describe_agreement(
    case: GuideCase, decision_path: Sequence[DecisionStep], ranked_options: Sequence[RankedOption]
) -> tuple[bool | None, str]:
    """Whether they agree (None: nothing tells), and a sentence that says so.

    Parameters
    ----------
    decision_path: sequence of DecisionStep
        The steps that were answered.
    ranked_options: sequence of RankedOption
        The leaf's.
    """
    does_agree, message = _describe_comparison(case, decision_path, ranked_options)
    if ranked_options[0].candidate is None and any(option.candidate is not None for option in ranked_options):
        message += f" What the tree names first, {ranked_options[0].training_option.name}, is not predicted."
    return does_agree, message


def _describe_comparison(
    case: GuideCase, decision_path: Sequence[DecisionStep], ranked_options: Sequence[RankedOption]
) -> tuple[bool | None, str]:
    fitting_candidates = [candidate for candidate in case.ranking.possible if candidate.does_fit]
    tree_candidates = [
        candidate for option in ranked_options if (candidate := option.candidate) is not None and option.does_fit
    ]
    if not fitting_candidates and not tree_candidates and case.ranking.possible:
        return None, "Nothing tells: nothing is predicted to fit for sure, and what might is too close to call."
    if not fitting_candidates:
        return True, _describe_without_ranking(case, [option for option in ranked_options if option.does_fit])
    count_text = format_plural(len(case.ranking.possible) + len(case.ranking.infeasible), "ranked candidate")
    if fitting_candidates[0].prediction.time is None:
        return None, (
            f"Nothing tells: no time is predicted, so the {count_text} are in the order of memory, and "
            f"{describe_candidate(fitting_candidates[0])} "
            "needs least. The tree prefers what is simple among what fits."
        )
    best = choose_recommended(fitting_candidates)
    best_of_text = f"the best of {count_text}"
    timed_candidates = sorted(
        (candidate for candidate in tree_candidates if candidate.tokens_per_second),
        key=lambda candidate: -(candidate.tokens_per_second or 0.0),
    )
    if (
        timed_candidates
        and not has_overlapping_speeds(best, timed_candidates[0])
        and (timed_candidates[0].tokens_per_second or 0) > (best.tokens_per_second or 0)
    ):
        return False, (
            "They do not agree, since the ranking does not compare everything: "
            f"{_find_option_name(timed_candidates[0], ranked_options)}, which the "
            f"tree names, is {describe_speed_difference(timed_candidates[0], best)}, than {best_of_text}, "
            f"{describe_candidate(best)}."
        )
    same_kind = _find_same_kind(best, ranked_options, case)
    if same_kind is not None and is_as_fast(same_kind, best):
        message = (
            f"They agree: {best_of_text}, {describe_candidate(best)}, is what the tree calls "
            f"{_find_option_name(same_kind, ranked_options)}"
        )
        return True, message + _describe_first_option(tree_candidates, same_kind, best)
    if timed_candidates and has_overlapping_speeds(best, timed_candidates[0]):
        return True, (
            f"They agree within the predictor's uncertainty: {best_of_text} is {describe_candidate(best)}; of what the "
            "tree names "
            f"{describe_candidate(timed_candidates[0])} is {_describe_against_best(timed_candidates[0], best)}"
            + _describe_first_option(tree_candidates, timed_candidates[0], best)
        )
    if same_kind is not None:
        return False, (
            f"They do not agree: {best_of_text} is {describe_candidate(best)}, and "
            f"{_find_option_name(same_kind, ranked_options)}, which the tree names, is "
            f"{_describe_against_best(same_kind, best)}" + _describe_first_option(tree_candidates, same_kind, best)
        )
    step = _find_contradicted_step(case, decision_path, best)
    step_text = f"step {step.number} ({step.answer.text})"
    if not timed_candidates:
        return False, (
            f"They do not agree: of what the tree names nothing that can be timed is predicted to fit, so {step_text} "
            f"gives way to {describe_candidate(best)}, {best_of_text}."
        )
    return False, (
        f"They do not agree: {best_of_text} is {describe_candidate(best)}, and the best that the tree names, "
        f"{describe_candidate(timed_candidates[0])}, is "
        f"{describe_speed_difference(timed_candidates[0], best)}. What contradicts the general advice of {step_text}: "
        f"{_describe_slowdown(timed_candidates[0], best)}."
    )


def _find_same_kind(
    best: RankedCandidate, ranked_options: Sequence[RankedOption], case: GuideCase
) -> RankedCandidate | None:
    """The fastest row of the ways of the same kind as what is ranked best, None if none is predicted to fit."""
    same_kind_candidates = [
        option.candidate
        for option in ranked_options
        if option.candidate is not None and option.does_fit and _is_of_option(best, option.training_option, case)
    ]
    return max(same_kind_candidates, key=lambda candidate: candidate.tokens_per_second or 0.0, default=None)


def _find_option_name(candidate: RankedCandidate, ranked_options: Sequence[RankedOption]) -> str:
    return next(option.training_option.name for option in ranked_options if option.candidate is candidate)


def _describe_first_option(
    tree_candidates: Sequence[RankedCandidate], described_candidate: RankedCandidate, best: RankedCandidate
) -> str:
    """How what the tree names first compares, if that is not what was told already; the end of the sentence."""
    first_candidate = tree_candidates[0]
    if first_candidate is described_candidate or first_candidate.tokens_per_second is None:
        return "."
    return (
        f"; what the tree names first, {describe_candidate(first_candidate)}, is "
        f"{_describe_against_best(first_candidate, best)}."
    )


def _describe_against_best(candidate: RankedCandidate, best: RankedCandidate) -> str:
    """How it compares with what is ranked best, and where it is slower why."""
    is_slower = (candidate.tokens_per_second or 0.0) < (best.tokens_per_second or 0.0) and not is_as_fast(
        candidate, best
    )
    return describe_speed_difference(candidate, best) + (
        f": {_describe_slowdown(candidate, best)}" if is_slower else ""
    )


def is_as_fast(candidate: RankedCandidate, best: RankedCandidate) -> bool:
    """Whether no percentage shows a difference."""
    return abs((candidate.tokens_per_second or 0.0) / (best.tokens_per_second or 1.0) - 1) < MIN_VISIBLE_DIFFERENCE


def find_sharding_kind(candidate: RankedCandidate) -> ShardingKind:
    """What sort of sharding a candidate is; a whole copy per GPU is DDP, whoever keeps it."""
    config = candidate.config
    name, factor = config.strategy.name, config.strategy.resolved_sharding_factor
    if not presentation.get_strategy_presentation(name).is_sharded_by_factor:
        return name, ""
    if factor == 1 and config.gpus > 1:
        return "ddp", ""
    return (
        name,
        OVER_ALL_GPUS if factor == config.gpus else WITHIN_NODE if factor <= config.gpus_per_node else ACROSS_NODES,
    )


def find_option_kind(option: TrainingOption, case: GuideCase) -> ShardingKind:
    """The same of a way."""
    name, factor = option.settings.get("strategy", ""), option.settings.get("strategy.sharding_factor")
    if not presentation.get_strategy_presentation(name).is_sharded_by_factor:
        return name, ""
    return name, WITHIN_NODE if factor == "node" and case.config.nodes > 1 else OVER_ALL_GPUS


def _is_of_option(candidate: RankedCandidate, option: TrainingOption, case: GuideCase) -> bool:
    """Whether a candidate is what a way means."""
    option_reshard = option.settings.get("strategy.reshard_after_forward")
    candidate_reshard = str(getattr(candidate.config.strategy, "reshard_after_forward", None)).lower()
    return find_sharding_kind(candidate) == find_option_kind(option, case) and option_reshard in (
        None,
        candidate_reshard,
    )


def _describe_without_ranking(case: GuideCase, fitting_options: Sequence[RankedOption]) -> str:
    candidate_count = len(case.ranking.possible) + len(case.ranking.infeasible)
    no_fit_text = f"of {format_plural(candidate_count, 'candidate')} that bench.predict ranks, none is predicted to fit"
    if not fitting_options:
        return f"They agree: {no_fit_text}, nor is any way that the tree names and that can be predicted."
    option_names = join_items([option.training_option.name for option in fitting_options])
    return f"They agree: {no_fit_text}; the ranking does not compare {option_names}, predicted to fit."


def _find_contradicted_step(
    case: GuideCase, decision_path: Sequence[DecisionStep], best: RankedCandidate
) -> DecisionStep:
    """The last step at which another answer would have led to what is ranked best; else the last step."""
    for step in reversed(decision_path):
        other_branches = [branch for answer, branch in step.node.branches.items() if branch is not step.next_node]
        leaves = [
            leaf
            for branch in other_branches
            for leaf in (branch.list_leaves() if isinstance(branch, TreeNode) else [branch])
        ]
        if any(
            find_option_kind(option, case) == find_sharding_kind(best) for leaf in leaves for option in leaf.options
        ):
            return step
    return decision_path[-1]


def _describe_slowdown(candidate: RankedCandidate, best: RankedCandidate) -> str:
    """The part of the time per token in which they differ most."""
    text_by_part = {
        "compute_s": _describe_compute(candidate, best),
        "exposed_communication_s": "it waits for the network",
        "optimizer_s": f"at batch {candidate.config.batch_size_per_gpu} rather than "
        f"{best.config.batch_size_per_gpu} per GPU its optimizer steps take",
        "bubble_s": f"it waits for {_describe_wait(candidate)}",
    }

    def compute_seconds_per_token(candidate: RankedCandidate, part: str) -> float:
        return float(getattr(candidate.prediction.time, part) / candidate.tokens_per_step)

    part = max(
        text_by_part,
        key=lambda part: compute_seconds_per_token(candidate, part) - compute_seconds_per_token(best, part),
    )
    slow_text, fast_text = (
        presentation.format_seconds(1000 * compute_seconds_per_token(timed_candidate, part))
        for timed_candidate in (candidate, best)
    )
    return f"{text_by_part[part]} {slow_text} per 1,000 tokens of a GPU rather than {fast_text}"


def _describe_wait(candidate: RankedCandidate) -> str:
    """What a device waits for that is no communication."""
    if candidate.prediction.time is not None and candidate.prediction.time.degraded:
        return "the allocator, its memory nearly exhausted,"
    return "kernels to be launched" if candidate.config.strategy.timetable is None else "other stages"


def _describe_compute(candidate: RankedCandidate, best: RankedCandidate) -> str:
    checkpointing_kinds = candidate.config.activation_checkpointing, best.config.activation_checkpointing
    if checkpointing_kinds[0] != checkpointing_kinds[1]:
        return f"with checkpointing {checkpointing_kinds[0]} rather than {checkpointing_kinds[1]} it computes"
    batch_sizes = candidate.config.batch_size_per_gpu, best.config.batch_size_per_gpu
    return f"at batch {batch_sizes[0]} rather than {batch_sizes[1]} per GPU it computes"
