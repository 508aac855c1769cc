"""One calibration from beginning to end: everything that is timed, and whether others disturbed it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from bench.calibration.collectives import measure_collectives
from bench.calibration.fit_compute import fit_compute
from bench.calibration.fit_links import fit_links
from bench.calibration.hardware_file import BaselineHardware, CalibrationProvenance, build_calibrated_hardware
from bench.calibration.kernels import (
    list_formats,
    measure_attention,
    measure_launch,
    measure_matmul,
    measure_memory,
    measure_sustained,
)
from bench.calibration.noise import Disturbance, ProcessorWait, find_disturbances, time_reference
from bench.calibration.processes import CalibrationProcess, run_local_processes
from bench.calibration.sample import CalibrationSample
from bench.calibration.steps import measure_steps
from bench.config.compose import compose_config
from bench.config.hydra_calls import list_override_values, parse_overrides
from bench.config.run_config import build_run_config
from bench.core.command_line import build_parser, require_path
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.core.processes import keep_freed_memory
from bench.hardware import Hardware, detect_device, refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import YAML_SUFFIX
from bench.planning.request import find_hardware_description
from bench.rank import environment


def measure_compute(
    device: torch.device, threads: int, *, quick: bool, on_progress: Callable[[str], None]
) -> list[CalibrationSample]:
    """Time matrix products, attention, operators, the optimizer and what starting work takes.

    Parameters
    ----------
    device: torch.device
        This machine's processor, or one GPU.
    threads: int
        Threads a rank computes with on a CPU.
    quick: bool
        Fewer sizes and repetitions, for tests: less than 40 seconds on a CPU.
    on_progress: callable
        Told in a few words what is timed next.
    """
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if device.type == "cpu":
            keep_freed_memory()  # as runs do
        return [
            *measure_launch(device, on_progress=on_progress),
            *measure_steps(device, list_formats(device), quick=quick, on_progress=on_progress),
            *(measure_matmul(device, quick=quick, on_progress=on_progress) if device.type == "cuda" else ()),
            *measure_attention(device, quick=quick, on_progress=on_progress),
            *(measure_sustained(device, quick=quick, on_progress=on_progress) if device.type == "cuda" else ()),
            *measure_memory(device, quick=quick, on_progress=on_progress),
        ]
    finally:
        torch.set_num_threads(previous_threads)


# --- One calibration from beginning to end: everything that is timed, and whether others disturbed it.


@dataclass(frozen=True)
class CalibrationSettings:
    """What is to be timed."""

    device_type: str
    """cpu or cuda."""
    cpu_threads: int
    """That a process computes with on a CPU."""
    times_compute: bool
    times_collectives: bool
    local_ranks: int
    """Processes to start for collectives, where nobody has started them; fewer than 2 time none."""
    is_quick: bool


@dataclass
class CalibrationMeasurements:
    device: torch.device
    processes_text: str = "1 process"
    """Who communicated, in words."""
    reference_samples: list[CalibrationSample] = field(default_factory=list)
    """The same measurement, again and again."""
    compute_samples: list[CalibrationSample] = field(default_factory=list)
    collective_samples: list[CalibrationSample] = field(default_factory=list)
    wait_share: float = 0.0
    """Share of the time in which other processes had this one's processor."""

    @property
    def samples(self) -> list[CalibrationSample]:
        return [*self.reference_samples, *self.compute_samples, *self.collective_samples]


def run_calibration(
    settings: CalibrationSettings, process: CalibrationProcess | None
) -> CalibrationMeasurements | None:
    """Time everything; None on a process that only communicates with the one that leads.

    On a machine that is busy from the beginning that is all that is found: the rest would take minutes for nothing.

    Parameters
    ----------
    process: Process or None
        This one among those that torchrun or srun started; None to start others where they are needed.
    """
    if process is not None and process.rank > 0:
        measure_rank_collectives(process, settings)
        return None
    torch.set_num_threads(settings.cpu_threads)
    is_gpu = settings.device_type == "cuda"
    device = (
        process.select_device(settings.device_type)
        if process
        else torch.device("cuda", 0)
        if is_gpu
        else torch.device("cpu")
    )
    measurements, processor_wait = CalibrationMeasurements(device), ProcessorWait()
    with processor_wait.measure():
        measurements.reference_samples.append(time_reference(device))
    if process is None and find_disturbances(measurements.reference_samples, processor_wait.share):
        measurements.wait_share = processor_wait.share
        return measurements
    if settings.times_collectives and (process is not None or settings.local_ranks > 1):
        measurements.collective_samples = (
            measure_rank_collectives(process, settings)
            if process
            else run_local_processes(settings.local_ranks, measure_rank_collectives, settings)
        )
        measurements.processes_text = _describe_processes(
            process.world_size if process else settings.local_ranks, measurements.collective_samples
        )
        with processor_wait.measure():
            measurements.reference_samples.append(time_reference(device))
    if settings.times_compute:
        with processor_wait.measure():
            measurements.compute_samples = measure_compute(
                device, settings.cpu_threads, quick=settings.is_quick, on_progress=print_progress
            )
            measurements.reference_samples.append(time_reference(device))
    measurements.wait_share = processor_wait.share
    return measurements


def measure_rank_collectives(process: CalibrationProcess, settings: CalibrationSettings) -> list[CalibrationSample]:
    """One process's part in the timing of collectives; all get the samples."""
    torch.set_num_threads(settings.cpu_threads)
    device = process.select_device(settings.device_type)
    with process.init_process_group(device):
        host, is_leader = environment.get_host_name(), process.rank == 0
        return measure_collectives(
            device, host, quick=settings.is_quick, on_progress=print_progress if is_leader else _ignore_progress
        )


def print_progress(text: str) -> None:
    """Tell whoever waits what is being timed."""
    print(text, file=sys.stderr, flush=True)


def _ignore_progress(text: str) -> None:
    pass


def _describe_processes(process_count: int, collective_samples: list[CalibrationSample]) -> str:
    nodes = max((-(-sample.ranks // sample.ranks_per_node) for sample in collective_samples), default=1)
    return f"{process_count} process{'es' * (process_count > 1)} on {nodes} node{'s' * (nodes > 1)}"


# --- The command line of ``bench.calibrate``.

EPILOG = """\
examples:
  python -m bench.calibrate                                             # this machine, in a few minutes
  python -m bench.calibrate output=mine.yaml
  python -m bench.calibrate hardware=mine.yaml only=collectives ranks=4 output=mine_4.yaml
  torchrun --nproc-per-node=8 -m bench.calibrate output=mine.yaml
  srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m bench.calibrate output=two_nodes.yaml
  python -m bench.predict model=gpt_125m gpus=8 hardware=mine.yaml

What is not measured stays as hardware=NAME or hardware=FILE says (default: what describes this machine). Fields can be
set, as in bench.sweep: hardware.cpu_threads=2. The options can be written key=value, too.

exit code: 0 a hardware file was written, 1 the machine was not quiet and none was, 2 bad input.
"""

COMPUTE, COLLECTIVES = "compute", "collectives"
OPTION_KEYS = ("output", "only", "ranks", "quick")

FALLBACK_HARDWARE = "h200"
"""The description that says what is not measured of a GPU that nobody has described."""

MAX_CPU_PROCESSES = 64
"""On a CPU."""


@dataclass(frozen=True)
class CalibrationRequest:
    baseline: BaselineHardware
    settings: CalibrationSettings
    output_path: Path


def parse_calibrate_arguments(arguments: Sequence[str] | None, description: str | None) -> CalibrationRequest:
    """Read a command line of ``bench.calibrate``.

    Raises
    ------
    UsageError
        On anything that cannot be measured, or written.
    """
    parser = build_parser("calibrate", description, EPILOG)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example hardware=h200 output=mine.yaml")
    parser.add_argument("--output", metavar="FILE", help="to write (default: hardware/NAME_calibrated.yaml)")
    parser.add_argument("--only", metavar=f"{COMPUTE}|{COLLECTIVES}", help="measure one part and keep the other")
    parser.add_argument("--ranks", metavar="N", help="processes that communicate (default: one per GPU, or per core)")
    parser.add_argument(
        "--quick", action="store_const", const="true", help="fewer sizes and repetitions, to try it out"
    )
    options = parser.parse_intermixed_args(arguments)
    option_values = {key: getattr(options, key) for key in OPTION_KEYS}
    return parse_calibration_request(options.overrides, option_values, detect_device())


def parse_calibration_request(
    arguments: list[str], option_values: dict[str, str | None], device: DetectedDevice
) -> CalibrationRequest:
    """Read a command line.

    Parameters
    ----------
    arguments: list of str
        ``key=value`` for the hardware, its fields, and any key of `option_values`.
    option_values: dict
        What was said as options, None for what was not.
    device: Device
        This machine's.

    Raises
    ------
    UsageError
        On anything that cannot be measured, or written.
    """
    chosen_options, settings = dict(option_values), {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in option_values:
            chosen_options[key] = value
            continue
        (override,) = parse_overrides([argument])
        name = ("+" if override.is_add() else "") + override.key_or_group
        if name.lstrip("+").partition(".")[0] != "hardware":
            raise UsageError(
                f"{name} is no part of a calibration: choose hardware, hardware.FIELD, {', '.join(OPTION_KEYS)}."
            )
        if len(list_override_values(override)) != 1:
            raise invalid_value_error(name, ",".join(list_override_values(override)), "one value")
        (settings[name],) = list_override_values(override)
    if settings.get("hardware", "auto") == "auto":
        settings["hardware"] = find_hardware_description(device)
    config = build_run_config(compose_config(settings))
    hardware, only = config.hardware, chosen_options["only"]
    refuse_unsupported(hardware, device, config.precision)
    require_choice("quick", chosen_options["quick"] or "false", ("true", "false"))
    if only is not None:
        require_choice("only", only, (COMPUTE, COLLECTIVES))
    if hardware.device != "cpu" and only != COLLECTIVES and not hardware.peak_tflops:
        valid_text = (
            "a description that knows the GPU's peaks, or add them: +hardware.peak_tflops.bf16=989 for each format"
        )
        raise invalid_value_error("hardware", settings["hardware"], valid_text)
    calibration_settings = CalibrationSettings(
        device_type=hardware.torch_device,
        cpu_threads=hardware.cpu_threads,
        times_compute=only != COLLECTIVES,
        times_collectives=only != COMPUTE,
        local_ranks=_parse_ranks(chosen_options["ranks"], hardware, device),
        is_quick=chosen_options["quick"] == "true",
    )
    name = hardware.name.removesuffix("_calibrated")
    output_path = Path(chosen_options["output"] or f"hardware/{name}_calibrated{YAML_SUFFIX}")
    baseline = _choose_baseline(hardware, settings["hardware"], only)
    _refuse_unwritable(output_path)
    return CalibrationRequest(baseline, calibration_settings, output_path)


def _choose_baseline(hardware: Hardware, hardware_option: str, only: str | None) -> BaselineHardware:
    """What is taken for what is not measured."""
    name = hardware_option if hardware_option.endswith(YAML_SUFFIX) else f"conf/hardware/{hardware_option}{YAML_SUFFIX}"
    if hardware.speeds is not None:
        return BaselineHardware(hardware, hardware.speeds, name)
    if only is not None:
        missing_part = COLLECTIVES if only == COMPUTE else COMPUTE
        raise invalid_value_error(
            "only", only, f"a hardware=FILE that knows the rest, or measure {missing_part} too ({name} does not)"
        )
    if hardware.device == "cpu":
        return BaselineHardware(hardware, None, name)
    fallback_hardware = build_run_config(compose_config({"hardware": FALLBACK_HARDWARE})).hardware
    return BaselineHardware(hardware, fallback_hardware.speeds, f"conf/hardware/{FALLBACK_HARDWARE}{YAML_SUFFIX}")


def _parse_ranks(ranks_text: str | None, hardware: Hardware, device: DetectedDevice) -> int:
    """Processes to start for collectives."""
    is_gpu = hardware.device != "cpu"
    if ranks_text is None:
        return device.count if is_gpu else max(2, len(os.sched_getaffinity(0)) // hardware.cpu_threads)
    max_ranks = device.count if is_gpu else MAX_CPU_PROCESSES
    if not ranks_text.isdecimal() or len(ranks_text) > 9 or not 2 <= int(ranks_text) <= max_ranks:
        valid_text = (
            f"a whole number from 2 to {max_ranks}" if max_ranks > 1 else "nothing: a single GPU has nobody to talk to"
        )
        raise invalid_value_error("ranks", ranks_text or "''", valid_text)
    return int(ranks_text)


def _refuse_unwritable(output_path: Path) -> None:
    """Raise `UsageError` unless a new file can be written; its folder is made."""
    if output_path.suffix != YAML_SUFFIX:
        raise invalid_value_error("output", output_path, f"a file that ends in {YAML_SUFFIX}")
    if require_path("output", str(output_path)).exists():
        raise invalid_value_error("output", output_path, "a file that does not exist yet: none is overwritten")
    try:
        output_path.parent.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(output_path.parent, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        raise invalid_value_error("output", output_path, "a file in a folder that can be written to")


# --- What comes of a calibration: a hardware file, or why there is none.


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
