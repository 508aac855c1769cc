"""Memory of runs as other software's loop has it: published rows are compared with that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.config.run_config import RunConfig
from bench.prediction.cost.rank_speed import RankSpeed
from bench.prediction.pipeline import predictor as pipeline_predictor
from bench.prediction.predictor import simulate_planned_rank
from bench.prediction.run_inputs import build_plan_inputs, build_trace_key, list_traced_sizes
from bench.prediction.simulation.device_memory import compute_workspace_bytes
from bench.prediction.simulation.other_loop import LossMemory, RankBesideState
from bench.prediction.simulation.rank_memory import ACTIVATION_MEMORY
from bench.prediction.simulation.simulated_rank import SimulatedRank
from bench.prediction.trace.trace_cache import load_scaled_trace
from bench.strategies.step_plan import PARAMETER_MEMORY


def predict_peak(config: RunConfig, *, is_reentrant: bool = False, loss: LossMemory | None = None) -> float:
    """Peak of allocated memory in bytes, as another software's loop has it.

    Parameters
    ----------
    is_reentrant: bool
        Blocks are checkpointed around their units, and reentrantly, as Hugging Face's Trainer does by default: runs of
        the suite checkpoint within units, and not so. To reshard a unit without trained parameters, torch's FSDP1
        registers hooks on its inputs (``_register_post_backward_reshard_only_hook``). These hold the graph nodes that
        accumulate the inputs' gradients. Inputs of a reentrant checkpoint are leaves, so such a node holds the input
        with its gradient, and the input holds the hooks: all of them stay until backward ends and the hooks are
        removed.
    loss: LossMemory, optional
        What is held of the logits; None for what this suite holds.
    """
    keeps = is_reentrant and config.strategy.name == "fsdp1" and config.activation_checkpointing == "full"
    ranks = _simulate_other_loop(config, loss, lambda: SimulatedRank(RankSpeed(), keeps_frozen_inputs=keeps))
    return compute_workspace_bytes(config) + max(rank.peak.size for rank in ranks)


@dataclass(frozen=True)
class BesideState:
    """Of a kind of rank, in bytes."""

    parameter_bytes: float
    peak_bytes: float
    """Of all that is not state."""
    activation_bytes: float
    """Of the peak, what waits for backward."""


def predict_beside_state(config: RunConfig, loss: LossMemory | None, state_parts: Iterable[str]) -> list[BesideState]:
    """What each kind of rank has beside its state, as `RankBesideState` has it, with another software's loss.

    Parameters
    ----------
    state_parts: iterable of str
        Of `MEMORY_PARTS`, what is state; parameters among them.
    """
    timetable = config.strategy.timetable
    micro_batches = 1 if timetable is None else timetable.micro_batches
    ranks = _simulate_other_loop(config, loss, lambda: RankBesideState(state_parts, micro_batches))
    return [
        BesideState(
            rank.state_bytes[PARAMETER_MEMORY],
            compute_workspace_bytes(config) + rank.peak.size,
            rank.peak.parts[ACTIVATION_MEMORY],
        )
        for rank in ranks
        if isinstance(rank, RankBesideState)
    ]


def _simulate_other_loop(
    config: RunConfig, loss: LossMemory | None, build_rank: Callable[[], SimulatedRank]
) -> list[SimulatedRank]:
    """Each kind of rank after a step in which another software's loss is computed."""
    if config.strategy.timetable is not None:
        return pipeline_predictor.simulate_other_loop(config, build_trace_key(config), loss, build_rank)
    scaled_trace = load_scaled_trace(
        build_trace_key(config),
        list_traced_sizes(config),
    )
    return [
        simulate_planned_rank(config, build_rank(), scaled_trace, plan, loss)
        for count, plan in config.strategy.plan_period(build_plan_inputs(config, scaled_trace))
        if count
    ]
