"""A question that was answered before is answered again without torch, and only where nothing can have changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.advice import remembered

QUESTION = ("gpus=2", "hardware=a100_80gb", "model=gpt_tiny", "strategy=ddp", "batch_size_per_gpu=1", "price=2.5")


@pytest.fixture(autouse=True)
def in_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BENCH_CONF", raising=False)


def ask(monkeypatch, capsys, main, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["predict", *arguments])
    code = remembered.answer_or_remember("predict", main)
    return code, capsys.readouterr().out


@pytest.mark.parametrize("exit_code", [0, 1, 2])
def test_an_answer_is_given_once_and_printed_again(exit_code, monkeypatch, capsys):
    asked = []

    def main() -> int:
        asked.append(sys.argv)
        print("an answer ±10 %")
        return exit_code

    for _ in range(2):
        assert ask(monkeypatch, capsys, main, *QUESTION) == (exit_code, "an answer ±10 %\n")
    assert len(asked) == (2 if exit_code == 2 else 1), "a mistake is no answer"
    ask(monkeypatch, capsys, main, *QUESTION, "tokens=1e9")
    monkeypatch.setenv("COLUMNS", "40")
    ask(monkeypatch, capsys, main, *QUESTION, "tokens=1e9")
    assert len(asked) == (4 if exit_code == 2 else 3), "another question, and another look of its answer"


@pytest.mark.parametrize(
    "argument",
    [
        "hardware=auto",
        "hardware=a100_80gb,auto",
        "hardware=mine.yaml",
        "model.path=./x",
        "strategy.name=my.module",
        "timeline=step.png",
        "seed=${oc.env:SEED}",
        "validate",
    ],
)
def test_what_may_change_unseen_is_not_remembered(argument, monkeypatch, capsys):
    asked = []
    for _ in range(2):
        ask(monkeypatch, capsys, lambda: asked.append("") or 0, *QUESTION, argument)
    assert len(asked) == 2


@pytest.mark.parametrize("change", ["code", "BENCH_CONF", "no cache"])
def test_another_suite_answers_anew(change, monkeypatch, capsys, tmp_path):
    source = tmp_path / "suite"
    (source / "conf").mkdir(parents=True)
    (source / "conf" / "some.yaml").write_text("bandwidth: 1")
    monkeypatch.setattr(remembered, "SOURCE_FOLDERS", (source,))
    asked = []
    for _ in range(2):
        ask(monkeypatch, capsys, lambda: asked.append("") or 0, *QUESTION)
        if change == "code":
            (source / "conf" / "some.yaml").write_text("bandwidth: 2")
        elif change == "BENCH_CONF":
            monkeypatch.setenv("BENCH_CONF", str(tmp_path))
        else:
            monkeypatch.setenv("BENCH_CACHE", "")
    assert len(asked) == 2


def test_nothing_of_torch_is_imported_for_it():
    """By the doors themselves, before they answer."""
    code = (
        "import sys, bench.predict, bench.advise; print([name for name in sys.modules if name in ('torch', 'hydra')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
