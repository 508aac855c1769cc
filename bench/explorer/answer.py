"""The answer to a state as plain data: what ``bench.predict`` ranks, and where memory and time of the best row go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.advice.answer import answer_question
from bench.advice.budget import TrainingBudget
from bench.advice.misfits import describe_misfit
from bench.advice.question import AdviceQuestion, read_question
from bench.advice.ranking import CandidateRanking, RankedCandidate
from bench.advice.sentence import choose_recommended, describe_assumed_network
from bench.advice.wording import MEMORY_PART_LABELS, describe_missing_time, format_strategy
from bench.core.errors import UsageError
from bench.explorer.controls import COST_OPTIONS, TOKENS
from bench.explorer.state import ExplorerState
from bench.hardware import detect_device
from bench.prediction.prediction import MEMORY_PARTS, PredictedRange

MAX_LISTED_OPTIONS = 12
"""Of all ways that were compared."""

STEP_PARTS = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "optimizer_s": "optimizer",
    "bubble_s": "waiting",
}
"""Parts of a step's time, which add up to it, and what they are called."""


@dataclass(frozen=True)
class MemoryUse:
    """Where the memory of the fullest GPU goes, in bytes."""

    parts: Mapping[str, int]
    """What the peak of allocated memory consists of, by its name in a sentence; without what is empty."""
    unused_bytes: int
    """Reserved by the caching allocator beside them."""
    reserved: PredictedRange
    capacity: int | None
    """What the allocator may use; None where nobody knows."""
    peak_location: str
    """Phase and module of the peak."""


@dataclass(frozen=True)
class OptionAnswer:
    """One way to train: whether it fits and how fast it is."""

    label: str
    """Strategy, checkpointing and batch."""
    strategy: str
    state: ExplorerState
    """That asks for this way alone."""
    run_id: str
    verdict: str | None
    """fits, too close to call or does not fit; None where the memory of the device is unknown."""
    misfit: str
    """Why it does not fit; empty where it may."""
    batch_size: int
    largest_batch: int | None
    checkpointing: str
    step_s: PredictedRange | None
    """None where no speed is known."""
    limited_by: str
    is_degraded: bool
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None
    memory: MemoryUse
    time_parts: Mapping[str, float]
    """Seconds by the names of `STEP_PARTS`; empty where no speed is known."""
    dollars: float | None
    """For the tokens that were asked for, or for a billion."""
    kwh: float | None
    days: float | None
    """None where no number of tokens was asked for."""


@dataclass(frozen=True)
class ExplorerAnswer:
    """What a state comes to."""

    state: ExplorerState
    advice: str
    """The sentence of ``bench.predict``."""
    best: OptionAnswer
    """What is recommended: the fastest that fits, or what comes nearest to it."""
    options: tuple[OptionAnswer, ...]
    """The fastest first, then those that do not fit, the nearest first; at most `MAX_LISTED_OPTIONS`."""
    num_options: int
    subject: str
    """Model, its parameters, GPUs."""
    network: str
    """What is assumed of the links."""
    warnings: tuple[str, ...]
    missing_time: str
    """Why no time is known; empty where one is."""
    cost_basis: tuple[str, ...]
    """What dollars and kWh stand on."""
    cost_tokens: float
    impossible_reasons: tuple[str, ...]


def read_state(state: ExplorerState) -> AdviceQuestion:
    """The question of a state, read as ``bench.predict`` reads it.

    Raises
    ------
    UsageError
        If it cannot be asked, or is several at once.
    """
    question = read_question(state.overrides, dict.fromkeys(COST_OPTIONS), detect_device)
    if question.section_axes:
        key, values = next(iter(question.section_axes.items()))
        raise UsageError(f"{key}={','.join(values)} is not valid here: choose one value; a terminal takes several.")
    return question


def answer_state(state: ExplorerState) -> ExplorerAnswer:
    """Answer a state.

    Raises
    ------
    UsageError
        If something is a mistake, or nothing of it is possible.
    """
    question = read_state(state)
    (section,) = answer_question(question).sections
    ranking, budget = section.ranking, question.budget
    best = choose_best(ranking)
    config = best.config
    candidates = [best, *(row for row in (*ranking.possible, *ranking.infeasible) if row is not best)]
    return ExplorerAnswer(
        state=state,
        advice=section.advice,
        best=build_option(best, state, budget),
        options=tuple(build_option(candidate, state, budget) for candidate in candidates[:MAX_LISTED_OPTIONS]),
        num_options=len(candidates),
        subject=f"{config.model.name}, {config.model.num_parameters / 1e9:.3g} B parameters, on {config.gpus} × "
        f"{config.hardware.name}",
        network=describe_assumed_network(config, section.settings),
        warnings=tuple(section.warnings),
        missing_time="" if best.prediction.time else describe_missing_time(config),
        cost_basis=tuple(budget.cost_terms.describe(config)),
        cost_tokens=budget.tokens or 1e9,
        impossible_reasons=tuple(section.impossible_reasons),
    )


def find_best_candidate(state: ExplorerState) -> RankedCandidate:
    """The row that the answer of a state is about.

    Raises
    ------
    UsageError
        If the state has no answer.
    """
    return choose_best(rank_state(state))


def choose_best(ranking: CandidateRanking) -> RankedCandidate:
    """The row that the sentence of ``bench.predict`` names."""
    fitting = [candidate for candidate in ranking.possible if candidate.does_fit]
    if ranking.possible and ranking.possible[0].prediction.time is None:
        return ranking.best_candidate
    if fitting:
        return choose_recommended(fitting)
    return min(ranking.possible, key=lambda row: row.prediction.memory.reserved.value, default=ranking.top_candidate)


def rank_state(state: ExplorerState) -> CandidateRanking:
    """All ways to train that a state leaves open, in order."""
    (section,) = answer_question(read_state(state)).sections
    return section.ranking


def build_option(candidate: RankedCandidate, state: ExplorerState, budget: TrainingBudget) -> OptionAnswer:
    """A ranked candidate as plain data.

    Parameters
    ----------
    state: ExplorerState
        Whose options of cost the candidate's own state has.
    """
    config, prediction = candidate.config, candidate.prediction
    memory, time = prediction.memory, prediction.time
    has_tokens = state.get(TOKENS) is not None
    checkpointing, batch = config.activation_checkpointing, config.batch_size_per_gpu
    return OptionAnswer(
        label=f"{format_strategy(config)}, checkpointing {checkpointing}, batch {batch}",
        strategy=format_strategy(config),
        state=state.replace_run_settings(candidate.settings),
        run_id=config.run_id,
        verdict=memory.verdict,
        misfit="" if candidate.can_fit else describe_misfit(candidate),
        batch_size=batch,
        largest_batch=candidate.largest_batch,
        checkpointing=checkpointing,
        step_s=None if time is None else time.step_s,
        limited_by=time.limited_by if time else "",
        is_degraded=bool(time and time.degraded),
        tokens_per_second=candidate.tokens_per_second,
        tokens_per_second_per_gpu=candidate.tokens_per_second_per_gpu,
        mfu=candidate.mfu,
        memory=MemoryUse(
            parts={MEMORY_PART_LABELS[name]: memory.parts[name] for name in MEMORY_PARTS if memory.parts.get(name)},
            unused_bytes=max(0, round(memory.reserved.value - memory.allocated.value)),
            reserved=memory.reserved,
            capacity=memory.capacity,
            peak_location=" of ".join(part for part in (memory.phase, memory.module) if part),
        ),
        time_parts={label: getattr(time, name) for name, label in STEP_PARTS.items()} if time else {},
        dollars=budget.compute_dollars(candidate) if has_tokens else budget.compute_unit_dollars(candidate),
        kwh=budget.compute_kwh(candidate) if has_tokens else budget.compute_unit_kwh(candidate),
        days=budget.compute_days(candidate),
    )
