"""Completion in a shell, through argcomplete's own protocol, in a process that imports nothing that takes long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.config.completion import list_completions
from bench.config.groups import list_config_groups

SCRIPT = "from bench.__main__ import run_console_script; raise SystemExit(run_console_script())"


def complete(line: str) -> list[str]:
    """What a shell is told that the last word of a line can become."""
    environment = {
        **os.environ,
        **{"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_COMP_WORDBREAKS": " \t"},
        **{"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"},
    }
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" 8>&1 9>/dev/null', "sh", sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.split("\n")


@pytest.mark.slow
def test_a_shell_is_told_commands_fields_and_options(tmp_path, monkeypatch):
    assert complete("fsdp-bench swe") == ["sweep"]
    assert complete("fsdp-bench sweep model=t5_t") == ["model=t5_tiny"]
    assert "strategy.bucket_cap_mb=" in complete("fsdp-bench predict strategy=ddp strategy.b")


def test_fields_are_those_of_the_option_that_was_chosen():
    assert "strategy.cpu_offload=" in list_completions("strategy.", [])
    ddp_fields = list(list_completions("strategy.", ["strategy=ddp"]))
    assert "strategy.bucket_cap_mb=" in ddp_fields
    assert "strategy.cpu_offload=" not in ddp_fields


def test_values_are_options_or_true_and_false():
    assert list(list_completions("precision=", [])) == [
        f"precision={name}" for name in list_config_groups()["precision"]
    ]
    assert "model=t5_tiny,gpt_tiny" in list_completions("model=t5_tiny,gp", [])
    assert list(list_completions("compile=", [])) == ["compile=true", "compile=false"]
    assert list(list_completions("gpus=", [])) == []


def test_nothing_that_takes_long_is_imported():
    script = "import sys, bench.config.completion; print([name for name in sys.modules if name in ('torch', 'hydra')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
