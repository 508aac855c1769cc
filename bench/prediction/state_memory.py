"""What a run holds whatever its batch: enough to tell that it cannot fit, without a trace of the model."""

from __future__ import annotations

from bench.config.run_config import RunConfig
from bench.prediction.cost import rank_speed
from bench.prediction.intervals import add_intervals
from bench.prediction.prediction import Prediction
from bench.prediction.run_inputs import build_plan_inputs
from bench.prediction.simulation.device_memory import predict_memory
from bench.prediction.simulation.simulated_rank import SimulatedRank
from bench.strategies.step_plan import GRADIENT_MEMORY


def predict_state_alone(config: RunConfig) -> Prediction | None:
    """The memory of the optimizer's step without activations, and no time: parameters, optimizer state, and the
    gradients of what this rank updates. No batch takes less.

    None where that cannot be said without a trace: of pipelines, of what is offloaded, and of a process that drives
    several devices.
    """
    if config.strategy.timetable is not None or config.devices_per_process > 1:
        return None
    _, plan = config.strategy.plan_period(build_plan_inputs(config, None))[-1]
    if plan.host_bytes or plan.updates_on_host:
        return None
    simulated_rank = SimulatedRank(rank_speed.RankSpeed())
    plan.allocate_persistent_state(simulated_rank)
    simulated_rank.phase, simulated_rank.module = "optimizer", "optimizer"
    if not simulated_rank.peak.parts.get(GRADIENT_MEMORY):  # not held from step to step
        gradient_bytes = sum(plan.updated_numels) * plan.inputs.parameter_itemsize
        simulated_rank.allocate("gradients", gradient_bytes, GRADIENT_MEMORY)
    return add_intervals(config, Prediction(predict_memory(config, simulated_rank), None))
