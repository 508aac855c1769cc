"""While memory is observed, collectives on a CPU let go of their tensors before they return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from bench.rank.tensor_release import count_references, wait_for_tensor_release

OPERATORS = torch.ops._c10d_functional
COLLECTIVES: dict[str, Callable[[torch.Tensor, str], torch.Tensor]] = {
    "all_reduce": lambda tensor, group: OPERATORS.all_reduce(tensor, "sum", group),
    "all_gather": lambda tensor, group: OPERATORS.all_gather_into_tensor(tensor, 2, group),
    "reduce_scatter": lambda tensor, group: OPERATORS.reduce_scatter_tensor(tensor, "sum", 2, group),
    "all_to_all": lambda tensor, group: OPERATORS.all_to_all_single(
        tensor, _list_unequal_parts(tensor), _list_unequal_parts(tensor), group
    ),
}
CALLS = 300
"""Of each: without waiting for threads of gloo, these hold some 3 of 100 tensors a moment longer."""


@pytest.mark.long
@pytest.mark.slow
def test_nobody_holds_a_tensor_of_a_collective_that_was_waited_for(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_count_held_tensors, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        held, results = torch.load(tmp_path / f"{rank}.pt")
        assert held == dict.fromkeys(COLLECTIVES, 0)
        assert results == torch.load(tmp_path / f"expected{rank}.pt"), "as torch's own operators compute it"


def _count_held_tensors(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    expected = {name: _call(name, _make_input(rank)).tolist() for name in COLLECTIVES}
    held = dict.fromkeys(COLLECTIVES, 0)
    results = {}
    with wait_for_tensor_release():
        for name in COLLECTIVES:
            for _ in range(CALLS):
                tensor = _make_input(rank)
                references = count_references(tensor)
                results[name] = _call(name, tensor).tolist()
                held[name] += count_references(tensor) > references
    torch.save((held, results), f"{folder}/{rank}.pt")
    torch.save(expected, f"{folder}/expected{rank}.pt")
    dist.destroy_process_group()


def _list_unequal_parts(tensor: torch.Tensor) -> list[int]:
    """A quarter for the rank itself, what is left for the other."""
    parts = [len(tensor) // 4, 3 * len(tensor) // 4]
    return parts if dist.get_rank() == 0 else parts[::-1]


def _make_input(rank: int) -> torch.Tensor:
    return torch.arange(1 << 10, dtype=torch.float32) + rank


def _call(name: str, tensor: torch.Tensor) -> torch.Tensor:
    assert dist.group.WORLD is not None
    result: torch.Tensor = OPERATORS.wait_tensor(COLLECTIVES[name](tensor, dist.group.WORLD.group_name))
    return result
