"""Command lines nobody wrote: every field of every group, from the YAMLs and the dataclasses, with values good and bad.

A field or option that is added is covered without a change here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import strategies as st

from bench.config.groups import list_config_groups
from bench.config.measurement import Measurement
from bench.config.run_config import SECTION_NAMES, RunConfig
from bench.core.option_files import CONF_FOLDER, find_option_file
from bench.core.plugins import find_plugin_class
from bench.core.precision import Precision
from bench.core.typed_config import FieldType, format_override_value, get_field_types, parse_type_hint
from bench.finetune import load_finetune
from bench.hardware import Hardware
from bench.hardware.interconnect import Network
from bench.launch.run_on_host import LocalProfile
from bench.launch.slurm.profile import SlurmProfile
from bench.models import load_family
from bench.optimizers import load_optimizer
from bench.planning.request import DEVICE_HINT, REPEATS_HINT, ExecutionOptions
from bench.strategies import load_strategy

HOSTILE_VALUES = (
    *(
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1e400",
        "-0.0",
        "1e-320",
        "1e18",
        "2147483648",
        "9" * 19,
        "9" * 400,
        "9" * 5000,
    ),
    *("true", "null", "", "''", "[]", "{}", "[1]", "{a:1}", "{1:2}", "[{a:[1]}]", "???", "'4'", "0x10", "1_000", "01"),
    *("a b", "..", ".", "a/b", "/", "~", "[/a]", "[red]", ":smile:", "é", "\udcff", "\x1b[31mred", "a\nb", "\\", "%s"),
    *("${gpus}", "${seed}", "${", "${nothing}", "${oc.env:HOME}", "${oc.decode:x}", "$(ls)", "x" * 300, "x" * 5000),
    *("1,2", "range(1,3)", "range(1,1000000000)", "range(1,2,0)", "shuffle(range(1,10000000000))", "choice(1,2)"),
    *(
        "glob(*)",
        "interval(1,2)",
        "sort(2,1)",
        "tag(a,b)",
        "int(3)",
        "float(nan)",
        "str(1)",
        "json_str('{}')",
        "bool(1)",
    ),
    *(
        "[" * 200 + "]" * 200,
        "{" * 9,
        "a=b",
        "=",
        "@",
        "+1",
        "1e5",
        "-1e308",
        "1e308",
        "os",
        "os.path",
        "antigravity/x",
    ),
)
"""What no field or hardly any takes, and what has a meaning to Hydra, rich, YAML or a shell."""


def find_option_class(group: str, values: dict[str, Any]) -> Any:
    """The dataclass of a group's option."""
    if group == "tracker":
        from bench import tracking

        return find_plugin_class("tracker.name", values["name"], tracking, tracking.Tracker)
    loaders = {
        "model": ("family", load_family),
        "strategy": ("name", load_strategy),
        "finetune": ("name", load_finetune),
        "optimizer": ("name", load_optimizer),
    }
    if group in loaders:
        key, load = loaders[group]
        return load(values[key])
    if group == "cluster":
        return SlurmProfile if values["launcher"] == "slurm" else LocalProfile
    return {"precision": Precision, "hardware": Hardware, "network": Network}[group]


@functools.cache
def list_option_fields(group: str, option: str) -> dict[str, FieldType | None]:
    """Keys as typed of all fields of an option, with what is known of their values."""
    if group == "sweep":
        return {
            "sweep.repeats": parse_type_hint(REPEATS_HINT),
            "sweep.device": parse_type_hint(DEVICE_HINT),
            "sweep.grids": None,
            "sweep.name": None,
        }
    values = yaml.safe_load(find_option_file(group, option).read_text())
    return dict(_walk_fields(group, find_option_class(group, values), values))


def _walk_fields(key: str, cls: type, values: Any) -> Iterator[tuple[str, FieldType | None]]:
    for field in dataclasses.fields(cls):
        kind = parse_type_hint(get_field_types(cls)[field.name])
        inner = values.get(field.name) if isinstance(values, dict) else None
        absent = "+" if not isinstance(values, dict) or field.name not in values else ""
        name = f"{absent}{key}.{field.name}"
        yield name, kind
        if kind.section_class is not None and not absent:
            yield from _walk_fields(f"{key}.{field.name}", kind.section_class, inner)
        if kind.entry_hints is not None:
            for entry in inner or {}:
                yield f"{key}.{field.name}.{entry}", parse_type_hint(kind.entry_hints[1])


@functools.cache
def list_top_level_fields() -> dict[str, FieldType | None]:
    """Fields outside of groups, those of measurements among them."""
    hints = {
        name: hint for name, hint in get_field_types(RunConfig).items() if name not in (*SECTION_NAMES, "requested")
    }
    run_fields = {name: parse_type_hint(hint) for name, hint in {**hints, **get_field_types(ExecutionOptions)}.items()}
    return {
        **run_fields,
        **dict(
            _walk_fields(
                "measurement", Measurement, yaml.safe_load((CONF_FOLDER / "config.yaml").read_text())["measurement"]
            )
        ),
    }


def build_valid_values(kind: FieldType | None) -> st.SearchStrategy[str]:
    """Values that a field takes, as typed, the bounds of numbers and what lies just outside among them."""
    if kind is None:
        return st.sampled_from(["null", "a"])
    if kind.choices:
        return st.sampled_from([format_override_value(choice) for choice in kind.choices])
    strategies = []
    if kind.bounds is not None and (int in kind.types or float in kind.types):
        edges = [kind.bounds.minimum, kind.bounds.maximum]
        near = [edge + step for edge in edges for step in (-1, 1)]
        strategies.append(
            st.sampled_from([format_override_value(number) for number in (*edges, *near, 1, 2, 3, 4, 8, 0.5)])
        )
    if int in kind.types and not strategies:
        strategies.append(st.sampled_from(["1", "2", "4", "8"]))
    if bool in kind.types:
        strategies.append(st.sampled_from(["true", "false"]))
    if str in kind.types:
        strategies.append(st.sampled_from(["full", "node", "auto", "a", "none"]))
    if type(None) in kind.types:
        strategies.append(st.just("null"))
    if kind.item_hint is not None:
        strategies.append(st.sampled_from(["[]", "[a]", "[--mail-type=END]", "['a b']"]))
    return st.one_of(strategies) if strategies else st.just("null")


@st.composite
def draw_overrides(draw: st.DrawFn, within: tuple[str, ...] = (), max_fields: int = 4) -> list[str]:
    """Options of some groups, and values of their fields.

    Parameters
    ----------
    within: tuple of str
        Groups that fields may be of; all of them, and what is in none, if empty.
    """
    names = within or tuple(list_config_groups())
    chosen_options = {
        group: draw(st.sampled_from(list_config_groups()[group]))
        for group in draw(st.lists(st.sampled_from(names), max_size=3))
    }
    default_options = {
        "model": "t5_tiny",
        "strategy": "fsdp",
        "precision": "fp32",
        "optimizer": "adamw",
        "finetune": "full",
    }
    default_options |= {
        "hardware": "a100_80gb",
        "cluster": "local",
        "tracker": "wandb" if within else "none",
        "network": "reference",
        "sweep": "adhoc",
    }
    typed = [f"{group}={option}" for group, option in chosen_options.items()]
    for _ in range(draw(st.integers(0 if chosen_options else 1, max_fields))):
        group = draw(st.sampled_from([*names] if within else [*names, ""]))
        field_kinds = (
            list_option_fields(group, chosen_options.get(group, default_options[group]))
            if group
            else list_top_level_fields()
        )
        key = draw(st.sampled_from(sorted(field_kinds)))
        value = draw(
            st.one_of(
                build_valid_values(field_kinds[key]),
                build_valid_values(field_kinds[key]),
                st.sampled_from(HOSTILE_VALUES),
            )
        )
        typed.append(f"{key}={value}")
    return draw(st.permutations(typed))


@functools.cache
def list_field_names() -> frozenset[str]:
    """Every key that a sentence may name."""
    field_names = set(list_top_level_fields()) | set(list_config_groups()) | {"search", "sweep", "mode"}
    for group, options in list_config_groups().items():
        for option in options:
            field_names |= {key.lstrip("+") for key in list_option_fields(group, option)}
    return frozenset(field_names)
