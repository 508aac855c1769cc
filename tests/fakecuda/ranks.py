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

RANKS_TIMEOUT_S = 120.0
"""After which ranks that say nothing are given up."""

OTHER_RANKS_TIMEOUT_S = 1.0
"""How long the others may take to say something when one has failed."""


def run_ranks(settings: dict[str, str], *, device: str, sanitize: bool, before: str) -> list[dict[str, Any]]:
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
    from bench.config.compose import compose_config
    from bench.config.run_config import build_run_config

    config = build_run_config(compose_config({"hardware": "h100_80gb" if device == "cuda" else "cpu", **settings}))
    fork = multiprocessing.get_context("fork")
    results: list[dict[str, Any]] = [{"outcome": {"status": "silent", "error": ""}}] * config.active_processes
    with tempfile.TemporaryDirectory() as folder:
        pending_ranks, processes = {}, []
        for rank in range(config.active_processes):
            receiver, sender = fork.Pipe(duplex=False)
            arguments = (config, rank, device, sanitize, before, folder, sender)
            processes.append(fork.Process(target=_run_rank, args=arguments, daemon=True))
            processes[-1].start()
            sender.close()
            pending_ranks[receiver] = rank
        deadline = time.monotonic() + RANKS_TIMEOUT_S
        while pending_ranks and (ready := connection.wait(list(pending_ranks), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = pending_ranks.pop(pipe)
                with contextlib.suppress(EOFError):
                    results[rank] = pipe.recv()
                if results[rank]["outcome"]["status"] != "ok":
                    deadline = min(deadline, time.monotonic() + OTHER_RANKS_TIMEOUT_S)
        for process in processes:
            process.kill()
            process.join()
    return results


def evaluate_script(script: str, *, ranks: int = 1) -> list[Any]:
    """What a script leaves in `result`, in processes of its own that have the fake CUDA.

    Parameters
    ----------
    ranks: int
        Processes, in which the script finds its `rank`, the `port` of their store and torchrun's variables.
    """
    from bench.launch.ranks import serve_tcp_store

    store = serve_tcp_store("127.0.0.1")
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        receiver, sender = fork.Pipe(duplex=False)
        pipes.append(receiver)
        processes.append(
            fork.Process(target=_evaluate_in_rank, args=(script, rank, ranks, store.port, sender), daemon=True)
        )
        processes[-1].start()
        sender.close()
    try:
        return [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _evaluate_in_rank(script: str, rank: int, ranks: int, port: int, pipe: connection.Connection) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the answers go there
    rank_variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in rank_variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    _install_fake_cuda()
    namespace: dict[str, Any] = {"rank": rank, "port": port}
    try:
        exec(script, namespace)
    except BaseException:
        namespace["result"] = traceback.format_exc()
    pipe.send(namespace["result"])
    pipe.close()
    os._exit(0)


def _install_fake_cuda() -> None:
    """Start the fake CUDA in this process."""
    from tests.fakecuda import nccl, nvml, profiler, runtime

    runtime.install()
    nccl.install()
    nvml.install()
    profiler.install()


def _run_rank(
    config: Any, rank: int, device: str, sanitize: bool, before: str, folder: str, pipe: connection.Connection
) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the answers go there
    from bench.rank.coordinates import RankCoordinates
    from bench.rank.run_rank import run_rank
    from tests.fakecuda import nccl, runtime

    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        if device == "cuda":
            _install_fake_cuda()
            if sanitize:
                from tests.fakecuda import sanitizer

                stack.enter_context(sanitizer.create_sanitizer_mode())
        exec(before, {})
        store = str(Path(folder) / "store")
        outcome = run_rank(
            config,
            RankCoordinates(rank, rank, config.active_processes),
            lambda: dist.FileStore(store, config.active_processes),
            Path(folder) / "trace.json.gz",
            lambda phase: runtime.log_call(f"- {phase}"),
        )
    log = {"calls": runtime.CALLS, "times": runtime.CALL_TIMES_S, "groups": nccl.GROUPS}
    pipe.send({"outcome": dataclasses.asdict(outcome), **log})
    pipe.close()
    os._exit(0)


def main() -> None:
    """Answer until there is nothing more to run."""
    import torch._dynamo  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.t5.modeling_t5  # noqa: F401

    import bench.rank.run_rank  # noqa: F401

    gc.freeze()  # ranks collect garbage before they measure: not among what is imported here
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer: Any = evaluate_script(**request) if "script" in request else run_ranks(**request)
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
