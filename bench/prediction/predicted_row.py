"""The row that comes of a prediction."""

from __future__ import annotations

from bench.config.run_config import RunConfig
from bench.config.speed_columns import compute_speed_columns
from bench.core.units import GIB
from bench.prediction.prediction import (
    MEMORY_RANGES,
    MemoryPrediction,
    Prediction,
    TimePrediction,
    prediction_to_plain,
)
from bench.records import Record


def build_predicted_row(config: RunConfig, prediction: Prediction) -> Record:
    """The columns that come from a prediction.

    A run that does not fit has no speed; its memory is what it would need.
    """
    memory, does_fit = prediction.memory, prediction.status == "ok"
    plain = prediction_to_plain(prediction)
    return {
        "status": prediction.status,
        "fit": memory.verdict,
        **({} if does_fit else {"oom_phase": _find_oom_phase(memory), "error": describe_shortage(memory)}),
        **(_build_speed_columns(config, prediction.time) if does_fit and prediction.time else {}),
        **(_build_bubble_column(prediction.time) if does_fit and prediction.time else {}),
        **_build_peak_columns(memory),
        "prediction": {"memory": _build_memory_section(plain["memory"]), "time": _build_time_section(plain["time"])},
    }


def describe_shortage(memory: MemoryPrediction) -> str:
    """Why a run does not fit, in a sentence."""
    if memory.is_host_memory_short:
        assert memory.host_capacity is not None
        return (
            f"predicted not to fit: {memory.host / GIB:.3g} GiB are offloaded, and the rank's share of its machine's "
            f"memory is {memory.host_capacity / GIB:.3g} GiB"
        )
    assert memory.capacity is not None
    needed_bytes, min_bytes = memory.reserved.value, memory.reserved.low
    return (
        f"predicted not to fit: needs {needed_bytes / GIB:.3g} GiB (at least {min_bytes / GIB:.3g}) of "
        f"{memory.capacity / GIB:.3g} GiB, most of it in {memory.phase}"
    )


def _build_speed_columns(config: RunConfig, time: TimePrediction) -> Record:
    return {
        **compute_speed_columns(config, time.step_s.value),
        "step_time_ci_low_s": time.step_s.low,
        "step_time_ci_high_s": time.step_s.high,
        "exposed_communication": time.exposed_communication_s / time.step_s.value,
        "limited_by": time.limited_by,
        "degraded": time.degraded,
    }


def _build_bubble_column(time: TimePrediction) -> Record:
    return {} if time.idle_share is None else {"bubble": time.idle_share}


def _build_peak_columns(memory: MemoryPrediction) -> Record:
    return {
        "peak_allocated_bytes": round(memory.allocated.value),
        "peak_allocated_low_bytes": round(memory.allocated.low),
        "peak_allocated_high_bytes": round(memory.allocated.high),
        "peak_active_bytes": round(memory.active.value),
        "peak_reserved_bytes": round(memory.reserved.value),
        "peak_reserved_low_bytes": round(memory.reserved.low),
        "peak_reserved_high_bytes": round(memory.reserved.high),
        "peak_device_used_bytes": round(memory.device_used.value),
    }


def _build_memory_section(memory: Record) -> Record:
    return {
        **{f"{name}_bytes": {end: round(value) for end, value in memory[name].items()} for name in MEMORY_RANGES},
        "parts_bytes": memory["parts"],
        "phase": memory["phase"],
        "module": memory["module"],
        "phase_peaks_bytes": memory["phase_peaks"],
        "capacity_bytes": memory["capacity"],
        **({"host_bytes": memory["host"], "host_capacity_bytes": memory["host_capacity"]} if memory["host"] else {}),
        "verdict": memory["verdict"],
        **({} if memory["others_bytes"] is None else {"others_bytes": memory["others_bytes"]}),
    }


def _build_time_section(time: Record | None) -> Record | None:
    return None if time is None else {name: value for name, value in time.items() if name != "idle_share"}


def _find_oom_phase(memory: MemoryPrediction) -> str:
    """Where memory runs out: the first phase that needs more than there is.

    In the first step the optimizer has no state yet: it is made at its end, and there from the second step on.
    """
    if memory.is_host_memory_short:
        return "init"
    assert memory.capacity is not None
    capacity = memory.capacity - memory.beside
    reserved_per_allocated = memory.reserved.value / memory.allocated.value
    optimizer_state_bytes = memory.parts.get("optimizer", 0)
    peaks = memory.phase_peaks
    needed_by_phase = [("init", max(memory.initial, memory.parts.get("parameters", 0)))]
    needed_by_phase += [(phase, peaks.get(phase, 0) - optimizer_state_bytes) for phase in ("forward", "backward")]
    needed_by_phase += [(phase, peaks.get(phase, 0)) for phase in ("optimizer", "forward", "backward")]
    return next((phase for phase, size in needed_by_phase if size * reserved_per_allocated > capacity), memory.phase)
