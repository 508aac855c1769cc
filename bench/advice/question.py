"""What is asked: the settings that are fixed, those that several values were given for, and how to answer."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.advice.budget import TrainingBudget
from bench.config.compose import compose_config
from bench.config.flop_conventions import FLOP_CONVENTIONS
from bench.config.grid import RunSettings
from bench.config.groups import list_config_groups
from bench.config.hydra_calls import list_override_values, parse_overrides
from bench.config.price import parse_cost_terms
from bench.core.command_line import PlainConsole, build_parser, require_path
from bench.core.errors import UsageError, invalid_value_error, require_choice
from bench.core.progress import show_progress
from bench.hardware import detect_device
from bench.hardware.detect import DetectedDevice
from bench.planning.request import EXECUTION_KEYS, find_hardware_description

OUTPUT_FORMATS = ("table", "json", "csv")
TIMELINE_SUFFIXES = (".png", ".svg", ".json")
"""Endings of a timeline's file: two pictures, and a trace for chrome://tracing and ui.perfetto.dev."""

KNOB_KEYS = (
    "strategy",
    "precision",
    "activation_checkpointing",
    "batch_size_per_gpu",
    "gradient_accumulation",
    "compile",
)
"""Keys and groups that are ranked against each other; others with several values make a table each."""

OPTIONAL_KNOB_KEYS = ("loss",)
"""So are these, where they have several values."""

ASSUMED_KEYS = ("hardware", "precision", "sequence_length", "gpus")
"""What decides an answer, and is said where it was not given; of the network every answer says what it assumes."""

LAYOUT_CHOICES = ("auto", "all", "none")
"""Whether layouts are searched: where they are likely to matter, always, or never."""

RANKINGS = ("speed", "cost")
"""What several tables are ordered by: as they were asked for, the fastest of each first; or the cheapest first."""

DEFAULT_TABLE_ROWS = 20
"""Rows of a table unless asked for more."""


@dataclass(frozen=True)
class AdviceQuestion:
    """A command line of ``bench.predict``, read."""

    fixed_settings: RunSettings
    """Settings with one value that are no knobs, as typed."""
    section_axes: dict[str, list[str]]
    """Settings with several values that are no knobs: a table for each combination."""
    knobs: dict[str, list[str]]
    """Values of the knobs that were given; all others are varied."""
    budget: TrainingBudget
    """Tokens to train on in all, and what GPU-hours cost."""
    shows_details: bool
    timeline_path: Path | None
    output_format: str
    max_rows: int | None
    """Most rows of a table, None for all."""
    flops: str = "model"
    """What FLOPs the table's TFLOP/s and MFU count: one of `FLOP_CONVENTIONS`."""
    rank: str = RANKINGS[0]
    """What sections are ordered by: one of `RANKINGS`."""
    not_given: tuple[str, ...] = ()
    """Which of `ASSUMED_KEYS` nobody typed."""
    layouts: str = LAYOUT_CHOICES[0]
    """Whether layouts are searched beside FSDP alone: one of `LAYOUT_CHOICES`."""

    def list_sections(self) -> Iterator[RunSettings]:
        """The settings of every table."""
        for values in itertools.product(*self.section_axes.values()):
            yield {**self.fixed_settings, **dict(zip(self.section_axes, values, strict=True))}

    def format_heading(self, settings: RunSettings) -> str:
        """What tells a section from the others: ``gpus=16``."""
        keys = self.section_axes or [key for key in ("model", "gpus") if key in settings]
        return " ".join(f"{key}={settings[key]}" for key in keys) or "the default model"


def read_question(
    arguments: Sequence[str], option_values: dict[str, str | None], detect: Callable[[], DetectedDevice]
) -> AdviceQuestion:
    """Read a command line.

    Parameters
    ----------
    arguments: sequence of str
        Hydra overrides, and ``key=value`` for any key of `option_values`.
    option_values: dict
        How to answer (tokens, price, details and so on), None where it was not said as an option.
    detect: callable
        Finds this machine's device, for ``hardware=auto`` alone: where there are GPUs that takes seconds.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    chosen_options = dict(option_values)
    overrides = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if separator and key in option_values:
            chosen_options[key] = value
        else:
            overrides.append(argument)
    values_by_key = _parse_overrides(overrides)
    given_groups = {_extract_group(key) for key, values in values_by_key.items() if values != ["auto"]}
    if "hardware" not in values_by_key or values_by_key["hardware"] == ["auto"]:
        cluster_fields = compose_config({key: values[0] for key, values in values_by_key.items() if key == "cluster"})[
            "cluster"
        ]
        values_by_key["hardware"] = [cluster_fields.get("hardware") or find_hardware_description(detect())]
    knobs = {
        key: values
        for key, values in values_by_key.items()
        if _extract_group(key) in KNOB_KEYS or (key in OPTIONAL_KNOB_KEYS and len(values) > 1)
    }
    return AdviceQuestion(
        fixed_settings={
            key: values[0] for key, values in values_by_key.items() if key not in knobs and len(values) == 1
        },
        section_axes={key: values for key, values in values_by_key.items() if key not in knobs and len(values) > 1},
        knobs=knobs,
        budget=_parse_budget(chosen_options),
        shows_details=_parse_details(chosen_options.get("details")),
        timeline_path=_parse_timeline(chosen_options.get("timeline")),
        output_format=_parse_format(chosen_options.get("format")),
        max_rows=_parse_max_rows(chosen_options.get("top")),
        flops=_parse_flops(chosen_options.get("flops")),
        rank=_parse_ranking(chosen_options),
        not_given=tuple(key for key in ASSUMED_KEYS if key not in given_groups),
        layouts=_parse_layouts(chosen_options.get("layouts")),
    )


def _require_model(question: AdviceQuestion, command: str) -> AdviceQuestion:
    """Raise `UsageError` where no model was given: nobody asks about the smallest one of the suite's own sweeps."""
    if "model" in question.fixed_settings or "model" in question.section_axes:
        return question
    values = {**question.section_axes, **question.knobs}
    given = {**question.fixed_settings, **{key: values[0] for key, values in values.items()}}
    compose_config({key: value for key, value in given.items() if "." not in key})  # a mistyped name comes first
    raise UsageError(
        f"model is not given: choose model=NAME, one of {', '.join(list_config_groups()['model'])}, for example python "
        f"-m bench.{command} model=llama3_8b gpus=8 hardware=h100_80gb."
    )


def _parse_overrides(overrides: list[str]) -> dict[str, list[str]]:
    """Key to values, as typed: several for ``gpus=8,16`` and for ``gpus=[8,16]``."""
    values_by_key: dict[str, list[str]] = {}
    for override in parse_overrides(overrides):
        key = override.key_or_group
        if _extract_group(key) in EXECUTION_KEYS and _extract_group(key) != "cluster":
            raise UsageError(
                f"{key} is no part of a prediction: leave it out, or predict a whole sweep with "
                "python -m bench.sweep sweep=NAME mode=predict."
            )
        if key == "mode" and list_override_values(override) != ["predict"]:
            raise invalid_value_error("mode", ",".join(list_override_values(override)), "predict, or leave it out")
        value = override.value()
        values = (
            [str(item) for item in value]
            if key == "gpus" and isinstance(value, list)
            else list_override_values(override)
        )
        if not values:
            raise invalid_value_error(key, "(nothing)", "at least one value")
        values_by_key[("+" if override.is_add() else "") + key] = list(dict.fromkeys(values))
    values_by_key.pop("mode", None)
    return values_by_key


def _extract_group(key: str) -> str:
    return key.lstrip("+").partition(".")[0]


def _parse_budget(options: Mapping[str, str | None]) -> TrainingBudget:
    cost_terms = parse_cost_terms(*(options.get(name) for name in ("price", "pue", "power_share")))
    return TrainingBudget(_parse_tokens(options.get("tokens")), cost_terms)


def _parse_ranking(options: Mapping[str, str | None]) -> str:
    ranking = options.get("rank") or RANKINGS[0]
    require_choice("rank", ranking, RANKINGS)
    if ranking == "cost" and options.get("price") is None:
        raise UsageError("rank=cost is not valid without a price: choose price=2.5 (dollars per GPU-hour) or an offer.")
    return ranking


def _parse_layouts(text: str | None) -> str:
    require_choice("layouts", text or LAYOUT_CHOICES[0], LAYOUT_CHOICES)
    return text or LAYOUT_CHOICES[0]


def _parse_tokens(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise invalid_value_error("tokens", text, "a number above 0, for example 300e9")
    return value


def _parse_details(text: str | None) -> bool:
    require_choice("details", text or "false", ("true", "false"))
    return text == "true"


def _parse_timeline(text: str | None) -> Path | None:
    if text is None:
        return None
    path = require_path("timeline", text)
    if path.suffix not in TIMELINE_SUFFIXES:
        raise invalid_value_error("timeline", text or "''", f"a file that ends in {', '.join(TIMELINE_SUFFIXES)}")
    if not path.parent.is_dir():
        raise invalid_value_error("timeline", text, "a file in a folder that exists")
    return path


def _parse_format(text: str | None) -> str:
    require_choice("format", text or "table", OUTPUT_FORMATS)
    return text or "table"


def _parse_flops(text: str | None) -> str:
    require_choice("flops", text or "model", FLOP_CONVENTIONS)
    return text or "model"


def _parse_max_rows(text: str | None) -> int | None:
    if text is None:
        return DEFAULT_TABLE_ROWS
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise invalid_value_error("top", text or "''", "a whole number of at least 1, or all")
    return int(text)


# --- The command lines of ``bench.predict`` and ``bench.advise``, and the line on the terminal while they are answered.

PREDICT_EPILOG = """\
examples:
  python -m bench.predict model=t5_11b gpus=64 hardware=h100_80gb
  python -m bench.predict model=gpt_13b model.num_layers=60 gpus=8,16 hardware=a100_80gb tokens=300e9
  python -m bench.predict model=t5_2b gpus=8 hardware=a100_80gb strategy=ddp batch_size_per_gpu=8 details=true
  python -m bench.predict explain model=t5_2b gpus=8 hardware=a100_80gb timeline=step.png
  python -m bench.predict model=gpt_13b gpus=16 hardware=a100_80gb,h100_80gb tokens=1e9 price=aws_p4de,aws_p5 rank=cost
  python -m bench.predict model=t5_2b gpus=16 hardware=h100_80gb network=aws_p5,8x200Gb,nvlink4+ethernet_100
  python -m bench.predict model=t5_2b gpus=8 hardware=like:a100_80gb hardware.memory_gb=96 hardware.peak_tflops.bf16=400
  python -m bench.predict device mine memory_gb=96 bf16_tflops=400 bandwidth=2400
  python -m bench.predict model=llama3_70b gpus=512 hardware=h100_80gb sequence_length=8192 global_batch=4M_tokens
  python -m bench.predict map model=llama3_8b,llama3_70b gpus=64,512 hardware=h100_80gb sequence_length=8192
  python -m bench.predict validate

Every field of every group can be set, as in bench.sweep, whose --help names them all. What is set is fixed; strategy,
sharding factor,
reshard_after_forward and activation_checkpointing are varied where they are not, each at the largest batch that fits.
global_batch=512 (sequences) or 4M_tokens compares all at one global batch.
On more than 64 GPUs, where state is large or nothing fits, and with fewer sequences than GPUs, layouts with tensor,
pipeline, context and expert parallelism are searched beside, at one global batch (4M tokens unless it is given):
layouts=all always does so, layouts=none never.
Commas give several values. The options below can be written key=value too.

exit code: 0 something may fit, 1 nothing does, 2 bad input.

--format json, stable keys (what is unknown is null):
  format, tokens, prices[], pue, power_share, sections[], left_out[]
  sections[]: question (with network: what is assumed of the links, and not_given), advice, warnings[], ranked[],
    infeasible[], impossible[], rules_of_thumb[], layouts{text, is_layout_best, global_sequences, best_layout_step_s,
    alone_step_s, num_layouts, num_predicted, num_too_large, num_too_slow}
  ranked[], infeasible[]: rank, status, overrides, strategy, sharding_factor, precision, activation_checkpointing,
    batch_size_per_gpu, largest_batch_per_gpu, tflops_per_gpu, mfu, causal_tflops_per_gpu, causal_mfu,
    tokens_per_second_per_gpu, tokens_per_second,
    gpu_hours, days, dollars, kwh, dollars_per_billion_tokens, kwh_per_billion_tokens,
    step_time_s{value, low, high}, time{compute_s, exposed_communication_s, optimizer_s, bubble_s,
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
  format, source, cases[]: question (with network), steps[], leaf, ranking, layouts, agrees, agreement, may_fit
  steps[]: number, key, question, answer, because, numbers[]{name, value, unit}, threshold{name, value, unit}, source,
    assumed
  leaf: name, advice, ways[]{name, remark, settings, fits, why_not_predicted, run, predict, best}
  ranking: advice, warnings[], best, possible, infeasible (rows as bench.predict's)
"""

ADVISE_FORMATS = ("text", "json")

BUDGET_OPTIONS = {
    "tokens": ("NUMBER", "to train on: adds GPU-hours, days, dollars and kWh"),
    "price": ("DOLLARS|OFFER", "per GPU-hour: 2.5, or files of conf/price such as aws_p4de,aws_p5, each for its GPU"),
    "pue": ("NUMBER", "of the data centre: multiplies the energy"),
    "power_share": ("NUMBER", "of its board power that a GPU draws (default: all, an upper bound)"),
}
"""What a training takes: name, and what its help says."""

LAYOUTS_OPTION = ("|".join(LAYOUT_CHOICES), "search layouts of several kinds of parallelism (default: auto)")

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
        **BUDGET_OPTIONS,
        "rank": ("|".join(RANKINGS), "order of several tables (default: as asked for)"),
        "timeline": ("FILE", "the best row's step: .png, .svg, or a trace as .json"),
        "format": ("table|json|csv", "default: table"),
        "top": ("ROWS|all", "most rows of a table (default: 20)"),
        "layouts": LAYOUTS_OPTION,
        "flops": ("|".join(FLOP_CONVENTIONS), "what the table's TFLOP/s and MFU count (default: model)"),
    }
    for name, (metavar, help_text) in options_help.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=help_text)
    parser.add_argument("--details", action="store_const", const="true", help="the best row in full")
    options = parser.parse_intermixed_args(
        ["details=true" if argument == "explain" else argument for argument in arguments]
    )
    option_values = {name: getattr(options, name) for name in (*options_help, "details")}
    return _require_model(read_question(options.overrides, option_values, detect_device), "predict")


def parse_advise_arguments(arguments: Sequence[str], description: str | None) -> tuple[AdviceQuestion | None, str]:
    """Read a command line of ``bench.advise``: the question (None if it asks for the names of the field), the format.

    Raises
    ------
    UsageError
        On anything that cannot be asked.
    """
    parser = _build_question_parser("advise", description, ADVISE_EPILOG)
    parser.add_argument("--format", metavar="|".join(ADVISE_FORMATS), help="default: text; also format=json")
    advise_options = {**BUDGET_OPTIONS, "layouts": LAYOUTS_OPTION}
    for name, (metavar, help_text) in advise_options.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=help_text)
    options = parser.parse_intermixed_args(arguments)
    if options.overrides == ["names"]:
        return None, "text"
    given_formats = [override.partition("=")[2] for override in options.overrides if override.startswith("format=")]
    output_format = (given_formats or [options.format or ADVISE_FORMATS[0]])[-1]
    require_choice("format", output_format, ADVISE_FORMATS)
    overrides = [override for override in options.overrides if not override.startswith("format=")]
    option_values = {name: getattr(options, name) for name in advise_options}
    return _require_model(read_question(overrides, option_values, detect_device), "advise"), output_format


def _build_question_parser(command: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """Parser of a command that is asked in Hydra's overrides."""
    parser = build_parser(command, description, epilog)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model=t5_11b gpus=64")
    return parser


def answer_with_progress(
    answer_question: Callable[[QuestionT, Callable[[str], None]], AnswerT], question: QuestionT
) -> AnswerT:
    """The answer, with a line on the terminal as long as it takes."""
    with show_progress(PlainConsole(stderr=True), "predicting") as line:
        return answer_question(question, line.show)
