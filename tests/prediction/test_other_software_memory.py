"""Memory of steps as other software's loop has them, against loops that are written here and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.config.run_config import RunConfig
from bench.models.materialize import Materializer
from bench.prediction.other_software_memory import predict_beside_state, predict_peak
from bench.prediction.predictor import predict_run
from bench.prediction.simulation.other_loop import LossMemory, RankBesideState
from bench.validation.command import list_published_lines
from bench.validation.readings import read_line
from bench.validation.scores import score_readings
from tests.conftest import compose_run_config

STATE = ("parameters", "gradients", "optimizer")

FREED, IN_PLACE = LossMemory(), LossMemory(bytes_per_logit=4.0)

RUN = ("mode=predict", "hardware=cpu", "strategy=single", "gpus=1", "precision=fp32", "sequence_length=64")
MANY_LOGITS = (*RUN, "model=llama_tiny", "batch_size_per_gpu=8")
WIDE_LAYERS = (
    *RUN, "model=llama_tiny", "batch_size_per_gpu=8", "model.vocabulary_size=512", "model.intermediate_size=2048",
)  # fmt: skip


class LiveStorages(TorchDispatchMode):
    """Bytes of all tensors that exist: what an operator uses within itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.references: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note((args, kwargs, result))
        return result

    def note(self, tensors: Any) -> None:
        self.references = {key: pair for key, pair in self.references.items() if not pair[0].expired()}
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.references[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.references.values()))


class InPlaceCrossEntropy(torch.autograd.Function):
    """Mean cross entropy that writes the gradient over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_sums = logits.logsumexp(dim=-1)
        ctx.save_for_backward(logits, labels, log_sums)
        return (log_sums - logits.gather(1, labels[:, None])[:, 0]).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, labels, log_sums = ctx.saved_tensors
        logits.detach().sub_(log_sums[:, None]).exp_()
        logits.detach()[torch.arange(len(labels)), labels] -= 1
        return logits.detach().mul_(gradients[0] / len(labels)), None


def let_go(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss, with nothing of the model's output held by name."""
    return functional.cross_entropy(model(**batch.inputs)["logits"].flatten(0, 1), batch.labels.flatten())


def write_over(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = InPlaceCrossEntropy.apply(
        model(**batch.inputs)["logits"].flatten(0, 1), batch.labels.flatten().clamp(min=0)
    )
    return loss


def measure_peak(config: RunConfig, compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor]) -> int:
    """Bytes at the peak of a second step, of one micro-batch or several equal ones."""
    model = config.model.build_model()
    Materializer(model, config.model, torch.device("cpu"), seed=0).fill_model(model)
    batch = config.model.build_batch(config.batch_size_per_gpu, config.sequence_length, torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with LiveStorages() as storages:
            storages.note((list(model.parameters()), list(model.buffers()), list(optimizer.state.values())))
            optimizer.zero_grad()
            for _ in range(config.gradient_accumulation):
                compute_loss(model, batch).backward()
            optimizer.step()
    return storages.peak


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MANY_LOGITS, id="many logits"),
        pytest.param(WIDE_LAYERS, id="wide layers"),
        pytest.param((*MANY_LOGITS, "gradient_accumulation=2"), id="two micro-batches", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(("loss", "compute_loss"), [(FREED, let_go), (IN_PLACE, write_over)], ids=["freed", "in place"])
def test_peaks_of_other_losses_are_those_of_loops_that_compute_them(
    settings: tuple[str, ...], loss: LossMemory, compute_loss: Callable[..., torch.Tensor]
) -> None:
    config = compose_run_config(*settings)
    assert predict_peak(config, loss=loss) == pytest.approx(measure_peak(config, compute_loss), rel=1e-3)
    assert predict_peak(config, loss=loss) < predict_peak(config)


def test_with_this_suites_loss_the_peak_is_what_a_run_is_predicted_to_have() -> None:
    config = compose_run_config(*MANY_LOGITS)
    assert predict_peak(config) == predict_run(config).memory.allocated.value


# State that is there all the time


def test_what_is_beside_state_has_neither_state_nor_the_optimizers_step() -> None:
    rank = RankBesideState(("parameters", "gradients"), micro_batches=4)
    rank.allocate("weights", 100.0, "parameters")
    rank.allocate("received", 40.0, "activations")
    rank.allocate("sent", 30.0, "activations")
    rank.note_peak(8.0, 0.0, 3.0)
    assert rank.peak.size == 40 / 4 + 8 - 3
    assert rank.state_bytes == {"parameters": 100, "gradients": 0}
    rank.phase = "optimizer"
    rank.allocate("temporary", 1000.0, "temporaries")
    assert rank.peak.size == 15


def test_the_first_stage_has_most_beside_its_state_and_the_last_one_logits() -> None:
    """In 1F1B the first of two stages holds what two micro-batches left, the last one that of one, and logits."""
    config = compose_run_config(
        "mode=predict", "model=llama_tiny", "model.num_layers=8", "strategy=mesh", "gpus=2", "strategy.pipeline=2",
        "strategy.schedule=1f1b", "strategy.micro_batches=4", "batch_size_per_gpu=8", "hardware=h100_80gb",
        "precision=bf16_pure", "sequence_length=64",
    )  # fmt: skip
    first, last = (rank.peak_bytes for rank in predict_beside_state(config, None, STATE))
    same, less = (rank.peak_bytes for rank in predict_beside_state(config, IN_PLACE, STATE))
    assert same == first > less
    assert last - less > 4 * 64 * 2048  # of 4 sequences of a micro-batch, a byte of each logit and more


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "rel"),
    [
        ("llama3_70b_l12_tp1_pp2_dp4_mbc4_cef", 0.03),
        ("llama3_405b_l4_tp8_pp1_dp1_mbc4_cef", 0.03),
        ("llama3_70b_l12_tp1_cp8_pp1_dp1_seq131072_mbc4_cef", 0.03),
        ("llama3_405b_l4_tp2_cp4_pp1_dp1_seq131072_mbc4_cef", 0.03),
    ],
)
def test_megatrons_peaks_on_b200_are_those_that_were_measured(configuration: str, rel: float) -> None:
    """With stages, with layers that ranks share and with divided sequences (SimuMax, results/published)."""
    (line,) = (
        line
        for line in list_published_lines()
        if (line["figure_or_table"], line["metric"]) == (configuration, "peak_memory_allocated")
    )
    reading = read_line(1, line)
    assert reading.reason is None
    (scored,), reasons = score_readings([reading])
    assert not reasons
    assert abs(scored.error) < rel
