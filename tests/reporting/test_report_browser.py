"""The report page in a real browser, without a network: sorted, filtered, hovered over, machines compared."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from matplotlib.image import imread
from playwright.sync_api import Browser, Page, expect

from bench.records import StoreContents
from bench.reporting import build_report, write_report
from tests.conftest import FULL_SCALE
from tests.records_fixture import make_default_sweep, make_record, write_store

pytestmark = pytest.mark.slow

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def environment(**facts: Any) -> dict[str, Any]:
    return {
        "python": "3.11.7", "packages": {"torch": "2.13.0+cpu", "numpy": "2.4.6"}, "kernel": "6.1", "cuda": None,
        "processor_cores": 2, "variables": {}, "devices": {"rank 0": {"name": "AMD EPYC", "threads": 1}}, **facts,
    }  # fmt: skip


def sweep() -> list[dict[str, Any]]:
    """The part of the default sweep with T5: every strategy on 1, 2 and 4 processes, and running out of memory."""
    return [row for row in make_default_sweep(("fp32",)) if row["family"] == "t5"]


def first_machine() -> list[dict[str, Any]]:
    """A sweep, other failures, a degraded run, a prediction, a rehearsal and a row that means harm."""
    rows = sweep()
    rows += [make_record(model="gpt_tiny", world_size=size) for size in (1, 2)]
    rows += [
        make_record(strategy="fsdp", sharding_factor=2, sweep="repeats", degraded=True, alloc_retries=4),
        make_record(strategy="fsdp", sharding_factor=2, evidence="predicted", gpu_name=None, hosts=None, ranks=None),
        make_record(strategy="fsdp", sharding_factor=2, evidence="rehearsed"),
        make_record(status="error", error="RuntimeError: the disk /scratch/7 is full", sequence_length=512),
        make_record(status="error", error="RuntimeError: the disk /scratch/9 is full", sequence_length=1024),
        make_record(
            status="error", error=HOSTILE, model=f"t5_{HOSTILE}", gpu_name=HOSTILE, sweep=HOSTILE, hosts=HOSTILE
        ),
    ]
    return [{**row, "environment": environment()} if row["evidence"] != "predicted" else row for row in rows]


def second_machine() -> list[dict[str, Any]]:
    """The same runs with a newer torch on another host, every step a quarter longer."""
    rows = [copy.deepcopy(row) for row in sweep() if row["world_size"] > 1]
    for row in rows:
        row |= {"hosts": "node-b", "torch_version": "2.14.0+cpu", "started_at": "2026-05-05T10:00:00+00:00"}
        row["environment"] = environment(packages={"torch": "2.14.0+cpu", "numpy": "2.4.6"}, processor_cores=4)
        if row["status"] == "ok":
            row["step_time_median_s"] *= 1.25
    return rows


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    write_store(folder / "a", first_machine())
    write_store(folder / "b", second_machine())
    return build_report(folder, folder / "report")


WITHIN_MS = 120_000
"""What is waited for comes in a second; a busy machine may take longer."""

expect.set_options(timeout=WITHIN_MS)


class Visit:
    """An open page and everything it did that it should not have."""

    def __init__(self, browser: Browser, url: str, size: dict[str, int] = DESK, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(viewport=size, offline=True, **options)
        self.context.set_default_timeout(WITHIN_MS)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def check(self) -> None:
        """Nothing was complained of, and nothing asked of a network."""
        asked = {re.split("[?#]", url)[0] for url in self.requests if not url.startswith(("data:", "blob:"))}
        assert (self.complaints, asked) == ([], {re.split("[?#]", self.url)[0]})


@pytest.fixture(scope="module")
def desk(browser: Browser, page_file: Path) -> Iterator[Visit]:
    """The page on a desk, which most tests share."""
    visit = Visit(browser, page_file.as_uri())
    yield visit
    visit.context.close()


@pytest.fixture
def page(desk: Visit) -> Iterator[Page]:
    """The shared page as if it had just been opened."""
    desk.page.keyboard.press("Escape")
    desk.page.mouse.move(0, 0)
    desk.page.get_by_role("button", name="Show all").click()
    yield desk.page
    desk.check()


@pytest.fixture
def visit(browser: Browser, page_file: Path) -> Iterator[Callable[..., Page]]:
    """Open the page anew: at an anchor, on another screen, without scripts."""
    visits: list[Visit] = []

    def start(anchor: str = "", **options: Any) -> Page:
        visits.append(Visit(browser, page_file.as_uri() + anchor, **options))
        return visits[-1].page

    yield start
    for one in visits:
        one.context.close()
        one.check()


def drawn(page: Page) -> Page:
    """The page once all interactive figures are drawn."""
    for frame in page.locator("figure.chart").all():
        frame.scroll_into_view_if_needed()
        expect(frame.locator(".main-svg").first).to_be_visible()
    return page


def texts(page: Page, column: str) -> list[str]:
    """The cells of a column of the runs that are shown, from top to bottom."""
    titles = [title.strip() for title in page.locator("#runs-table thead th").all_inner_texts()]
    place = titles.index(column) + 1
    return page.locator(f"#runs-table tbody tr:not([hidden]) > :nth-child({place})").all_inner_texts()


def milliseconds(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number.replace(",", "")) * (1000 if unit == "s" else 1)


@pytest.mark.long
def test_a_click_on_a_heading_sorts_by_the_numbers_behind_the_texts(page):
    heading = page.locator("#runs-table thead th", has_text="Peak allocated")
    assert heading.get_attribute("aria-sort") is None
    before = texts(page, "Peak allocated")
    for direction in ("ascending", "descending"):
        heading.get_by_role("button").click()
        assert heading.get_attribute("aria-sort") == direction
        shown = texts(page, "Peak allocated")
        sizes = [float(text.split()[0]) * {"MiB": 1, "GiB": 1024}[text.split()[1]] for text in shown if text != "–"]
        assert sizes == sorted(sizes, reverse=direction == "descending")
        assert {text.split()[1] for text in shown if text != "–"} == {"MiB", "GiB"}, "text order would be another one"
        assert shown[-1] == "–", "runs without a value come last both ways"
        assert sorted(shown) == sorted(before)
    assert page.locator("[aria-sort]").count() == 1


def test_the_keyboard_sorts_too_and_show_all_restores_the_order(page):
    before = texts(page, "Run")
    page.locator("#runs-table thead").get_by_role("button", name="Step median (p95)").focus()
    page.keyboard.press("Enter")
    times = [milliseconds(text) for text in texts(page, "Step median (p95)") if text != "–"]
    assert times == sorted(times)
    page.keyboard.press("Space")
    assert [milliseconds(text) for text in texts(page, "Step median (p95)") if text != "–"] == sorted(times)[::-1]
    page.get_by_role("button", name="Show all").press("Enter")
    expect(page.locator("[aria-sort]")).to_have_count(0)
    assert texts(page, "Run") == before


def test_strategies_sort_from_replicated_to_sharded(page):
    page.locator("#runs-table thead").get_by_role("button", name="Strategy").click()
    kinds = list(dict.fromkeys(text.partition(" · ")[0] for text in texts(page, "Strategy")))
    assert kinds == ["DDP", "FSDP2 full replication", "FSDP2 hybrid (F=2)", "FSDP2 full shard", "FSDP2 unsharded"]


def test_words_and_choices_filter_and_the_number_shown_is_announced(page):
    said = page.locator("#shown")
    assert said.get_attribute("aria-live") == "polite"
    count = len(texts(page, "Run"))
    expect(said).to_have_text(f"All {count} runs are shown.")
    page.get_by_label("Search").fill("disk FULL")  # in no visible cell: in the cause
    expect(said).to_have_text(f"2 of {count} runs are shown.")
    page.get_by_label("Search").fill("")
    page.get_by_label("Status", exact=True).select_option("oom")
    page.get_by_label("Strategy", exact=True).select_option("DDP · torch_version=2.13.0+cpu")
    assert set(texts(page, "Status")) == {"oom"}
    assert set(texts(page, "Strategy")) == {"DDP · torch_version=2.13.0+cpu"}
    expect(said).to_have_text(re.compile(r"^\d+ of \d+ runs"))
    page.get_by_role("button", name="Show all").click()
    expect(said).to_have_text(f"All {count} runs are shown.")
    for evidence in ("rehearsed", "predicted"):
        page.get_by_label("Evidence", exact=True).select_option(evidence)
        assert texts(page, "Evidence") == [evidence]


def test_what_tells_runs_apart_stands_beside_the_strategy_and_filters(visit):
    page = visit(size={"width": 1440, "height": 900})
    expect(page.locator("#filters")).to_be_visible()
    titles = [title.strip() for title in page.locator("#runs-table thead th").all_inner_texts()]
    beside = ["Strategy", "Ranks", "Batch × sequence", "Checkpointing", "Evidence"]
    assert titles[1 : 1 + len(beside)] == beside
    box = page.locator("#runs .box.tall").bounding_box()
    for place in range(2, 2 + len(beside)):
        cell = page.locator(f"#runs-table thead th:nth-child({place})").bounding_box()
        assert cell["x"] + cell["width"] <= box["x"] + box["width"], "seen without scrolling"
    page.get_by_label("Ranks", exact=True).select_option("4")
    assert set(texts(page, "Ranks")) == {"4"}
    page.get_by_label("Batch", exact=True).select_option("4")
    assert {text.partition(" ")[0] for text in texts(page, "Batch × sequence")} == {"4"}


@pytest.mark.long
def test_a_selection_is_in_the_address_and_comes_back_with_it(visit):
    page = visit()
    page.get_by_label("Status", exact=True).select_option("oom")
    page.get_by_label("Search").fill("t5")
    page.locator("#runs-table thead").get_by_role("button", name="Strategy").click()
    expect(page.locator("#shown")).to_have_text(re.compile(r"^\d+ of "))
    shown = texts(page, "Run")
    address = page.url
    assert "status=oom" in address
    assert "search=t5" in address
    assert "sort=Strategy" in address
    again = visit(address.partition("index.html")[2])
    expect(again.locator("#shown")).to_have_text(page.locator("#shown").inner_text())
    assert texts(again, "Run") == shown
    assert again.get_by_label("Status", exact=True).input_value() == "oom"
    again.get_by_role("button", name="Show all").click()
    expect(again.locator("#shown")).to_have_text(re.compile("^All "))
    expect(again).not_to_have_url(re.compile(r"\?"))
    lost = visit("?status=nothing&sort=Nothing&ranks=<b>#runs")
    expect(lost.locator("#shown")).to_have_text(re.compile("^All "))


def test_a_finding_leads_to_its_runs(page):
    link = page.locator("#findings a[data-runs]").first
    wanted = link.get_attribute("data-runs").split(",")
    link.click()
    expect(page.locator("#shown")).to_have_text(re.compile(f"^{len(wanted)} of .* those of a finding"))
    anchors = page.locator("#runs-table tbody tr").evaluate_all("rows => rows.map(row => row.id)")
    assert {anchor.removeprefix("run-") for anchor in anchors} == set(wanted)
    expect(page).to_have_url(re.compile(re.escape(f"runs={link.get_attribute('data-runs')}")))
    page.get_by_role("button", name="Show all").click()
    page.get_by_role("link", name="Show them in the table").click()
    assert set(texts(page, "Status")) == {"oom"}


def test_figures_are_dark_in_the_dark(visit):
    """A pixel at the corner of a figure: of its paper."""
    brightness = {}
    for scheme in ("light", "dark"):
        image = visit(color_scheme=scheme).locator("figure img").first
        image.scroll_into_view_if_needed()
        expect(image).to_have_attribute("src", re.compile("^blob:"))
        image.evaluate("image => image.decode()")
        pixels = imread(io.BytesIO(image.screenshot()))
        brightness[scheme] = float(pixels[2, 2, :3].mean())
    assert brightness["light"] > 0.95
    assert brightness["dark"] < 0.2


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [512, 10_000] if FULL_SCALE else [512])
def test_a_page_of_many_runs_is_small_and_opens_soon(browser, tmp_path, num_rows):
    """5 MB, and the table ready within 2 seconds on two cores with nothing else to do, more where they are busy."""
    seeds = [row for row in make_default_sweep() if row["world_size"] > 1]
    rows = []
    for number in range(num_rows):
        row = seeds[number % len(seeds)]
        varied = {"repeat": number // len(seeds) % 5, "batch_size_per_gpu": 1 + number // len(seeds) // 5}
        times = {"step_time_median_s": row["step_time_median_s"] * (1 + number % 7 / 100)} if "ranks" in row else {}
        config = {**row["config"], **varied}
        rows.append({**row, **varied, **times, "config": config, "run_id": f"{number:016x}"})
    file = write_report(StoreContents(rows), "many runs", tmp_path)
    assert file.stat().st_size < 5_000_000
    visit = Visit(browser, file.as_uri())
    expect(visit.page.locator("#shown")).to_have_text(f"All {num_rows} runs are shown.")
    timing = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    assert visit.page.evaluate(timing) < 6000
    assert visit.page.evaluate("document.documentElement.scrollHeight") < 40_000
    assert visit.page.locator("#runs-table tbody tr").count() == 100
    visit.page.locator("#more-runs").click()
    assert visit.page.locator("#runs-table tbody tr").count() == 200
    visit.page.get_by_label("Search").fill(f"{num_rows - 1:016x}")
    expect(visit.page.locator("#runs-table tbody tr")).to_have_count(1)
    visit.page.locator("#runs-table tbody").get_by_role("link").click()
    expect(visit.page.get_by_role("dialog")).to_contain_text("Peak")
    visit.page.keyboard.press("Escape")
    visit.page.locator("details.more-figures > summary").first.click()
    image = visit.page.locator("details.more-figures img").first
    image.scroll_into_view_if_needed()
    expect(image).to_have_attribute("src", re.compile("^blob:"))
    visit.context.close()
    visit.check()


def test_a_run_opens_by_keyboard_with_all_that_its_row_holds(page):
    row = next(row for row in first_machine() if row["status"] == "ok" and row["world_size"] == 1)
    run_id = row["run_id"]
    link = page.locator(f"#run-{run_id}").get_by_role("link")
    link.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Run {run_id}")
    expect(dialog).to_be_visible()
    shown = dialog.inner_text()
    for words in (
        f"a/{run_id}/0.json", "node-a", "AMD EPYC", row["git_sha"], "2.13.0+cpu", "numpy", "processor_cores",
        "Configuration: strategy", "python -m bench.run model=", "timed steps", "Ranks",
        f"{row['peak_allocated_bytes']:,} bytes",
    ):  # fmt: skip
        assert words in shown, words
    steps = dialog.get_by_role("img")
    assert re.match(r"Times of 20 steps in milliseconds: from \d", steps.get_attribute("aria-label"))
    assert steps.locator("circle").count() == 20
    expect(page).to_have_url(re.compile(f"#run-{run_id}$"))
    for _ in range(4):
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        )
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page).not_to_have_url(re.compile("#"))
    # Back where it was opened.
    page.wait_for_function(f"document.activeElement.getAttribute('href') === '#run-{run_id}'")


def test_a_link_opens_its_run_and_next_walks_through_the_table(visit):
    rows = [row for row in first_machine() if row["status"] == "oom"]
    page = visit(f"#run-{rows[0]['run_id']}")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(rows[0]["run_id"])
    expect(dialog).to_contain_text("96.0 MiB")
    order = texts(page, "Run")
    page.get_by_role("button", name="Next").click()
    expect(dialog).to_contain_text(order[order.index(rows[0]["run_id"]) + 1])
    page.get_by_role("button", name="Close").click()
    page.locator("#why + .box").get_by_role("link").first.click()
    expect(dialog).to_be_visible()


def test_a_run_of_two_machines_has_two_addresses(page):
    shared = second_machine()[0]["run_id"]
    for anchor, host in ((f"run-{shared}", "node-a"), (f"run-{shared}-2", "node-b")):
        page.evaluate("anchor => { location.hash = anchor; }", anchor)
        expect(page.get_by_role("dialog")).to_contain_text(host)


def test_causes_stand_together_in_the_summary(page):
    said = page.locator("#summary").inner_text()
    assert "and 1 message that differ only in numbers" in said
    assert "in optimizer, limit of 0.5 GiB" in said


def test_two_machines_differ_in_what_the_rows_say(page):
    expect(page.locator("details.pair:visible")).to_have_count(1)
    options = page.get_by_label("First").locator("option").all_inner_texts()
    letters = {host: option[0] for option in options for host in ("node-a", "node-b") if f" {host} " in option}
    page.get_by_label("First").select_option(letters["node-a"])
    page.get_by_label("Against it").select_option(letters["node-b"])
    pair = page.locator("details.pair:visible")
    expect(pair).to_have_count(1)
    said = pair.inner_text()
    for words in ("2.14.0+cpu", "Processor cores", "node-b", "+25.0 % in the middle", "the same to the byte"):
        assert words in said, words
    assert "numpy" not in pair.locator("table").first.inner_text(), "what is the same is no difference"
    matched = pair.locator("table").nth(1).locator("tbody tr")
    assert matched.count() == sum(row["world_size"] > 1 for row in sweep())
    page.get_by_label("First").select_option(letters["node-b"])
    expect(page.locator("#pair-said")).to_have_text("Choose two different machines.")


def test_the_interactive_figure_has_every_run_its_hover_and_opens_one(page):
    plot = page.locator("figure[data-group=explorer] .plot")
    plot.scroll_into_view_if_needed()
    expect(plot.locator(".main-svg").first).to_be_visible()
    data = plot.evaluate(
        "plot => plot.data.map(({name, x, marker, customdata, text}) => ({name, x, marker, customdata, text}))"
    )
    ran = [trace for trace in data if trace["customdata"] and "degraded" not in trace["name"]]
    anchors = [anchor for trace in ran for anchor in trace["customdata"]]
    rows = [*first_machine(), *second_machine()]
    here = [row for row in rows if row["status"] in ("ok", "oom") and row["evidence"] != "predicted"]
    assert len(anchors) == len(set(anchors)) == len(here)
    looks = {trace["name"]: trace["marker"]["symbol"] for trace in ran}
    name = "FSDP2 full shard · torch_version=2.13.0+cpu"
    assert looks[f"{name} (rehearsed)"] == f"{looks[name]}-open-dot"
    assert any(trace["marker"]["symbol"] == "x" for trace in ran)
    points = plot.locator(".scatterlayer .point")
    assert points.count() == sum(len(trace["x"]) for trace in data if trace["customdata"])
    buttons = plot.locator(".modebar [data-title]").evaluate_all("all => all.map(one => one.dataset.title)")
    assert len(buttons) == 6
    assert not any(re.search("cloud|link|share|chart studio", title, re.IGNORECASE) for title in buttons)
    box = points.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(plot.locator(".hoverlayer .hovertext")).to_be_visible()
    assert "per process" in plot.locator(".hoverlayer").text_content()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_label("Evidence", exact=True).select_option("rehearsed")
    expect(points).to_have_count(1)
    page.get_by_label("Throughput against memory").select_option("CPU")
    expect(points).to_have_count(0)
    page.get_by_role("button", name="Show all").click()
    expect(points).to_have_count(1)


def test_static_figures_are_unpacked(page):
    image = page.locator("figure img").last
    image.scroll_into_view_if_needed()
    page.wait_for_function("image => image.complete && image.naturalWidth > 100", arg=image.element_handle())
    assert page.locator("figure img:visible:not([src^='blob:'])").count() == 0
    assert all(len(text) > 20 for text in page.locator("figure img").evaluate_all("all => all.map(one => one.alt)"))


def test_lines_over_world_size_can_be_chosen(page):
    frame = page.locator("figure[data-group=lines]")
    frame.scroll_into_view_if_needed()
    expect(frame.locator(".main-svg").first).to_be_visible()
    first = frame.locator(".plot").get_attribute("aria-label")
    frame.get_by_role("combobox").select_option(index=1)
    expect(frame.locator(".plot")).not_to_have_attribute("aria-label", first)


def axe_complains_of(page: Page) -> list[tuple[str, str, list[str]]]:
    """What axe finds wrong with the page, and with a run that is open."""
    found = Axe().run(drawn(page)).response["violations"]
    page.locator("#runs-table tbody").get_by_role("link").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    found += Axe().run(page, context="#run").response["violations"]
    return [(one["id"], one["impact"], [node["target"] for node in one["nodes"]][:3]) for one in found]


def test_axe_finds_nothing_to_complain_of(page):
    assert axe_complains_of(page) == []


@pytest.mark.long
def test_a_phone_in_the_dark_shows_all_and_never_scrolls_sideways(visit):
    page = visit(size=PHONE, color_scheme="dark")
    assert axe_complains_of(page) == []
    assert page.locator("#run").evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth + 1")
    page.keyboard.press("Escape")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_without_scripts_everything_can_be_read(visit):
    page = visit(java_script_enabled=False)
    rows = [*first_machine(), *second_machine()]
    assert page.locator("#runs-table tbody tr").count() == len(rows)
    assert page.locator("#filters").is_hidden()
    row = next(row for row in rows if "scratch/7" in str(row.get("error")))
    line = page.locator(f"#run-{row['run_id']}")
    line.get_by_text("Details").click()
    for words in (row["error"], f"a/{row['run_id']}/0.json", "python -m bench.run"):
        expect(line).to_contain_text(words)
    pair = page.locator("details.pair").first
    expect(pair).to_contain_text("2.14.0+cpu")
    expect(page.get_by_text("Without them, every run has its details at its end")).to_be_visible()


def test_a_hostile_row_executes_nothing_and_is_shown_as_it_is(page):
    for frame in page.locator("figure.chart").all():
        frame.scroll_into_view_if_needed()
    link = page.locator("#runs-table tbody").get_by_role("link", name="window.hacked")
    link.click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("document.scripts.length") <= 7, "five of data, the page's and plotly"
