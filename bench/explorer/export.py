"""A folder for any web server: the same page, with the answers to a grid of questions beside it as files."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dash import Dash
from plotly.utils import PlotlyJSONEncoder

from bench.config.hydra_calls import list_override_values, parse_overrides
from bench.core.errors import UsageError, invalid_value_error
from bench.explorer.app import SECTIONS, build_app, describe_controls, render_sections
from bench.explorer.controls import CONTROL_KEYS, DEFAULT_SETTINGS
from bench.explorer.state import ExplorerState
from bench.explorer.worker import ANSWER, PARTS, Refusal, compute_part

MAX_QUESTIONS = 5000
"""Of one folder: each takes seconds, and some hundred kB."""

DASH_PATHS = ("_dash-layout", "_dash-dependencies")
"""What the page asks of its server besides its scripts; the exported page's script adds .json to them."""

ROOT_PREFIX = re.compile(r'"requests_pathname_prefix":"(?:/|\\u002f)"')

SCRIPT_PATH = re.compile(r'(?:src|href)="/?((?:_dash-component-suites|assets)/[^"?]+)')


def parse_grid(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values of each setting that the page is to offer, defaults included.

    Parameters
    ----------
    arguments: sequence of str
        As of ``bench.predict``: ``gpus=8,16``; ``strategy=`` leaves one open, ``strategy=,ddp`` offers both.

    Raises
    ------
    UsageError
        If a setting is none of the page's, or there are more than `MAX_QUESTIONS`.
    """
    choices = {key: [value] for key, value in DEFAULT_SETTINGS.items()}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or key not in CONTROL_KEYS:
            raise invalid_value_error("setting", argument, f"key=value with one of {', '.join(CONTROL_KEYS)}")
        (override,) = parse_overrides([f"{key}={text.strip(',')}"]) if text.strip(",") else (None,)
        values = [] if override is None else list_override_values(override)
        choices[key] = list(dict.fromkeys([*([""] if not text or text.startswith(",") else []), *values]))
    num_questions = 1
    for values in choices.values():
        num_questions *= len(values)
    if num_questions > MAX_QUESTIONS:
        raise UsageError(f"The grid has {num_questions} questions: choose values that make at most {MAX_QUESTIONS}.")
    return {key: choices[key] for key in CONTROL_KEYS if key in choices}


def list_states(choices: Mapping[str, Sequence[str]]) -> list[ExplorerState]:
    """Every question of a grid."""
    return [
        ExplorerState.from_settings(dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]


def export_page(
    folder: Path, arguments: Sequence[str], on_progress: Callable[[str], None] = lambda message: None
) -> int:
    """Write the folder; returns the number of questions that it answers.

    Raises
    ------
    UsageError
        If the grid is a mistake, or the folder holds something else.
    """
    choices = parse_grid(arguments)
    states = list_states(choices)
    if folder.exists() and any(folder.iterdir()) and not (folder / "answers" / "index.json").exists():
        raise invalid_value_error("FOLDER", folder, "a folder that is new, empty, or an earlier export")
    answers_folder = folder / "answers"
    shutil.rmtree(answers_folder, ignore_errors=True)
    answers_folder.mkdir(parents=True)
    file_names: dict[str, str] = {}
    known_addresses = {state.address for state in states}
    for number, state in enumerate(states, 1):
        on_progress(f"{number} of {len(states)}: {' '.join(state.overrides)}")
        text = json.dumps(_answer_for_page(state, known_addresses), cls=PlotlyJSONEncoder, separators=(",", ":"))
        name = f"{hashlib.sha256(state.address.encode()).hexdigest()[:16]}.json"
        (answers_folder / name).write_text(text, encoding="utf-8")
        file_names["&".join(sorted(state.overrides))] = name
    (answers_folder / "index.json").write_text(json.dumps(file_names), encoding="utf-8")
    _write_page(folder, build_app(None, describe_controls(dict(choices))))
    return len(states)


def _answer_for_page(state: ExplorerState, known_addresses: set[str]) -> dict[str, Any]:
    """The sections of the page for a state, in the order of `SECTIONS`."""
    parts = {}
    for part in PARTS:
        parts[part] = compute_part(part, state.address)
        if isinstance(parts[ANSWER], Refusal):
            break
    sections = render_sections(parts)
    plain = json.loads(json.dumps([sections.get(name, []) for name in SECTIONS], cls=PlotlyJSONEncoder))
    _drop_unknown_links(plain, known_addresses)
    answer = parts[ANSWER]
    refusal = {"key": answer.key, "sentence": answer.sentence} if isinstance(answer, Refusal) else None
    return {"sections": plain, "refusal": refusal}


def _drop_unknown_links(component: Any, known_addresses: set[str]) -> None:
    """Make a text of each link to a state that is no part of the grid."""
    if isinstance(component, list):
        for child in component:
            _drop_unknown_links(child, known_addresses)
    elif isinstance(component, dict) and "props" in component:
        href = component["props"].get("href")
        if component.get("type") == "A" and href not in known_addresses:
            component["type"] = "Span"
            del component["props"]["href"]
        _drop_unknown_links(component["props"].get("children"), known_addresses)


def _write_page(folder: Path, app: Dash) -> None:
    """The page and all that it asks of its server, under relative paths."""
    client = app.server.test_client()
    html_text = client.get("/").get_data(as_text=True)
    html_text = ROOT_PREFIX.sub('"requests_pathname_prefix":"./"', html_text)
    paths = {*SCRIPT_PATH.findall(html_text), *_list_lazy_scripts(app)}
    for path in (*paths, *DASH_PATHS):
        file = folder / (f"{path}.json" if path in DASH_PATHS else path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with client.get(f"/{path}") as response:
            if response.status_code != 200:
                raise RuntimeError(f"Dash does not serve {path}: {response.status}")
            file.write_bytes(response.get_data())
    (folder / ".nojekyll").touch()  # else GitHub Pages leaves out what begins with an underscore
    (folder / "index.html").write_text(re.sub(r'(src|href)="/(?=[_a])', r'\1="', html_text), encoding="utf-8")


def _list_lazy_scripts(app: Dash) -> list[str]:
    """Scripts that Dash's components load when they are first shown."""
    return [
        f"_dash-component-suites/{package}/{path}"
        for package, paths in app.registered_paths.items()
        for path in paths
        if path.endswith(".js")
    ]
