"""The page in a real browser: controls, addresses, keyboard, phone, and the exported folder on a plain web server."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from bench.explorer.answer import answer_state
from bench.explorer.export import export_page
from bench.explorer.state import ExplorerState
from tests.conftest import ROOT, needs

pytestmark = [pytest.mark.slow, needs("dash")]

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
WITHIN_MS = 180_000
"""What is waited for comes in seconds; a busy machine may take longer."""

SMALL = {
    "model": "gpt_tiny",
    "hardware": "a100_80gb",
    "gpus": "8",
    "sequence_length": "128",
    "batch_size_per_gpu": "4",
    "activation_checkpointing": "none",
}
SMALL_STATE = ExplorerState.from_settings(SMALL)

OF_THE_FILE = re.compile(r"(?<!gpt_)tiny, ")

HEADINGS = [
    "It fits",
    "Memory",
    "Time",
    "The step, stream by stream",
    "What a change would do",
    "Where the limits are",
    "All ways that were compared",
    "Cost",
    "The same in a terminal",
    "Measured and published",
]
"""First what was found, then why, then the rest."""

expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """The address of the command's own page."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.explore", "--port", "0", "--no-browser"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as a shell in front leaves it
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ \(Ctrl-C ends it\)\n", line), line
    yield line.split()[0]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "Interrupted.\n")


class ExplorerVisit:
    """An open page, what it complained of, and what it asked of any network."""

    def __init__(self, browser: Browser, url: str, size: dict[str, int] = DESK, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
        self.context.set_default_timeout(WITHIN_MS)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def wait_for_all(self) -> None:
        expect(self.page.locator("#verdict")).to_be_visible()
        expect(self.page.locator("#sections")).not_to_have_class("busy")
        expect(self.page.locator("#progress progress")).to_have_count(0)

    def check(self) -> None:
        elsewhere = [url for url in self.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]
        assert (self.complaints, elsewhere) == ([], [])
        self.context.close()


def find_violations(page: Page) -> list[str]:
    return [violation["id"] for violation in Axe().run(page).response["violations"]]


def test_the_page_answers_and_everybody_can_use_it(browser: Browser, served: str) -> None:
    visit = ExplorerVisit(browser, served + SMALL_STATE.address)
    page = visit.page
    visit.wait_for_all()
    assert [text.lstrip("✓≈✗\n ") for text in page.locator("main h2").all_inner_texts()] == HEADINGS
    answer = answer_state(SMALL_STATE)
    assert page.inner_text("#advice") == answer.advice
    assert shlex.split(page.inner_text("#command")) == ["python", "-m", "bench.predict", *SMALL_STATE.overrides]
    expect(page.locator(".js-plotly-plot .barlayer .point").nth(3)).to_be_attached()
    assert find_violations(page) == []
    visit.check()


@pytest.mark.long
def test_by_keyboard_alone_with_an_address_for_each_state(browser: Browser, served: str) -> None:
    visit = ExplorerVisit(browser, served + SMALL_STATE.address)
    page = visit.page
    visit.wait_for_all()
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the answer")
    while page.evaluate("document.activeElement.name") != "gpus":
        page.keyboard.press("Tab")
    page.keyboard.press("Control+a")
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    expect(page.locator("section.headline")).to_contain_text("on 4 × a100_80gb")
    expect(page).to_have_url(re.compile("gpus=4"))
    while page.evaluate("document.activeElement.name") != "strategy":
        page.keyboard.press("Tab")
    page.keyboard.type("ddp")
    page.keyboard.press("Tab")
    expect(page.locator("#advice")).to_contain_text("DDP")
    expect(page.locator("#command")).to_contain_text("strategy=ddp")
    expect(page).to_have_url(re.compile("strategy=ddp"))
    while page.input_value("#control-strategy"):  # each letter may have chosen another
        page.go_back()
    expect(page.locator("#command")).not_to_contain_text("strategy=")
    expect(page).to_have_url(re.compile("gpus=4"))
    page.go_back()
    expect(page.locator("section.headline")).to_contain_text("on 8 × a100_80gb")
    assert page.input_value("#control-gpus") == "8"
    visit.check()


def test_a_mistake_is_one_sentence_beside_its_control(browser: Browser, served: str) -> None:
    visit = ExplorerVisit(browser, served + SMALL_STATE.address)
    page = visit.page
    visit.wait_for_all()
    page.fill("#control-gpus", "9")
    page.press("#control-gpus", "Enter")
    sentence = "gpus=9 is not valid: choose a multiple of gpus_per_node=8, or fewer."
    expect(page.locator("#error-gpus")).to_have_text(sentence)
    assert page.get_attribute("#control-gpus", "aria-invalid") == "true"
    expect(page.locator("#verdict")).to_have_count(0)
    assert find_violations(page) == []
    page.fill("#control-gpus", "8")
    page.press("#control-gpus", "Enter")
    expect(page.locator("#error-gpus")).to_have_text("")
    expect(page.locator("#verdict")).to_be_visible()
    visit.check()


@pytest.mark.long
def test_a_cell_of_the_map_a_change_and_a_dropped_file_lead_on(browser: Browser, served: str) -> None:
    visit = ExplorerVisit(browser, served + SMALL_STATE.address)
    page = visit.page
    visit.wait_for_all()
    assert page.locator(".map td.here").count() == 1
    cell = page.locator(".map tr", has=page.get_by_role("rowheader", name="DDP", exact=True)).locator("td a").last
    address = cell.get_attribute("href")
    assert address is not None
    cell.click()
    expect(page.locator("#command")).to_contain_text("strategy=ddp")
    expect(page).to_have_url(served + address)
    page.get_by_role("link", name="half the batch: 2").click()
    expect(page.locator("#command")).to_contain_text("batch_size_per_gpu=2")
    config = {**json.loads((ROOT / "docs" / "examples" / "my-model.json").read_text()), "num_hidden_layers": 2}
    file = {"name": "tiny.json", "mimeType": "application/json", "buffer": json.dumps(config).encode()}
    page.set_input_files("#model-file-input", file)  # type: ignore[arg-type]
    expect(page.locator("#control-further")).to_have_value(re.compile("model.num_hidden_layers=2"))
    expect(page.locator("section.headline")).to_contain_text(OF_THE_FILE)
    page.reload()
    expect(page.locator("section.headline")).to_contain_text(OF_THE_FILE)
    # a refusal stays while the question before it is still being answered, and goes with the next question
    refusal = page.locator("#error-model")
    page.locator("#control-sequence_length").fill("192")
    page.locator("#control-sequence_length").press("Enter")
    page.set_input_files("#model-file-input", {"name": "x.json", "mimeType": "application/json", "buffer": b"[]"})
    expect(refusal).to_contain_text("model=x.json is not valid: choose a config.json")
    expect(page.locator("#command")).to_contain_text("sequence_length=192")
    visit.wait_for_all()
    expect(refusal).to_contain_text("model=x.json is not valid: choose a config.json")
    page.locator("#control-sequence_length").fill("128")
    page.locator("#control-sequence_length").press("Enter")
    expect(refusal).to_have_text("")
    visit.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, served: str, scheme: str) -> None:
    visit = ExplorerVisit(browser, served + SMALL_STATE.address, PHONE, scheme)
    visit.wait_for_all()
    assert visit.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert not visit.page.locator("#control-strategy").is_visible()
    visit.page.get_by_text("More settings").click()
    expect(visit.page.locator("#control-strategy")).to_be_visible()
    assert find_violations(visit.page) == []
    visit.check()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an exported folder, below a path, served by Python's own web server."""
    folder = tmp_path_factory.mktemp("site")
    settings = {**SMALL, "gpus": "4,8", "strategy": ",ddp"}
    assert export_page(folder / "below" / "here", [f"{key}={value}" for key, value in settings.items()]) == 4
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/below/here/"
        server.shutdown()


def test_an_exported_folder_answers_on_any_web_server(browser: Browser, exported: str) -> None:
    visit = ExplorerVisit(browser, exported)
    page = visit.page
    visit.wait_for_all()
    assert page.locator("select").count() == len({*SMALL, "strategy"})
    expect(page.locator("section.headline")).to_contain_text("on 4 × a100_80gb")
    page.select_option("#control-gpus", "8")
    expect(page.locator("section.headline")).to_contain_text("on 8 × a100_80gb")
    assert page.inner_text("#advice") == answer_state(SMALL_STATE).advice
    expect(page.locator(".js-plotly-plot .barlayer .point").nth(3)).to_be_attached()
    page.select_option("#control-strategy", "ddp")
    expect(page.locator("#command")).to_contain_text("strategy=ddp")
    assert page.inner_text("#advice") == answer_state(SMALL_STATE.change({"strategy": "ddp"})).advice
    assert find_violations(page) == []
    links = [link.get_attribute("href") for link in page.locator("main a").all()]
    known = {
        ExplorerState.from_settings({**SMALL, "gpus": gpus, **way}).address
        for gpus in ("4", "8")
        for way in ({}, {"strategy": "ddp"})
    }
    assert set(links) <= known
    page.reload()
    expect(page.locator("#command")).to_contain_text("strategy=ddp")
    visit.check()


def test_an_export_is_written_anew_over_itself_alone(tmp_path: Path) -> None:
    settings = [f"{key}={value}" for key, value in {**SMALL, "strategy": "ddp"}.items()]
    assert export_page(tmp_path / "site", settings) == 1
    assert export_page(tmp_path / "site", settings) == 1
    assert len(list((tmp_path / "site" / "answers").iterdir())) == 2
