"""Tests bench/step_time.py: what it counts and prints, and its rank without others. Asserts no times."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt as tg
from launch import TINY, make_corpus

sys.path.insert(0, str(Path(tg.__file__).resolve().parent / "bench"))
import step_time

SETTINGS = [*TINY, "compile=false", "attention=dense", "stages.*.steps=2", "stages.3.steps=0"]
SETTINGS += ["ngrams.rows=300", "ngrams.width=12"]  # of a variant that has n-grams
TEXT_COLUMNS = {"variant", "quartiles", "ratio quartiles", "wait", "ratio"}
CPU = torch.device("cpu")


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def cfg():
    cfg = tg.CPU
    for setting in SETTINGS:
        cfg = tg.override(cfg, setting)
    return cfg


@pytest.fixture
def shards(cfg, tmp_path):
    return step_time.synthetic_shard(str(tmp_path), cfg, [0, 1, 2], 8)[0]


def bench(*arguments):
    return step_time.main(["--preset", "cpu", "--steps", "2", "--set", *SETTINGS, *arguments])


def table_lines(out):
    """Returns the table's lines as dicts by column, with the heading above each as "work"."""
    columns = step_time.COLUMNS.split(",")
    columns[-1] = "ratio quartiles"
    work, lines = None, []
    for line in out.splitlines():
        work = line.split(":")[0] if line.startswith("stage ") else work
        words = line.split()
        if len(words) >= 13 and words[0] in ("base", "A", "B"):
            lines.append({"work": work, **dict(zip(columns, words))})
    return lines


def test_mean_keys_by_counting():
    cu_seqlens = np.array([0, 1, 8, 8, 20, 33, 33, 33], dtype=np.int32)  # with an empty document and padding
    document = np.repeat(np.arange(7), np.diff(cu_seqlens))
    i, j = np.arange(33)[:, None], np.arange(33)[None, :]
    for window in (1, 2, 6, 7, 12, 100):
        seen = (document[:, None] == document) & (i >= j) & (i - j <= window)
        assert step_time.mean_keys(cu_seqlens, window) == pytest.approx(seen.sum() / 33, rel=1e-12)


def test_mean_keys_are_those_of_the_reference_attention():
    """Checks which queries see a key, by giving that key alone a value."""
    cu_seqlens, T = torch.tensor([0, 5, 21, 30, 30], dtype=torch.int32), 30
    zeros = torch.zeros(T, 1, 4)
    for window in (1, 4, 40):
        seen = 0.0
        for key in range(T):
            v = zeros.clone()
            v[key] = 1
            y = tg.attention(zeros, zeros, v, cu_seqlens, 16, window, 1.0)
            seen += (y[:, 0, 0] > 0).sum().item()
        assert step_time.mean_keys(cu_seqlens.numpy(), window) == pytest.approx(seen / T)


def test_a_paired_layers_windows_count_rows(cfg):
    plan = tg.plan_step(cfg, 0)._replace(windows={"short": 3, "long": 100})
    keys = step_time.layer_keys(cfg, plan, np.array([0, 4, 10], dtype=np.int32))
    kinds = [(layer.attention, layer.window) for layer in cfg.layers if layer.attention]
    want = {
        ("plain", "short"): (1 + 2 + 3 + 4 + 1 + 2 + 3 + 3 * 4) / 10,
        ("plain", "long"): (4 * 5 / 2 + 6 * 7 / 2) / 10,
        ("paired", "short"): (1 + 2 + 3 + 5 * 4 + 1 + 2 + 3 + 9 * 4) / 20,
    }
    assert keys == pytest.approx([want[kind] for kind in kinds])


def test_flops_by_hand(cfg):
    """Counts for two layers of width 12, one of them without attention."""
    layers = tg.Layer("plain"), tg.Layer(None)
    cfg = replace(cfg, heads=2, head_dim=6, mlp_dim=20, padded_vocab=32, layers=layers)
    qk, vo, mlps, head = 2 * 12 * 12, 2 * 12 * 12, 2 * (2 * 20 * 12), 12 * 32
    scores = 2 * (2 * 2 * 6 * 7.5)  # q k^T and p v of two heads, with 7.5 keys
    assert step_time.flops_per_token(cfg, [7.5]) == 6 * (qk + vo + mlps + head) + 3 * scores


def test_flops_of_the_record_preset_are_those_of_its_banks():
    shapes = tg.param_shapes(tg.RECORD, 1)
    weights = sum(
        math.prod(shapes[name]) for name in ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank", "lm_head")
    )
    weights -= 2 * 768 * 768  # of values and outputs, layers 1 and 8 read half
    assert step_time.flops_per_token(tg.RECORD, [0.0] * 7) == 6 * weights


@pytest.mark.slow
def test_output(cpu, cfg, tmp_path, capsys, monkeypatch):
    """Runs on synthetic data, before and after the untie step, in both setups, with two variants."""
    monkeypatch.chdir(tmp_path)
    assert bench("--stages", "0,2", "--against", "main_grad=false head_chunk=7") == 0
    out = capsys.readouterr().out
    assert "synthetic tokens" in out and "A: main_grad=false head_chunk=7" in out and "matmul ceiling" in out
    (changed,) = [line for line in out.splitlines() if line.startswith("preset cpu; ")]
    assert "head_dim (32, 8)" in changed and "window_unit" not in changed and torch.__version__ in out
    ceiling = float(out.split("matmul ceiling: ")[1].split()[0]) * 1e12
    lines = table_lines(out)
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        number = {name: float(text) for name, text in line.items() if name not in TEXT_COLUMNS | {"work"}}
        assert all(value > 0 and math.isfinite(value) for value in number.values()), line
        assert float(line["wait"]) >= 0 and 0 < number["MFU"] < 1.2
        low, high = map(float, line["quartiles"].split(".."))
        assert low <= number["ms"] <= high
        only_pair = (number["first"] + number["second"]) / 2
        assert number["ms"] == pytest.approx(only_pair, abs=0.02)
        rate = number["tokens"] / number["ms"] * 1000
        assert number["tokens/s"] == pytest.approx(rate, rel=0.005 / number["ms"] + 1e-3, abs=0.5)
        mfu = number["tokens/s"] * number["MFLOP"] * 1e6 / ceiling
        assert number["MFU"] == pytest.approx(mfu, rel=1e-2, abs=1e-4)
        stage, setup = line["work"].split(", ")
        batch_tokens = cfg.stages[int(stage.split()[1])].batch_tokens
        assert number["tokens"] == (batch_tokens if setup == "one GPU" else batch_tokens / 8)
        assert ("ratio" in line) == (line["variant"] == "A")
        if line["variant"] == "A":
            low, high = map(float, line["ratio quartiles"].split(".."))
            assert 0 < low <= float(line["ratio"]) <= high


@pytest.mark.slow
def test_own_data(cpu, tmp_path, capsys):
    make_corpus(tmp_path / "corpus")
    assert bench("--stages", "0", "--data", str(tmp_path / "corpus")) == 0
    out = capsys.readouterr().out
    assert f"data: 2 shards of {tmp_path / 'corpus'}" in out and len(table_lines(out)) == 2


# fmt: off
@pytest.mark.parametrize("arguments, message", [
    (["--kernels"], "Triton kernels cannot be timed on a CPU"),
    (["--set", "attention=varlen"], "FlashAttention needs a GPU"),
    (["--against", "kernels=gram"], "the kernels need"),
    (["--set", "headz=2"], "unknown; use heads"),
    (["--set", "padded_vocab=260"], "8 processes cannot share the rows"),
    (["--stages", "0,7"], "name stages with steps"),
    (["--stages", "3"], "name stages with steps"),
    (["--steps", "3"], "Adam updates every second step"),
    (["--data", "/nowhere"], "no train shards"),
    (["--kernel", "1"], "unrecognized arguments: --kernel 1"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
# fmt: on
def test_errors_are_one_line(cpu, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    try:
        status = bench(*arguments)
    except SystemExit as e:  # argparse's, which prints the usage first
        status = e.code
    captured = capsys.readouterr()
    assert status and captured.err.splitlines()[-1].startswith("step_time.py: error: ")
    assert message in captured.err
    assert "tokens/s" not in captured.out


@pytest.mark.slow
def test_out_of_memory(cpu, cfg, shards, capsys, monkeypatch):
    """Checks that a variant is dropped, whether it or the base fails, and that the base is timed."""
    warm_up = step_time.Training.warm_up
    for failing, dropped, kept in (("A", "A", "B"), ("base", "B", "A")):
        variants = [step_time.Variant(name, cfg, tg.TORCH_BACKEND) for name in ("base", "A", "B")]
        failed = []

        def fail_once(training, steps):
            if training.variant.name == failing and not failed:
                failed.append(failing)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has")
            return warm_up(training, steps)

        monkeypatch.setattr(step_time.Training, "warm_up", fail_once)
        left = step_time.time_stage(variants, 0, 8, shards, 2, CPU, 1e12)
        out = capsys.readouterr().out
        assert [variant.name for variant in left] == ["base", kept]
        assert [line["variant"] for line in table_lines(out)] == ["base", kept]
        message = f"{dropped}: out of memory next to the others; continuing without it"
        assert [line for line in out.splitlines() if "out of memory" in line] == [message]

    def fail(*args):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(step_time.Training, "warm_up", fail)
    with pytest.raises(tg.UserError, match="out of memory"):
        step_time.time_stage(variants[:1], 0, 8, shards, 2, CPU, 1e12)


# -------------------------------------------------------------------------------- one rank without the others


def describe_rank(cfg, shards, exchange, prefetch):
    """Runs two steps. Returns shapes of state and of exchanged gradients, micro-batch sizes, and more."""
    model = tg.GPT(cfg, 8)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange)
    loader = tg.TrainLoader(cfg, shards, 0, 8)
    batches = tg.Prefetcher(loader, [tg.plan_step(cfg, 0), tg.plan_step(cfg, 1)], prefetch)
    exchanged, sent, work = {}, [], optimizer.work

    def record(name, pending):
        def finish(result):
            value = pending.finish(result) if pending.finish else result
            shape = tuple(value.shape)
            # An owner's rows of n-grams are as many as all ranks together touch.
            exchanged[name] = shape[name == "ngrams" :], str(value.dtype)
            return value

        return pending._replace(finish=finish)

    def recording_work(plan, pending, following):
        work(plan, {name: record(name, p) for name, p in pending.items()}, following)

    optimizer.work = recording_work
    for _ in range(2):
        batch = batches.next()
        sizes = [len(m.inputs) for m in batch.micro_batches]
        routes = batch.rows | batch.ngrams
        sent.append({name: route.send_counts for name, route in routes.items() if name != "buffer"})
        tg.train_step(model, optimizer, batch, batches.peek)
    optimizer.finish_gathers()
    loader.close()
    state = [dict(model.named_parameters()), optimizer.state_dict()]
    state += [{name: grad.mean for name, grad in optimizer.grads.items()}, optimizer.recv_buffers]
    described = [tg.map_tensors(lambda t: (tuple(t.shape), str(t.dtype)), values) for values in state]
    finite = all(p.isfinite().all() for p in model.parameters())
    return described, exchanged, sizes, sent, finite


def describe_real_rank(rank, world_size, cfg, shards):
    prefetch = tg.Exchange(rank, world_size, torch.distributed.new_group(backend="gloo"))
    return describe_rank(cfg, shards, tg.Exchange(rank, world_size), prefetch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["main_grad=true", "params.*.reduction=fp32", "delay_head_grad=true", "ngrams.orders=2,3"],
)
def test_a_single_rank_does_what_a_real_one_does(cfg, shards, workers, setting):
    cfg = tg.override(cfg, setting)
    if setting.startswith("params"):  # so that there is a dense fp32 exchange too
        cfg = tg.override(cfg, "params.value_embeds.exchange=reduce_scatter")
    described = describe_rank(cfg, shards, *(step_time.SingleRankExchange(0, 8) for _ in range(2)))
    assert described == workers(8, describe_real_rank, cfg, shards)[0]
    *_, sizes, sent, finite = described
    assert all(("ngrams" in plans) == setting.startswith("ngrams") for plans in sent)
    assert finite and sizes == [cfg.stages[0].batch_tokens // 8]


def test_a_single_rank_receives_its_own_rows():
    exchange, send_counts = step_time.SingleRankExchange(1, 4), [1, 2, 1, 1]
    places = np.array([1, 2, 9, 30, 3], np.int32)
    ids, recv_counts = exchange.send_ids("tokens", places, send_counts)
    assert ids.tolist() == [2, 9] and recv_counts == [0, 2, 0, 0]
    rows = torch.arange(15.0).view(5, 3)
    counts, out = (send_counts, recv_counts), torch.full((5, 3), 7.0)
    assert torch.equal(exchange.send_rows("rows", "embed", rows, *counts).wait(), rows[1:3])
    assert exchange.send_rows("rows", "embed", rows[:2], *reversed(counts), out).wait() is out
    assert torch.equal(out[1:3], rows[:2]) and (out[[0, 3, 4]] == 7).all()


@pytest.mark.slow
def test_weights_train_in_every_stage(cfg, shards):
    with_ngrams = tg.override(cfg, "ngrams.orders=2,3")
    for stage, world_size, cfg in ((0, 1, cfg), (0, 8, cfg), (2, 8, with_ngrams)):
        variant = step_time.Variant("base", cfg, tg.TORCH_BACKEND)
        training = step_time.Training(variant, stage, world_size, shards, 6, CPU)
        model, optimizer = training.model, training.optimizer
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        training.warm_up(6)
        training.loader.close()
        optimizer.finish_gathers()
        for name, p in model.named_parameters():
            assert p.isfinite().all() and not torch.equal(p, before[name]), name
        # A rank updates its own shard; the rest of a table or bank keeps its values.
        rows = len(optimizer.shard_of("lm_head", model.lm_head))
        assert rows * world_size == len(model.lm_head)
        assert torch.equal(model.lm_head[rows:], before["lm_head"][rows:])
        assert torch.equal(model.embed, model.lm_head.T) == (stage < 2)
        if cfg.ngrams.orders:
            assert optimizer.ngrams.block.any() and optimizer.ngrams.block.isfinite().all()


# ---------------------------------------------------------------------------------------------------- kernels


def test_kernel_cases_run(cfg, shards):
    """Runs every case of --kernels with plain torch in the kernels' place."""
    cfg = replace(cfg, kernels=tuple(tg.KERNELS), attention="varlen", fp8=True)
    results = {}
    for case in step_time.kernel_cases(cfg, [0, 2], shards, CPU):
        assert case[:2] not in results and (case.flops > 0) != (case.nbytes > 0)
        results[case[:2]] = case.run(tg.TORCH_BACKEND)
    operations = {*tg.TORCH_BACKEND._fields} - {"fp8"}
    assert {operation for operation, _ in results} == operations
    losses = [result for (operation, _), result in results.items() if operation == "softcap_loss"]
    assert {grad.dtype for _, grad in losses} == {torch.float32, torch.float8_e5m2}
    grams = [shapes for operation, shapes in results if operation == "gram"]
    assert sum(" of 8" in shapes for shapes in grams) == sum(" of 1" in shapes for shapes in grams) == 8
    sums = [shapes for operation, shapes in results if operation == "segment_sum_rows"]
    assert any(shapes.startswith("bigram_embed") for shapes in sums)
