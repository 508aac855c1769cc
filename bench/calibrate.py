"""``python -m bench.calibrate``: measure this machine, so that predictions know what it really does."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import command
from bench.calibration.facts import Facts
from bench.calibration.fit_compute import fit_compute
from bench.calibration.fit_links import fit_links
from bench.calibration.hardware_file import Known, calibrated
from bench.calibration.noise import Disturbance, disturbances
from bench.calibration.session import Extent, Measured, measured
from bench.calibration.world import started_process
from bench.config import run_config
from bench.errors import UsageError, bad_value, require_choice
from bench.hardware import Hardware, detect, refuse_unsupported
from bench.hardware.detect import Device
from bench.hardware.file import ENDING
from bench.paths import require_path
from bench.planning.compose import composed, parse, values_of
from bench.planning.request import description_of
from bench.terminal import output

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
OWN = ("output", "only", "ranks", "quick")

OTHER_GPU = "h200"
"""The description that says what is not measured of a GPU that nobody has described."""

MOST_PROCESSES = 64
"""On a CPU."""

WIDTH_WITHOUT_TERMINAL = 140


@dataclass(frozen=True)
class Order:
    """A command line, read."""

    known: Known
    extent: Extent
    output: Path


def main(arguments: list[str] | None = None) -> int:
    """Calibrate this machine.

    Returns
    -------
    int
        0 if a hardware file was written, 1 if the machine was too busy for one, 2 on bad input.
    """
    options = _parser().parse_intermixed_args(arguments)
    try:
        process = started_process()
        order = read_order(options.overrides, {key: getattr(options, key) for key in OWN}, detect())
        if process is not None and not order.extent.collectives:
            raise bad_value("only", COMPUTE, f"{COLLECTIVES} where several processes were started, or start one")
        found = measured(order.extent, process)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if found is None:
        return 0
    noise = disturbances(found.samples, found.waiting)
    if noise:
        _refuse(noise)
        return 1
    _conclude(order, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calibrate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example hardware=h200 output=mine.yaml")
    parser.add_argument("--output", metavar="FILE", help="to write (default: hardware/NAME_calibrated.yaml)")
    parser.add_argument("--only", metavar=f"{COMPUTE}|{COLLECTIVES}", help="measure one part and keep the other")
    parser.add_argument("--ranks", metavar="N", help="processes that communicate (default: one per GPU, or per core)")
    parser.add_argument(
        "--quick", action="store_const", const="true", help="fewer sizes and repetitions, to try it out"
    )
    return parser


def read_order(arguments: list[str], own: dict[str, str | None], device: Device) -> Order:
    """Read a command line.

    Parameters
    ----------
    arguments: list of str
        ``key=value`` for the hardware, its fields, and any key of `own`.
    own: dict
        What was said as options, None for what was not.
    device: Device
        This machine's.

    Raises
    ------
    UsageError
        On anything that cannot be measured, or written.
    """
    said, settings = dict(own), {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in own:
            said[key] = value
            continue
        (override,) = parse([argument])
        name = ("+" if override.is_add() else "") + override.key_or_group
        if name.lstrip("+").partition(".")[0] != "hardware":
            raise UsageError(f"{name} is no part of a calibration: choose hardware, hardware.FIELD, {', '.join(OWN)}.")
        if len(values_of(override)) != 1:
            raise bad_value(name, ",".join(values_of(override)), "one value")
        (settings[name],) = values_of(override)
    if settings.get("hardware", "auto") == "auto":
        settings["hardware"] = description_of(device)
    config = run_config(composed(settings))
    hardware, only = config.hardware, said["only"]
    refuse_unsupported(hardware, device, config.precision, compile_blocks=False)
    require_choice("quick", said["quick"] or "false", ("true", "false"))
    if only is not None:
        require_choice("only", only, (COMPUTE, COLLECTIVES))
    if hardware.device == "cuda" and only != COLLECTIVES and not hardware.peak_tflops:
        valid = "a description that knows the GPU's peaks, or add them: +hardware.peak_tflops.bf16=989 for each format"
        raise bad_value("hardware", settings["hardware"], valid)
    extent = Extent(
        device=hardware.device,
        threads=hardware.cpu_threads,
        compute=only != COLLECTIVES,
        collectives=only != COMPUTE,
        ranks=_ranks(said["ranks"], hardware, device),
        quick=said["quick"] == "true",
    )
    name = hardware.name.removesuffix("_calibrated")
    output = Path(said["output"] or f"hardware/{name}_calibrated{ENDING}")
    known = _known(hardware, settings["hardware"], only)
    _refuse_unwritable(output)
    return Order(known, extent, output)


def _known(hardware: Hardware, option: str, only: str | None) -> Known:
    """What is taken for what is not measured."""
    name = option if option.endswith(ENDING) else f"conf/hardware/{option}{ENDING}"
    if hardware.speeds is not None:
        return Known(hardware, hardware.speeds, name)
    if only is not None:
        rest = COLLECTIVES if only == COMPUTE else COMPUTE
        raise bad_value("only", only, f"a hardware=FILE that knows the rest, or measure {rest} too ({name} does not)")
    if hardware.device == "cpu":
        return Known(hardware, None, name)
    other = run_config(composed({"hardware": OTHER_GPU})).hardware
    return Known(hardware, other.speeds, f"conf/hardware/{OTHER_GPU}{ENDING}")


def _ranks(said: str | None, hardware: Hardware, device: Device) -> int:
    """Processes to start for collectives."""
    on_gpu = hardware.device == "cuda"
    if said is None:
        return device.count if on_gpu else max(2, len(os.sched_getaffinity(0)) // hardware.cpu_threads)
    most = device.count if on_gpu else MOST_PROCESSES
    if not said.isdecimal() or len(said) > 9 or not 2 <= int(said) <= most:
        valid = f"a whole number from 2 to {most}" if most > 1 else "nothing: a single GPU has nobody to talk to"
        raise bad_value("ranks", said or "''", valid)
    return int(said)


def _refuse_unwritable(output: Path) -> None:
    """Raise `UsageError` unless a new file can be written; its folder is made."""
    if output.suffix != ENDING:
        raise bad_value("output", output, f"a file that ends in {ENDING}")
    if require_path("output", str(output)).exists():
        raise bad_value("output", output, "a file that does not exist yet: none is overwritten")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(output.parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise bad_value("output", output, "a file in a folder that can be written to")


def _refuse(noise: list[Disturbance]) -> None:
    """Say why there is no hardware file."""
    print("This machine was not quiet: what was timed is not what it can do, and no hardware file was written.")
    for disturbance in noise:
        print(f"  {disturbance}.")
    print("Stop what else runs on it, and type the same command again.")


def _conclude(order: Order, found: Measured) -> None:
    """Fit, write everything, and say what was found."""
    from bench.reporting.calibration import found_tables, write_calibration  # takes matplotlib

    compute = fit_compute(found.compute, order.known.hardware) if found.compute else None
    links = None
    if found.collectives:
        before = order.known.speeds.links if order.known.speeds else None
        links = fit_links(found.collectives, before, gloo=order.extent.device == "cpu", base_name=order.known.name)
    facts = Facts.gathered(found.device, found.processes)
    hardware = calibrated(order.output.stem, order.known, compute, links, facts)
    timed = [*found.compute, *found.collectives]
    files = write_calibration(order.output, hardware, facts, timed)
    console = output(WIDTH_WITHOUT_TERMINAL)
    residuals = {**(compute.residuals if compute else {}), **(links.residuals if links else {})}
    for part in found_tables(hardware, residuals):
        console.print(part, highlight=False)
    console.print()
    file, timings, *_ = files
    console.print(
        f"Hardware file: {file}\nTimings: {timings}\nCurves: {file.with_suffix('')}-*.png and .svg", soft_wrap=True
    )
    ranks = max(order.extent.ranks, 1)
    console.print(f"Next: python -m bench.predict model=gpt_125m gpus={ranks} hardware={file}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command.execute(main))
