"""What comes of a calibration: a hardware file, or why there is none."""

from __future__ import annotations

from rich.console import Console

from bench.calibration.arguments import CalibrationRequest
from bench.calibration.fit_compute import fit_compute
from bench.calibration.fit_links import fit_links
from bench.calibration.hardware_file import build_calibrated_hardware
from bench.calibration.noise import Disturbance
from bench.calibration.provenance import CalibrationProvenance
from bench.calibration.session import CalibrationMeasurements


def print_disturbances(disturbances: list[Disturbance]) -> None:
    """Say why there is no hardware file."""
    print("This machine was not quiet: what was timed is not what it can do, and no hardware file was written.")
    for disturbance in disturbances:
        print(f"  {disturbance}.")
    print("Stop what else runs on it, and type the same command again.")


def write_results(request: CalibrationRequest, measurements: CalibrationMeasurements, console: Console) -> None:
    """Fit, write the hardware file with its timings and curves, and print what was found."""
    from bench.reporting.calibration.calibration import build_calibration_tables, write_calibration  # takes matplotlib

    compute_fit = (
        fit_compute(measurements.compute_samples, request.baseline.hardware) if measurements.compute_samples else None
    )
    links_fit = None
    if measurements.collective_samples:
        base_links = request.baseline.speeds.links if request.baseline.speeds else None
        links_fit = fit_links(
            measurements.collective_samples,
            base_links,
            uses_gloo=request.settings.device_type == "cpu",
            base_name=request.baseline.name,
        )
    provenance = CalibrationProvenance.from_environment(measurements.device, measurements.processes_text)
    hardware = build_calibrated_hardware(request.output_path.stem, request.baseline, compute_fit, links_fit, provenance)
    samples = [*measurements.compute_samples, *measurements.collective_samples]
    written_paths = write_calibration(request.output_path, hardware, provenance, samples)
    residuals = {**(compute_fit.residuals if compute_fit else {}), **(links_fit.residuals if links_fit else {})}
    for renderable in build_calibration_tables(hardware, residuals):
        console.print(renderable, highlight=False)
    console.print()
    hardware_path, timings_path, *_ = written_paths
    console.print(
        f"Hardware file: {hardware_path}\nTimings: {timings_path}\nCurves: {hardware_path.with_suffix('')}-*.png and "
        ".svg",
        soft_wrap=True,
    )
    ranks = max(request.settings.local_ranks, 1)
    console.print(f"Next: python -m bench.predict model=gpt_125m gpus={ranks} hardware={hardware_path}", soft_wrap=True)
