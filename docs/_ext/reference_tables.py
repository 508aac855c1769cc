"""Reference pages as Markdown, from the code: commands, configuration, columns, sweeps, strategies, Python API."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from sphinx.pycode import ModuleAnalyzer

import bench
from bench import finetune, models, strategies, tracking
from bench.advice.tree.page import list_training_terms
from bench.config.compose import compose_config
from bench.config.groups import list_config_groups, list_presets
from bench.config.price import PRICE_GROUP, load_offer
from bench.config.run_config import SECTION_NAMES, RunConfig, build_run_config
from bench.core import plugins
from bench.core.option_files import CONF_FOLDER, find_option_file
from bench.core.presentation import get_presentation
from bench.core.typed_config import get_field_types, parse_type_hint
from bench.finetune import Finetune
from bench.hardware.derived import list_assumed_fields, list_numbers
from bench.hardware.interconnect import Network
from bench.models import Family
from bench.optimizers import list_optimizers
from bench.optimizers.updated_tensor import DIVIDED_DTENSORS, DTENSORS, FLAT_TENSORS, PARTS, WHOLE_TENSORS
from bench.planning.request import parse_sweep_request
from bench.records.schema import COLUMNS, NESTED_PARTS
from bench.strategies import Strategy
from bench.tracking import Tracker

COMMENT_PATTERN = re.compile(r"^(?P<indent> *)(?P<key>[\w.]+):(?: (?P<value>.*?))?(?:(?<=\s)#\s*(?P<comment>.*))?$")


def _format_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heads), *([_escape_cell(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _escape_cell(text: str) -> str:
    """A cell of a Markdown table: one line, no cell's end within it, angle brackets outside of code as characters."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|").replace("\n", " "))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


# --- Commands.


@functools.cache
def list_command_modules() -> list[str]:
    """Modules of ``bench`` that are commands: those with a `main` that is run as ``python -m bench.NAME``."""
    names = []
    for info in pkgutil.iter_modules(bench.__path__):
        path = (
            Path(bench.__path__[0], info.name, "__main__.py")
            if info.ispkg
            else Path(bench.__path__[0], f"{info.name}.py")
        )
        if not info.name.startswith("_") and path.is_file() and 'if __name__ == "__main__"' in path.read_text():
            names.append(f"bench.{info.name}")
    return names


def _call_help(module_name: str) -> str:
    """What ``python -m MODULE --help`` prints."""
    is_package = importlib.util.find_spec(module_name).submodule_search_locations is not None  # type: ignore[union-attr]
    module = importlib.import_module(f"{module_name}.__main__" if is_package else module_name)
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.suppress(SystemExit),
        mock.patch.object(sys, "argv", [module_name, "--help"]),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
    ):
        module.main(["--help"]) if inspect.signature(module.main).parameters else module.main()
    return output.getvalue().rstrip()


def write_commands() -> str:
    """A section per command, with its help."""
    sections = []
    for name in list_command_modules():
        sections.append(f"## `python -m {name}`\n\n```text\n{_call_help(name)}\n```\n")
    return "\n".join(sections)


# --- Configuration.


@functools.cache
def _read_attribute_docs(cls: type) -> dict[str, str]:
    """The texts below a dataclass's fields, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("bench."):
            analyzer = ModuleAnalyzer.for_module(base.__module__)
            analyzer.analyze()
            docs |= {
                name: " ".join(lines).strip()
                for (owner, name), lines in analyzer.attr_docs.items()
                if owner == base.__qualname__
            }
    return docs


def _read_yaml_comments(path: Path) -> dict[str, str]:
    """The comment beside every key of a YAML file; a comment that goes on in the next line is joined."""
    comments: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    last_key = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = COMMENT_PATTERN.match(line)
        if match:
            indent = len(match["indent"])
            parents = [parent for parent in parents if parent[0] < indent]
            last_key = ".".join([*(name for _, name in parents), match["key"]])
            parents.append((indent, match["key"]))
            comments[last_key] = match["comment"] or ""
        elif (more := re.match(r"^ +# ?(.*)$", line)) and last_key and comments[last_key]:
            comments[last_key] += " " + more[1].strip()
        elif not line.strip().startswith("#"):
            last_key = ""
    return comments


def _read_head_comment(path: Path) -> str:
    """The comment at the top of a YAML file, as one paragraph per block."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return "\n".join(lines)


def _find_class(group: str, values: dict[str, Any]) -> type | None:
    """The dataclass that reads an option of a configuration group."""
    name = values.get("name", "")
    if group == "strategy":
        return plugins.find_plugin_class("strategy", name, strategies, Strategy)
    if group == "model":
        return plugins.find_plugin_class("model.family", values["family"], models, Family)
    if group == "tracker":
        return plugins.find_plugin_class("tracker", name, tracking, Tracker)
    if group == "finetune":
        classes = (value for value in vars(finetune).values() if inspect.isclass(value) and issubclass(value, Finetune))
        return next((cls for cls in classes if cls.__name__.lower().startswith(name)), Finetune)
    if group == "cluster":
        profile_modules = ("bench.launch.slurm.profile", "bench.launch.run_on_host")
        classes = (
            value
            for module in map(importlib.import_module, profile_modules)
            for value in vars(module).values()
            if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__name__.endswith("Profile")
        )
        return next((cls for cls in classes if values["launcher"] in cls.__name__.lower()), None)
    if group == "network":
        return Network
    return parse_type_hint(get_field_types(RunConfig)[group]).section_class


def _describe_type(hint: Any) -> str:
    field_type = parse_type_hint(hint)
    if field_type.section_class is not None:
        return "its own fields" + (", or null" if type(None) in field_type.types else "")
    return field_type.description


def _format_value(value: Any) -> str:
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict) and value:
        return "see the file"
    return f"`{value}`" if value != "" else ""


def _format_fields(values: dict[str, Any], comments: dict[str, str], cls: type | None, prefix: str) -> str:
    rows = list(_list_field_rows(values, comments, cls, prefix))
    return _format_table(("field", "default", "meaning, and *what is valid*"), rows) if rows else "It has no fields.\n"


def _list_field_rows(
    values: dict[str, Any], comments: dict[str, str], cls: type | None, prefix: str
) -> Iterator[list[str]]:
    """Field, default and meaning of every field of a section, those of sections within it after their own."""
    names = [field.name for field in dataclasses.fields(cls)] if cls is not None else []
    hints = {name: hint for name, hint in get_field_types(cls).items() if name in names} if cls is not None else {}
    docs = _read_attribute_docs(cls) if cls is not None else {}
    for key in dict.fromkeys([*values, *names]):
        if key in ("name", "family") and prefix.count(".") == 1:
            continue
        default = values[key] if key in values else _get_field_default(cls, key)
        section_class = parse_type_hint(hints[key]).section_class if key in hints else None
        meaning = docs.get(key, "") or comments.get(key, "")
        yield [f"`{prefix}{key}`", _format_value(default), _describe_field(meaning, hints.get(key))]
        if section_class is not None:
            section_values = default if isinstance(default, dict) else {}
            section_comments = {
                name.removeprefix(f"{key}."): text for name, text in comments.items() if name.startswith(f"{key}.")
            }
            yield from _list_field_rows(section_values, section_comments, section_class, f"{prefix}{key}.")


def _describe_field(meaning: str, hint: Any) -> str:
    """A sentence on what a field says, and in italics what it takes."""
    meaning = meaning.strip().rstrip(".").replace("*", "\\*")
    choices = (parse_type_hint(hint).choices or ()) if hint is not None else ()
    first_word = re.split(r"\W", meaning)[0]
    if meaning and first_word not in {*map(str, choices), "null", "true", "false"}:
        meaning = meaning[0].upper() + meaning[1:]
    valid = _describe_type(hint).replace("_", "\\_").replace("*", "\\*") if hint is not None else ""
    return ". ".join(part for part in (meaning, f"*{valid}*" if valid else "") if part)


def _get_field_default(cls: Any, key: str) -> Any:
    field = next(field for field in dataclasses.fields(cls) if field.name == key)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return "" if field.default is dataclasses.MISSING else field.default


def write_top_level_fields() -> str:
    """The fields of ``conf/config.yaml`` that no group has."""
    path = CONF_FOLDER / "config.yaml"
    comments = _read_yaml_comments(path)
    config = {
        key: value
        for key, value in yaml.safe_load(path.read_text(encoding="utf-8")).items()
        if key not in {"defaults", "hydra", *SECTION_NAMES, *list_config_groups()}
    }
    hints, docs = get_field_types(RunConfig), _read_attribute_docs(RunConfig)
    rows = []
    for key, value in config.items():
        default = "that of `cluster`" if str(value).startswith("${") else _format_value(value)
        meaning = comments.get(key, "") or docs.get(key, "")
        rows.append([f"`{key}`", default, _describe_field(meaning, hints.get(key))])
    return _format_table(("field", "default", "meaning, and *what is valid*"), rows)


def write_measurement_fields() -> str:
    """The fields of ``measurement``."""
    comments = _read_yaml_comments(CONF_FOLDER / "config.yaml")
    values = yaml.safe_load((CONF_FOLDER / "config.yaml").read_text(encoding="utf-8"))["measurement"]
    cls = parse_type_hint(get_field_types(RunConfig)["measurement"]).section_class
    comments = {key.removeprefix("measurement."): text for key, text in comments.items()}
    return _format_fields(values, comments, cls, "measurement.")


def write_group(group: str, level: int = 3) -> str:
    """Every option of a configuration group: the head of its file, and its fields with defaults and valid values."""
    sections = []
    for option in list_config_groups()[group]:
        path = CONF_FOLDER / group / f"{option}.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        text = _format_fields(values, _read_yaml_comments(path), _find_class(group, values), f"{group}.")
        sections.append(f"{'#' * level} `{group}={option}`\n\n{_read_head_comment(path)}\n\n{text}")
    return "\n".join(sections)


def write_options(group: str) -> str:
    """The options of a group, with the head of each file."""
    rows = []
    for option in list_config_groups()[group]:
        head = _read_head_comment(CONF_FOLDER / group / f"{option}.yaml").split("\n\n")[0]
        rows.append([f"`{option}`", head])
    return _format_table((f"`{group}=`", "what it is"), rows)


def write_option_fields(group: str, option: str) -> str:
    """The fields of one option of a group."""
    path = CONF_FOLDER / group / f"{option}.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return _format_fields(values, _read_yaml_comments(path), _find_class(group, values), f"{group}.")


SHAPE_WORDS = {
    "hidden_size": "wide",
    "d_model": "wide",
    "num_layers": "layers",
    "num_encoder_layers": "layers in the encoder",
    "num_decoder_layers": "in the decoder",
    "num_heads": "heads",
    "num_kv_heads": "of keys",
    "num_experts": "experts",
}
"""Fields of a model's shape, and what stands behind their values."""


def write_models() -> str:
    """The models: shapes as their files have them, parameters counted on the meta device, with their sources."""
    rows = []
    for option in list_config_groups()["model"]:
        values = compose_config({"model": option})["model"]
        if "path" in values:  # whose shape a file says
            continue
        family = models.load_family(values["family"])(**values)
        shape = ", ".join(f"{values[key]} {word}" for key, word in SHAPE_WORDS.items() if values.get(key) is not None)
        active = family.num_active_parameters
        parameters = f"{family.num_parameters:,}" + (f" ({active:,} active)" if active < family.num_parameters else "")
        source = find_option_file("model", option).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        rows.append([f"`{option}`", values["family"], parameters, shape, source])
    return _format_table(("`model=`", "family", "parameters", "shape", "source"), rows)


def write_hardware() -> str:
    """The hardware descriptions: memory, power, peaks, links, and how many of the numbers are assumed."""
    rows = []
    for option in list_config_groups()["hardware"]:
        hardware = build_run_config(compose_config({"hardware": option})).hardware
        numbers = (hardware.memory_gb, hardware.memory_bandwidth_gb_s, hardware.power_w)
        peaks = ", ".join(f"{name} {value:g}" for name, value in hardware.peak_tflops.items())
        words, speeds = hardware.interconnect, hardware.speeds
        links = f"{words.gpu_link} {speeds.links.gpu_gb_s:g} GB/s, {words.machine}" if words and speeds else ""
        assumed = f"{len(list_assumed_fields(hardware))} of {len(list_numbers(hardware))}" if speeds else ""
        rows.append(
            [f"`{option}`", *("" if value is None else f"{value:g}" for value in numbers), peaks, links, assumed]
        )
    heads = ("`hardware=`", "memory, GB", "bandwidth, GB/s", "power, W", "dense peaks, TFLOP/s", "links", "assumed")
    return _format_table(heads, rows)


def write_offers() -> str:
    """The offers of GPUs for rent that ``price`` takes by name."""
    rows = []
    for offer in map(load_offer, list_presets(PRICE_GROUP)):
        gpu_text = f"`{offer.hardware}`" + (f", {offer.gpus_per_instance} at a time" * (offer.gpus_per_instance > 1))
        terms = str(offer.terms).replace("_", " ")
        rows.append(
            [f"`{offer.name}`", f"{offer.dollars_per_gpu_hour:g}", gpu_text, terms, offer.region, offer.read_on]
        )
    return _format_table(("`price=`", "$", "GPU", "terms", "region", "read on"), rows)


def write_sweeps() -> str:
    """The sweeps that ship with the suite: what each shows, and how many runs it has with ``mode=predict``."""
    from bench.hardware.detect import DetectedDevice

    device = DetectedDevice("cpu", "processor", 0)
    rows = []
    for option in list_config_groups()["sweep"]:
        head = _read_head_comment(CONF_FOLDER / "sweep" / f"{option}.yaml").split("\n\n")[0]
        sentence = re.split(r"(?<=[^.\d][.:])\s", " ".join(head.split()))[0].rstrip(":.")
        sweep_device = yaml.safe_load((CONF_FOLDER / "sweep" / f"{option}.yaml").read_text(encoding="utf-8")).get(
            "device"
        )
        hardware = "cpu" if sweep_device == "cpu" else "a100_80gb"
        arguments = [f"sweep={option}", "mode=predict", f"hardware={hardware}"]
        request = parse_sweep_request(arguments, multirun=False, device=device)
        rows.append([f"`{option}`", str(len(request.points)), f"`{hardware}`", sentence])
    return _format_table(("`sweep=`", "runs", "counted for", "what it is"), rows)


# --- The record.


def write_columns() -> str:
    """The columns of a row."""
    rows = [[f"`{column.name}`", column.dtype, column.meaning] for column in COLUMNS]
    return _format_table(("column", "type", "meaning"), rows)


def write_nested_parts() -> str:
    """What a row holds beside its columns."""
    return _format_table(("part", "meaning"), ([f"`{name}`", meaning] for name, meaning in NESTED_PARTS.items()))


# --- Strategies.


def list_strategy_labels() -> dict[str, str]:
    """Names of strategy classes' files, and what reports call them, in the order of reports."""
    presentations = {
        name: get_presentation("bench.strategies", name) for name in plugins.list_plugin_names(strategies, Strategy)
    }
    ordered = sorted(presentations.items(), key=lambda item: (item[1].position, item[0]))
    return {name: presentation.label or name for name, presentation in ordered}


def write_strategies() -> str:
    """A section per strategy: what its class says of itself, and its fields with defaults and valid values."""
    sections = []
    for option in list_config_groups()["strategy"]:
        path = CONF_FOLDER / "strategy" / f"{option}.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        cls = _find_class("strategy", values)
        assert cls is not None
        text = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
        fields = _format_fields(values, _read_yaml_comments(path), cls, "strategy.")
        sections.append(f"## `strategy={option}`\n\n{_read_head_comment(path)}\n\n{text}\n\n{fields}")
    return "\n".join(sections)


def write_optimizers() -> str:
    """A table of what each optimizer updates, and a section per optimizer: what its class says of itself."""
    rows, sections = [], []
    for name, cls in list_optimizers().items():
        works = [
            "refused"
            if kind not in cls.supported_tensors
            else "as in one process"
            if kind in cls.updates_like_one_process
            else "not as in one process"
            for kind in TENSOR_KINDS
        ]
        rows.append([f"`{name}`", *works, cls.required_extra or "none"])
        text = inspect.cleandoc(cls.__doc__ or "").replace("``", "`")
        reason = f"\n\nRefused elsewhere: {cls.unsupported_reason}." if cls.unsupported_reason else ""
        sections.append(f"## `optimizer={name}`\n\n{text}{reason}\n")
    table = _format_table(("`optimizer=`", *TENSOR_KINDS.values(), "extra"), rows)
    return table + "\n" + "\n".join(sections)


TENSOR_KINDS = {
    WHOLE_TENSORS: "whole parameters (single, ddp, zero1, fsdp1 at factor 1)",
    DTENSORS: "DTensors (fsdp)",
    FLAT_TENSORS: "flat parameters (fsdp1, deepspeed)",
    PARTS: "parts of layers (tensor parallelism)",
    DIVIDED_DTENSORS: "DTensors of divided layers (tensor parallelism with fsdp)",
}


def describe_missing_term(name: str) -> str:
    """Why something that the field has a name for is not offered."""
    (term,) = (term for term in list_training_terms() if term.name == name)
    return (term.missing_reason or term.settings_text).removeprefix("not offered: ")


# --- Python API.


def write_python_api() -> str:
    """A section per package of ``bench`` with a public interface (`__all__`), documented by autodoc."""
    sections = []
    for info in pkgutil.iter_modules(bench.__path__, "bench."):
        if not info.ispkg:
            continue
        package = importlib.import_module(info.name)
        if not getattr(package, "__all__", None):
            continue
        sections.append(
            f"## `{info.name}`\n\n```{{eval-rst}}\n.. automodule:: {info.name}\n"
            "   :members:\n   :imported-members:\n   :no-index:\n```\n"
        )
    return "\n".join(sections)
