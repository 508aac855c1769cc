"""The command lines of ``bench.predict`` and ``bench.advise``, and the line on the terminal while they are answered."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from bench.advice.question import AdviceQuestion, read_question
from bench.core.command_line import PlainConsole, build_parser
from bench.core.errors import require_choice
from bench.hardware import detect_device

PREDICT_EPILOG = """\
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


ADVISE_EPILOG = """\
examples:
  python -m bench.advise model=t5_11b gpus=8 hardware=a100_80gb
  python -m bench.advise model=gpt_13b gpus=64 hardware=a100_80gb hardware.speeds.links.node_gb_s=3
  python -m bench.advise model=gpt_13b model.num_layers=60 gpus=8,512 hardware=h100_80gb format=json
  python -m bench.advise names

Every field of every group under conf/ can be set, as in bench.predict; the strategy is the answer, so it cannot. Steps
about memory are answered at one sequence per GPU, those about the network at the largest batch that fits, unless
batch_size_per_gpu says otherwise. `names` prints a line on every strategy that readers of course notes meet.

exit code: 0 something may fit, 1 nothing does, 2 bad input.

--format json, stable keys (what is unknown is null):
  format, source, cases[]: question, steps[], leaf, ranking, agrees, agreement, may_fit
  steps[]: number, key, question, answer, because, numbers[]{name, value, unit}, threshold{name, value, unit}, source,
    assumed
  leaf: name, advice, ways[]{name, remark, settings, fits, why_not_predicted, run, predict, best}
  ranking: advice, best, possible, infeasible (rows as bench.predict's)
"""

ADVISE_FORMATS = ("text", "json")

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


def parse_predict_arguments(arguments: Sequence[str], description: str | None) -> AdviceQuestion:
    """Read a command line of ``bench.predict``.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    parser = _build_question_parser("predict", description, PREDICT_EPILOG)
    parser.add_argument("-m", "--multirun", action="store_true", help="not needed: commas are understood without it")
    options_help = {
        "tokens": ("NUMBER", "to train on: adds GPU-hours and days"),
        "timeline": ("FILE", "the best row's step: .png, .svg, or a trace as .json"),
        "format": ("table|json|csv", "default: table"),
        "top": ("ROWS|all", "most rows of a table (default: 20)"),
    }
    for name, (metavar, help_text) in options_help.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=help_text)
    parser.add_argument("--details", action="store_const", const="true", help="the best row in full")
    options = parser.parse_intermixed_args(
        ["details=true" if argument == "explain" else argument for argument in arguments]
    )
    option_values = {name: getattr(options, name) for name in (*options_help, "details")}
    return read_question(options.overrides, option_values, detect_device())


def parse_advise_arguments(arguments: Sequence[str], description: str | None) -> tuple[AdviceQuestion | None, str]:
    """Read a command line of ``bench.advise``: the question (None if it asks for the names of the field), the format.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    parser = _build_question_parser("advise", description, ADVISE_EPILOG)
    parser.add_argument("--format", metavar="|".join(ADVISE_FORMATS), help="default: text; also format=json")
    options = parser.parse_intermixed_args(arguments)
    if options.overrides == ["names"]:
        return None, "text"
    given_formats = [override.partition("=")[2] for override in options.overrides if override.startswith("format=")]
    output_format = (given_formats or [options.format or ADVISE_FORMATS[0]])[-1]
    require_choice("format", output_format, ADVISE_FORMATS)
    overrides = [override for override in options.overrides if not override.startswith("format=")]
    return read_question(overrides, {}, detect_device()), output_format


def _build_question_parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """Parser of a command that is asked in Hydra's overrides."""
    parser = build_parser(command, description, epilog)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=t5_11b gpus=64")
    return parser


def answer_with_progress(
    answer_question: Callable[[QuestionT, Callable[[str], None]], AnswerT], question: QuestionT
) -> AnswerT:
    """The answer, with a line on the terminal as long as it takes."""
    error_console = PlainConsole(stderr=True)
    if not error_console.is_terminal:
        return answer_question(question, lambda message: None)
    with error_console.status("predicting") as status:
        return answer_question(question, status.update)
