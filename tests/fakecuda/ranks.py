"""Runs on the fake CUDA: a process that forks the ranks of one run after another and says what became of them.

``python -m tests.fakecuda.ranks`` reads one run per line from its input, as JSON, and answers each with one line. It
does the imports once. Nothing in it touches the device before it forks, and each rank starts its own CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 120.0
"""After which ranks that say nothing are given up."""

GRACE_S = 1.0
"""How long the others may take to say something when one has failed."""


def run(settings: dict[str, str], *, device: str, sanitize: bool, before: str) -> list[dict[str, Any]]:
    """All ranks of a run, one process each: for each its outcome, what it asked of CUDA and when, and its groups.

    Parameters
    ----------
    settings: dict
        Values by key, as the command line takes them.
    device: str
        cuda (the fake one), or cpu to compare with.
    sanitize: bool
        Have torch's CUDA sanitizer look for work in one stream that does not wait for another's.
    before: str
        Python to execute in each rank before it starts: a bug, planted.
    """
    from bench.config import run_config
    from bench.planning.compose import composed

    config = run_config(composed({"hardware": "h100_80gb" if device == "cuda" else "cpu", **settings}))
    fork = multiprocessing.get_context("fork")
    found: list[dict[str, Any]] = [{"outcome": {"status": "silent", "error": ""}}] * config.processes
    with tempfile.TemporaryDirectory() as folder:
        waiting, processes = {}, []
        for rank in range(config.processes):
            receiver, sender = fork.Pipe(duplex=False)
            arguments = (config, rank, device, sanitize, before, folder, sender)
            processes.append(fork.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            sender.close()
            waiting[receiver] = rank
        deadline = time.monotonic() + PATIENCE_S
        while waiting and (ready := connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                with contextlib.suppress(EOFError):
                    found[rank] = pipe.recv()
                if found[rank]["outcome"]["status"] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for process in processes:
            process.kill()
            process.join()
    return found


def evaluate(script: str, *, ranks: int = 1) -> list[Any]:
    """What a script leaves in `result`, in processes of its own that have the fake CUDA.

    Parameters
    ----------
    ranks: int
        Processes, in which the script finds its `rank`, the `port` of their store and torchrun's variables.
    """
    from bench.rendezvous import listening_store

    store = listening_store("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        receiver, sender = fork.Pipe(duplex=False)
        pipes.append(receiver)
        processes.append(fork.Process(target=_evaluate, args=(script, rank, ranks, store.port, sender), daemon=True))
        processes[-1].start()
        sender.close()
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _evaluate(script: str, rank: int, ranks: int, port: int, pipe: connection.Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the answers go there
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    _start()
    names: dict[str, Any] = {"rank": rank, "port": port}
    try:
        exec(script, names)
    except BaseException:
        names["result"] = traceback.format_exc()
    pipe.send(names["result"])
    pipe.close()
    os._exit(0)


def _start() -> None:
    """Start the fake CUDA in this process."""
    from tests.fakecuda import nccl, nvml, profiler, runtime

    runtime.install()
    nccl.install()
    nvml.install()
    profiler.install()


def _rank(
    config: Any, rank: int, device: str, sanitize: bool, before: str, folder: str, pipe: connection.Connection
) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the answers go there
    from bench.rank import RankPlace, run_rank
    from tests.fakecuda import nccl, runtime

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            _start()
            if sanitize:
                from tests.fakecuda import sanitizer

                stack.enter_context(sanitizer.mode())
        exec(before, {})
        store = str(Path(folder) / "store")
        outcome = run_rank(
            config,
            RankPlace(rank, rank, config.processes),
            lambda: dist.FileStore(store, config.processes),
            Path(folder) / "trace.json.gz",
            lambda phase: runtime.note(f"- {phase}"),
        )
    log = {"calls": runtime.CALLS, "times": runtime.TIMES_S, "groups": nccl.GROUPS}
    pipe.send({"outcome": dataclasses.asdict(outcome), **log})
    pipe.close()
    os._exit(0)


def main() -> None:
    """Answer until there is nothing more to run."""
    import torch._dynamo  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.t5.modeling_t5  # noqa: F401

    import bench.rank  # noqa: F401

    gc.freeze()  # ranks collect garbage before they measure: not among what is imported here
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            answer: Any = evaluate(**asked) if "script" in asked else run(**asked)
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
