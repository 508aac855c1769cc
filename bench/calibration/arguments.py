"""The command line of ``bench.calibrate``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.calibration.hardware_file import BaselineHardware
from bench.calibration.session import CalibrationSettings
from bench.config.compose import compose_config, list_override_values, parse_overrides
from bench.config.run_config import build_run_config
from bench.core.command_line import build_parser, require_path
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.hardware import Hardware, detect_device, refuse_unsupported
from bench.hardware.detect import DetectedDevice
from bench.hardware.hardware_file import YAML_SUFFIX
from bench.planning.request import find_hardware_description

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
    """A command line, read."""

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
    refuse_unsupported(hardware, device, config.precision, compile_blocks=False)
    require_choice("quick", chosen_options["quick"] or "false", ("true", "false"))
    if only is not None:
        require_choice("only", only, (COMPUTE, COLLECTIVES))
    if hardware.device == "cuda" and only != COLLECTIVES and not hardware.peak_tflops:
        valid_text = (
            "a description that knows the GPU's peaks, or add them: +hardware.peak_tflops.bf16=989 for each format"
        )
        raise invalid_value_error("hardware", settings["hardware"], valid_text)
    calibration_settings = CalibrationSettings(
        device_type=hardware.device,
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
    is_gpu = hardware.device == "cuda"
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
