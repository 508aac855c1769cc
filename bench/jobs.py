"""``python -m bench.jobs watch|collect|cancel|nodes [STORE]``: follow what was submitted; compare its nodes."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.core import command_line
from bench.core.command_line import build_parser, open_stdout_console, parse_path_argument, report_usage_errors
from bench.launch.slurm.queue import SlurmError
from bench.launch.slurm.submission_status import DONE, send_closed_submissions
from bench.reporting.hosts import load_nodes_table
from bench.sweeps import submitted_runs

ACTIONS = {
    "watch": "follow until all is over",
    "collect": "write down what is over and say how far the rest is",
    "cancel": "cancel the rest",
    "nodes": "compare the nodes that rows were measured on",
}


@report_usage_errors
def main(arguments: list[str] | None = None) -> int:
    """Follow submissions. Exit code 0 if all runs are done, 1 if some are not (yet), 2 on bad input."""
    parser = build_parser("jobs", __doc__)
    parser.add_argument("action", choices=ACTIONS, help="; ".join(f"{name}: {text}" for name, text in ACTIONS.items()))
    parser.add_argument("store", nargs="?", type=parse_path_argument, default=Path("runs"), help="default: runs")
    parser.add_argument("--submission", metavar="NAME", help="only this one, as collect names it (default: all open)")
    options = parser.parse_args(arguments)
    console = open_stdout_console(140)
    if options.action == "nodes":
        console.print(load_nodes_table(options.store), soft_wrap=True)
        return 0
    try:
        statuses = submitted_runs.follow_submissions(options.action, options.store, options.submission, console)
        if not statuses:
            print(f"Nothing submitted from {options.store} is open.")
            return 0
        send_closed_submissions(options.store, statuses)
    except SlurmError as error:
        print(f"SLURM cannot be asked: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"store={options.store} cannot be written: {error.strerror or error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("The jobs go on.")
        return command_line.INTERRUPTED_EXIT_CODE
    console.print(submitted_runs.build_status_report(options.store, statuses), soft_wrap=True)
    return 0 if all(status.state == DONE for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
