"""What the fitted numbers say of each timing."""

from __future__ import annotations

from bench.calibration.fit_links import predict_collective_seconds
from bench.calibration.parts import predict_kernel_seconds
from bench.calibration.sample import ATTENTION, COLLECTIVE, MATMUL, MEMORY, OPERATOR, OPTIMIZER, CalibrationSample
from bench.hardware import Hardware


def predict_sample_seconds(sample: CalibrationSample, hardware: Hardware) -> float | None:
    """Seconds that predictions come to; None for what no prediction takes on its own, or no number is known for."""
    assert hardware.speeds is not None
    if sample.kind == COLLECTIVE:
        return predict_collective_seconds(sample, hardware.speeds.links)
    if sample.kind == OPTIMIZER and hardware.speeds.processor is not None:
        updates = hardware.speeds.processor.updates
        return (
            sample.dims[0] * updates.tensor_us[sample.name] * 1e-6
            + sample.bytes_moved / updates.gb_s[sample.name] / 1e9
        )
    if sample.kind not in (MATMUL, ATTENTION, OPERATOR, MEMORY):
        return None
    try:
        return float(predict_kernel_seconds([sample], hardware)[0])
    except ValueError:  # a format without a speed
        return None
