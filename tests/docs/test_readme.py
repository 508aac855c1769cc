"""README.md: short, its numbers those of rows. `python -m tests.docs.test_readme` rewrites what is generated."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap

import pytest
import row_numbers

from bench import predict
from tests.conftest import ROOT

README = ROOT / "README.md"
MAX_LINES, MAX_LINE_LENGTH = 150, 120
PREDICT_COMMAND = re.compile(r"^python -m bench\.predict (.*)$", re.MULTILINE)


def write_sweep() -> str:
    return f"```text\n{row_numbers.write_default_sweep()}```\n"


def write_predict() -> str:
    """What the page's command prints: sentences wrapped anew, the table as it is, without what does not fit."""
    match = PREDICT_COMMAND.search(README.read_text(encoding="utf-8"))
    assert match
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert predict.main(match[1].split()) == 0
    advice, table, *_ = (part.splitlines() for part in re.split(r"\n\s*\n", output.getvalue()))
    network_line, model_line, *sentences = advice
    wrapped = textwrap.wrap(" ".join(" ".join(sentences).split()), MAX_LINE_LENGTH - 4)
    lines = [network_line, *textwrap.wrap(model_line, MAX_LINE_LENGTH - 4), *wrapped, "", *table]
    return "```text\n" + "\n".join(line.rstrip() for line in lines) + "\n```\n"


def write_accuracy() -> str:
    numbers = row_numbers.accuracy

    def both(quantity: str, column: str) -> str:
        """Of the H100 and of the H200."""
        return " and ".join(row_numbers.gpu(name, quantity, column) for name in row_numbers.GPU_PAGES)

    sources, devices, memory = "speed, left out", "speed, each device left out", "memory, allocated or active"
    stated = "step time, training rows, complete"
    lines = [
        f"Speed, {numbers(sources, 'count')} published configurations, each with constants chosen without its source: "
        f"{numbers(sources, 'mean')} off on average, {numbers(sources, 'worst')} at worst; without its kind of GPU: "
        f"{numbers(devices, 'mean')} and {numbers(devices, 'worst')}.",
        f"The interval that is stated for a step is {row_numbers.interval(stated, 'interval')} where training runs on "
        f"that kind of GPU were compared. Of runs of a source that took no part in choosing it "
        f"{row_numbers.interval(stated, 'sources')} lie within, of a kind of GPU "
        f"{row_numbers.interval(stated, 'devices')}. On other GPUs it is wider.",
        f"Memory on GPUs, {numbers(memory, 'count')} published numbers: {numbers(memory, 'mean')} off on average, "
        f"{numbers(memory, 'worst')} at worst.",
        f"On an H100 and an H200, predicted before: step times {both('step time', 'before mean')} off on average, "
        f"{both('step time', 'before within')} within the interval ({both('step time', 'now mean')}, "
        f"{both('step time', 'now within')} since); allocated memory {both('allocated memory', 'before mean')} off, "
        f"{both('allocated memory', 'before worst')} at worst.",
        f"Memory on CPU processes, against measured runs: {row_numbers.predicted_peaks()}.",
        f"Memory on CPU processes, rehearsed against measured: {row_numbers.rehearsed_peaks()}.",
    ]
    return "".join(
        textwrap.fill(line, MAX_LINE_LENGTH, initial_indent="* ", subsequent_indent="  ") + "\n" for line in lines
    )


GENERATED = {
    "sweep": write_sweep,
    "predict": write_predict,
    "accuracy": write_accuracy,
    "evidence": row_numbers.write_evidence,
}


def read_section(name: str) -> str:
    """What lies between the marks of a generated part."""
    match = re.search(rf"<!-- {name}:.*?-->\n(.*?)<!-- end -->", README.read_text(encoding="utf-8"), re.DOTALL)
    assert match, f"README.md has lost the marks of its part {name}"
    return match[1]


def rewrite() -> None:
    for name, write in GENERATED.items():
        text = README.read_text(encoding="utf-8")
        start = text.index("-->\n", text.index(f"<!-- {name}:")) + len("-->\n")
        README.write_text(text[:start] + write() + text[text.index("<!-- end -->", start) :], encoding="utf-8")


def test_it_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_LINE_LENGTH] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sweep", "predict", "accuracy"])
def test_its_numbers_are_those_of_rows(name: str) -> None:
    assert read_section(name) == GENERATED[name]()


@pytest.mark.long
@pytest.mark.slow
def test_strategies_have_the_evidence_that_rows_give_them() -> None:
    shown = read_section("evidence").splitlines()
    generated = row_numbers.write_evidence().splitlines()
    with_rows = [line for line in generated if not line.endswith("✗ |") or line in shown]
    assert shown == with_rows  # a strategy without any row may be left out


def test_its_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
    local_targets = [target for target in targets if "://" not in target]
    assert len(local_targets) > 10
    assert [target for target in local_targets if not (ROOT / target).exists()] == []


if __name__ == "__main__":
    rewrite()
