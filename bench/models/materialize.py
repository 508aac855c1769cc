"""Give a model that was built on meta its weights: the same values however it is sharded."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, distribute_tensor

from bench.models.base import Family

USUAL_STD = 0.02
"""GPT-2's, for parameters that nobody draws at random otherwise."""

SAME_EVERYWHERE_ELEMENTS = 2**20
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
        self._names = {
            (id(module), name): first_name[id(parameter)]
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._parameters = {id(parameter): (parameter, name) for name, parameter in model.named_parameters()}
        self._done: dict[str, nn.Parameter] = {}
        self._keep_on_cpu = False
        self.arrange: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, whole: whole
        """Puts a whole parameter, drawn by its name, into the order in which it is sharded."""

    def of_part(self, part: nn.Module) -> Materializer:
        """What fills a module that was made of the model's parameters: what it shares with others becomes its own."""
        own = copy.copy(self)
        own._names = {
            (id(module), name): self._parameters[id(parameter)][1]
            for module in part.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        own._done = {}
        return own

    def names(self, part: nn.Module) -> list[str]:
        """The names that the whole model has for a part's parameters, while they are still on meta."""
        return [self._parameters[id(parameter)][1] for parameter in part.parameters()]

    def model(self, model: nn.Module, *, keep_on_cpu: bool = False) -> None:
        """Fill every parameter of `model` that is still on meta, whether whole or sharded (DTensor).

        With `keep_on_cpu` each is drawn and sharded on the device, then kept on the CPU.
        """
        self._keep_on_cpu = keep_on_cpu
        for module in model.modules():
            self.module(module)

    def module(self, module: nn.Module, *, constants: bool = True) -> None:
        """Fill the parameters that belong to `module` itself, not to its children.

        Without `constants` those that start as ones or zeros are drawn at random like the others.
        """
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, self._filled(self._names[id(module), name], parameter, constants=constants))
        fill_buffers(module, self._family, self._device)
        self._family.store(module)

    def _filled(self, name: str, meta: nn.Parameter, *, constants: bool) -> nn.Parameter:
        if name not in self._done:
            whole = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
            std = self._family.init_std(name, whole)
            if not constants:
                std = std or USUAL_STD
            if std is None:
                whole.fill_(1.0)
            elif std == 0:
                whole.zero_()
            else:
                self._draw(name, whole, std)
            value = whole
            if isinstance(meta, DTensor):
                arranged = self.arrange(name, whole)
                value = distribute_tensor(arranged, meta.device_mesh, meta.placements, src_data_rank=None)
            value = value.cpu() if self._keep_on_cpu else value
            self._done[name] = nn.Parameter(value, requires_grad=meta.requires_grad)
        return self._done[name]

    def _draw(self, name: str, whole: torch.Tensor, std: float) -> None:
        """Fill a parameter at random: a small one on the CPU, so that it is the same on every kind of device."""
        digest = hashlib.sha256(f"{self._seed}:{self._family.drawn_as(name)}".encode()).digest()
        device = torch.device("cpu") if whole.numel() <= SAME_EVERYWHERE_ELEMENTS else self._device
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        if device == self._device:
            whole.normal_(std=std, generator=generator)
        else:
            whole.copy_(torch.empty(whole.shape, dtype=whole.dtype).normal_(std=std, generator=generator))


def fill_buffers(module: nn.Module, family: Family, device: torch.device) -> None:
    """Give a module its own buffers, not its children's, on a device: what is on meta gets what the family says.

    Raises
    ------
    ImpossibleError
        If the family does not say what a buffer holds.
    """
    for name, buffer in module.named_buffers(recurse=False):
        value = family.buffer(module, name, device) if buffer.is_meta else buffer.to(device)
        module.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)


@functools.lru_cache(maxsize=64)
def buffers_bytes(family: Family) -> int:
    """Bytes of all buffers of a family's model, of which every device has a copy."""
    model = family.build()
    if not any(True for _ in model.buffers()):
        return 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            fill_buffers(module, family, torch.device("cpu"))
    return sum({id(each): each.nbytes for each in model.buffers()}.values())
