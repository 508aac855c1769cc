"""Give a model that was built on meta its weights: the same values however it is sharded."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bench.core.units import MIB
from bench.models.base import Family

DEFAULT_STD = 0.02
"""GPT-2's, for parameters that nobody draws at random otherwise."""

MAX_CPU_DRAWN_NUMEL = MIB
"""Up to this size parameters are drawn on the CPU: models of a few million parameters have equal losses on CPU and GPU
(`bench.check`). Larger ones are drawn where they go, which takes a GPU no time."""


class Materializer:
    """Fills the parameters of a model with random values that depend on their names and the seed alone.

    Each parameter is drawn whole from a generator of its own, and a sharded one then keeps its shard: one process,
    DDP and FSDP at every factor start from equal weights, and no rank ever holds more than one whole parameter
    besides its own. Tied parameters stay tied.

    Create it before the model is wrapped, since it remembers every parameter's name.

    Parameters
    ----------
    model: nn.Module
        On meta.
    family: Family
        Says how each parameter is distributed.
    device: torch.device
        Where the parameters go.
    seed: int
        Seed of all weights.
    """

    def __init__(self, model: nn.Module, family: Family, device: torch.device, seed: int) -> None:
        self._family = family
        self._device = device
        self._seed = seed
        first_name = {id(parameter): name for name, parameter in model.named_parameters()}
        self._name_of_parameter = {
            (id(module), name): first_name[id(parameter)]
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        self.note_replaced_parameters(model)
        self._filled_parameters: dict[str, nn.Parameter] = {}
        self._keep_on_cpu = False
        self.arrange_parameter: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, full_parameter: (
            full_parameter
        )
        """Puts a whole parameter, drawn by its name, into the order in which it is sharded."""

    def note_replaced_parameters(self, model: nn.Module) -> None:
        """Again after layers were divided: parameters that took the places of others have their names."""
        self._parameters = {
            id(parameter): (parameter, self._name_of_parameter[id(module), name])
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }

    def build_for_part(self, part: nn.Module) -> Materializer:
        """What fills a module that was made of the model's parameters: what it shares with others becomes its own."""
        part_materializer = copy.copy(self)
        part_materializer._name_of_parameter = {
            (id(module), name): self._parameters[id(parameter)][1]
            for module in part.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        part_materializer._filled_parameters = {}
        return part_materializer

    def list_parameter_names(self, part: nn.Module) -> list[str]:
        """The names that the whole model has for a part's parameters, while they are still on meta."""
        return [self._parameters[id(parameter)][1] for parameter in part.parameters()]

    def fill_model(self, model: nn.Module, *, keep_on_cpu: bool = False) -> None:
        """Fill every parameter of `model` that is still on meta, whether whole or sharded (DTensor).

        With `keep_on_cpu` each is drawn and sharded on the device, then kept on the CPU.
        """
        self._keep_on_cpu = keep_on_cpu
        for module in model.modules():
            self.fill_module(module)

    def fill_module(self, module: nn.Module, *, constants: bool = True) -> None:
        """Fill the parameters that belong to `module` itself, not to its children.

        Without `constants` those that start as ones or zeros are drawn at random like the others.
        """
        drawn_names = {}
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                drawn_names[name] = self._name_of_parameter[id(module), name]
                setattr(module, name, self._fill_parameter(drawn_names[name], parameter, constants=constants))
        fill_buffers(module, self._family, self._device)
        if drawn_names:
            self._family.convert_drawn_parameters(module)
        for name, model_name in drawn_names.items():
            if getattr(module, name) is not self._filled_parameters[model_name]:  # converted: its memory is freed
                del self._filled_parameters[model_name]

    def _fill_parameter(self, name: str, meta_parameter: nn.Parameter, *, constants: bool) -> nn.Parameter:
        if name not in self._filled_parameters:
            full_parameter = torch.empty(meta_parameter.shape, dtype=meta_parameter.dtype, device=self._device)
            std = self._family.find_init_std(name, full_parameter)
            if not constants:
                std = std or DEFAULT_STD
            if std is None:
                full_parameter.fill_(1.0)
            elif std == 0:
                full_parameter.zero_()
            else:
                self._draw_values(name, full_parameter, std)
            value = full_parameter
            if isinstance(meta_parameter, DTensor):
                value = take_part(self.arrange_parameter(name, full_parameter), meta_parameter)
            value = value.cpu() if self._keep_on_cpu else value
            self._filled_parameters[name] = nn.Parameter(value, requires_grad=meta_parameter.requires_grad)
        return self._filled_parameters[name]

    def _draw_values(self, name: str, full_parameter: torch.Tensor, std: float) -> None:
        """Fill a parameter at random: a small one on the CPU, so that it is the same on every kind of device."""
        digest = hashlib.sha256(f"{self._seed}:{self._family.find_seed_name(name)}".encode()).digest()
        device = torch.device("cpu") if full_parameter.numel() <= MAX_CPU_DRAWN_NUMEL else self._device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        if device == self._device:
            full_parameter.normal_(std=std, generator=generator)
        else:
            full_parameter.copy_(
                torch.empty(full_parameter.shape, dtype=full_parameter.dtype).normal_(std=std, generator=generator)
            )


def take_part(whole: torch.Tensor, divided: DTensor) -> DTensor:
    """What this rank has of a parameter, in whose place there is a DTensor on meta.

    FSDP2 divides what other kinds of parallelism have left of a dimension. `distribute_tensor` gives other rows where
    their number is uneven: of 2,457 over 2 x 4 ranks one has 306, which FSDP2 takes for 305 (torch 2.13).
    """
    mesh, part = divided.device_mesh, whole
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    placements: list[tuple[int, Any]] = list(enumerate(divided.placements))
    for mesh_dim, placement in sorted(placements, key=lambda pair: isinstance(pair[1], _StridedShard)):
        if isinstance(placement, (Shard, _StridedShard)):
            parts, index = part.chunk(mesh.size(mesh_dim), placement.dim), coordinates[mesh_dim]
            part = parts[index] if index < len(parts) else part.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        part if part is whole else part.clone(memory_format=torch.contiguous_format),
        mesh,
        divided.placements,
        run_check=False,
        shape=divided.shape,
        stride=divided.stride(),
    )


def fill_buffers(module: nn.Module, family: Family, device: torch.device) -> None:
    """Give a module its own buffers, not its children's, on a device: what is on meta gets what the family says.

    Raises
    ------
    ImpossibleError
        If the family does not say what a buffer holds.
    """
    for name, buffer in module.named_buffers(recurse=False):
        value = family.build_buffer(module, name, device) if buffer.is_meta else buffer.to(device)
        module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


def count_buffer_bytes(family: Family, num_ranks: int = 1) -> int:
    """Bytes that each of so many ranks has of all buffers of a family's model: all, unless the model divides them."""
    return family.count_divided_buffer_bytes(num_ranks) if family.communicates else _count_whole_buffer_bytes(family)


@functools.lru_cache(maxsize=64)
def _count_whole_buffer_bytes(family: Family) -> int:
    model = family.build_model()
    if not any(True for _ in model.buffers()):
        return 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            fill_buffers(module, family, torch.device("cpu"))
    return sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values())
