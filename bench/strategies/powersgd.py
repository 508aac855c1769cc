"""PowerSGD as a communication hook of DDP: of each gradient matrix two narrow factors are all-reduced.

Vogels et al. 2019, arXiv:1905.13727, as ``torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`` of torch 2.13
carries it out, with error feedback and warm start: what is lost in one step is added to the next one's gradient, and
the factors of one step are where the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.strategies.plan_inputs import ParameterSpec
from bench.strategies.step_plan import REDUCE_STREAM, REDUCTION_MEMORY, WORLD_GROUP, PlanDevice

MIN_COMPRESSION_RATE = 2
"""A matrix is sent as factors if they are less than 1 / this of it (torch's default)."""

MIN_POWERSGD_START_ITER = 2
"""DDP makes its buckets anew after the first backward pass it reduces, and what is kept from one to the next belongs to
a bucket."""

KERNELS_PER_COLUMN, KERNELS_PER_PROJECTION = 3, 4
"""Kernels that normalise a column of a factor, and that take it out of those after it. From rank 3 on torch takes a QR
decomposition instead: not known to be faster or slower, and counted as the same."""


class PowerSGDPlan:
    """What compressing buckets keeps, sends and takes. Sizes are of elements in the gradients' format."""

    def __init__(self, approximation_rank: int, itemsize: int) -> None:
        self._approximation_rank = approximation_rank
        self._itemsize = itemsize

    def allocate_persistent_state(self, device: PlanDevice, parameters: Sequence[ParameterSpec]) -> None:
        """From one step to the next: what was lost of every gradient, and the factors."""
        device.allocate("errors", sum(parameter.numel for parameter in parameters) * self._itemsize, REDUCTION_MEMORY)
        device.allocate(
            "factors", sum(map(sum, map(self.compute_factor_numels, parameters))) * self._itemsize, REDUCTION_MEMORY
        )

    def compute_factor_numels(self, parameter: ParameterSpec) -> tuple[int, int]:
        """Elements of the two factors a gradient is sent as; none if it is sent as it is."""
        rows = parameter.shape[0]
        columns = parameter.numel // rows
        factor_columns = min(rows, columns, self._approximation_rank)
        if (rows + columns) * factor_columns * MIN_COMPRESSION_RATE >= rows * columns:
            return 0, 0
        return rows * factor_columns, columns * factor_columns

    def all_reduce_bucket(self, device: PlanDevice, name: str, parameters: Sequence[ParameterSpec]) -> str:
        """A bucket: add what was lost before, send, put together again, note what is lost.

        On a GPU the hook ends by waiting for the device (``torch.cuda.synchronize``), so nothing of it is hidden behind
        backward: products of matrices as narrow are bound by reading the gradient, and each all-reduce waits for what
        was computed before.

        Returns
        -------
        str
            The name of what was sent last.
        """
        bucket_bytes = sum(parameter.numel for parameter in parameters) * self._itemsize
        factor_numels = [self.compute_factor_numels(parameter) for parameter in parameters]
        compressed_parameters = [
            parameter for parameter, (first_numel, _) in zip(parameters, factor_numels, strict=True) if first_numel
        ]
        uncompressed_bytes = bucket_bytes - sum(parameter.numel for parameter in compressed_parameters) * self._itemsize
        device.run_hooks()
        device.copy_within_device("add errors", 3 * bucket_bytes)
        device.allocate(f"{name} copy", bucket_bytes, REDUCTION_MEMORY)
        device.copy_within_device("copy", 2 * bucket_bytes)
        device.allocate(f"{name} whole", uncompressed_bytes, REDUCTION_MEMORY)
        device.copy_within_device("collect what is sent whole", 2 * uncompressed_bytes)
        self._orthogonalise_factors(device, compressed_parameters)
        self._multiply_matrices(device, compressed_parameters)
        self._all_reduce_and_wait(device, f"{name} whole", uncompressed_bytes)
        device.copy_within_device("put back what is sent whole", 2 * uncompressed_bytes)
        self._all_reduce_and_wait(
            device, f"{name} first", sum(first_numel for first_numel, _ in factor_numels) * self._itemsize
        )
        self._orthogonalise_factors(device, compressed_parameters)
        self._multiply_matrices(device, compressed_parameters)
        self._all_reduce_and_wait(
            device, f"{name} second", sum(second_numel for _, second_numel in factor_numels) * self._itemsize
        )
        self._multiply_matrices(device, compressed_parameters)
        device.allocate(f"{name} errors", bucket_bytes, REDUCTION_MEMORY)
        device.copy_within_device("errors", 3 * bucket_bytes)
        for buffer in ("copy", "whole", "errors"):
            device.free(f"{name} {buffer}")
        device.note_late_free()
        device.limit_all_gathers(1)
        return f"{name} second"

    def _all_reduce_and_wait(self, device: PlanDevice, name: str, size: int) -> None:
        device.run_collective(name, "all-reduce", size, WORLD_GROUP, REDUCE_STREAM, after="compute")
        device.wait_for_event(name)

    def _orthogonalise_factors(self, device: PlanDevice, compressed_parameters: Sequence[ParameterSpec]) -> None:
        """The columns of one factor of each matrix, which are few and short: only starting the kernels takes time."""
        for parameter in compressed_parameters:
            factor_columns = min(parameter.shape[0], parameter.numel // parameter.shape[0], self._approximation_rank)
            for _ in range(KERNELS_PER_COLUMN * factor_columns + KERNELS_PER_PROJECTION * (factor_columns - 1)):
                device.copy_within_device("orthogonalise", 0.0)

    def _multiply_matrices(self, device: PlanDevice, compressed_parameters: Sequence[ParameterSpec]) -> None:
        """A product per matrix, which reads or writes the matrix once."""
        for parameter in compressed_parameters:
            device.copy_within_device("product", parameter.numel * self._itemsize)
