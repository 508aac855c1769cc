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

from bench.config import SECTIONS, Measurement, RunConfig
from bench.finetune import load_finetune
from bench.hardware import Hardware
from bench.launch.local import LocalProfile
from bench.launch.slurm.profile import SlurmProfile
from bench.models import load_family
from bench.planning.compose import CONF, groups
from bench.planning.request import DEVICE, REPEATS, Execution
from bench.plugins import find
from bench.precision import Precision
from bench.strategies import load_strategy
from bench.training.optimizer import OptimizerConfig
from bench.typed import Kind, as_typed, kind_of, type_hints

BAD = (
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


def classes(group: str, values: dict[str, Any]) -> Any:
    """The dataclass of a group's option."""
    if group == "tracker":
        from bench import tracking

        return find("tracker.name", values["name"], tracking, tracking.Tracker)
    loaders = {
        "model": ("family", load_family),
        "strategy": ("name", load_strategy),
        "finetune": ("name", load_finetune),
    }
    if group in loaders:
        key, load = loaders[group]
        return load(values[key])
    if group == "cluster":
        return SlurmProfile if values["launcher"] == "slurm" else LocalProfile
    return {"precision": Precision, "optimizer": OptimizerConfig, "hardware": Hardware}[group]


@functools.cache
def fields(group: str, option: str) -> dict[str, Kind | None]:
    """Keys as typed of all fields of an option, with what is known of their values."""
    values = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    if group == "sweep":
        return {
            "sweep.repeats": kind_of(REPEATS),
            "sweep.device": kind_of(DEVICE),
            "sweep.grids": None,
            "sweep.name": None,
        }
    return dict(_fields(group, classes(group, values), values))


def _fields(key: str, cls: type, values: Any) -> Iterator[tuple[str, Kind | None]]:
    for field in dataclasses.fields(cls):
        kind = kind_of(type_hints(cls)[field.name])
        inner = values.get(field.name) if isinstance(values, dict) else None
        absent = "+" if not isinstance(values, dict) or field.name not in values else ""
        name = f"{absent}{key}.{field.name}"
        yield name, kind
        if kind.section is not None and not absent:
            yield from _fields(f"{key}.{field.name}", kind.section, inner)
        if kind.entries is not None:
            for entry in inner or {}:
                yield f"{key}.{field.name}.{entry}", kind_of(kind.entries[1])


@functools.cache
def top() -> dict[str, Kind | None]:
    """Fields outside of groups, those of measurements among them."""
    hints = {name: hint for name, hint in type_hints(RunConfig).items() if name not in (*SECTIONS, "requested")}
    run = {name: kind_of(hint) for name, hint in {**hints, **type_hints(Execution)}.items()}
    return {
        **run,
        **dict(_fields("measurement", Measurement, yaml.safe_load((CONF / "config.yaml").read_text())["measurement"])),
    }


def good(kind: Kind | None) -> st.SearchStrategy[str]:
    """Values that a field takes, as typed, the bounds of numbers and what lies just outside among them."""
    if kind is None:
        return st.sampled_from(["null", "a"])
    if kind.choices:
        return st.sampled_from([as_typed(choice) for choice in kind.choices])
    told = []
    if kind.within is not None and (int in kind.types or float in kind.types):
        edges = [kind.within.least, kind.within.most]
        near = [edge + step for edge in edges for step in (-1, 1)]
        told.append(st.sampled_from([as_typed(number) for number in (*edges, *near, 1, 2, 3, 4, 8, 0.5)]))
    if int in kind.types and not told:
        told.append(st.sampled_from(["1", "2", "4", "8"]))
    if bool in kind.types:
        told.append(st.sampled_from(["true", "false"]))
    if str in kind.types:
        told.append(st.sampled_from(["full", "node", "auto", "a", "none"]))
    if type(None) in kind.types:
        told.append(st.just("null"))
    if kind.items is not None:
        told.append(st.sampled_from(["[]", "[a]", "[--mail-type=END]", "['a b']"]))
    return st.one_of(told) if told else st.just("null")


@st.composite
def settings(draw: st.DrawFn, within: tuple[str, ...] = (), most: int = 4) -> list[str]:
    """Options of some groups, and values of their fields.

    Parameters
    ----------
    within: tuple of str
        Groups that fields may be of; all of them, and what is in none, if empty.
    """
    names = within or tuple(groups())
    chosen = {
        group: draw(st.sampled_from(groups()[group])) for group in draw(st.lists(st.sampled_from(names), max_size=3))
    }
    usual = {"model": "t5_tiny", "strategy": "fsdp", "precision": "fp32", "optimizer": "adamw", "finetune": "full"}
    usual |= {"hardware": "a100_80gb", "cluster": "local", "tracker": "wandb" if within else "none", "sweep": "adhoc"}
    typed = [f"{group}={option}" for group, option in chosen.items()]
    for _ in range(draw(st.integers(0 if chosen else 1, most))):
        group = draw(st.sampled_from([*names] if within else [*names, ""]))
        known = fields(group, chosen.get(group, usual[group])) if group else top()
        key = draw(st.sampled_from(sorted(known)))
        value = draw(st.one_of(good(known[key]), good(known[key]), st.sampled_from(BAD)))
        typed.append(f"{key}={value}")
    return draw(st.permutations(typed))


@functools.cache
def names_of_fields() -> frozenset[str]:
    """Every key that a sentence may name."""
    found = set(top()) | set(groups()) | {"search", "sweep", "mode"}
    for group, options in groups().items():
        for option in options:
            found |= {key.lstrip("+") for key in fields(group, option)}
    return frozenset(found)
