"""A tiny model that misbehaves on request, and what tests need to watch real sweeps: their processes and their rows.

The model is a plug-in like anybody's own: ``model=gpt_tiny model.family=tests.fake_model`` with fields of its own
added, ``+model.fault=oom:forward:1``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench import records
from bench.config.run_config import RunConfig
from bench.hardware.detect import DetectedDevice
from bench.models import Batch
from bench.models.base import IGNORED_LABEL, Family, FlopCount
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.records import Record

ROOT = Path(__file__).resolve().parents[1]

OOM_REQUEST_BYTES = 32 * 2**30 + 512
"""Asked for by ``oom``: more than any memory limit of these tests, and no round number."""

FLOPS_PER_TOKEN = 1_000_000
"""What the model claims of one token's forward pass."""

FAKE_MODEL_OVERRIDES = (
    "model=gpt_tiny",
    "model.family=tests.fake_model",
    "model.vocabulary_size=64",
    "model.hidden_size=32",
    "model.num_layers=2",
    "hardware=cpu",
    "batch_size_per_gpu=2",
    "sequence_length=16",
    "measurement.warmup_steps=2",
    "measurement.steps=1",
    "report=false",
)
"""Selects the model and makes everything about it quick."""

CPU = DetectedDevice("cpu", "a processor", 0)

SWEEP_MARK_VARIABLE = "BENCH_TEST_SWEEP"


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong, when, written ``kind:phase:rank`` or ``kind:phase:rank:step`` (from 0, the first)."""

    kind: str
    phase: str
    rank: int
    step: int = 0

    @classmethod
    def parse(cls, text: str) -> list[Fault]:
        """Faults joined by ``+``; ``none`` for none."""
        parts = [fault.split(":") for fault in text.split("+") if fault != "none"]
        return [cls(kind, phase, int(rank), *(int(step) for step in rest)) for kind, phase, rank, *rest in parts]

    def trigger(self, device: torch.device) -> None:
        """Do it, on the rank's device."""
        print(f"fault: {self}", file=sys.__stdout__, flush=True)  # pytest has another in place of sys.stdout
        if self.kind == "oom":
            device_type = (
                "cuda" if torch.cuda.is_available() else "cpu"
            )  # while the model is built its weights are on meta
            torch.empty(OOM_REQUEST_BYTES, dtype=torch.uint8, device=device_type if device.type == "meta" else device)
        elif self.kind == "raise":
            raise ArithmeticError("the fake model was told to fail")
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "leave":
            sys.exit(0)
        elif self.kind == "hang":
            time.sleep(10**6)
        elif self.kind == "stubborn":  # a hang that no polite signal ends
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signal_number, signal.SIG_IGN)
            time.sleep(10**6)
        elif self.kind != "none":
            raise AssertionError(f"no such fault: {self.kind}")


@dataclass(frozen=True)
class FakeModel(Family):
    """An embedding, a few linear layers and a head: GPT's fields, so that GPT's options configure it, and its own."""

    vocabulary_size: int
    block_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int | None = None
    dropout: float = 0.0
    activation: str = "gelu_new"
    fault: str = "none"
    """See `Fault`."""
    step_s: float = 0.0
    """Slept in every forward pass."""
    slow_rank_s: float = 0.0
    """Slept by rank 1 on top."""

    def build_model(self) -> nn.Module:
        faults = Fault.parse(self.fault)
        with torch.device("meta"):
            model = FaultyModel(self, faults)
        if dist.is_initialized():  # in a rank, not where parameters are counted
            register_optimizer_step_pre_hook(lambda *_: model.trigger_due_faults("optimizer"))
            model.trigger_due_faults("init")
        return model

    def find_init_std(self, name: str, parameter: torch.Tensor) -> float | None:
        return 0.0 if name.endswith("bias") else 0.02

    def build_batch(self, num_sequences: int, sequence_length: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(0, self.vocabulary_size, (num_sequences, sequence_length), generator=generator)
        return Batch({"tokens": tokens}, nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED_LABEL))

    def find_block_lists(self, model: nn.Module) -> Sequence[nn.ModuleList]:
        return [model.get_submodule("blocks")]  # type: ignore[list-item]

    def count_flops_per_sequence(self, sequence_length: int) -> FlopCount:
        return FlopCount(FLOPS_PER_TOKEN * sequence_length, 0, FLOPS_PER_TOKEN * sequence_length // 4, 0)

    def count_tokens_per_sequence(self, sequence_length: int) -> int:
        return sequence_length

    def check_sequence_length(self, sequence_length: int) -> None:
        pass


class FaultyModel(nn.Module):
    """The model itself."""

    def __init__(self, family: FakeModel, faults: Sequence[Fault]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(family.vocabulary_size, family.hidden_size)
        self.blocks = nn.ModuleList(nn.Linear(family.hidden_size, family.hidden_size) for _ in range(family.num_layers))
        self.head = nn.Linear(family.hidden_size, family.vocabulary_size)
        self.family, self.faults, self.step = family, faults, -1

    def trigger_due_faults(self, phase: str) -> None:
        """Strike where a fault is due in this phase of this step on this rank."""
        for fault in self.faults:
            if (fault.phase, fault.rank, fault.step) == (phase, dist.get_rank(), max(self.step, 0)):
                fault.trigger(self.head.weight.device)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        self.step += 1
        print(f"rank {dist.get_rank()}: forward {self.step}", flush=True)
        self.trigger_due_faults("forward")
        time.sleep(self.family.step_s + (self.family.slow_rank_s if dist.get_rank() == 1 else 0.0))
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        logits.register_hook(lambda _: self.trigger_due_faults("backward"))
        return {"logits": logits}


def build_marked_environment(mark: str, **variables: str) -> dict[str, str]:
    """Of a process that can be found by its mark, as can all that come of it, and that finds the tests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, SWEEP_MARK_VARIABLE: mark, "PYTHONPATH": path, **variables}


def find_marked_processes(mark: str, containing: str = "") -> list[int]:
    """The live processes with a mark in their environment and some text in their command line, oldest first."""
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or is a zombie
            if f"{SWEEP_MARK_VARIABLE}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command_line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if containing in command_line:
                    pids.append(int(folder.name))
    return sorted(pids)


class SweepProcess:
    """A ``python -m bench.sweep`` in a process of its own, whose every descendant can be found."""

    def __init__(self, store: Path, *arguments: str) -> None:
        self.store = store
        self.mark = uuid.uuid4().hex
        store.parent.mkdir(parents=True, exist_ok=True)
        self._log = store.parent / f"sweep-{self.mark}.txt"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.sweep", *arguments, f"store={store}"],
                cwd=ROOT,
                env=build_marked_environment(self.mark, OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def wait(self, timeout_s: float = 180) -> int:
        """Wait for it to end; returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.clean_up()
            raise AssertionError(f"the sweep did not end within {timeout_s} s:\n{self.output}") from None

    def list_pids(self, containing: str = "") -> list[int]:
        """The live processes that come of it and whose command line contains some text, oldest first."""
        return find_marked_processes(self.mark, containing)

    def wait_for_leftover_pids(self, timeout_s: float = 5) -> list[int]:
        """The processes that are still there after some time, which all of them have to end."""
        wait_until(lambda: not self.list_pids(), timeout_s)
        return self.list_pids()

    def clean_up(self) -> None:
        """Kill whatever is left of it."""
        while pids := self.list_pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)


def run_sweep(store: Path, *arguments: str, timeout_s: float = 180) -> SweepProcess:
    """A sweep that has come to its end, leaving no process."""
    sweep_process = SweepProcess(store, *arguments)
    sweep_process.wait(timeout_s)
    leftover_pids = sweep_process.wait_for_leftover_pids()
    sweep_process.clean_up()
    assert not leftover_pids, f"processes {leftover_pids} are left after:\n{sweep_process.output}"
    return sweep_process


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is so; returns whether it is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def plan_runs(*arguments: str, store: Path = Path("no store")) -> list[RunConfig]:
    """The runs that ``-m`` and these overrides ask for, in order, whatever is recorded."""
    request = parse_sweep_request(arguments, multirun=True, device=CPU)
    plan = build_sweep_plan(request.points, store, force=True, check_run=lambda config: None)
    assert not plan.impossible
    return plan.to_run


def read_attempts_by_run(store: Path) -> dict[str, list[Record]]:
    """Every attempt of every run in a store, in order."""
    run_ids = [folder.name for folder in store.iterdir() if len(folder.name) == 16] if store.exists() else []
    return {
        run: [
            records.read_row(records.get_row_path(store, run, attempt)) for attempt in records.list_attempts(store, run)
        ]
        for run in run_ids
    }


def read_row_files(store: Path) -> dict[Path, tuple[bytes, int]]:
    """Content and time of every row file."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in store.glob("*/*.json")}
