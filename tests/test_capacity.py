"""A CPU run that would exhaust the machine is refused before it starts."""

from __future__ import annotations

import pytest

from bench.errors import ImpossibleError
from bench.launch.capacity import model_state_bytes, refuse_what_exhausts_this_machine
from tests.conftest import configuration

GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        (("gpus=1",), 16),  # fp32 parameters and gradients, two states of AdamW
        (("gpus=4",), 16),  # fully sharded, however many share it
        (("gpus=4", "strategy.sharding_factor=2"), 32),
        (("gpus=4", "strategy=ddp"), 64),
        (("gpus=1", "precision=bf16_pure"), 8),
        (("gpus=1", "optimizer=sgd"), 8),
    ],
)
def test_model_state_is_counted_as_the_strategies_keep_it(overrides: tuple[str, ...], bytes_per_parameter: int) -> None:
    config = configuration("model=gpt_1b3", *overrides)
    # Norms, biases and learned positions multiply no tokens: the count is a little low, never high.
    state = model_state_bytes(config)
    assert 0.98 < state / (bytes_per_parameter * config.model.num_parameters) <= 1


def test_what_exhausts_the_machine_is_refused() -> None:
    config = configuration("model=t5_11b", "gpus=8")
    with pytest.raises(ImpossibleError, match=r"needs at least 168 GiB.*this machine has 24 GiB"):
        refuse_what_exhausts_this_machine(config, 24 * GIB)
    refuse_what_exhausts_this_machine(config, 512 * GIB)


def test_a_memory_limit_lets_it_try() -> None:
    refuse_what_exhausts_this_machine(configuration("model=t5_11b", "gpus=8", "hardware.memory_limit_gib=2"), 24 * GIB)
    with pytest.raises(ImpossibleError):
        refuse_what_exhausts_this_machine(
            configuration("model=t5_11b", "gpus=8", "hardware.memory_limit_gib=20"), 24 * GIB
        )
