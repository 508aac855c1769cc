"""Pipelines: the training of one process, memory and bubbles as predicted, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from bench.config.run_config import RunConfig
from bench.config.run_id import get_added_strategy_knobs
from bench.core.errors import ImpossibleError, UsageError
from bench.models import Batch
from bench.models.materialize import Materializer
from bench.models.t5 import T5Family
from bench.planning.batch_search import choose_next_batch_size
from bench.planning.request import parse_sweep_request
from bench.planning.sweep_plan import build_sweep_plan
from bench.prediction.cost.collectives import CollectiveGroup
from bench.prediction.pipeline.rank_timelines import StageSeconds, compute_idle_share, simulate_timetable
from bench.prediction.pipeline.stages import build_pipeline_stages, find_shared_parameters
from bench.prediction.pipeline.time import TiedGradientAllReduce, add_tied_all_reduces, list_tied_all_reduces
from bench.prediction.predicted_row import build_predicted_row
from bench.prediction.prediction import TimePrediction
from bench.prediction.predictor import predict_run, predict_runs
from bench.prediction.run_inputs import build_trace_key
from bench.rank.row import _compute_idle_share
from bench.rank.timed_loop import RankSamples
from bench.records.reading import read_latest_attempts
from bench.reporting.drawing import style
from bench.reporting.figures import idle
from bench.reporting.tables.table import prepare_table
from bench.strategies.pipeline import stage_timer
from bench.strategies.pipeline.model import PipelineStepper, TiedParameter
from bench.strategies.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    Timetable,
    compute_bubble_share,
)
from bench.strategies.pipeline.step_plans import find_tied_parameters
from bench.strategies.pipeline.torch_stages import TimedPipelineStage
from bench.strategies.stepper import Stepper
from tests.conftest import CPU, ROOT, SMALL_GPT, SMALL_LLAMA, SMALL_MOE, SMALL_T5, compose_run_config
from tests.records_fixture import make_record

Execute = Callable[..., list[dict[str, Any]]]

STEPS = ("sequence_length=16", "measurement.warmup_steps=2", "measurement.steps=1", "optimizer.learning_rate=1e-3")
GPT = (*SMALL_GPT, "model.num_layers=4")
WINDOWED = (*SMALL_LLAMA, "model.architecture=gemma3_text", "model.sliding_window=8", "model.num_layers=7")
"""Every sixth layer attends to everything, the others to a window."""
PIPELINE = ("strategy=pipeline",)
FOUR, TWO = ("gpus=4", "batch_size_per_gpu=2"), ("gpus=2", "batch_size_per_gpu=4")
PAIRS = (*FOUR, "strategy.stages=2")
FSDP = ("strategy.data_parallel=fsdp",)

PARITY = {
    "t5": (
        SMALL_T5,
        {
            "pipeline/gpipe": (*PIPELINE, *FOUR, "strategy.schedule=gpipe"),
            "pipeline/interleaved_1f1b+fsdp": (*PIPELINE, *PAIRS, *FSDP, "strategy.schedule=interleaved_1f1b"),
            "naive_pipeline": ("strategy=naive_pipeline", *TWO),
        },
    ),
    "gated t5": (
        (*SMALL_T5, "model.feed_forward=gated-gelu", "model.tie_embeddings=false"),
        {"pipeline/1f1b+ddp": (*PIPELINE, *PAIRS)},
    ),
    "llama": (
        WINDOWED,
        {
            "pipeline/1f1b": (*PIPELINE, *FOUR, "strategy.first_stage_less_blocks=1"),
            "pipeline/interleaved_1f1b+fsdp": (*PIPELINE, *PAIRS, *FSDP, "strategy.schedule=interleaved_1f1b"),
        },
    ),
    "moe": (SMALL_MOE, {"pipeline/1f1b+ddp": (*PIPELINE, *PAIRS)}),
    "gpt": (
        GPT,
        {
            "pipeline/1f1b": (*PIPELINE, *FOUR),
            "pipeline/1f1b+ddp": (*PIPELINE, *PAIRS, "strategy.last_stage_less_blocks=2"),
            "pipeline/interleaved_1f1b": (*PIPELINE, *TWO, "strategy.schedule=interleaved_1f1b"),
            "naive_pipeline": ("strategy=naive_pipeline", *FOUR),
        },
    ),
}


def predicted(*overrides: str) -> float:
    return predict_run(compose_run_config(*overrides)).memory.allocated.value


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", PARITY)
def test_stages_train_as_one_process_does_and_keep_what_is_predicted(execute: Execute, family: str) -> None:
    model, kinds = PARITY[family]
    asked = {kind: (*model, *STEPS, *knobs) for kind, knobs in kinds.items()}
    single, *records = execute((*model, *STEPS, "strategy=single", "gpus=1", "batch_size_per_gpu=8"), *asked.values())
    assert single["losses"][-1] < single["losses"][0] - 0.01
    for (kind, overrides), row in zip(asked.items(), records, strict=True):
        assert row["status"] == "ok", (kind, row.get("error"))
        assert row["effective_strategy"] == kind
        assert row["losses"] == pytest.approx(single["losses"], rel=1e-5), kind
        assert row["peak_allocated_bytes"] == pytest.approx(predicted(*overrides), rel=0.02), kind
        assert 0.0 < row["bubble"] < 1.0
        assert all(sum(rank["busy_s"]) < sum(rank["step_times_s"]) for rank in row["ranks"])
        if kind == "naive_pipeline":  # one of the stages computes at a time; their optimizers together
            assert row["bubble"] > 0.3


@pytest.mark.long
@pytest.mark.slow
def test_narrow_formats_checkpointing_and_the_first_stage_alone(execute: Execute) -> None:
    deep = (*SMALL_GPT, "model.num_layers=12", *STEPS, "gpus=2", *PIPELINE, "strategy.micro_batches=4")
    runs = {
        "bf16": (*deep, "precision=bf16"),
        "fsdp": (*SMALL_T5, *STEPS, *PIPELINE, *PAIRS, *FSDP, "precision=bf16", "activation_checkpointing=full"),
        "alone": (*SMALL_T5, *STEPS, *PIPELINE, *PAIRS, *FSDP, "precision=bf16", "mode=rehearse"),
    }
    records = dict(zip(runs, execute(*runs.values()), strict=True))
    for name in ("bf16", "fsdp"):
        assert records[name]["status"] == "ok", records[name].get("error")
        assert records[name]["peak_allocated_bytes"] == pytest.approx(predicted(*runs[name]), rel=0.02), name
        assert records[name]["losses"][-1] < records[name]["losses"][0]
    assert records["fsdp"]["mixed_precision"] == "fsdp policy"
    # The first stage knows no loss; nobody's was made up.
    assert records["alone"]["status"] == "ok"
    assert (records["alone"]["losses"], records["alone"]["final_loss"]) == ([], None)


# Stages


def split_blocks(blocks: int, stages: int, *less_blocks: int) -> list[range]:
    return Timetable("1f1b", stages, 1, stages, *less_blocks).split_blocks(blocks)


@pytest.mark.parametrize(
    ("blocks", "stages", "less_blocks", "counts"),
    [
        (4, 4, (), [1, 1, 1, 1]),
        (10, 4, (), [2, 3, 3, 2]),
        (7, 4, (), [2, 2, 2, 1]),
        (3, 2, (), [2, 1]),
        (10, 4, (0, 2), [3, 3, 3, 1]),
        (126, 16, (1, 1), [7, *[8] * 14, 7]),  # Llama 3 405B
        (11, 4, (0, 2), [3, 4, 3, 1]),
        (5, 1, (1, 2), [5]),
    ],
)
def test_stages_have_as_many_blocks_but_for_one_and_what_is_taken_off(
    blocks: int, stages: int, less_blocks: tuple[int, ...], counts: list[int]
) -> None:
    spans = split_blocks(blocks, stages, *less_blocks)
    assert [len(span) for span in spans] == counts
    assert [block for span in spans for block in span] == list(range(blocks))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [SMALL_T5, GPT, WINDOWED, SMALL_MOE], ids=["t5", "gpt", "gemma", "moe"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_one_after_the_other_are_the_model(overrides: tuple[str, ...], stages: int) -> None:
    family = compose_run_config(*overrides, "model.attention=eager").model
    batch = family.build_batch(2, 16, torch.Generator().manual_seed(0))
    whole = family.build_model()
    Materializer(whole, family, torch.device("cpu"), seed=1).fill_model(whole)
    model = family.build_model()
    materializer = Materializer(model, family, torch.device("cpu"), seed=1)
    assert family.num_blocks is not None
    spans = split_blocks(family.num_blocks, stages)
    handed: Any = ()
    for span, stage in [(span, family.build_stage(model, span)) for span in spans]:
        materializer.build_for_part(stage).fill_model(stage)
        if span.start:
            assert [tuple(each.shape[1:]) for each in handed] == list(family.find_stage_input_shapes(span.start, 16))
        handed = stage(*handed, **batch.inputs)
    torch.testing.assert_close(handed, whole(**batch.inputs)["logits"])


def test_what_several_stages_have_is_known_by_its_name() -> None:
    family = compose_run_config(*SMALL_T5).model
    model = family.build_model()
    materializer = Materializer(model, family, torch.device("cpu"), seed=0)
    names = [materializer.list_parameter_names(family.build_stage(model, span)) for span in split_blocks(4, 4)]
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    # The embedding of encoder and decoder is the head; the tables of position biases are each list's own.
    assert find_tied_parameters(names) == {
        "shared.weight": [0, 2, 3],
        f"encoder.{bias}": [0, 1],
        f"decoder.{bias}": [2, 3],
    }


def test_copies_on_one_rank_get_the_sum_of_their_gradients() -> None:
    copies = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for number, copy in enumerate(copies):
        copy.grad = torch.full((3,), number + 1.0)
    TiedParameter(copies, None, len(copies)).sum_gradients()
    assert all(copy.grad is not None and copy.grad.tolist() == [3.0] * 3 for copy in copies)


# What is noted of waiting


class Clock:
    """Time that passes when it is told to, and CUDA events on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(stage_timer, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        for name in ("current_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda device: None)

    def passes(self, seconds: float) -> Callable[..., None]:
        """Something that takes so long."""

        def work(*args: Any, **kwargs: Any) -> None:
            self.now_s += seconds

        return work

    def event(self, enable_timing: bool) -> Any:
        """What torch has, in milliseconds."""
        event = SimpleNamespace()
        event.record = lambda stream: setattr(event, "at_s", self.now_s)
        event.elapsed_time = lambda later: 1000 * (later.at_s - event.at_s)
        return event


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_spans_are_those_of_timed_steps_from_the_first_ones_beginning(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    clock = Clock(monkeypatch)
    watch = stage_timer.StageTimer(torch.device(device))

    def step(seconds: float) -> None:
        watch.begin_step()
        for _ in range(2):
            clock.passes(0.5)()
            with watch.record_span():
                clock.passes(seconds)()
        clock.passes(0.25)()

    step(8)  # warm-up
    watch.start()
    step(1)
    step(2)
    assert watch.stop() == [[(0.5, 1.5), (2.0, 3.0)], [(3.75, 5.75), (6.25, 8.25)]]
    step(8)  # of the profiler, say
    watch.start()
    step(2)
    assert watch.stop() == [[(0.5, 2.5), (3.0, 5.0)]], "what was told once is told again"


def test_stages_loss_and_optimizer_are_computation_and_what_is_exchanged_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    watch = stage_timer.StageTimer(torch.device("cpu"))
    monkeypatch.setattr(PipelineStage, "forward_one_chunk", clock.passes(1))
    monkeypatch.setattr(PipelineStage, "backward_one_chunk", clock.passes(2))
    monkeypatch.setattr(Stepper, "update", clock.passes(4))
    exchange = clock.passes(0.5)
    engine: Any = SimpleNamespace(enter_phase=lambda phase: None, autocast=nullcontext)
    stage, stepper = TimedPipelineStage.__new__(TimedPipelineStage), PipelineStepper.__new__(PipelineStepper)
    stage.engine, stage.stage_timer, stepper._stage_timer = engine, watch, watch
    stepper.scaler = torch.amp.GradScaler("cpu", enabled=False)
    stepper._model = SimpleNamespace(tied_parameters=[SimpleNamespace(sum_gradients=exchange)])  # type: ignore[assignment]

    def logits_loss(logits: Any, labels: Any) -> torch.Tensor:
        clock.passes(0.25)()
        return torch.tensor(6.0)

    share = stepper._build_loss_share(logits_loss, 2)

    def step(losses: list[Any], **inputs: Any) -> None:
        exchange()
        stage.forward_one_chunk()
        losses.append(share(torch.empty(0), torch.empty(0)))
        exchange()
        stage.backward_one_chunk()

    stepper._schedule = SimpleNamespace(step=step)
    stepper.start_timed_steps()
    assert stepper.step(engine, [Batch({}, torch.empty(0))]) == 3.0
    assert stepper.collect_busy_spans() == [[(0.5, 1.5), (1.5, 1.75), (2.25, 4.25), (4.75, 8.75)]]


def test_the_idle_share_is_the_mean_over_ranks_that_took_note() -> None:
    def rank(busy_s: list[float] | None) -> RankSamples:
        peaks: Any = None
        return RankSamples([1.0, 3.0], [], 0.0, 0, peaks, None, busy_s)

    assert _compute_idle_share([rank([0.5, 0.5]), rank([0.5, 1.5]), rank(None)]) == pytest.approx(
        1 - (1 / 4 + 2 / 4) / 2
    )
    assert _compute_idle_share([rank(None)]) is None


# Timetables and bubbles


class Noting:
    """A stage that exchanges nothing, and notes what a schedule of torch has it do."""

    is_first = is_last = False

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.done: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.done.append((FORWARD, self.stage_index, number))

    def backward_one_chunk(self, number: int, *args: Any, **kwargs: Any) -> None:
        self.done.append((BACKWARD, self.stage_index, number))

    def nothing(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = perform_reduce_grad = nothing


@pytest.mark.parametrize(("name", "torchs"), [(GPIPE, ScheduleGPipe), (ONE_F_ONE_B, Schedule1F1B)])
def test_timetables_of_one_stage_per_rank_are_what_torch_does(name: str, torchs: Any) -> None:
    timetable = Timetable(name, ranks=4, virtual_stages=1, micro_batches=9)
    for rank in range(4):
        stage = Noting(rank, 4)
        schedule = torchs(stage, 9)
        schedule._initialize_stage = stage.nothing
        schedule._step_microbatches()
        assert [tuple(action) for action in timetable.list_actions(rank)] == stage.done


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [(4, 3, 8), (4, 2, 6), (2, 2, 2)])
def test_interleaved_timetables_are_those_of_torch(ranks: int, virtual: int, micro_batches: int) -> None:
    timetable = Timetable(INTERLEAVED, ranks, virtual, micro_batches)
    torchs: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    torchs._n_microbatches, torchs.pp_group_size, torchs.n_local_stages = micro_batches, ranks, virtual
    torchs.microbatches_per_round = micro_batches // max(1, micro_batches // ranks)
    kinds = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD}
    for rank in range(ranks):
        theirs = [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in torchs._calculate_single_rank_operations(rank)
            if action is not None
        ]
        assert [tuple(action) for action in timetable.list_actions(rank)] == theirs


def test_interleaved_micro_batches_make_equal_rounds_where_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = ScheduleInterleaved1F1B.__base__
    monkeypatch.setattr(
        runtime, "__init__", lambda self, n_microbatches, **_: setattr(self, "_n_microbatches", n_microbatches)
    )
    monkeypatch.setattr(runtime, "_prepare_schedule_with_comms", lambda *_: None)
    own: Any = [SimpleNamespace(group_size=4, group_rank=0, stage_index=0, num_stages=8)] * 2
    accepted = []
    for micro_batches in range(4, 40):
        with suppress(ValueError):
            ScheduleInterleaved1F1B(own, micro_batches)
            accepted.append(micro_batches)
    ours = [number for number in range(4, 40) if Timetable(INTERLEAVED, 4, 2, number).has_equal_rounds]
    assert ours == accepted
    assert 10 in ours


@pytest.mark.parametrize(("asked", "named"), [(9, "8 or 10"), (11, "10 or 12"), (13, "12 or 15")])
def test_micro_batches_that_are_named_instead_are_valid(asked: int, named: str) -> None:
    four = ("gpus=4", "batch_size_per_gpu=90", "model.num_layers=8", "strategy.schedule=interleaved_1f1b")
    with pytest.raises(ImpossibleError, match=rf"micro_batches={asked} is not valid: choose {named}, say"):
        compose_run_config(*SMALL_GPT, *PIPELINE, *four, f"strategy.micro_batches={asked}")
    for number in named.split(" or "):
        compose_run_config(*SMALL_GPT, *PIPELINE, *four, f"strategy.micro_batches={number}")


@pytest.mark.parametrize(
    "timetable",
    [
        Timetable(GPIPE, 4, 1, 8),
        Timetable(ONE_F_ONE_B, 4, 1, 8),
        Timetable(ONE_F_ONE_B, 8, 1, 64),
        Timetable(INTERLEAVED, 4, 2, 8),
        Timetable(INTERLEAVED, 4, 3, 16),
    ],
    ids=str,
)
def test_the_bubble_of_equal_stages_is_the_formulas(timetable: Timetable) -> None:
    equal = [StageSeconds(1.0, 2.0)] * timetable.num_stages
    at_once = [0.0] * (timetable.num_stages - 1)
    assert compute_idle_share(simulate_timetable(timetable, equal, at_once)) == pytest.approx(
        compute_bubble_share(timetable)
    )
    # A slower stage, and sending that takes time, make it larger.
    assert compute_idle_share(
        simulate_timetable(timetable, [*equal[:-1], StageSeconds(2.0, 4.0)], at_once)
    ) > compute_bubble_share(timetable)
    assert compute_idle_share(simulate_timetable(timetable, equal, [0.5] * len(at_once))) > compute_bubble_share(
        timetable
    )


def test_formulas_of_the_papers() -> None:
    assert compute_bubble_share(Timetable(GPIPE, 2, 1, 1)) == 0.5
    assert compute_bubble_share(Timetable(GPIPE, 4, 1, 8)) == pytest.approx(3 / (8 + 3))
    ideal = compute_bubble_share(Timetable(INTERLEAVED, 4, 2, 8))
    assert ideal / (1 - ideal) == pytest.approx(3 / (2 * 8))


def big(*overrides: str) -> RunConfig:
    hardware = ("hardware=h100_80gb", "precision=bf16", "activation_checkpointing=full", "sequence_length=512")
    model = ("model=gpt_13b", "model.vocabulary_size=50304")  # another head is slow, and with it the last stage
    return compose_run_config(*model, "mode=predict", "gpus=8", "batch_size_per_gpu=8", *hardware, *overrides)


@pytest.mark.slow
def test_the_predicted_bubble_is_near_the_formulas_and_naive_stages_mostly_wait() -> None:
    shares = {}
    for schedule, micro_batches in ((GPIPE, 8), (ONE_F_ONE_B, 8), (ONE_F_ONE_B, 32)):
        config = big("strategy=pipeline", f"strategy.schedule={schedule}", f"strategy.micro_batches={micro_batches}")
        time = predict_run(config).time
        assert time is not None
        assert config.strategy.timetable is not None
        shares[schedule, micro_batches] = time.bubble_s / time.step_s.value
        # Stages are not quite equal, the last one has the head, which can only make it larger.
        assert 0 < shares[schedule, micro_batches] - compute_bubble_share(config.strategy.timetable) < 0.08
    assert shares[ONE_F_ONE_B, 32] < shares[ONE_F_ONE_B, 8] - 0.1
    naive = predict_run(big("strategy=naive_pipeline"), timeline=True).time
    assert naive is not None
    assert naive.limited_by == "pipeline bubble"
    assert naive.bubble_s / naive.step_s.value == pytest.approx(7 / 8, abs=0.03)
    first = [span.kind for span in naive.timeline if span.stream == "rank 0"]
    assert first == ["forward", "backward", "optimizer"]
    assert {span.stream for span in naive.timeline} == {f"rank {rank}" for rank in range(8)}


@pytest.mark.long
@pytest.mark.slow
def test_bubbles_measured_on_a_machine_of_their_own_are_the_predicted_ones() -> None:
    """On the calibrated machine, the median of three runs within 0.035 of a step; memory of each to some bytes."""
    calibrated = ROOT / "results" / "calibration" / "cpu_2core.yaml"
    request = parse_sweep_request(
        ["sweep=pipelines", "mode=predict", f"hardware={calibrated}"], multirun=False, device=CPU
    )
    plan = build_sweep_plan(request.points, Path("nowhere"), force=True, check_run=lambda config: None)
    predicted = dict(
        zip(map(knobs, [config.to_dict() for config in plan.to_run]), predict_runs(plan.to_run), strict=True)
    )
    rows = read_latest_attempts(ROOT / "results" / "measured" / "cpu_pipelines").records
    assert len(rows) == 3 * len(predicted) == 24
    bubbles: dict[str, list[float]] = {}
    for row in rows:
        bubbles.setdefault(knobs(row["config"]), []).append(row["bubble"])
        found = predicted[knobs(row["config"])]
        assert row["peak_allocated_bytes"] == pytest.approx(found.memory.allocated.value, rel=1e-5)
    for key, measured in bubbles.items():
        time = predicted[key].time
        assert time is not None
        assert len(measured) == 3
        assert median(measured) == pytest.approx(time.idle_share, abs=0.035), key


def knobs(config: Mapping[str, Any]) -> str:
    """What runs of one sweep differ in; older rows do not have all knobs."""
    strategy = config["strategy"]
    return repr(sorted({**get_added_strategy_knobs(strategy), **strategy}.items()))


@pytest.mark.slow
def test_1f1b_keeps_as_many_micro_batches_as_stages_and_gpipe_all() -> None:
    def activations(schedule: str, batch: int) -> int:
        # Twice the batch in twice as many micro-batches.
        knobs = ("strategy=pipeline", f"strategy.schedule={schedule}", f"strategy.micro_batches={batch}")
        config = compose_run_config(*GPT, "mode=predict", "gpus=2", f"batch_size_per_gpu={batch}", *knobs)
        return predict_run(config).memory.parts["activations"]

    assert activations(GPIPE, 16) > 1.8 * activations(GPIPE, 8)
    assert activations(ONE_F_ONE_B, 16) < 1.5 * activations(ONE_F_ONE_B, 8)
    assert activations(ONE_F_ONE_B, 16) < activations(GPIPE, 16) / 2


@pytest.mark.long
@pytest.mark.slow
def test_what_a_stage_receives_is_cast_as_often_when_it_is_computed_again() -> None:
    # A received tensor is a leaf, whose cast autocast would keep; selective checkpointing counts them.
    run = (*SMALL_T5, *PIPELINE, "mode=predict", "gpus=2", "precision=bf16")
    assert predicted(*run, "activation_checkpointing=selective") < predicted(*run)


@pytest.mark.long
@pytest.mark.slow
def test_a_decoder_makes_half_of_what_it_sends() -> None:
    """It hands on the encoder's output, which lies where it was received and is not held a second time."""
    config = compose_run_config(*SMALL_T5, *PIPELINE, "mode=predict", "gpus=4")
    assert config.strategy.timetable is not None
    *stages, last = build_pipeline_stages(config, build_trace_key(config), config.strategy.timetable)
    assert [stage.produced_bytes / stage.sent_bytes for stage in stages] == [1, 1, 0.5]
    assert last.produced_bytes == 0


def test_batches_are_searched_in_steps_that_make_equal_micro_batches() -> None:
    config = compose_run_config(*GPT, *PIPELINE, "gpus=2", "batch_size_per_gpu=6", "strategy.micro_batches=6")
    assert config.strategy.batch_size_multiple == 3
    assert [choose_next_batch_size(peaks, 3, None, 3) for peaks in ({}, {3: 10}, {3: 10, 6: None})] == [3, 6, None]


# What is refused


REFUSED = [
    (("gpus=1",), r"strategy.stages=full is not valid .* gpus=1 .* fewer than 2 ranks: choose gpus=2 or more"),
    (("strategy.stages=1",), r"strategy.stages=1 is not valid .* gpus=4 .* fewer than 2 ranks: choose 2 or more"),
    (
        ("strategy.stages=node", "gpus_per_node=1"),
        r"strategy.stages=node is not valid .*gpus_per_node=1.* fewer than 2",
    ),
    (("strategy.stages=3",), r"strategy.stages=3 is not valid: .* gpus=4: 2, 4\.$"),
    (("strategy.stages=2", "gpus=1"), r"strategy.stages=2 is not valid: choose gpus=2 or a multiple of it"),
    (("gpus=8",), r"with 8 stages is not valid for model=t5_tiny, which has 4 blocks: choose .* at most 4"),
    (
        ("strategy.schedule=interleaved_1f1b",),
        r"with 8 stages is not valid for model=t5_tiny, which has 4 blocks: .* product is at most 4",
    ),
    (("strategy.micro_batches=0",), r"strategy.micro_batches=0 .* at least 1"),
    (("batch_size_per_gpu=2", "strategy.micro_batches=6"), r"micro_batches=6 .* divisor of the 8 sequences .* 1, 2, 4"),
    (("strategy.micro_batches=2",), r"micro_batches=2 is not valid: choose at least one per stage, 4, or .*gpipe"),
    (
        ("strategy.stages=2", "strategy.schedule=interleaved_1f1b", "strategy.micro_batches=1"),
        r"micro_batches=1 is not valid: choose at least one per rank of the pipeline, 2, or .*gpipe",
    ),
    (
        ("strategy.stages=2", "strategy.schedule=interleaved_1f1b", "strategy.micro_batches=5"),
        r"micro_batches=5 is not valid: choose 4 or 6, say, for micro_batches // 2 rounds of equal size: .*=interl",
    ),
    (("strategy.schedule=zero_bubble",), r"strategy.schedule=zero_bubble is not valid: choose gpipe, 1f1b, inter"),
    (
        ("strategy.stages=2", "strategy.last_stage_less_blocks=3"),
        r"strategy.last_stage_less_blocks=3 is not valid: choose at most 2, .* one of the model's 4 blocks in 2 stages",
    ),
    (("strategy.first_stage_less_blocks=1",), r"strategy.first_stage_less_blocks=1 is not valid: choose at most 0, "),
    (("strategy.virtual_stages=2",), r"virtual_stages=2 is not valid: choose 1, or strategy.schedule=interleaved_1f1b"),
    (
        ("strategy.stages=2", "strategy.schedule=interleaved_1f1b", "strategy.virtual_stages=1"),
        r"virtual_stages=1 is not valid: choose 2 or more",
    ),
    (("strategy.data_parallel=fsdp",), r"data_parallel=fsdp is not valid with strategy.stages=4 on gpus=4"),
    (("strategy.stages=2", "strategy.data_parallel=tp"), r"data_parallel=tp is not valid: choose ddp, fsdp"),
    (("strategy.sharding_factor=2",), r"sharding_factor=2 is not valid: choose stages"),
    (("gradient_accumulation=2",), r"gradient_accumulation=2 .* accumulate gradients already"),
    (("precision=fp16",), r"precision=fp16 is not valid for strategy=pipeline: each stage would look for overflow"),
    (
        ("strategy.stages=2", "precision=bf16", "precision.reduce=bf16"),
        r"precision.reduce=bf16 .* reduces gradients as they are stored: choose fp32, or fsdp",
    ),
    (
        ("strategy.stages=2", *FSDP, "optimizer=sgd", "optimizer.implementation=fused"),
        r"optimizer.implementation=fused is not valid",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_what_makes_no_sense_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compose_run_config(*SMALL_T5, *PIPELINE, "gpus=4", *overrides)


def test_stages_can_be_as_many_as_ranks_of_a_machine() -> None:
    config = compose_run_config(*SMALL_T5, *PIPELINE, "gpus=4", "gpus_per_node=2", "strategy.stages=node")
    assert config.to_dict()["strategy"]["stages"] == config.to_dict()["strategy"]["micro_batches"] == 2


@pytest.mark.parametrize("stages", ["foo", "0", "-1"])
def test_no_number_of_stages_is_a_mistake_and_stops_a_sweep(stages: str) -> None:
    with pytest.raises(UsageError, match=rf"stages={stages} is not valid: choose full, node.* at least 2") as refusal:
        compose_run_config(*SMALL_T5, *PIPELINE, "gpus=4", f"strategy.stages={stages}")
    assert not isinstance(refusal.value, ImpossibleError)


def test_a_naive_pipeline_has_no_micro_batches_to_choose() -> None:
    with pytest.raises(UsageError, match=r"strategy.micro_batches is not a field of strategy=naive_pipeline"):
        compose_run_config(*SMALL_T5, "strategy=naive_pipeline", "gpus=2", "strategy.micro_batches=2")


def test_a_family_that_does_not_say_how_it_is_cut_is_refused() -> None:
    with pytest.raises(ImpossibleError, match=r"strategy=pipeline is not valid for model.family=tests.fake_model"):
        compose_run_config("model=gpt_tiny", "model.family=tests.fake_model", *PIPELINE, "gpus=2")


# The figure


def test_a_profiled_pipeline_is_drawn_with_what_its_ranks_wait() -> None:
    naive = make_record(strategy="naive_pipeline", effective_strategy="naive_pipeline", device="cpu")
    for rank, spans in zip(naive["ranks"], ([[0.0, 0.1], [0.3, 0.6]], [[0.1, 0.3]]), strict=True):
        rank |= {"busy_spans_s": spans, "step_times_s": [0.8]}
    table = prepare_table([naive, make_record(device="cpu")])
    with style.apply_report_style():
        (drawing,) = idle.build_section(table, style.build_palette(table["variant_key"])).drawings
        nothing = idle.build_section(table.iloc[1:], style.build_palette(table["variant_key"]))
    assert "Naive pipeline" in drawing.alt
    assert "waits 50, 75 percent" in drawing.alt
    # A page without pipelines says nothing about them.
    assert (nothing.drawings, nothing.notice) == ([], "")


# --- The time of pipelines: gradients that stages share, idle shares, and memory that runs short.


def pipelined(*overrides: str) -> RunConfig:
    return compose_run_config("strategy=pipeline", "mode=predict", "precision=bf16", *overrides)


def tied(*overrides: str) -> list[TiedGradientAllReduce]:
    config = pipelined(*overrides)
    assert config.strategy.timetable is not None
    num_shards = config.gpus // 4 if "strategy.data_parallel=fsdp" in overrides else 1
    return list_tied_all_reduces(config, config.strategy.timetable, num_shards)


def timed(config: RunConfig) -> TimePrediction:
    found = predict_run(config).time
    assert found is not None
    return found


@pytest.mark.long
@pytest.mark.slow
def test_stages_of_models_without_ties_share_nothing() -> None:
    run = ("model=gpt_2b7", "gpus=8", "hardware=a100_80gb")
    (embedding,) = tied(*run)
    assert embedding.ranks == (0, 7)
    assert embedding.seconds > 1e-3
    assert tied(*run, "model.family=mingpt") == []
    without = timed(pipelined(*run, "model.family=mingpt"))
    assert timed(pipelined(*run)).exposed_communication_s == pytest.approx(
        without.exposed_communication_s + embedding.seconds / 4, rel=0.01
    )


def test_gradients_that_several_stages_share_are_reduced_among_all_of_them() -> None:
    run = ("model=t5_611m", "strategy.stages=4", "hardware=v100_32gb", "precision=fp32")
    # Tables of position biases, and the embedding that is the decoder's and the head too.
    assert [each.ranks for each in tied(*run, "gpus=4")] == [(0, 1), (0, 2, 3), (2, 3)]
    assert tied(*run, "gpus=4")[1].group == CollectiveGroup(3, 3)
    # On 8 GPUs stages 0 and 1 are on one half of a node, and so are 2 and 3.
    assert tied(*run, "gpus=8", "gpus_per_node=4")[1].group == CollectiveGroup(3, 1, 2)
    spread = tied(*run, "gpus=32")[1]
    assert spread.group == CollectiveGroup(3, 1, 8)  # eight copies of the pipeline share the adapters
    assert spread.seconds == pytest.approx(31.8e-3, rel=0.01)
    # Shards of what FSDP divides among copies.
    assert tied(*run, "gpus=32", "strategy.data_parallel=fsdp")[1].seconds < spread.seconds / 4


def test_what_stages_share_is_named_as_the_run_names_it() -> None:
    family = compose_run_config("model=t5_611m").model
    assert isinstance(family, T5Family)
    shared = find_shared_parameters(family, tuple(split_blocks(family.num_blocks or 0, 4)))
    assert shared["shared.weight"] == (family.vocabulary_size * family.d_model, [0, 2, 3])
    assert len(shared) == 3


def test_ranks_wait_for_those_they_share_gradients_with() -> None:
    group = CollectiveGroup(2, 2)
    assert add_tied_all_reduces(
        [1.0, 5.0, 2.0], [TiedGradientAllReduce((0, 1), group, 1.0), TiedGradientAllReduce((1, 2), group, 0.5)]
    ) == [6.0, 6.5, 6.5]
    assert add_tied_all_reduces([1.0, 5.0], []) == [1.0, 5.0]


@pytest.mark.long
@pytest.mark.slow
def test_a_predicted_bubble_counts_what_a_measured_one_counts() -> None:
    """Kernels that a stage waits for are part of it: small batches on a fast GPU are all launching."""
    config = pipelined("model=gpt_125m", "gpus=2", "batch_size_per_gpu=1", "sequence_length=64", "hardware=h100_80gb")
    time = timed(config)
    assert time.idle_share is not None
    assert time.idle_share < 0.38 < 1 - (time.compute_s + time.optimizer_s) / time.step_s.value
    row = build_predicted_row(config, predict_run(config))
    assert row["bubble"] == time.idle_share
    alone = compose_run_config("model=gpt_125m", "mode=predict", "gpus=2", "hardware=h100_80gb")
    assert "bubble" not in build_predicted_row(alone, predict_run(alone))
