"""What every strategy says and does: which world sizes it takes, how it wraps a model, when it communicates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bench import plugins
from bench.errors import ImpossibleError, bad_value
from bench.models import Family
from bench.models.materialize import Materializer
from bench.precision import AUTOCAST, Precision
from bench.strategies.pipeline_plan import RankPlan, StageUnits
from bench.strategies.pipeline_schedule import Timetable
from bench.strategies.plan import Plan, Setting
from bench.strategies.split import Split
from bench.strategies.stepper import Stepper

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""The optimizer that was asked for, over some parameters."""


@dataclass(frozen=True)
class Job:
    """What a strategy needs to know of the run it wraps a model for."""

    family: Family
    precision: Precision
    device: torch.device
    world_size: int
    materializer: Materializer
    rehearsed: bool = False
    """Only the first rank is there, and its shards stand for those of the others."""
    build_optimizer: BuildOptimizer | None = None
    """For frameworks that must be given model and optimizer together; others get it in `Strategy.optimizer`."""
    micro_batches: int = 1
    """Micro-batches whose gradients make one step."""
    mesh: DeviceMesh | None = None
    """For data parallelism within a larger mesh: the part of it that is its own, of dimensions replicas and shards."""


@dataclass(frozen=True)
class Step:
    """How a step is carried out, as far as a framework that carries it out itself may object."""

    micro_batches: int
    synchronize_every_micro_batch: bool
    keep_gradients: bool
    """Gradients are filled with zeros after a step, not freed."""
    compile: bool
    precision: Precision


@dataclass(frozen=True)
class Strategy(ABC):
    """A strategy and its knobs. Subclasses add knobs as fields: each is on the row."""

    name: str
    """File under bench/strategies, or module path, that defines the subclass."""
    sharding_factor: int | str
    """Ranks one copy of the model is spread over: a divisor of the world size, `node` for the ranks of one machine,
    or `full` for the world size."""

    finetunes: ClassVar[tuple[str, ...]] = ("full",)
    """What of a model the strategy can train: full, lora (frozen weights beside others), qlora (quantised ones)."""

    mixings: ClassVar[tuple[str, ...]] = (AUTOCAST,)
    """Ways of mixed precision that the strategy has, of `bench.precision.MIXINGS`: its users' usual one first."""

    other_mixing: ClassVar[str] = "which computes with parameters as they are stored"
    """Why the strategy has no other way of mixed precision than its usual one, as a relative clause."""

    autocast_caches = True
    """Whether autocast keeps what it casts of parameters until the forward pass is over: not of views of others."""

    shards_fp32_apart = False
    """Whether layers that stay in fp32 in fp16 runs are sharded by themselves, where autocast does not see to them."""

    takes_float8 = False
    """Whether it was shown to train a model whose linear layers compute in FP8."""

    def uses_autocast(self, precision: Precision) -> bool:
        """Whether mixed precision is autocast's (else the strategy casts parameters itself)."""
        return (precision.mixing or self.mixings[0]) == AUTOCAST

    def mixed_precision(self, precision: Precision) -> str:
        """Who makes computation narrower than stored parameters, for the row."""
        return AUTOCAST if self.uses_autocast(precision) else "fsdp policy"

    def settled(self, precision: Precision) -> Precision:
        """The precision with one name for each thing: `mixing` is null where nothing is mixed, or in the usual way.

        Raises
        ------
        ImpossibleError
            If the strategy does not have the way of mixed precision that was asked for.
        """
        asked = precision.mixing
        if asked is None:
            return precision
        if precision.mixed and asked not in self.mixings:
            others = _those(lambda each: isinstance(each.mixings, tuple) and asked in each.mixings)
            raise ImpossibleError(
                f"precision.mixing={asked} is not valid for strategy={self.name}, {self.other_mixing}: choose "
                f"{self.mixings[0]}, or strategy {others}."
            )
        usual = asked == self.mixings[0] or not precision.mixed
        return _unasked(precision) if usual else precision

    def resolve(self, world_size: int, ranks_per_node: int, *, accumulates: bool) -> Strategy:
        """The same strategy with every knob that depends on the run as a value, the sharding factor as a number.

        Parameters
        ----------
        accumulates: bool
            Whether micro-batches accumulate gradients without communication.

        Raises
        ------
        ImpossibleError
            If the strategy cannot run at this world size with this factor.
        """
        factor = ranks_asked_for("strategy.sharding_factor", self.sharding_factor, world_size, ranks_per_node)
        resolved = dataclasses.replace(self, sharding_factor=factor)
        resolved.check(world_size)
        return resolved

    @property
    def timetable(self) -> Timetable | None:
        """In which order a rank runs the stages of a pipeline; None where every rank runs the whole model."""
        return None

    @property
    def factor(self) -> int:
        """The sharding factor of a resolved strategy."""
        assert isinstance(self.sharding_factor, int), "resolve the strategy first"
        return self.sharding_factor

    @property
    def offloaded(self) -> str:
        """What is kept in the memory of the machine around the devices, in words; empty for nothing."""
        return ""

    @property
    def uses_host(self) -> bool:
        """Whether something is."""
        return bool(self.offloaded)

    @property
    def reduces_on_host(self) -> bool:
        """Whether ranks exchange tensors that lie in the memory of the machine around their devices, too."""
        return False

    def split(self) -> Split | None:
        """Over how many ranks every layer of the resolved strategy's model is split; None where layers are whole."""
        return None

    def batch_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """Which share of the global batch a rank of the resolved strategy works on, and how many shares there are.

        As many as ranks, unless several ranks work on the same sequences, each with its part of the model: these
        have one share, which is as large as theirs would be together, so that the global batch is the same.
        """
        return rank, world_size

    def state_bytes(self, precision: Precision, states_per_parameter: int, world_size: int) -> float:
        """Least bytes that all ranks of the resolved strategy together have when a backward is over, per parameter:
        itself, its gradient and so many states of the optimizer."""
        return precision.parameter_dtype.itemsize * (2 + states_per_parameter) * world_size / self.factor

    @property
    def settling_steps(self) -> int:
        """Steps of the resolved strategy until one is like all later: optimizer state appears in the first."""
        return 2

    @property
    def steps_before_steady(self) -> int:
        """Steps of the resolved strategy that are not like the later ones. They are taken before any is timed, and
        before memory counts, however few warm-up steps are asked for."""
        return self.settling_steps - 1

    def devices_per_process(self, world_size: int) -> int:
        """Devices that one process of the resolved strategy drives: 1, unless a single process drives them all."""
        return 1

    def plan_beside_first(self, setting: Setting) -> Plan | None:
        """What the devices after the first do, where one process drives several and the first does most: else None."""
        return None

    @property
    def batch_unit(self) -> int:
        """What the batch size per GPU of the resolved strategy must be a multiple of."""
        return 1

    def check(self, world_size: int) -> None:
        """Raise `ImpossibleError` where the resolved strategy makes no sense at this world size."""

    def check_model(self, family: Family, batch_size_per_gpu: int, sequence_length: int) -> None:
        """Raise `ImpossibleError` where the resolved strategy cannot train this model on such batches."""

    def check_device(self, device: str) -> None:
        """Raise `ImpossibleError` where a knob needs a device this is not (cpu or cuda)."""

    def check_precision(self, precision: Precision) -> None:
        """Raise `ImpossibleError` where the strategy cannot train in this precision."""

    def check_optimizer(self, name: str, implementation: str) -> None:
        """Raise `ImpossibleError` where the strategy's parameters cannot be updated that way."""

    def check_finetune(self, name: str) -> None:
        """Raise `ImpossibleError` where the strategy cannot train a part of a model like that."""
        if name not in self.finetunes:
            beside = "quantised weights" if name == "qlora" else "frozen parameters"
            raise ImpossibleError(
                f"finetune={name} is not valid with strategy={self.name}, which is not made to keep {beside} beside "
                f"others: choose finetune={' or '.join(self.finetunes)}, or strategy {that_train(name)}."
            )

    def check_step(self, step: Step) -> None:
        """Raise `ImpossibleError` where the strategy cannot carry out a step like this."""

    def check_installed(self) -> None:
        """Raise `ImpossibleError` where a library that only this strategy needs is missing on this machine."""

    def imports(self, device: str) -> tuple[str, ...]:
        """Modules that take long to import, for ranks to find there when they are forked: such as touch no device."""
        return ()

    @abstractmethod
    def effective(self, world_size: int) -> str:
        """What the strategy comes to at this world size, for the row: ``name/kind``."""

    @abstractmethod
    def wrap(self, model: nn.Module, job: Job) -> nn.Module:
        """Wrap the model, which is on meta with its blocks prepared, and give it its weights."""

    def optimizer(self, module: nn.Module, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer of this rank, over what `wrap` made of the model."""
        return build(module.parameters())

    def stepper(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, keep_gradients: bool
    ) -> Stepper:
        """How gradients are computed and applied: by plain PyTorch, unless a framework does it its own way."""
        return Stepper(optimizer, scaler, keep_gradients)

    def plan(self, setting: Setting) -> Plan:
        """What the strategy stores and sends, and when: what a prediction is made from.

        Raises
        ------
        ImpossibleError
            If nobody has stated it.
        """
        raise ImpossibleError(
            f"strategy={self.name} states no plan, so it cannot be predicted: choose mode=measure, or give it a `plan`."
        )

    def rank_plan(self, stages: Sequence[StageUnits], setting: Setting) -> RankPlan:
        """What a rank of a pipeline holds and reduces for its stages: the plan of strategies that have a timetable.

        Raises
        ------
        ImpossibleError
            If nobody has stated it.
        """
        raise ImpossibleError(
            f"strategy={self.name} states no plan of stages, so it cannot be predicted as a pipeline: choose "
            "mode=measure, or give it a `rank_plan`."
        )

    def widens_outputs(self, precision: Precision) -> bool:
        """Whether the model's outputs are converted to fp32 as they leave it: by frameworks, before any loss."""
        return False

    @contextlib.contextmanager
    def accumulate(self, wrapped: nn.Module, synchronize: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch: reduce its gradients now (`synchronize`) or later."""
        yield

    def grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """The loss scaler for fp16 that knows where this strategy keeps its gradients."""
        return torch.amp.GradScaler(device.type)


@functools.cache
def _unasked(precision: Precision) -> Precision:
    """Without a way of mixing: the same object every time."""
    return dataclasses.replace(precision, mixing=None)


def ranks_asked_for(field: str, asked: int | str, world_size: int, ranks_per_node: int, least: int = 1) -> int:
    """Ranks that a knob means: a divisor of the world size, ``node`` (the ranks of one machine) or ``full`` (all).

    Raises
    ------
    UsageError
        If it is none of these, or fewer than `least`.
    """
    number: int | str = asked
    if isinstance(number, str):
        number = {"full": world_size, "node": min(ranks_per_node, world_size)}.get(number, number)
    if not isinstance(number, int) or number < 1:
        raise bad_value(field, number, f"full, node, or a whole number of at least {least}")
    if world_size % number:
        possible = [str(n) for n in divisors(world_size) if n >= least]
        valid = f"a divisor of the world size, gpus={world_size}: {', '.join(possible)}"
        if not possible:
            valid = f"gpus={number} or a multiple of it, instead of gpus={world_size}"
        raise bad_value(field, number, valid, ImpossibleError)
    if number < least:
        others = f"{least} or more" if world_size >= least else f"gpus={least} or more"
        raise ImpossibleError(
            f"{field}={asked} is not valid with gpus={world_size} and gpus_per_node={ranks_per_node}, where that is "
            f"fewer than {least} ranks: choose {others}, or another strategy."
        )
    return number


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order: of 10^9 in a millisecond."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def require_factor(strategy: Strategy, word: str, factor: int, world_size: int, because: str) -> None:
    """Raise `ImpossibleError` unless the sharding factor asked for is the one that other knobs have decided.

    Parameters
    ----------
    word: str
        What is typed to leave it to them.
    because: str
        What spreads a copy of the model over so many ranks.
    """
    asked = world_size if strategy.sharding_factor == "full" else strategy.sharding_factor
    if asked not in (word, factor):
        valid = f"{word}: {because} over {factor} of gpus={world_size} ranks"
        raise bad_value("strategy.sharding_factor", strategy.sharding_factor, valid, ImpossibleError)


def require_replicas(strategy: Strategy) -> None:
    """Raise `ImpossibleError` unless the sharding factor is 1, for strategies with a whole model on every rank."""
    if strategy.factor != 1:
        raise ImpossibleError(
            f"strategy.sharding_factor={strategy.factor} is not valid for strategy={strategy.name}, which keeps the "
            "whole model on every rank: choose 1, or strategy fsdp or fsdp1."
        )


def require_stored_format(what: str, precision: Precision, otherwise: str = "") -> None:
    """Raise `ImpossibleError` where gradients should be reduced in another format than the one they are stored in.

    Parameters
    ----------
    what: str
        What reduces them as they are: ``strategy=NAME``, perhaps with knobs.
    otherwise: str
        What else to choose, with its comma.
    """
    if precision.reduce_dtype != precision.parameter_dtype:
        raise ImpossibleError(
            f"precision.reduce={precision.reduce} is not valid for {what}, which reduces gradients as they are stored: "
            f"choose {precision.parameters}{otherwise}."
        )


def load_strategy(name: str) -> type[Strategy]:
    """The strategy class that ``bench/strategies/<name>.py``, or the module with that path, defines."""
    return plugins.find("strategy.name", name, sys.modules[__package__], Strategy)


def that_train(finetune: str) -> str:
    """The strategies that can train a part of a model like that, for a sentence."""
    return _those(lambda strategy: finetune in strategy.finetunes)


def that_take_float8() -> str:
    """The strategies that can train a model whose linear layers compute in FP8, for a sentence."""
    return _those(lambda strategy: strategy.takes_float8)


def _those(can: Callable[[type[Strategy]], bool]) -> str:
    package = sys.modules[__package__]
    *names, last = [name for name in plugins.names(package, Strategy) if can(load_strategy(name))]
    return f"{', '.join(names)} or {last}"
