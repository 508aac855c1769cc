"""What a change of one setting would do, and the frontier: ways to shard against numbers of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.advice.candidates import Candidate
from bench.advice.ranking import RankedCandidate, rank_candidates
from bench.advice.wording import format_strategy
from bench.config.compose import compose_config
from bench.config.grid import RunSettings
from bench.config.run_config import RunConfig, build_run_config
from bench.core.errors import ImpossibleError, UsageError
from bench.explorer.answer import OptionAnswer, build_option, choose_best, find_best_candidate, rank_state, read_state
from bench.explorer.controls import BATCH, CHECKPOINTING, GPUS, SHARDING_FACTOR, STRATEGY
from bench.explorer.state import ExplorerState

RESHARD = "strategy.reshard_after_forward"

CHECKPOINTING_NEIGHBOURS = ("none", "full")

MAX_FRONTIER_COLUMNS = 6

SINGLE_STRATEGY = "single"
"""What DDP is on one GPU."""


@dataclass(frozen=True)
class NeighbourAnswer:
    """The best row with one thing changed."""

    change: str
    option: OptionAnswer | None
    """None where it cannot be."""
    refusal: str
    """Why it cannot be; empty where it can."""


@dataclass(frozen=True)
class FrontierMap:
    """A way to train per row, a number of GPUs per column: each at the batch asked for, else the largest that fits."""

    gpu_counts: tuple[int, ...]
    rows: tuple[tuple[str, tuple[OptionAnswer | None, ...]], ...]
    """Names, and an option per column; None where it cannot be."""


def answer_neighbours(state: ExplorerState) -> tuple[NeighbourAnswer, ...]:
    """What a step from the best row of a state would do.

    Raises
    ------
    UsageError
        If the state has no answer.
    """
    question = read_state(state)
    best, others = _find_best(state)
    config, settings = best.config, {**best.settings}
    gpus, batch = config.gpus, config.batch_size_per_gpu
    factor_setting = {SHARDING_FACTOR: "full"} if _is_fully_sharded(config) and SHARDING_FACTOR in settings else {}
    changes: list[tuple[str, RunSettings]] = [
        ("one GPU more", {GPUS: str(gpus + 1), **factor_setting}),
        ("twice the GPUs", {GPUS: str(2 * gpus), **factor_setting}),
    ]
    if gpus > 1:
        changes.append(("half the GPUs", {GPUS: str(gpus // 2), **factor_setting}))
    if batch > 1:
        changes.append((f"half the batch: {batch // 2}", {BATCH: str(batch // 2)}))
    changes.append((f"twice the batch: {2 * batch}", {BATCH: str(2 * batch)}))
    changes += [
        (f"checkpointing {mode}", {CHECKPOINTING: mode})
        for mode in CHECKPOINTING_NEIGHBOURS
        if mode != config.activation_checkpointing
    ]
    neighbours = [_predict_change(change, {**settings, **changed}, state) for change, changed in changes]
    strategies = {build_option(best, state, question.budget).strategy}
    for candidate in others:
        option = build_option(candidate, state, question.budget)
        if option.strategy not in strategies and len(strategies) <= 2:
            strategies.add(option.strategy)
            neighbours.append(NeighbourAnswer(f"the next strategy: {option.label}", option, ""))
    return tuple(neighbours)


def answer_frontier(state: ExplorerState) -> FrontierMap:
    """Ways to shard against numbers of GPUs, everything else as in the best row of a state.

    Raises
    ------
    UsageError
        If the state has no answer.
    """
    best = find_best_candidate(state)
    config = best.config
    fixed_settings = {key: value for key, value in best.settings.items() if not key.startswith(STRATEGY)}
    has_requested_batch = state.get(BATCH) is not None or state.get("global_batch") is not None
    if not has_requested_batch:
        fixed_settings.pop(BATCH)
    gpu_counts = _list_gpu_counts(config.gpus)
    row_settings = _list_frontier_rows(best, config)
    cells: dict[tuple[str, int], Candidate] = {}
    for name, settings in row_settings.items():
        for gpus in gpu_counts:
            if settings.get(SHARDING_FACTOR) == str(gpus):
                continue  # full sharding, which another row is about
            candidate = _build_candidate({**fixed_settings, **settings, GPUS: str(gpus)}, has_requested_batch)
            if candidate is not None:
                cells[name, gpus] = candidate
    options = _predict_cells(cells, state)
    return FrontierMap(
        gpu_counts,
        tuple((name, tuple(options.get((name, gpus)) for gpus in gpu_counts)) for name in row_settings),
    )


def _find_best(state: ExplorerState) -> tuple[RankedCandidate, Sequence[RankedCandidate]]:
    """The best row of a state, and the others in order."""
    ranking = rank_state(state)
    best = choose_best(ranking)
    return best, [row for row in (*ranking.possible, *ranking.infeasible) if row is not best]


def _predict_change(change: str, settings: RunSettings, state: ExplorerState) -> NeighbourAnswer:
    candidate_state = state.replace_run_settings(settings)
    try:
        question = read_state(candidate_state)
        best = find_best_candidate(candidate_state)
    except UsageError as error:
        return NeighbourAnswer(change, None, str(error))
    return NeighbourAnswer(change, build_option(best, state, question.budget), "")


def _is_fully_sharded(config: RunConfig) -> bool:
    return config.gpus > 1 and config.strategy.resolved_sharding_factor == config.gpus


def _list_gpu_counts(gpus: int) -> tuple[int, ...]:
    """Powers of two around a number of GPUs, and the number itself."""
    counts = [2**power for power in range(15)]
    nearest = min(range(len(counts)), key=lambda index: abs(counts[index] - gpus))
    first = max(0, min(nearest - MAX_FRONTIER_COLUMNS // 2, len(counts) - MAX_FRONTIER_COLUMNS))
    return tuple(sorted({gpus, *counts[first : first + MAX_FRONTIER_COLUMNS]}))


def _list_frontier_rows(best: RankedCandidate, config: RunConfig) -> Mapping[str, RunSettings]:
    """The ways to shard that are compared, from replicated to sharded, and the best row's where it is another one."""
    node = str(config.gpus_per_node)
    rows: dict[str, RunSettings] = {
        "DDP": {STRATEGY: "ddp"},
        "FSDP2, full replication": {STRATEGY: "fsdp", SHARDING_FACTOR: "1", RESHARD: "true"},
        f"FSDP2 hybrid, F={node}": {STRATEGY: "fsdp", SHARDING_FACTOR: node, RESHARD: "true"},
        "FSDP2 full shard, no reshard": {STRATEGY: "fsdp", SHARDING_FACTOR: "full", RESHARD: "false"},
        "FSDP2 full shard": {STRATEGY: "fsdp", SHARDING_FACTOR: "full", RESHARD: "true"},
    }
    best_row = {key: value for key, value in best.settings.items() if key.startswith(STRATEGY)}
    if _is_fully_sharded(config) and SHARDING_FACTOR in best_row:
        best_row[SHARDING_FACTOR] = "full"
    is_listed = best_row in rows.values()
    if config.strategy.name != SINGLE_STRATEGY and not is_listed:
        rows[format_strategy(config)] = best_row
    return rows


def _build_candidate(settings: RunSettings, has_requested_batch: bool) -> Candidate | None:
    """None where such a run cannot be."""
    if settings[GPUS] == "1" and settings[STRATEGY] == "ddp":
        settings = {**settings, STRATEGY: SINGLE_STRATEGY}
    try:
        config = build_run_config(compose_config({**settings, "mode": "predict"}))
    except ImpossibleError:
        return None
    return Candidate(
        {key: value for key, value in settings.items() if key != BATCH}, config, has_requested_batch=has_requested_batch
    )


def _predict_cells(
    cells: Mapping[tuple[str, int], Candidate], state: ExplorerState
) -> dict[tuple[str, int], OptionAnswer]:
    budget = read_state(state).budget
    if not cells:
        return {}
    ranking = rank_candidates(list(cells.values()))
    rows = [*ranking.possible, *ranking.infeasible]
    options = {}
    for place, candidate in cells.items():
        for row in rows:
            if {**row.settings, BATCH: ""} == {**candidate.settings, BATCH: ""}:
                options[place] = build_option(row, state, budget)
    return options
