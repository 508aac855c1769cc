"""The parts of an answer as components of the page: first what it comes to, then why, then what else there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dash import dcc, html

from bench.core.presentation import (
    MISSING,
    format_count,
    format_interval,
    format_memory,
    format_number,
    format_percent,
    format_seconds,
)
from bench.core.units import GIB
from bench.explorer.answer import STEP_PARTS, ExplorerAnswer, MemoryUse, OptionAnswer
from bench.explorer.recorded import RecordedRow
from bench.explorer.step_timeline import StepTimeline
from bench.explorer.timeline_figure import build_timeline_figure
from bench.explorer.variations import FrontierMap, NeighbourAnswer
from bench.prediction.prediction import DOES_NOT_FIT, FITS, TOO_CLOSE

VERDICT_CLASSES = {FITS: "fits", TOO_CLOSE: "close", DOES_NOT_FIT: "misfit"}
VERDICT_MARKS = {FITS: "✓", TOO_CLOSE: "≈", DOES_NOT_FIT: "✗"}
VERDICT_HEADINGS = {FITS: "It fits", TOO_CLOSE: "Too close to call", DOES_NOT_FIT: "It does not fit"}

UNKNOWN_HEADING = "Whether it fits is not known"

SPEED_SHARES = (0.5, 0.75, 0.9, 0.98)
"""Of the fastest speed of the map: from each on a cell is a shade darker."""

MAX_UNBROKEN_CHARACTERS = 18
"""Of a cell of a table whose text is kept in one line."""

UNUSED_LABEL, FREE_LABEL = "reserved, not in use", "free"

UNIT_TOKENS_TEXT = "a billion tokens"

Component = Any
"""A component of Dash's, or a text."""


def build_answer(answer: ExplorerAnswer) -> list[Component]:
    """What was found, and why."""
    best = answer.best
    verdict = best.verdict or ""
    return [
        html.Section(
            [
                html.P(answer.subject, className="muted"),
                html.H2(
                    [
                        html.Span(
                            VERDICT_MARKS.get(verdict, "?"), className=f"mark {VERDICT_CLASSES.get(verdict, '')}"
                        ),
                        VERDICT_HEADINGS.get(verdict, UNKNOWN_HEADING),
                    ],
                    id="verdict",
                ),
                html.P(answer.advice, id="advice"),
                _build_headline_figures(answer),
                *(html.P(f"Note: {warning}.", className="note") for warning in answer.warnings),
            ],
            className="headline",
        ),
        html.Section([html.H2("Memory"), *_build_memory(best.memory)]),
        html.Section([html.H2("Time"), *_build_time(answer)]),
    ]


def build_summary(answer: ExplorerAnswer) -> list[Component]:
    """What a screen reader says when an answer is complete; the page shows it anyway."""
    heading = VERDICT_HEADINGS.get(answer.best.verdict or "", UNKNOWN_HEADING)
    speed = f", {format_count(answer.best.tokens_per_second)} tokens per second" if answer.best.step_s else ""
    return [html.Span(f"{heading}{speed}.", className="spoken")]


def build_answer_end(answer: ExplorerAnswer) -> list[Component]:
    """All ways that were compared, cost, and the command."""
    return [
        html.Section([html.H2("All ways that were compared"), *_build_options(answer)]),
        html.Section([html.H2("Cost"), *_build_cost(answer)]),
        html.Section(
            [
                html.H2("The same in a terminal"),
                html.Pre(html.Code(answer.state.command, id="command"), tabIndex=0),
                html.Button("Copy the command", id="copy-command", **_copy_target("command")),
                html.P(f"Of the links: {answer.network}", className="muted"),
            ]
        ),
    ]


def _copy_target(element_id: str) -> dict[str, str]:
    return {"data-copies": element_id}


def _build_headline_figures(answer: ExplorerAnswer) -> Component:
    best = answer.best
    memory = best.memory
    capacity_text = "" if memory.capacity is None else f" of {format_number(memory.capacity / GIB)}"
    step_text = MISSING
    if best.step_s is not None:
        step = best.step_s
        step_text = f"{format_seconds(step.value)} {format_interval(step.value, step.low, step.high)}"
    figures = [
        ("Tokens per second", format_count(best.tokens_per_second)),
        ("Step", step_text),
        ("MFU", MISSING if best.mfu is None else format_percent(best.mfu)),
        ("Limited by", best.limited_by + (", the allocator retries" if best.is_degraded else "") or MISSING),
        ("Memory per GPU", f"{format_number(memory.reserved.value / GIB)}{capacity_text} GiB"),
        ("Batch per GPU", _format_batch(best)),
    ]
    return html.Dl([html.Div([html.Dt(name), html.Dd(text)]) for name, text in figures], className="figures")


def _format_batch(option: OptionAnswer) -> str:
    if option.largest_batch is None or option.largest_batch == option.batch_size:
        return str(option.batch_size)
    return f"{option.batch_size} (at most {option.largest_batch})"


def _build_memory(memory: MemoryUse) -> list[Component]:
    """A bar of what the reserved memory consists of, against what the device has; the same as a table."""
    sizes = {**memory.parts, **({UNUSED_LABEL: memory.unused_bytes} if memory.unused_bytes else {})}
    used = sum(sizes.values())
    total = max(used, memory.capacity or 0) or 1
    if memory.capacity and memory.capacity > used:
        sizes[FREE_LABEL] = memory.capacity - used
    shares = {label: size / total for label, size in sizes.items()}
    limit = []
    if memory.capacity and memory.capacity < used:
        position = {"left": f"{100 * memory.capacity / total:.2f}%"}
        limit = [html.Span(className="limit", style=position, title=f"the device has {format_memory(memory.capacity)}")]
    capacity_text = "" if memory.capacity is None else f", of {format_memory(memory.capacity)}"
    low, high = format_memory(memory.reserved.low), format_memory(memory.reserved.high)
    return [
        html.P(
            f"{format_memory(memory.reserved.value)} reserved{capacity_text}; the peak is in {memory.peak_location}."
        ),
        html.Div([*_build_bar_parts(shares), *limit], className="bar", role="img", **_label("Parts of the memory")),
        _build_table(
            "What the memory consists of",
            ("Part", "Memory", "Share"),
            [
                (
                    [html.Span(className=f"swatch {_name_class(label)}"), label],
                    format_memory(size),
                    _format_share(size / total),
                )
                for label, size in sizes.items()
            ],
        ),
        html.P(f"19 times of 20 between {low} and {high}.", className="muted"),
    ]


def _build_time(answer: ExplorerAnswer) -> list[Component]:
    best = answer.best
    if best.step_s is None:
        return [html.P(f"Not predicted: {answer.missing_time}.")]
    step = best.step_s
    shares = {label: seconds / step.value for label, seconds in best.time_parts.items() if seconds > 0}
    return [
        html.P(
            f"A step takes {format_seconds(step.value)}, 19 times of 20 between {format_seconds(step.low)} and "
            f"{format_seconds(step.high)}; it is limited by {best.limited_by}."
        ),
        html.Div(_build_bar_parts(shares), className="bar", role="img", **_label("Parts of the step")),
        _build_table(
            "What the step consists of",
            ("Part", "Time", "Share"),
            [
                (
                    [html.Span(className=f"swatch {_name_class(label)}"), label],
                    format_seconds(best.time_parts[label]),
                    _format_share(best.time_parts[label] / step.value),
                )
                for label in STEP_PARTS.values()
            ],
        ),
    ]


def build_timeline(timeline: StepTimeline | None) -> list[Component]:
    """The simulated step, stream by stream."""
    if timeline is None:
        return []
    note = ["Only its beginning is shown."] if timeline.is_cut else []
    figure = dcc.Graph(
        figure=build_timeline_figure(timeline),
        config={"displayModeBar": False, "responsive": True, "scrollZoom": False},
        className="timeline",
        style={"height": f"{9 + 2.2 * len(timeline.lanes):.1f}rem"},
    )
    labels = _label(f"Timeline of one step: {', '.join(timeline.lanes)}; its parts are in the table above")
    return [
        html.Section(
            [
                html.H2("The step, stream by stream"),
                html.P(
                    ["One rank, simulated; drag to look closer, double-click for the whole. ", *note], className="muted"
                ),
                html.Div(figure, role="img", **labels),
            ]
        )
    ]


def build_neighbours(neighbours: Sequence[NeighbourAnswer], best: OptionAnswer) -> list[Component]:
    """A row per change, with what it does to speed and memory; each leads to its own state."""
    rows = []
    for neighbour in neighbours:
        option = neighbour.option
        if option is None:
            rows.append((neighbour.change, html.Span(neighbour.refusal, className="muted"), "", "", "", ""))
            continue
        rows.append(
            (
                build_link(neighbour.change, option),
                build_verdict(option.verdict),
                format_count(option.tokens_per_second),
                _format_change(option.tokens_per_second, best.tokens_per_second),
                MISSING if option.step_s is None else format_seconds(option.step_s.value),
                format_memory(option.memory.reserved.value),
            )
        )
    headings = ("Change", "Fits", "Tokens/s", "Speed", "Step", "Memory")
    table = _build_table("One thing changed, all else as above", headings, rows)
    return [html.Section([html.H2("What a change would do"), table])]


def build_frontier(frontier: FrontierMap, best: OptionAnswer) -> list[Component]:
    """The map: each cell says whether it fits and how fast it is, and leads to its own state."""
    speeds = [option.tokens_per_second_per_gpu or 0 for _, options in frontier.rows for option in options if option]
    fastest = max([speed for speed in speeds if speed], default=1.0)
    head = html.Tr([html.Th("GPUs", scope="col"), *(html.Th(str(count), scope="col") for count in frontier.gpu_counts)])
    body = []
    for name, options in frontier.rows:
        cells = [_build_map_cell(option, fastest, best) for option in options]
        body.append(html.Tr([html.Th(name, scope="row"), *cells]))
    caption = "Batch per GPU and tokens per second per GPU; the darker, the faster"
    table = html.Table([html.Caption(caption), html.Thead(head), html.Tbody(body)], className="map")
    return [
        html.Section(
            [
                html.H2("Where the limits are"),
                html.P("Ways to shard on other numbers of GPUs, all else as above. Choose a cell to go there."),
                html.Div(table, className="scroll", tabIndex=0, role="region", **_label("Map of what fits")),
            ]
        )
    ]


def _build_map_cell(option: OptionAnswer | None, fastest: float, best: OptionAnswer) -> Component:
    if option is None:
        return html.Td(html.Span(MISSING, className="muted", title="not possible, or what another row is"))
    classes = [VERDICT_CLASSES.get(option.verdict or "", "")]
    if option.verdict == DOES_NOT_FIT:
        text = [html.Span("✗ does not fit")]
    else:
        speed = option.tokens_per_second_per_gpu
        mark = "≈ " if option.verdict == TOO_CLOSE else ""
        text = [html.Span(f"{mark}batch {option.batch_size}"), html.Br(), html.Span(format_count(speed))]
        classes.append(f"speed-{sum((speed or 0) >= share * fastest for share in SPEED_SHARES)}")
    if option.run_id == best.run_id:
        classes.append("here")
    return html.Td(html.A(text, href=option.state.address), className=" ".join(classes))


def build_recorded(rows: Sequence[RecordedRow]) -> list[Component]:
    """What others measured or published of the same question."""
    if not rows:
        content: list[Component] = [
            html.P("There is no measured and no published run of this model, or of one of its size.")
        ]
    else:
        table_rows = [
            (row.evidence, row.run, row.result, ", ".join(row.differences) or "nothing", row.source) for row in rows
        ]
        headings = ("Evidence", "Run", "Result", "Differs in", "Source")
        content = [_build_table("Runs of the same model, or of one of its size", headings, table_rows)]
    return [html.Section([html.H2("Measured and published"), *content])]


def _build_options(answer: ExplorerAnswer) -> list[Component]:
    rows = [
        (
            build_link(option.strategy, option),
            option.checkpointing,
            str(option.batch_size),
            build_verdict(option.verdict),
            format_count(option.tokens_per_second),
            MISSING if option.mfu is None else format_percent(option.mfu),
            format_memory(option.memory.reserved.value),
            option.misfit or option.limited_by,
        )
        for option in answer.options
    ]
    headings = ("Strategy", "Checkpointing", "Batch", "Fits", "Tokens/s", "MFU", "Memory", "Limited by")
    more = answer.num_options - len(answer.options)
    notes = [html.P(f"{more} more: the command below shows them with top=all.", className="muted")] if more else []
    impossible = [html.Li(reason) for reason in answer.impossible_reasons]
    return [
        _build_table("The fastest first; each at the batch asked for, else at its largest", headings, rows),
        *notes,
        *([html.Details([html.Summary("What is not possible"), html.Ul(impossible)])] if impossible else []),
    ]


def _build_cost(answer: ExplorerAnswer) -> list[Component]:
    best = answer.best
    tokens = f"{format_count(answer.cost_tokens)} tokens" if best.days is not None else UNIT_TOKENS_TEXT
    figures = [
        ("Days", MISSING if best.days is None else format_number(best.days)),
        (
            "Dollars",
            MISSING
            if best.dollars is None
            else f"${best.dollars:,.0f}"
            if best.dollars >= 100
            else f"${best.dollars:,.2f}",
        ),
        ("Energy", MISSING if best.kwh is None else f"{format_number(best.kwh)} kWh"),
    ]
    dollars_note = "" if best.dollars is not None else " Dollars need a price."
    return [
        html.P(f"Of {tokens} on these GPUs.{dollars_note}"),
        html.Dl([html.Div([html.Dt(name), html.Dd(text)]) for name, text in figures], className="figures"),
        *(html.P(sentence, className="muted") for sentence in answer.cost_basis),
    ]


def build_link(text: str, option: OptionAnswer) -> Component:
    """A link to the state that asks for one way alone."""
    return html.A(text, href=option.state.address)


def build_verdict(verdict: str | None) -> Component:
    """Whether it fits, by a mark and a word."""
    text = f"{VERDICT_MARKS.get(verdict or '', '?')} {verdict or 'not known'}"
    return html.Span(text, className=VERDICT_CLASSES.get(verdict or "", ""))


def _build_bar_parts(shares: Mapping[str, float]) -> list[Component]:
    return [
        html.Span(
            className=f"part {_name_class(label)}",
            style={"width": f"{100 * share:.3f}%"},
            title=f"{label}: {_format_share(share)}",
        )
        for label, share in shares.items()
    ]


def _build_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Component]]) -> Component:
    head = html.Tr([html.Th(heading, scope="col") for heading in headings])
    body = [html.Tr([html.Th(row[0], scope="row"), *map(_build_cell, row[1:])]) for row in rows]
    table = html.Table([html.Caption(caption), html.Thead(head), html.Tbody(body)])
    return html.Div(table, className="scroll", tabIndex=0, role="region", **_label(caption))


def _build_cell(content: Component) -> Component:
    is_short = isinstance(content, str) and len(content) <= MAX_UNBROKEN_CHARACTERS
    return html.Td(content, className="short" if is_short else "")


def _label(text: str) -> dict[str, str]:
    return {"aria-label": text}


def _name_class(label: str) -> str:
    """The class that colours a part: ``part-optimizer-state``."""
    return "part-" + label.replace(",", "").replace(" ", "-")


def _format_share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 or share == 0 else "<1 %"


def _format_change(value: float | None, base: float | None) -> str:
    if value is None or not base:
        return MISSING
    return format_percent(value / base - 1, signed=True) if abs(value / base - 1) >= 0.005 else "the same"
