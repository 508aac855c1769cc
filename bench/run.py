"""``python -m bench.run OVERRIDES``: one run in this terminal, its ranks' output included."""

from __future__ import annotations

import sys

from bench import records
from bench.core.command_line import build_parser, report_usage_errors, require_writable_store, run_main
from bench.core.errors import UsageError
from bench.hardware import detect_device
from bench.launch.attempt import describe_outcome, describe_owner
from bench.launch.run_on_host import compose_single_run, execute_single_run
from bench.planning.request import parse_sweep_request
from bench.records import RunClaimedError
from bench.records.schema import FINISHED_STATUSES


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Execute one configuration. Exit code 0 if it ended ok or oom, 1 if not, 2 on bad input."""
    parser = build_parser("run", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=gpt_tiny gpus=2")
    options = parser.parse_args(arguments)
    device = detect_device()
    request = parse_sweep_request([*options.overrides, "sweep=adhoc"], multirun=False, device=device)
    if not request.executes_runs:
        raise UsageError("mode=predict executes nothing: predict with python -m bench.sweep or bench.predict.")
    config = compose_single_run(request, device)
    require_writable_store(request.store)
    for message in device.messages:
        print(message, file=sys.stderr)
    try:
        record = execute_single_run(request, config)
    except RunClaimedError as error:
        print(f"{config.label} is being executed by {describe_owner(error.claim.owner)}.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"store={request.store} cannot take the row of {config.label}: {error}.", file=sys.stderr)
        return 1
    if record is None:
        return 1
    print(f"{config.label}: {record['status']}, {describe_outcome(record)}")
    print(records.get_row_path(request.store, record["run_id"], record["attempt"]))
    return 0 if record["status"] in FINISHED_STATUSES else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
