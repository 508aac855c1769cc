"""Twenty questions of people with a model and some GPUs, answered by what the page calls, and by bench.predict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from bench import predict
from bench.explorer.answer import ExplorerAnswer, answer_state
from bench.explorer.recorded import find_recorded_rows
from bench.explorer.state import ExplorerState, read_model_file
from bench.explorer.step_timeline import simulate_timeline
from bench.explorer.variations import answer_frontier, answer_neighbours
from bench.explorer.worker import ANSWER, Refusal, compute_part
from tests.conftest import ROOT, needs

pytestmark = pytest.mark.slow

GIB = 2**30

FULL_SHARD = "strategy=fsdp&strategy.sharding_factor=full&strategy.reshard_after_forward=true"
ONE_BATCH = "sequence_length=512&batch_size_per_gpu=1"


@dataclass(frozen=True)
class UserQuestion:
    """What somebody asks, its address, and what the answer must contain."""

    question: str
    query: str
    verdict: str | None
    holds: Callable[[ExplorerAnswer], bool] = lambda answer: True


QUESTIONS = (
    UserQuestion(
        "Can I train all of GPT-2.7B with DDP on RTX 4090s?",
        f"model=gpt_2b7&hardware=rtx_4090&gpus=4&strategy=ddp&activation_checkpointing=full&{ONE_BATCH}",
        "does not fit",  # 16 bytes x 2.7e9 are 40 GiB
        lambda answer: "parameters" in answer.best.misfit,
    ),
    UserQuestion(
        "And when FSDP shards it?",
        f"model=gpt_2b7&hardware=rtx_4090&gpus=4&{FULL_SHARD}&activation_checkpointing=full&{ONE_BATCH}",
        "fits",
        lambda answer: answer.best.memory.parts["parameters"] < 4 * 2.8e9 / 4 * 1.05,
    ),
    UserQuestion(
        "What slows FSDP down on gaming cards without NVLink?",
        f"model=gpt_1b3&hardware=rtx_4090&gpus=8&{FULL_SHARD}&activation_checkpointing=none&{ONE_BATCH}",
        "fits",
        lambda answer: answer.best.limited_by == "network",
    ),
    UserQuestion(
        "Does the same wait for the network on A100s with NVLink?",
        f"model=gpt_1b3&hardware=a100_80gb&gpus=8&{FULL_SHARD}&activation_checkpointing=none&sequence_length=2048"
        "&batch_size_per_gpu=8",
        "fits",
        lambda answer: answer.best.time_parts["exposed communication"] < 0.2 * answer.best.time_parts["compute"],
    ),
    UserQuestion(
        "Does T5-11B train with DDP on A100s, as in the paper's Figure 6(a)?",
        "model=t5_11b&hardware=a100_80gb&gpus=8&strategy=ddp&activation_checkpointing=full&" + ONE_BATCH,
        "does not fit",
    ),
    UserQuestion(
        "How large a batch of GPT-125M fits one A100 of 40 GB?",
        "model=gpt_125m&hardware=a100_40gb&gpus=1&strategy=single&activation_checkpointing=none&sequence_length=1024",
        "fits",
        lambda answer: answer.best.largest_batch == answer.best.batch_size > 4,
    ),
    UserQuestion(
        "Which strategy for GPT-125M on two GPUs?",
        "model=gpt_125m&hardware=a100_40gb&gpus=2&batch_size_per_gpu=4&sequence_length=1024",
        "fits",
        lambda answer: (
            answer.advice.startswith("Use DDP")
            and "a whole copy of the model fits on each GPU" in answer.advice
            and answer.best.strategy == "DDP"
            and answer.num_options > 5
        ),
    ),
    UserQuestion(
        "What do a billion tokens of it cost?",
        "model=gpt_125m&hardware=a100_40gb&gpus=8&strategy=ddp&activation_checkpointing=none&batch_size_per_gpu=4"
        "&sequence_length=1024&price=2.5&tokens=1e9",
        "fits",
        lambda answer: bool(
            answer.best.dollars
            and answer.best.tokens_per_second_per_gpu
            and abs(answer.best.dollars / (1e9 / answer.best.tokens_per_second_per_gpu / 3600 * 2.5) - 1) < 1e-6
        ),
    ),
    UserQuestion(
        "How much energy is that?",
        "model=gpt_125m&hardware=a100_40gb&gpus=8&strategy=ddp&activation_checkpointing=none&batch_size_per_gpu=4"
        "&sequence_length=1024&pue=1.5",
        "fits",
        lambda answer: bool(answer.best.kwh) and any("pue=1.5" in sentence for sentence in answer.cost_basis),
    ),
    UserQuestion(
        "What takes the memory at 8,192 tokens per sequence?",
        "model=llama3_2_1b&hardware=h100_80gb&gpus=8&strategy=ddp&activation_checkpointing=none&batch_size_per_gpu=1"
        "&sequence_length=8192",
        "fits",
        lambda answer: (
            max(answer.best.memory.parts, key=lambda name: answer.best.memory.parts[name])
            in ("activations", "temporary results")
        ),
    ),
    UserQuestion(
        "Would a loss in chunks help there?",
        "model=llama3_2_1b&hardware=h100_80gb&gpus=8&strategy=ddp&activation_checkpointing=none&batch_size_per_gpu=1"
        "&sequence_length=8192&further=loss%3Dchunked",
        "fits",
        lambda answer: "loss=chunked" in answer.state.command,
    ),
    UserQuestion(
        "Would my GPU with 96 GB do? It is like an A100.",
        "model=gpt_125m&hardware=like:a100_80gb&further=hardware.memory_gb%3D96&gpus=1&strategy=single"
        "&activation_checkpointing=none&batch_size_per_gpu=4&sequence_length=1024",
        "fits",
        lambda answer: (answer.best.memory.capacity or 0) > 85 * GIB,
    ),
    UserQuestion(
        "How long on my laptop's processor? Nobody calibrated it.",
        "model=gpt_tiny&hardware=cpu&gpus=2&sequence_length=128&batch_size_per_gpu=2&strategy=ddp",
        None,
        lambda answer: answer.best.step_s is None and "says nothing of its speed" in answer.missing_time,
    ),
    UserQuestion(
        "Does V100, which has no bf16, train GPT-125M?",
        "model=gpt_125m&hardware=v100_32gb&gpus=4&strategy=ddp&batch_size_per_gpu=1&sequence_length=1024",
        "fits",
        lambda answer: "precision" not in dict(answer.state.settings) and answer.best.state.get("precision") == "fp16",
    ),
    UserQuestion(
        "What if the nodes are joined by 10 Gb/s Ethernet only?",
        f"model=gpt_1b3&hardware=a100_80gb&gpus=16&network=ethernet_10&{FULL_SHARD}&activation_checkpointing=none"
        "&sequence_length=2048&batch_size_per_gpu=1",
        "fits",
        lambda answer: answer.best.limited_by == "network" and "10 Gb/s" in answer.network,
    ),
)

SHORT_ON_A100 = "hardware=a100_80gb&model=gpt_125m&sequence_length=1024"

REFUSED_QUESTIONS = (
    ("Can I use 9 GPUs of machines with 8?", "gpus=9&model=gpt_125m", "gpus", "choose a multiple of gpus_per_node=8"),
    pytest.param(
        *("FP8 on an A100?", f"precision=fp8&{SHORT_ON_A100}", "precision", "no peak for fp8"), marks=needs("torchao")
    ),
    ("A model I misspell", "model=lama3_8b", "model", "model=lama3_8b is not valid"),
    ("A price for other GPUs", f"price=aws_p5&{SHORT_ON_A100}", "price", "for hardware=a100_80gb"),
    ("Half a GPU", "gpus=0.5&model=gpt_125m", "gpus", "gpus=0.5 is not valid: choose a whole number"),
    ("Two numbers of GPUs at once", "gpus=8,16&model=gpt_125m", "gpus", "choose one value"),
    ("A setting that does not exist", "further=model.colour%3Dred&model=gpt_125m", "further", "model.colour"),
)


@pytest.mark.long
@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked.question)
def test_a_users_question_is_answered_as_by_predict(asked: UserQuestion, capsys: pytest.CaptureFixture[str]) -> None:
    answer = compute_part(ANSWER, ExplorerState.from_address(asked.query).address)
    assert isinstance(answer, ExplorerAnswer), answer
    assert answer.best.verdict == asked.verdict or asked.verdict is None
    assert asked.holds(answer), answer
    code = predict.main([*answer.state.overrides, "--format", "json"])
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    assert code == (1 if asked.verdict == "does not fit" else 0)
    assert section["advice"] == answer.advice
    rows = {row["run_id"]: row for row in [*section["ranked"], *section["infeasible"]]}
    row: dict[str, Any] = rows[answer.best.run_id]
    assert row["memory"]["verdict"] == answer.best.verdict
    assert row["memory"]["reserved"]["value"] == answer.best.memory.reserved.value
    assert row["tokens_per_second"] == answer.best.tokens_per_second
    assert row["batch_size_per_gpu"] == answer.best.batch_size
    assert (row["dollars"] or row["dollars_per_billion_tokens"]) == answer.best.dollars
    assert len(rows) == answer.num_options


@pytest.mark.parametrize(("question", "query", "key", "sentence"), REFUSED_QUESTIONS, ids=lambda part: str(part)[:40])
def test_what_cannot_be_asked_is_one_sentence_beside_its_control(
    question: str, query: str, key: str, sentence: str
) -> None:
    refusal = compute_part(ANSWER, f"?{query}")
    assert isinstance(refusal, Refusal), question
    assert refusal.key == key
    assert sentence in refusal.sentence
    assert "\n" not in refusal.sentence


# --- The other parts of an answer, of a model that is traced in a second.

SMALL = f"model=gpt_tiny&hardware=a100_80gb&gpus=8&sequence_length=128&{FULL_SHARD}&activation_checkpointing=none"


def test_parts_of_memory_and_time_add_up() -> None:
    best = answer_state(ExplorerState.from_address(f"{SMALL}&batch_size_per_gpu=4")).best
    memory = best.memory
    used_bytes = sum(memory.parts.values()) + memory.unused_bytes
    assert used_bytes == pytest.approx(memory.reserved.value, rel=0.01)
    assert best.step_s is not None
    assert sum(best.time_parts.values()) == pytest.approx(best.step_s.value)


def test_a_neighbour_is_what_its_own_address_answers() -> None:
    state = ExplorerState.from_address(f"{SMALL}&batch_size_per_gpu=4")
    neighbours = {neighbour.change: neighbour for neighbour in answer_neighbours(state)}
    assert "multiple of gpus_per_node=8" in neighbours["one GPU more"].refusal
    assert neighbours["one GPU more"].option is None
    for change in ("twice the GPUs", "half the batch: 2", "twice the batch: 8", "checkpointing full"):
        option = neighbours[change].option
        assert option is not None
        again = answer_state(option.state).best
        assert (again.run_id, again.tokens_per_second) == (option.run_id, option.tokens_per_second)
    best = answer_state(state).best
    half, full = neighbours["half the batch: 2"].option, neighbours["checkpointing full"].option
    assert half is not None
    assert full is not None
    assert half.batch_size == 2
    assert sum(full.memory.parts.values()) < sum(best.memory.parts.values())
    assert any(change.startswith("the next strategy") for change in neighbours) is False  # one strategy was asked for


def test_the_frontier_is_what_the_addresses_of_its_cells_answer() -> None:
    state = ExplorerState.from_address(f"{SMALL}&batch_size_per_gpu=4")
    frontier = answer_frontier(state)
    rows = dict(frontier.rows)
    assert 8 in frontier.gpu_counts
    hybrid = dict(zip(frontier.gpu_counts, rows["FSDP2 hybrid, F=8"], strict=True))
    assert hybrid[4] is None
    assert hybrid[8] is None  # which is full sharding
    assert hybrid[16] is not None
    full = dict(zip(frontier.gpu_counts, rows["FSDP2 full shard"], strict=True))
    assert all(option is not None for option in full.values())
    for option in (hybrid[16], full[4]):
        assert option is not None
        assert option.batch_size == 4
        again = answer_state(option.state).best
        assert (again.run_id, again.memory.reserved) == (option.run_id, option.memory.reserved)
    assert any(option and option.run_id == answer_state(state).best.run_id for option in full.values())


def test_the_timeline_is_that_of_the_step() -> None:
    state = ExplorerState.from_address(f"{SMALL}&batch_size_per_gpu=4")
    timeline = simulate_timeline(state)
    step_s = answer_state(state).best.step_s
    assert timeline is not None
    assert step_s is not None
    assert timeline.lanes[0] == "compute"
    assert max(span.end_s for _, span in timeline.spans) == pytest.approx(step_s.value, rel=0.05)
    assert {lane for lane, _ in timeline.spans} == set(timeline.lanes)


@pytest.mark.long
def test_measured_and_published_rows_stand_beside_the_prediction() -> None:
    measured = find_recorded_rows(
        ExplorerState.from_address(
            "model=gpt_mini&hardware=cpu&gpus=4&strategy=ddp&batch_size_per_gpu=1&sequence_length=128"
        )
    )
    assert measured[0].evidence == "measured"
    assert "model" not in " ".join(measured[0].differences)
    published = find_recorded_rows(
        ExplorerState.from_address(
            f"model=t5_611m&hardware=a100_80gb&gpus=8&{FULL_SHARD}&activation_checkpointing=none&{ONE_BATCH}"
        )
    )
    assert any(row.source.startswith("fsdp_paper") and row.evidence == "published" for row in published)
    assert all(row.differences for row in published)  # the paper does not say on how many GPUs that was
    counts = [len(row.differences) for row in measured]
    assert counts[0] == min(counts)


def test_a_dropped_config_is_answered() -> None:
    text = json.dumps(
        {**json.loads((ROOT / "docs" / "examples" / "my-model.json").read_text()), "num_hidden_layers": 2}
    )
    settings = {
        **read_model_file("tiny.json", text),
        **{"gpus": "8", "batch_size_per_gpu": "1", "sequence_length": "128", "strategy": "ddp"},
        **{"activation_checkpointing": "none", "hardware": "a100_80gb"},
    }
    answer = answer_state(ExplorerState.from_settings(settings))
    assert answer.subject.startswith("tiny, ")
    assert answer.best.verdict == "fits"
