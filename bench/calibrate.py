"""``python -m bench.calibrate``: measure this machine, so that predictions know what it really does."""

from __future__ import annotations

import sys

from bench.calibration.noise import find_disturbances
from bench.calibration.processes import find_launched_process
from bench.calibration.session import (
    COLLECTIVES,
    COMPUTE,
    parse_calibrate_arguments,
    print_disturbances,
    run_calibration,
    write_results,
)
from bench.core.command_line import open_stdout_console, report_usage_errors, run_main
from bench.core.errors import invalid_value_error

WIDTH_WITHOUT_TERMINAL = 140


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Calibrate this machine.

    Returns
    -------
    int
        0 if a hardware file was written, 1 if the machine was too busy for one, 2 on bad input.
    """
    process = find_launched_process()
    request = parse_calibrate_arguments(arguments, __doc__)
    if process is not None and not request.settings.times_collectives:
        valid_text = f"{COLLECTIVES} where several processes were started, or start one"
        raise invalid_value_error("only", COMPUTE, valid_text)
    measurements = run_calibration(request.settings, process)
    if measurements is None:
        return 0
    disturbances = find_disturbances(measurements.samples, measurements.wait_share)
    if disturbances:
        print_disturbances(disturbances)
        return 1
    write_results(request, measurements, open_stdout_console(WIDTH_WITHOUT_TERMINAL))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
