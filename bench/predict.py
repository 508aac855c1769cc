"""``python -m bench.predict``: will it fit, how fast will it be, which sharding? For hardware you do not have."""

from __future__ import annotations

import argparse
import sys

from rich.console import Group

from bench.advice.answer import AdviceAnswer, answer_question
from bench.advice.details import build_candidate_details
from bench.advice.json_csv import format_answer_csv, format_answer_json
from bench.advice.question import AdviceQuestion, answer_with_progress, build_question_parser, read_question
from bench.advice.tables import build_answer_tables
from bench.core import command_line
from bench.core.command_line import open_stdout_console
from bench.core.errors import UsageError
from bench.hardware import detect_device

EPILOG = """\
examples:
  python -m bench.predict model=t5_11b gpus=64 hardware=h100_80gb
  python -m bench.predict model=gpt_13b model.num_layers=60 gpus=8,16 hardware=a100_80gb tokens=300e9
  python -m bench.predict model=t5_2b gpus=8 hardware=a100_80gb strategy=ddp batch_size_per_gpu=8 details=true
  python -m bench.predict explain model=t5_2b gpus=8 hardware=a100_80gb timeline=step.png
  python -m bench.predict validate

Every field of every group under conf/ can be set, as in bench.sweep. What is set is fixed; strategy, sharding factor,
reshard_after_forward and activation_checkpointing are varied where they are not, each at the largest batch that fits.
Commas give several values. The options below can be written key=value too.

exit code: 0 something may fit, 1 nothing does, 2 bad input.

--format json, stable keys (what is unknown is null):
  format, tokens, sections[], left_out[]
  sections[]: question, advice, ranked[], infeasible[], impossible[], rules_of_thumb[]
  ranked[], infeasible[]: rank, status, overrides, strategy, sharding_factor, precision, activation_checkpointing,
    batch_size_per_gpu, largest_batch_per_gpu, tflops_per_gpu, mfu, tokens_per_second_per_gpu, tokens_per_second,
    gpu_hours, days, step_time_s{value, low, high}, time{compute_s, exposed_communication_s, optimizer_s, bubble_s,
    communication_s, limited_by, degraded}, memory{allocated, reserved, device_used{value, low, high}, parts, phase,
    module, phase_peaks, capacity_bytes, headroom_bytes, host_bytes, verdict}, reason, notes
"""

WIDTH_WITHOUT_TERMINAL = 160

OPTION_KEYS = ("tokens", "details", "timeline", "format", "top")


def main(arguments: list[str] | None = None) -> int:
    """Answer a question about runs that nobody has made.

    Returns
    -------
    int
        0 if something may fit, 1 if nothing does, 2 on bad input.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["validate"]:
        from bench.validation.command import main as validate

        return validate(arguments[1:])
    arguments = ["details=true" if argument == "explain" else argument for argument in arguments]
    options = _build_parser().parse_intermixed_args(arguments)
    try:
        question = read_question(
            options.overrides, {key: getattr(options, key) for key in OPTION_KEYS}, detect_device()
        )
        answer = answer_with_progress(answer_question, question)
        if question.timeline_path is not None:
            from bench.advice.timelines import write_timeline  # takes matplotlib, and seconds

            write_timeline(answer.sections[0].ranking.top_candidate, question.timeline_path)
            print(f"Timeline of the best row: {question.timeline_path}", file=sys.stderr)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    _print_answer(answer, question)
    return 0 if any(section.ranking.possible for section in answer.sections) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = build_question_parser("bench.predict", __doc__, EPILOG)
    parser.add_argument("-m", "--multirun", action="store_true", help="not needed: commas are understood without it")
    parser.add_argument("--tokens", metavar="NUMBER", help="to train on: adds GPU-hours and days")
    parser.add_argument("--details", action="store_const", const="true", help="the best row in full")
    parser.add_argument("--timeline", metavar="FILE", help="the best row's step: .png, .svg, or a trace as .json")
    parser.add_argument("--format", metavar="table|json|csv", help="default: table")
    parser.add_argument("--top", metavar="ROWS|all", help="most rows of a table (default: 20)")
    return parser


def _print_answer(answer: AdviceAnswer, question: AdviceQuestion) -> None:
    """Data, and nothing but data, on the standard output."""
    if question.output_format != "table":
        print((format_answer_json if question.output_format == "json" else format_answer_csv)(answer, question.tokens))
        return
    console = open_stdout_console(WIDTH_WITHOUT_TERMINAL)
    console.print(build_answer_tables(answer, question.tokens, question.max_rows), highlight=False, crop=False)
    if question.shows_details:
        for section in answer.sections:
            console.print(
                Group("", *build_candidate_details(section.ranking.top_candidate, section.rule_comparisons)),
                highlight=False,
                crop=False,
            )


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
