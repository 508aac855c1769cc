"""``python -m bench.advise``: which strategy? A decision tree whose every step is answered by a prediction."""

from __future__ import annotations

import argparse
import sys

from bench.advice.question import answer_with_progress, build_question_parser, read_question
from bench.advice.tree.guidance import build_guidance
from bench.advice.tree.json import format_guidance_json
from bench.advice.tree.page import build_pages, build_terms_table
from bench.core import command_line
from bench.core.command_line import open_stdout_console
from bench.core.errors import UsageError, require_choice
from bench.hardware import detect_device

EPILOG = """\
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

OUTPUT_FORMATS = ("text", "json")
WIDTH_WITHOUT_TERMINAL = 120


def main(arguments: list[str] | None = None) -> int:
    """Answer with the path through the tree and the ranked prediction.

    Returns
    -------
    int
        0 if something may fit, 1 if nothing does, 2 on bad input.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _build_parser().parse_intermixed_args(arguments)
    if options.overrides == ["names"]:
        open_stdout_console(WIDTH_WITHOUT_TERMINAL).print(build_terms_table(), highlight=False)
        return 0
    try:
        overrides, output_format = _extract_format(options.overrides, options.format)
        guidances = answer_with_progress(build_guidance, read_question(overrides, {}, detect_device()))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    if output_format == "json":
        print(format_guidance_json(guidances))
    else:
        open_stdout_console(WIDTH_WITHOUT_TERMINAL).print(build_pages(guidances), highlight=False, crop=False)
    return 0 if any(guidance.can_fit for guidance in guidances) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = build_question_parser("bench.advise", __doc__, EPILOG)
    parser.add_argument("--format", metavar="|".join(OUTPUT_FORMATS), help="default: text; also format=json")
    return parser


def _extract_format(overrides: list[str], format_option: str | None) -> tuple[list[str], str]:
    """The overrides without ``format=``, and the format."""
    given_formats = [override.partition("=")[2] for override in overrides if override.startswith("format=")]
    output_format = (given_formats or [format_option or OUTPUT_FORMATS[0]])[-1]
    require_choice("format", output_format, OUTPUT_FORMATS)
    return [override for override in overrides if not override.startswith("format=")], output_format


if __name__ == "__main__":
    sys.exit(command_line.run_main(main))
