"""``python -m bench.run OVERRIDES``: one run in this terminal, its ranks' output included."""

from __future__ import annotations

import argparse
import sys

from bench import command, records
from bench.errors import UsageError
from bench.hardware import detect
from bench.launch.alone import run_alone
from bench.launch.local import LocalLauncher
from bench.launch.owners import described
from bench.launch.verdict import describe
from bench.paths import require_writable
from bench.planning.plan import make_plan
from bench.planning.request import read_request
from bench.records import TakenError
from bench.records.schema import FINISHED


def main(arguments: list[str] | None = None) -> int:
    """Execute one configuration. Exit code 0 if it ended ok or oom, 1 if not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Execute one run in this terminal.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=gpt_tiny gpus=2")
    options = parser.parse_args(arguments)
    try:
        device = detect()
        request = read_request([*options.overrides, "sweep=adhoc"], multirun=False, device=device)
        if not request.executes:
            raise UsageError("mode=predict executes nothing: predict with python -m bench.sweep or bench.predict.")
        plan = make_plan(request.points, request.store, force=True, check=LocalLauncher(request.cluster, device).check)
        if plan.impossible:
            raise UsageError(plan.impossible[0][1])
        require_writable(request.store)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    for remark in device.remarks:
        print(remark, file=sys.stderr)
    config = plan.to_run[0]
    try:
        record = run_alone(request, config)
    except TakenError as taken:
        print(f"{config.label} is being executed by {described(taken.claim.owner)}.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"store={request.store} cannot take the row of {config.label}: {error}.", file=sys.stderr)
        return 1
    if record is None:
        return 1
    print(f"{config.label}: {record['status']}, {describe(record)}")
    print(records.row_path(request.store, record["run_id"], record["attempt"]))
    return 0 if record["status"] in FINISHED else 1


if __name__ == "__main__":
    sys.exit(command.execute(main))
