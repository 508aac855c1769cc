"""What a preloaded fake CUDA must do before anything that is tested with it means something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakecuda.library import build_environment

NOT_READY = "device not ready"
OUTCOME_BY_WAIT = {
    "nothing": NOT_READY,
    "first.synchronize()": NOT_READY,
    "last.synchronize()": "read",
    "stream.synchronize()": "read",
    "other.synchronize()": NOT_READY,
    "other.wait_event(last); other.synchronize()": "read",
    "other.wait_stream(stream); other.synchronize()": "read",
}
"""What is done between recording two events in a stream and reading the time between them, and what comes of it."""

EVENTS_SCRIPT = f"""
import json, torch
assert torch.accelerator.current_accelerator() == torch.device("cuda")
nothing, outcomes = None, {{}}
for waits in {list(OUTCOME_BY_WAIT)!r}:
    stream, other = torch.Stream(device="cuda"), torch.Stream(device="cuda")
    first, last = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))
    first.record(stream), last.record(stream)
    exec(waits)
    try:
        assert first.elapsed_time(last) >= 0
        outcomes[waits] = "read"
    except RuntimeError as error:
        outcomes[waits] = {NOT_READY!r} if {NOT_READY!r} in str(error) else str(error)
print(json.dumps(outcomes))
"""

FORK_SCRIPT = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
def backward():
    with FakeTensorMode():
        weight = torch.ones(2, device="cuda", requires_grad=True)
        (weight * weight).sum().backward()
backward()
if os.fork() == 0:
    try:
        backward()
    except RuntimeError as error:
        os._exit(3 if "fork" in str(error) else 4)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run_script(script: str, library: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], env=build_environment(library), stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def outcomes(fake_cuda: Path) -> dict[str, str]:
    script_outcomes: dict[str, str] = json.loads(run_script(EVENTS_SCRIPT, fake_cuda))
    return script_outcomes


@pytest.mark.parametrize("waits", OUTCOME_BY_WAIT)
def test_the_time_between_events_is_known_only_to_who_waited_for_both(outcomes: dict[str, str], waits: str) -> None:
    assert outcomes[waits] == OUTCOME_BY_WAIT[waits]


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_ran_backward_forks_none_that_can(fake_cuda: Path) -> None:
    """As on a machine with GPUs, where autograd has a thread for each: of fake tensors, too."""
    assert run_script(FORK_SCRIPT, fake_cuda) == "3"
