"""Where a rank stands.

Without torch: a task of SLURM reads its rank before it is ready for signals, and importing torch would make that
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankCoordinates:
    """Where a rank stands in its run and on its machine."""

    rank: int
    local_rank: int
    world_size: int

    def select_device(self, device_type: str) -> torch.device:
        """The rank's own device: its local rank's among all GPUs of the machine, or the only one it is shown."""
        import torch

        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else self.local_rank)

    def list_node_ranks(self, ranks_per_node: int) -> list[int]:
        """The ranks of its machine, itself included."""
        first_rank = self.rank - self.local_rank
        return list(range(first_rank, min(first_rank + ranks_per_node, self.world_size)))
