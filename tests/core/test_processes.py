"""Where ranks, traces and other children come from on a machine with GPUs: a forkserver that has touched no device."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from bench import records, sweep
from bench.core import processes
from bench.core.command_line import PlainConsole
from bench.core.errors import UsageError
from bench.launch import ranks, run_on_host
from bench.launch.attempt import build_outcome_columns
from bench.launch.ranks import RankExit, StopSignal
from bench.launch.run_on_host import execute_run
from bench.launch.task import LaunchTask
from bench.launch.worker import Worker
from bench.prediction.predictor import predict_run
from bench.prediction.trace import stage_trace, step_trace, trace_cache
from bench.rank import run_rank
from bench.rank.run_rank import RankOutcome
from tests.conftest import ROOT, SMALL_GPT, SMALL_T5, compose_run_config, needs
from tests.fake_model import build_marked_environment, find_marked_processes, wait_until
from tests.fakecuda.library import build_environment

RUN = (*SMALL_T5, "hardware=cpu", "gpus=2", "measurement.warmup_steps=2", "measurement.steps=1", "sequence_length=16")

OF_EXTRAS = {
    "nothing": (("strategy=ddp",), ()),
    "torchao": (("strategy=fsdp",), ("torchao",)),
    "peft": (("strategy=ddp", "finetune=lora"), ("peft",)),
    "bitsandbytes": (("strategy=ddp", "finetune=qlora", "finetune.bits=8"), ("peft", "bitsandbytes")),
    "accelerate": (("strategy=accelerate",), ("accelerate",)),
    "lightning": (("strategy=lightning",), ("lightning",)),
    "deepspeed": (("strategy=deepspeed",), ("deepspeed",)),
}

STARTER = """
import json, sys
from pathlib import Path
import tests.pretend_cuda as cuda
from bench.core import processes
from bench.launch.run_on_host import execute_run
from bench.launch.ranks import StopSignal
from tests.conftest import compose_run_config

method, store = sys.argv[1], Path(sys.argv[2])
processes.can_reach_gpus = lambda: method == "forkserver"
processes.FORKSERVER_MODULES = ("tests.pretend_cuda", *processes.FORKSERVER_MODULES)
with StopSignal() as stop:
    for line in sys.stdin:
        config = compose_run_config(*json.loads(line))
        row = execute_run(config, store, launcher="local", sweep="test", time_limit_s=200, stop=stop, log_to_file=True)
        print(json.dumps([row["status"], row.get("error"), cuda.cuda_touches]), flush=True)
"""


@contextlib.contextmanager
def starter(method: str, store: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that executes the runs it is sent, as a worker does, and would be spoilt by touching CUDA."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, method, str(store)],
        cwd=ROOT,
        env=build_marked_environment(store.name, OMP_NUM_THREADS="1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str], *overrides: str) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(overrides) + "\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> tuple[str, str | None, list[str]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("["):
            return tuple(json.loads(line))
    raise AssertionError("the starter ended")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[subprocess.Popen[str]]:
    with starter("forkserver", tmp_path_factory.mktemp("served")) as process:
        yield process


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("extra", [pytest.param(name, marks=needs(*of[1])) for name, of in OF_EXTRAS.items()])
def test_whatever_is_installed_ranks_can_use_cuda(served, extra):
    send(served, *RUN, *OF_EXTRAS[extra][0])
    status, error, _ = answer(served)
    assert (status, error) == ("ok", None)


@pytest.mark.slow
@needs("torchao")
def test_a_rank_forked_after_cuda_was_touched_says_so(tmp_path):
    with starter("fork", tmp_path / "store") as process:
        send(process, *RUN, "strategy=ddp")
        status, error, touched = answer(process)
    assert any("torchao" in place for place in touched)
    assert status == "error"
    assert "forked from a process that had started CUDA" in error


PRELOAD_BESIDE_GPUS = """
import sys
from bench.config.compose import compose_config
from bench.config.run_config import build_run_config
from bench.core import processes
from bench.launch.ranks import preload_for_ranks

processes.can_reach_gpus = lambda: True
preload_for_ranks(build_run_config(compose_config({"model": "gpt_tiny", "gpus": "2"})))
assert "bench.rank.run_rank" in sys.modules, "outcomes are read without an import"
assert "transformers.modeling_utils" not in sys.modules, "libraries that may start CUDA are left to the ranks"
"""


@pytest.mark.slow
def test_where_there_are_gpus_a_launcher_imports_what_outcomes_consist_of_and_no_models() -> None:
    subprocess.run([sys.executable, "-c", PRELOAD_BESIDE_GPUS], cwd=ROOT, check=True, timeout=120)


@pytest.mark.slow
def test_a_forked_rank_refuses_what_it_cannot_use(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    monkeypatch.setattr(run_rank, "needs_cuda", lambda config: True)
    monkeypatch.setattr(processes, "can_reach_gpus", lambda: False)
    with StopSignal() as stop:
        asked = {"launcher": "local", "sweep": "test", "time_limit_s": 100, "stop": stop, "log_to_file": True}
        row = execute_run(compose_run_config(*RUN, "strategy=ddp"), tmp_path, **asked)
    assert row["status"] == "error"
    assert row["error"].startswith("rank 0, init: RuntimeError: this rank was forked from a process that had started")


@pytest.mark.slow
def test_a_rank_on_a_cpu_does_not_mind_who_asked_for_gpus_before_it(tmp_path, monkeypatch):
    """A CUDA build of torch where there is no GPU: packages ask it for one when they are imported."""
    monkeypatch.setattr("torch.cuda._is_in_bad_fork", lambda: True)
    monkeypatch.setattr(processes, "can_reach_gpus", lambda: False)
    with StopSignal() as stop:
        asked = {"launcher": "local", "sweep": "test", "time_limit_s": 100, "stop": stop, "log_to_file": True}
        row = execute_run(compose_run_config(*RUN, "strategy=ddp"), tmp_path, **asked)
    assert row["status"] == "ok", row["error"]


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_starter(tmp_path):
    hanging = ("model=gpt_tiny", "model.family=tests.fake_model", "+model.fault=hang:forward:0", "hardware=cpu")
    with starter("forkserver", tmp_path / "killed") as process:
        send(process, *hanging, "strategy=ddp", "gpus=2")
        logs = tmp_path / "killed"
        assert wait_until(lambda: any("fault" in log.read_text() for log in logs.glob("*/*.log")), 120)
        assert len(find_marked_processes("killed")) >= 5  # itself, the forkserver, the store of the ranks, and these
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert wait_until(lambda: not find_marked_processes("killed"), 20), find_marked_processes("killed")


def test_no_module_forks_but_as_the_machine_allows():
    texts = {path.as_posix(): path.read_text() for path in (ROOT / "bench").rglob("*.py")}
    others = "\n".join(text for name, text in texts.items() if not name.endswith("bench/core/processes.py"))
    assert set(re.findall(r"get_context\((.*?)\)", others)) == {'"spawn"'}
    assert "os.fork(" not in others


@pytest.mark.long
@pytest.mark.slow
def test_where_gpus_may_be_reached_even_one_trace_is_made_apart(monkeypatch):
    monkeypatch.setenv("BENCH_CACHE", "")
    monkeypatch.setattr(processes, "can_reach_gpus", lambda: True)
    monkeypatch.setattr(trace_cache, "_loaded_traces", {})
    trace_cache.load_scaled_trace.cache_clear()
    for module, name in ((step_trace, "trace_step"), (stage_trace, "trace_stage")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("traced in this process"))
    config = compose_run_config(*SMALL_GPT, "mode=predict", "strategy=fsdp", "gpus=2", "hardware=a100_80gb")
    assert predict_run(config).memory.allocated.value > 0
    assert 0 < len(trace_cache._loaded_traces) < trace_cache.MIN_TRACES_FOR_PROCESSES


ONE_AFTER_THE_OTHER = """
import json
from bench.core import processes
from bench.planning.run_predictions import predict_configs
from tests.conftest import compose_run_config

processes.can_reach_gpus = lambda: True
asked = ("model=gpt_tiny", "mode=predict", "hardware=h100_80gb", "precision=bf16")
for run in (("strategy=fsdp", "gpus=8"), ("strategy=pipeline", "gpus=4"), ("strategy=ddp", "gpus=8")):
    (told,) = predict_configs([compose_run_config(*asked, *run)])
    print(json.dumps([run[0], getattr(told, "reason", "ok")]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_predictions_follow_each_other_where_autograd_has_threads_for_gpus(fake_cuda):
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER],
        cwd=ROOT,
        env=build_environment(fake_cuda, BENCH_CACHE=""),
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    assert said == dict.fromkeys(("strategy=fsdp", "strategy=pipeline", "strategy=ddp"), "ok")


@pytest.mark.slow
def test_a_run_whose_store_is_killed_is_an_error_at_once(tmp_path):
    hanging = ("model=gpt_tiny", "model.family=tests.fake_model", "+model.fault=hang:init:0", "hardware=cpu", "gpus=2")

    def kill_store() -> None:
        def found() -> list[multiprocessing.process.BaseProcess]:
            return [each for each in multiprocessing.active_children() if each.name == "rendezvous server"]

        assert wait_until(lambda: any("fault" in log.read_text() for log in tmp_path.glob("*/*.log")), 60)
        found()[0].kill()

    killer = threading.Thread(target=kill_store)
    killer.start()
    with StopSignal() as stop:
        asked = {"launcher": "local", "sweep": "test", "time_limit_s": 250, "stop": stop, "log_to_file": True}
        row = execute_run(compose_run_config(*hanging, "strategy=ddp"), tmp_path, **asked)
    killer.join()
    assert (row["status"], row["error"]) == ("error", "the store in which its ranks find each other was killed")


class Unkillable:
    """A rank that hangs where no signal reaches it; the real thing needs a driver that hangs."""

    exitcode = None

    def __init__(self, *_: object, **__: object) -> None:
        self.sentinel, self._other = os.pipe()

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float) -> None:
        assert timeout <= ranks.KILL_TIMEOUT_S

    def is_alive(self) -> bool:
        return True


def test_a_rank_that_cannot_be_killed_ends_the_sweep_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "KILL_TIMEOUT_S", 0.1)
    receiver, sender = processes.get_mp_context().Pipe(duplex=False)
    started = [ranks.RankProcess(0, Unkillable(), receiver, [1])]  # type: ignore[arg-type]
    monkeypatch.setattr(run_on_host, "start_ranks", lambda *_, **__: started)
    config = compose_run_config(*RUN, "strategy=ddp")
    tasks = [LaunchTask(config), LaunchTask(compose_run_config(*RUN, "strategy=fsdp"))]
    folder = tmp_path / "job"
    folder.mkdir()
    worker = Worker(tasks, tmp_path, "test", 0.2, folder / "events.jsonl", None)
    with worker.sweep_lock_path.open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        worker()
    row = records.read_latest_row(tmp_path, config.run_id)
    assert row["status"] == "error"  # not timeout: the machine is not what it was
    assert row["error"] == "rank 0 could not be killed: it hangs in the kernel or in a driver, see dmesg"
    sender.close()
    events = [json.loads(line) for line in worker.events_path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "stuck"]
    assert "Nothing more can be measured on this machine" in events[-1]["error"]
    assert records.read_latest_row(tmp_path, tasks[1].config.run_id) is None


def test_a_killed_ranks_message_keeps_what_failed_first():
    first = RankOutcome(1, "here", status="error", error="RuntimeError: NCCL error", phase="forward", failed_at=1.0)
    ended = [RankExit(0, exit_description="was killed by SIGABRT"), RankExit(1, first)]
    row = build_outcome_columns(compose_run_config(*RUN, "strategy=ddp"), ended)
    assert row == {
        "status": "error",
        "error": "rank 0 was killed by SIGABRT; rank 1, forward: RuntimeError: NCCL error",
    }


# --- Text that users typed and rows brought along is shown as it is.


def shown(thing: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=100).print(thing)
    return file.getvalue()


def test_markup_emoji_codes_and_control_characters_are_plain_text():
    assert shown("[/a] [red]x[/red] :smile:") == "[/a] [red]x[/red] :smile:\n"
    assert shown("a\x1b[31mb\udcffc\nd") == "a\\x1b[31mb\\udcffc\nd\n"
    table = Table()
    table.add_row("[/b]\x1b]0;title\a")
    assert "[/b]\\x1b]0;title\\x07" in shown(table)


def test_a_refusal_is_one_line_whatever_was_typed():
    assert str(UsageError("model=\x1b[2J\nx is not valid.")) == r"model=\x1b[2J\nx is not valid."


def test_a_name_that_looks_like_markup_is_planned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(["model=t5_tiny", "model.name='[/a]'", "hardware=a100_80gb", "mode=predict", "dry_run=true"]) == 0
    assert "[/a]" in capsys.readouterr().out


USE_THREADS_THEN_FORK = """
import torch
from bench.core import processes

def add_up():
    return float(torch.ones(2000, 2000).tril().sum())

torch.set_num_threads(2)
here = add_up()
with processes.open_worker_pool(1) as pool:
    assert pool.submit(add_up).result(timeout=60) == here
"""


def test_a_worker_computes_where_its_parent_did_so_with_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", USE_THREADS_THEN_FORK], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_work_is_shared_once() -> None:
    """Not again by each of several processes that share it; a process that works alone may share what it does."""
    everything = processes.count_workers()
    assert everything == os.cpu_count()
    for workers, expected in ((1, everything), (2, 1)):
        with processes.open_worker_pool(workers) as pool:
            assert pool.submit(processes.count_workers).result(timeout=60) == expected


DISCARD_PROCESS_GROUP_THEN_FORK = """
import gc, os, types
import torch
import torch.distributed as dist
from bench.core import processes

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
discarded = types.SimpleNamespace(group=dist.group.WORLD)
discarded.itself = discarded
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
del discarded
with processes.open_worker_pool(1) as pool:
    pool.submit(gc.collect).result(timeout=60)
assert gc.collect(), "there was nothing to destroy"
"""


def test_a_worker_leaves_alone_what_its_parent_discarded() -> None:
    """The destructor of gloo's process group would wait there forever for threads that the parent has."""
    done = subprocess.run(
        [sys.executable, "-c", DISCARD_PROCESS_GROUP_THEN_FORK], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


LEAKY_IMPORT = """
def keep_own_frame():
    try:
        raise ValueError
    except ValueError as error:
        kept = error  # frame, exception and traceback hold each other, and through the traceback all callers' frames

keep_own_frame()
"""

PRELOADING = """
import weakref
from bench.core.processes import preload_modules

class Result: pass

def compute():
    preload_modules(("leaky",))
    result = Result()
    return weakref.ref(result)

assert compute()() is None
"""


@pytest.mark.slow
def test_what_is_computed_after_preloading_does_not_stay_in_memory(tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(LEAKY_IMPORT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", PRELOADING], env=environment, check=True)
