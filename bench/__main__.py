"""``python -m bench`` and ``fsdp-bench``: all commands, each with what it is for."""

from __future__ import annotations

import importlib
import os
import sys

from bench.advice.remembered import answer_or_remember
from bench.core.command_line import build_parser, end_silently_on_interrupt, import_command, run_main
from bench.core.errors import invalid_value_error

COMMANDS = {
    "sweep": "measure, rehearse or predict a sweep: here, or on a SLURM cluster",
    "run": "one run in this terminal",
    "jobs": "follow, collect or cancel what was submitted to a cluster",
    "check": "a new machine: is everything right before a sweep?",
    "predict": "will it fit, how fast will it be, which sharding? Without a GPU",
    "advise": "which strategy? A decision tree, each step answered by a prediction",
    "explore": "the questions of predict in a browser, with controls",
    "calibrate": "measure this machine, so that predictions know it",
    "report": "figures and one page from rows",
    "notebooks": "the notebooks of the paper's figures, rendered from rows",
    "compare": "two stores: did the last upgrade make it slower?",
    "history": "one store over time: which commit changed a level?",
    "track": "send a store to Weights & Biases, later",
    "dashboard": "workspace, report and alerts in Weights & Biases",
    "overhead": "what the suite itself costs, against a bare script",
    "claims": "what rows say of the claims of papers and course notes",
    "records": "pack and unpack stores of rows",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command that is named first; without one, list all."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return int(import_command(arguments[0]).main(arguments[1:]))
    listing = "\n".join(f"  {name:{max(map(len, COMMANDS))}}  {purpose}" for name, purpose in COMMANDS.items())
    parser = build_parser("", __doc__, f"commands:\n{listing}\n\nEach explains itself: COMMAND --help.")
    if arguments and not arguments[0].startswith("-"):
        parser.error(str(invalid_value_error("COMMAND", arguments[0], COMMANDS)))
    parser.parse_args(arguments[:1])  # --help, or an option that there is not
    parser.print_help()
    return 0


def run_console_script() -> int:
    end_silently_on_interrupt()
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("bench.config.completion").complete_command_line(COMMANDS)
    return run_main(_run_process)


def _run_process() -> int:
    return answer_or_remember("bench", main) if sys.argv[1:2] in (["predict"], ["advise"]) else main()


if __name__ == "__main__":
    sys.exit(run_main(_run_process))
