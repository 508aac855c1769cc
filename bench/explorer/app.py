"""The page: its form is plain HTML, its answer is Dash's, and every change of its address is a new question."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import socket
import webbrowser
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Any

import jinja2
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from werkzeug.serving import make_server

from bench.core.errors import UsageError, invalid_value_error, require_at_least
from bench.explorer import components
from bench.explorer.controls import CONTROLS, DEFAULT_SETTINGS, FURTHER_SETTINGS, GPUS, MODEL, ExplorerControl
from bench.explorer.state import ExplorerState, read_model_file
from bench.explorer.worker import (
    ANSWER,
    FRONTIER,
    NEIGHBOURS,
    PARTS,
    RECORDED,
    TIMELINE,
    AnswerQueue,
    Refusal,
    open_answer_queue,
)

ASSETS_FOLDER = Path(__file__).parent / "assets"
"""What the page loads, beside what Dash brings; its template lies above."""

POLL_INTERVAL_MS = 300

IMMEDIATE_S = 0.4
"""How long a new question is waited for before progress is shown."""

END = "end"

SECTIONS = (ANSWER, TIMELINE, NEIGHBOURS, FRONTIER, END, RECORDED)
"""Sections of the answer as they stand on the page, each a part of it; `END` belongs to `ANSWER`."""

MAX_PORT = 65535

STOPPED_SENTENCE = "The process that predicts was killed: start python -m bench.explore again."


def render_sections(parts: dict[str, Any]) -> dict[str, list[Any]]:
    """The sections of the page that some parts of an answer fill; a refused one takes all others' place.

    Parameters
    ----------
    parts: dict
        Of one state, as `compute_part` computes them.
    """
    answer = parts.get(ANSWER)
    if answer is None or isinstance(answer, Refusal):
        return {} if answer is None else {ANSWER: [html.P(answer.sentence, className="note", role="alert")]}
    builders: dict[str, Callable[[Any], list[Any]]] = {
        ANSWER: components.build_answer,
        TIMELINE: components.build_timeline,
        NEIGHBOURS: lambda part: components.build_neighbours(part, answer.best),
        FRONTIER: lambda part: components.build_frontier(part, answer.best),
        RECORDED: components.build_recorded,
    }
    sections = {
        name: [html.P(part.sentence, className="note")] if isinstance(part, Refusal) else builders[name](part)
        for name, part in parts.items()
    }
    return {**sections, END: components.build_answer_end(answer)}


def build_app(queue: AnswerQueue | None, controls: list[dict[str, Any]] | None = None) -> Dash:
    """The application.

    Parameters
    ----------
    queue: AnswerQueue or None
        Computes answers; None for a page whose answers are files beside it.
    controls: list of dict or None
        What the form's template is told of each control; None for `describe_controls`.
    """
    app = Dash(
        __name__,
        title="Will it fit, how fast will it go?",
        assets_folder=str(ASSETS_FOLDER),
        update_title="",
        suppress_callback_exceptions=True,
    )
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS_FOLDER.parent), autoescape=True, undefined=jinja2.StrictUndefined
    ).get_template("page.html.j2")
    app.index_string = template.render(
        controls=controls or describe_controls(),
        is_static=queue is None,
        further=FURTHER_SETTINGS,
        defaults=DEFAULT_SETTINGS,
    )
    app.layout = html.Div(
        [
            # the page's script puts the address here
            dcc.Store(id="address"),
            dcc.Store(id="shown"),
            dcc.Store(id="refusal"),
            dcc.Store(id="model-file"),
            dcc.Store(id="model-settings"),
            dcc.Interval(id="poll", interval=POLL_INTERVAL_MS, disabled=True),
            html.Div(id="progress", role="status"),
            html.Div([html.Div(id=f"section-{name}") for name in SECTIONS], id="sections"),
        ]
    )
    outputs = [
        *(Output(f"section-{name}", "children") for name in SECTIONS),
        Output("sections", "className"),
        Output("progress", "children"),
        Output("poll", "disabled"),
        Output("shown", "data"),
        Output("refusal", "data"),
    ]
    inputs = [Input("address", "data"), Input("poll", "n_intervals"), State("shown", "data")]
    if queue is None:
        app.clientside_callback(ClientsideFunction("explorer", "read_answer"), *outputs, *inputs)
    else:
        app.callback(*outputs, *inputs, prevent_initial_call=True)(lambda *values: _update(queue, *values))
        app.callback(Output("model-settings", "data"), Input("model-file", "data"), prevent_initial_call=True)(
            _read_uploaded_model
        )
    app.clientside_callback(
        ClientsideFunction("explorer", "show_refusal"), Input("refusal", "data"), Input("model-settings", "data")
    )
    app.clientside_callback(ClientsideFunction("explorer", "take_model"), Input("model-settings", "data"))
    return app


def describe_controls(choices_by_key: dict[str, list[str]] | None = None) -> list[dict[str, Any]]:
    """What the form's template is told of each control.

    Parameters
    ----------
    choices_by_key: dict or None
        Of a page with a few questions: the values of each setting; a control without any is left out.
    """
    descriptions = []
    for control in CONTROLS:
        choices = list(control.list_choices()) if control.list_choices else []
        if choices_by_key is not None:
            if control.key not in choices_by_key:
                continue
            choices = choices_by_key[control.key]
        is_select = bool(choices) and (choices_by_key is not None or not control.suggests)
        descriptions.append({**_describe_control(control), "choices": choices, "is_select": is_select})
    return descriptions


def _describe_control(control: ExplorerControl) -> dict[str, Any]:
    return {
        "key": control.key,
        "label": control.label,
        "hint": control.hint,
        "empty_label": control.empty_label,
        "is_number": control.is_number,
        "takes_file": control.key == MODEL,
        "has_steps": control.key == GPUS,
    }


def _update(queue: AnswerQueue, address: str | None, _: int | None, shown: dict[str, Any] | None) -> tuple[Any, ...]:
    """The sections that are new since what is shown, the progress of the others, and whether to ask again."""
    if address is None:
        return (*[no_update] * len(SECTIONS), no_update, no_update, True, no_update, no_update)
    with contextlib.suppress(UsageError):  # the process that predicts says why
        address = ExplorerState.from_address(address).address
    shown_sections = [] if shown is None or shown["address"] != address else shown["sections"]
    is_new = shown is None or shown["address"] != address
    try:
        queue.request(address)
        parts = queue.collect(address, IMMEDIATE_S if is_new else 0.0)
    except BrokenExecutor:
        parts = {ANSWER: Refusal(FURTHER_SETTINGS, STOPPED_SENTENCE)}
    sections = render_sections(parts)
    refusal = parts[ANSWER] if isinstance(parts.get(ANSWER), Refusal) else None
    is_over = refusal is not None or len(parts) == len(PARTS)
    if ANSWER not in sections:
        updates = [no_update] * len(SECTIONS)  # the last answer stays until the new one is there
    elif ANSWER not in shown_sections:
        updates = [sections.get(name, []) for name in SECTIONS]
    else:
        updates = [
            sections[name] if name in sections and name not in shown_sections else no_update for name in SECTIONS
        ]
    return (
        *updates,
        "" if ANSWER in sections else "busy",
        build_progress(parts) if not is_over else [] if refusal else components.build_summary(parts[ANSWER]),
        is_over,
        {"address": address, "sections": list(sections)},
        None if refusal is None else dataclasses.asdict(refusal),
    )


def build_progress(parts: dict[str, Any]) -> list[Any]:
    """What is being computed, and how many parts are there."""
    next_part = next(name for name in PARTS if name not in parts)
    return [
        html.Span(f"{PARTS[next_part].capitalize()} … ({len(parts)} of {len(PARTS)} parts)"),
        html.Progress(value=str(len(parts)), max=str(len(PARTS)), **{"aria-label": "Parts of the answer"}),
    ]


def _read_uploaded_model(file: dict[str, str]) -> dict[str, Any]:
    """The settings of a dropped file, or the sentence that refuses it."""
    try:
        return {"settings": read_model_file(file["name"], file["text"])}
    except UsageError as error:
        return {"key": MODEL, "sentence": str(error)}


def serve(host: str, port: int, *, opens_browser: bool, print_address: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Parameters
    ----------
    print_address: callable
        Told where the page is, once it can be opened.

    Raises
    ------
    UsageError
        If nothing can be served there.
    KeyboardInterrupt
        At Ctrl-C.
    """
    require_free_address(host, port)
    with open_answer_queue() as queue:
        server = make_server(host, port, build_app(queue).server, threaded=True)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # which writes a line for each request
        shown_host = f"[{host}]" if ":" in host else host
        address = f"http://{shown_host}:{server.server_port}/"
        print_address(address)
        if opens_browser:
            webbrowser.open(address)
        server.serve_forever()
        raise KeyboardInterrupt  # which alone ends serving, and is not passed on


def require_free_address(host: str, port: int) -> None:
    """Raise `UsageError` unless a server can listen there; port 0 is any free one."""
    require_at_least("--port", port, 0)
    if port > MAX_PORT:
        raise invalid_value_error("--port", port, f"a whole number of at most {MAX_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise invalid_value_error("--port", port, f"another, or 0 for any free one ({reason})") from None
        raise invalid_value_error("--host", host, f"an address of this machine ({reason})") from None
    except UnicodeError:
        raise invalid_value_error("--host", host, "an address of this machine") from None
