"""The notebooks under ``analysis``: committed clean, no logic in cells, run and rendered by one command."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from bench import notebooks
from bench.core.errors import UsageError
from bench.reporting.drawing.drawing import Drawing, FigureTable, ReportSection, create_figure
from bench.reporting.figures import sharding_factor, throughput
from bench.reporting.notebook import execution, render
from bench.reporting.notebook.notebook import Notebook
from bench.reporting.page.interactive_figures import build_trade_off_figure
from tests.browser import open_browser
from tests.conftest import ROOT, run_command
from tests.records_fixture import make_default_sweep, make_record, write_store

NOTEBOOK_FILES = sorted((ROOT / "analysis").glob("*.ipynb"))
QUESTIONS = {
    "memory", "model_scale", "oom_frontier", "predicted_against_measured", "prefetch", "rate_limiter", "regressions",
    "scaling", "sharding_factor", "your_own_rows",
}  # fmt: skip
LOGIC = (
    ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.IfExp, ast.Try, ast.With, ast.ListComp,
    ast.DictComp, ast.SetComp, ast.GeneratorExp,
)  # fmt: skip


# ---- as they are committed


def test_there_is_one_for_each_question():
    assert {file.stem for file in NOTEBOOK_FILES} == QUESTIONS


@pytest.mark.parametrize("file", NOTEBOOK_FILES, ids=lambda file: file.stem)
def test_committed_without_anything_of_the_machine_they_were_written_on(file):
    notebook = json.loads(file.read_text(encoding="utf-8"))
    nbformat.validate(nbformat.from_dict(notebook))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["metadata"] == {"kernelspec": kernel}
    for cell in notebook["cells"]:
        assert cell["metadata"] == ({"tags": ["parameters"]} if cell["id"] == "parameters" else {})
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert not re.search(r"/home/|/root/|/tmp/|[A-Z]:\\\\", file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", NOTEBOOK_FILES, ids=lambda file: file.stem)
def test_cells_are_short_and_have_no_logic(file):
    for cell in nbformat.read(file, as_version=4).cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 12, cell.id
            assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, LOGIC)], cell.id


@pytest.mark.parametrize("file", NOTEBOOK_FILES, ids=lambda file: file.stem)
def test_files_that_the_text_links_to_exist(file):
    text = "".join(cell.source for cell in nbformat.read(file, as_version=4).cells)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (file.parent / target).exists(), target


# ---- carried out


class RenderedPage(HTMLParser):
    """What a page shows, and what it would load from elsewhere."""

    def __init__(self, text: str):
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.loaded: list[str] = []
        self.kinds: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.images += [values] if tag == "img" else []
        self.kinds |= {values["data-mime-type"]} if "data-mime-type" in values else set()
        names = {"script": ["src"], "img": ["src"], "link": ["href"], "iframe": ["src"], "object": ["data"]}
        self.loaded += [values[name] for name in names.get(tag, []) if values.get(name)]


@pytest.mark.long
@pytest.mark.slow
def test_one_command_renders_all_to_pages_that_are_complete_in_themselves(tmp_path):
    done = run_command("bench.notebooks", f"output={tmp_path}")
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.split() == [str(tmp_path / f"{name}.html") for name in sorted(QUESTIONS)]
    for name in QUESTIONS:
        page = RenderedPage((tmp_path / f"{name}.html").read_text(encoding="utf-8"))
        assert page.images, name
        assert all(image["alt"] and "No description" not in image["alt"] for image in page.images), name
        assert [address for address in page.loaded if not address.startswith("data:")] == [], name
        assert not page.kinds & {"application/vnd.jupyter.stderr", "text/plain"}, name
    pictures = {ending: {path.stem for path in tmp_path.glob(f"figures/*.{ending}")} for ending in ("png", "svg")}
    assert pictures["png"] == pictures["svg"]
    assert len(pictures["png"]) >= 12
    check_in_browser(tmp_path / "sharding_factor.html")


def check_in_browser(page: Path) -> None:
    """A page without a network: the interactive figure is drawn and tells numbers, and nothing is complained about."""
    with open_browser() as browser:
        context = browser.new_context(offline=True, viewport={"width": 1000, "height": 900})
        tab, console_messages = context.new_page(), []
        tab.on("console", lambda message: console_messages.append(message.text))
        tab.on("pageerror", lambda error: console_messages.append(str(error)))
        tab.goto(page.as_uri())
        points = tab.locator(".plotly-graph-div .scatterlayer .point")
        points.first.wait_for(state="attached")
        assert points.count() >= 10
        points.nth(2).scroll_into_view_if_needed()
        points.nth(2).hover(force=True)
        tab.locator(".hoverlayer .hovertext").first.wait_for()
        assert "TFLOP/s" in (tab.locator(".hoverlayer").text_content() or "")
        assert console_messages == []


RUN_ALL_SCRIPT = """
import ast, json, sys
import nbformat
from bench.reporting.notebook.execution import set_parameters
from bench.reporting.notebook.notebook import CellOutput
seen = {}
for name in sys.argv[2:]:
    notebook = set_parameters(nbformat.read(f"{name}.ipynb", as_version=4), {"STORE": sys.argv[1]})
    space, shown = {}, []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            *body, last = ast.parse(cell.source).body
            exec(compile(ast.Module(body, []), cell.id, "exec"), space)
            if isinstance(last, ast.Expr):
                shown.append(eval(compile(ast.Expression(last.value), cell.id, "eval"), space))
            else:
                exec(compile(ast.Module([last], []), cell.id, "exec"), space)
    shown = [output for output in shown if isinstance(output, CellOutput)]  # others are pandas's, drawn by hand
    seen[name] = ["".join(output.html for output in shown).count("<img"), "your store" in shown[0].html]
print(json.dumps(seen))
"""


@pytest.mark.long
@pytest.mark.slow
def test_they_run_from_the_repository_with_a_store_of_ones_own(tmp_path):
    store = write_store(tmp_path / "store", make_default_sweep(("fp32",)))
    command = [sys.executable, "-W", "error", "-c", RUN_ALL_SCRIPT, str(store), *sorted(QUESTIONS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    done = subprocess.run(command, cwd=ROOT / "analysis", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    assert set(seen) == QUESTIONS
    assert all(images > 0 and own for images, own in seen.values()), seen


def make_notebook(*sources: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_cell_that_fails_or_warns_is_named(tmp_path):
    with pytest.raises(execution.NotebookFailedError, match=r"cell 2 \(1 / 0\) failed: ZeroDivisionError: division by"):
        execution.execute_notebook(make_notebook("import bench.core.errors", "1 / 0", "2"), tmp_path)
    with pytest.raises(execution.NotebookFailedError, match=r"cell 1 wrote to stderr: .*careful"):
        execution.execute_notebook(make_notebook("import warnings; warnings.warn('careful', stacklevel=1)"), tmp_path)


def test_parameters_are_set_once_and_their_comments_stay():
    cell = nbformat.v4.new_code_cell('STORE = None  # a "store"\nFIGURES = None')
    cell.metadata["tags"] = ["parameters"]
    notebook = execution.set_parameters(nbformat.v4.new_notebook(cells=[cell]), {"STORE": "/a\\b", "FIGURES": None})
    assert notebook.cells[0].source == "STORE = '/a\\\\b'  # a \"store\"\nFIGURES = None"
    assert execution.set_parameters(notebook, {"BASE": 1}).cells[0].source == notebook.cells[0].source
    with pytest.raises(ValueError, match="not enough values"):
        execution.set_parameters(make_notebook("STORE = None"), {"STORE": 1})


@pytest.mark.parametrize("file", NOTEBOOK_FILES, ids=lambda file: file.stem)
def test_every_notebook_can_be_given_a_store(file):
    notebook = execution.set_parameters(nbformat.read(file, as_version=4), {"STORE": "there", "FIGURES": "here"})
    (cell,) = [cell for cell in notebook.cells if cell.id == "parameters"]
    assert cell.source.startswith("STORE = 'there'  #")
    assert "\nFIGURES = 'here'  #" in cell.source


# ---- what the user types


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            ["prefech"],
            "notebook=prefech is not valid: choose memory, model_scale, oom_frontier,",
        ),
        (["stor=runs"], "option=stor is not valid: choose store, base, output (did you mean store?)."),
        (["store=/no/such/place"], "There is no store at /no/such/place: choose a store, "),
        (["base=/no/such/place"], "There is no store at /no/such/place: choose a store, "),
    ],
)
def test_what_is_mistyped_is_answered_in_a_sentence_and_nothing_runs(typed, sentence, capsys, monkeypatch):
    monkeypatch.setattr(render, "render_notebooks", lambda *_: pytest.fail("a notebook was carried out"))
    assert notebooks.main(typed) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


def test_without_the_extra_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(render, "REQUIRED_LIBRARIES", ("nbformat", "no_such_library"))
    assert notebooks.main(["prefetch"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Rendering notebooks needs no_such_library: install the extra")
    assert error.count("\n") == 1


def test_all_are_rendered_where_none_is_named_and_each_once(tmp_path):
    names, stores, output = render.parse_arguments([f"output={tmp_path}"])
    assert (set(names), stores, output) == (QUESTIONS, {}, tmp_path)
    assert render.parse_arguments(["scaling.ipynb", "memory", "scaling"])[0] == ["scaling", "memory"]


# ---- what cells call


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return write_store(tmp_path_factory.mktemp("own") / "store", make_default_sweep(("fp32",)))


@pytest.mark.long
@pytest.mark.slow
def test_rows_are_the_committed_ones_and_ones_own(store):
    book, alone = Notebook(store), Notebook()
    assert len(book.select_records()) == len(alone.select_records()) + len(make_default_sweep(("fp32",)))
    assert {row["evidence"] for row in alone.select_records()} == {"measured", "predicted", "rehearsed"}
    chosen = book.select_records(model=("t5_tiny", "gpt_tiny"), world_size=4, strategy="ddp", hosts="node-a")
    assert {(row["model"], row["world_size"], row["strategy"]) for row in chosen} == {
        ("t5_tiny", 4, "ddp"), ("gpt_tiny", 4, "ddp"),
    }  # fmt: skip
    about = book.describe_rows().html
    for kind in ("published", "predicted", "measured", "rehearsed", "your store"):
        assert kind in about
    with pytest.raises(UsageError, match="no store at"):
        Notebook("/no/such/place")


def test_a_checkout_without_rows_is_no_error(tmp_path):
    assert Notebook(results_dir=tmp_path).select_records() == []


@pytest.mark.long
@pytest.mark.slow
def test_ones_own_figures_or_how_to_have_them(store):
    assert "python -m bench.notebooks store=DIR" in Notebook().draw_own_store(throughput).text
    shown = Notebook(store).draw_own_store(throughput)
    assert shown.html.count("<img") >= 2
    assert "TFLOP/s" in shown.text


def draw_figure(name: str = "a-figure") -> Drawing:
    figure = create_figure(4, 2)
    figure.add_subplot().plot([1, 2])
    return Drawing(name, "Title", figure, "A caption <1 GiB.", 'An "alt" text', notes=["A note"])


@pytest.mark.slow
def test_figures_have_alt_texts_captions_and_are_saved_where_asked(tmp_path):
    section = ReportSection("s", "S", "Read <this>.")
    section.plan_figure(draw_figure)
    shown = Notebook(results_dir=tmp_path, figures_dir=tmp_path / "figures").show(section)
    assert 'alt="An &quot;alt&quot; text"' in shown.html
    assert "A caption &lt;1 GiB." in shown.html
    assert "<p>Read &lt;this&gt;.</p>" in shown.html
    assert "<li>A note</li>" in shown.html
    assert {path.name for path in tmp_path.glob("figures/*")} == {"a-figure.png", "a-figure.svg"}
    assert not list(tmp_path.glob("*.png"))


def test_tables_are_escaped_and_numbers_stand_to_the_right(tmp_path):
    book = Notebook(results_dir=tmp_path)
    shown = book.show(pd.DataFrame({"Name": ["a<b"], "GiB": ["1,234.5"]}))
    assert '<td style="text-align:left">a&lt;b</td>' in shown.html
    assert '<td style="text-align:right">1,234.5</td>' in shown.html
    listed = book.show(FigureTable("Title", ["x"], [["1"]], frozenset({"x"})))
    assert "<summary>Title</summary>" in listed.html


def test_the_library_of_interactive_figures_is_in_a_page_once(tmp_path):
    runs = [make_record(strategy="fsdp", sharding_factor=factor, world_size=4) for factor in (1, 2, 4)]
    book = Notebook(write_store(tmp_path / "store", runs), results_dir=tmp_path)
    figure = build_trade_off_figure(sharding_factor.select(book.build_table()))
    first, second = book.show(figure).html, book.show(figure).html
    assert len(first) > 10**6 > len(second)
    assert "plotly" in second.lower()
    assert 'src="http' not in first
