"""What FSDP2 and FSDP1 share: knobs, the mesh of a sharding factor, and the name of what it comes to."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.errors import ImpossibleError, require_at_least
from bench.strategies.base import Job, Strategy


@dataclass(frozen=True)
class ShardingStrategy(Strategy):
    """Fully sharded data parallelism: parameters, gradients and optimizer state spread over `sharding_factor` ranks.

    The world is a mesh of W / F replicas by F shards. F = 1 is full replication, F = W full sharding, what lies
    between is hybrid: gather and scatter among the F, all-reduce across the replicas.
    """

    reshard_after_forward: bool
    """Free a unit's gathered parameters after its forward and gather them again in backward (ZeRO-3), or keep them
    until its backward is done (ZeRO-2)."""
    forward_prefetch: bool
    """Issue the next unit's all-gather before the current unit's forward."""
    blocks_per_unit: int
    """Transformer blocks whose parameters are gathered as one."""
    cpu_offload: bool
    """Keep the shards and the optimizer step on the CPU."""

    uses_autocast = False

    def check(self, world_size: int) -> None:
        """Any world size the factor divides."""
        require_at_least("strategy.blocks_per_unit", self.blocks_per_unit, 1)

    def check_device(self, device: str) -> None:
        """Offloading needs a device to offload from."""
        if self.cpu_offload and device == "cpu":
            raise ImpossibleError(
                "strategy.cpu_offload=true is not valid on a CPU, where parameters are already: choose false."
            )

    def effective(self, world_size: int) -> str:
        """Full or hybrid sharding, ZeRO-2 behaviour, or nothing sharded at all."""
        if self.factor == 1:
            return f"{self.name}/{'unsharded' if world_size == 1 else 'full_replication'}"
        kind = "full" if self.factor == world_size else "hybrid"
        if self.reshard_after_forward:
            return f"{self.name}/{kind}_shard"
        return f"{self.name}/{'' if kind == 'full' else 'hybrid_'}shard_grad_op"

    def mesh(self, job: Job) -> DeviceMesh:
        """The mesh (W / F replicas, F shards), its dimensions named as hybrid sharding requires."""
        shape = (job.world_size // self.factor, self.factor)
        return init_device_mesh(job.device.type, shape, mesh_dim_names=("replicate", "shard"))
