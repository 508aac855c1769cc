"""Collectives while memory is observed: nobody but their caller holds their tensors once they are over."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.rank import memory_probe
from bench.rank.memory_probe import count_references, wait_for_tensor_release

REPETITIONS = 2000
"""The backend's thread lets go late in one of some hundred collectives."""


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """A process group of this process alone: its backend has threads of its own nevertheless."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def all_gather_functional(tensor: torch.Tensor, *, async_op: bool) -> None:
    torch.ops._c10d_functional.all_gather_into_tensor(tensor, 1, dist.group.WORLD.group_name)


def all_gather(tensor: torch.Tensor, *, async_op: bool) -> dist.Work | None:
    return dist.all_gather_into_tensor(torch.empty_like(tensor), tensor, async_op=async_op)


def reduce_to_rank_0(tensor: torch.Tensor, *, async_op: bool) -> dist.Work | None:
    return dist.reduce(tensor, 0, async_op=async_op)


@pytest.mark.parametrize("collective", [all_gather, reduce_to_rank_0])
@pytest.mark.parametrize("async_op", [False, True], ids=["returned", "waited for"])
def test_tensors_are_the_callers_alone_when_a_collective_is_over(
    alone: None, collective: Callable[..., dist.Work | None], async_op: bool
) -> None:
    tensor = torch.ones(8)
    before, original = count_references(tensor), dist.all_reduce
    with wait_for_tensor_release():
        for _ in range(REPETITIONS):
            work = collective(tensor, async_op=async_op)
            assert isinstance(work, dist.Work) == async_op
            if work is not None:
                assert work.wait()
                assert work.is_completed()
                assert torch.equal(work.get_future().wait()[0], tensor)
            del work
            assert count_references(tensor) == before
    assert dist.all_reduce is original


@pytest.mark.slow
def test_a_caller_that_holds_on_to_what_is_gathered_is_not_waited_for_every_time(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed does, of a hundred tensors in a step."""
    monkeypatch.setattr(memory_probe, "RELEASE_TIMEOUT_S", 0.4)
    tensor, views = torch.ones(8), []
    begun = time.monotonic()
    with wait_for_tensor_release():
        for _ in range(100):
            work = all_gather(tensor, async_op=True)
            assert work is not None
            views.append(tensor.view(2, 4))
            work.wait()
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("collective", [all_gather_functional, all_gather, reduce_to_rank_0])
def test_while_the_backend_may_hold_tensors_python_is_never_left_alone_with_them(
    alone: None, collective: Callable[..., dist.Work | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves Python as the only holder gives up a reference of Python's a moment later, which nobody sees: until
    the last look at who holds a tensor, someone else must."""
    seen: list[int] = []
    monkeypatch.setattr(
        memory_probe, "count_references", lambda tensor: seen.append(count_references(tensor)) or seen[-1]
    )
    tensor = torch.ones(8)
    with wait_for_tensor_release():
        work = collective(tensor, async_op=collective is all_gather)
        if work is not None:
            work.wait()
    assert seen[-1] == count_references(tensor) + 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("all_reduce", ("sum",)), ("all_gather_into_tensor", (1,)), ("reduce_scatter_tensor", ("sum", 1))],
)
def test_functional_collectives_are_done_when_they_return_and_stay_operators(
    alone: None, name: str, arguments: tuple[object, ...]
) -> None:
    operator = getattr(torch.ops._c10d_functional, name)
    operands = (torch.arange(8.0), *arguments, dist.group.WORLD.group_name)
    fresh = count_references(torch.empty(0))
    with wait_for_tensor_release():
        assert getattr(torch.ops._c10d_functional, name) is operator  # inductor asks operators for their overloads
        for _ in range(REPETITIONS):
            result = operator(*operands)
            assert count_references(result) == fresh
            assert torch.equal(result, operands[0])
    under_way = operator(*operands)
    assert count_references(under_way) > fresh, "its own kernel is back, which returns before it is done"
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(under_way), operands[0])


def test_threads_of_gloo_are_waited_for_until_they_have_nothing_to_do(monkeypatch) -> None:
    looks = [["S", "R"], ["S", "S"], ["R"], ["S"], ["S"], ["R"]]
    monkeypatch.setattr(memory_probe, "_gloo_thread_states", lambda: looks.pop(0))
    memory_probe.wait_for_gloo_threads()
    assert looks == [["R"]]


@pytest.mark.slow
def test_the_threads_of_a_group_are_found_by_their_name() -> None:
    script = """
import torch, torch.distributed as dist
from bench.rank import memory_probe
assert list(memory_probe._gloo_thread_states()) == []
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(3))
memory_probe.wait_for_gloo_threads()
assert set(memory_probe._gloo_thread_states()) == {"S"}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=Path(__file__).parents[2])
