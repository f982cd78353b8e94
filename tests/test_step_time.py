"""bench/step_time.py: what it counts, what it prints, and its rank that has no others. No time is asserted."""
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
import step_time  # noqa: E402 (after the path above)

# With a stage that has no steps.
SETTINGS = [*TINY, "compile=false", "attention=dense", "stages.3.steps=0"]
NUMBERS = ["tokens", "ms", "first", "second", "tokens/s", "keys", "MFLOP", "MFU", "MiB", "first s"]


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def cfg():
    cfg = tg.CPU
    for setting in SETTINGS:
        cfg = tg.override(cfg, setting)
    return cfg


@pytest.fixture
def shards(cfg, tmp_path):
    return step_time.made_shard(str(tmp_path), cfg, [0, 1, 2], 8)[0]


def bench(*arguments):
    return step_time.main(["--preset", "cpu", "--steps", "2", "--set", *SETTINGS, *arguments])


def lines_of(out):
    """What a table line holds, by the name of its column, with the work that stands above it."""
    work, lines = None, []
    for line in out.splitlines():
        work = line.split(":")[0] if line.startswith("stage ") else work
        words = line.split()
        if len(words) >= 13 and words[0] in ("base", "A", "B") and not words[0].endswith(":"):
            names = ["form", "tokens", "ms", "quartiles", "first", "second", "wait", "tokens/s", "keys", "MFLOP", "MFU", "MiB",
                     "first s", "ratio", "ratio quartiles"]
            lines.append({"work": work, **dict(zip(names, words))})
    return lines


def test_keys_per_query_by_counting():
    cu = np.array([0, 1, 8, 8, 20, 33, 33, 33], dtype=np.int32)  # an empty document, and the filling at the end
    document = np.repeat(np.arange(7), np.diff(cu))
    i, j = np.arange(33)[:, None], np.arange(33)[None, :]
    for window in (1, 2, 6, 7, 12, 100):
        seen = (document[:, None] == document) & (i >= j) & (i - j <= window)
        assert step_time.mean_keys(cu, window) == pytest.approx(seen.sum() / 33, rel=1e-12)


def test_keys_are_those_the_reference_attention_sees(cfg):
    """A query's output, for values of 1 at one key and equal scores, is one over the number of keys it sees."""
    cu, T = torch.tensor([0, 5, 21, 30, 30], dtype=torch.int32), 30
    zeros = torch.zeros(T, 1, 4)
    for window in (1, 4, 40):
        seen = 0.0
        for key in range(T):
            v = zeros.clone()
            v[key] = 1
            seen += (tg.attention(zeros, zeros, v, cu, 16, window, 1.0)[:, 0, 0] > 0).sum().item()
        assert step_time.mean_keys(cu.numpy(), window) == pytest.approx(seen / T)


def test_keys_of_a_paired_layer_count_rows(cfg):
    now = tg.plan(cfg, 0)._replace(short=3, long=100)
    cu = np.array([0, 4, 10], dtype=np.int32)
    keys = step_time.layer_keys(cfg, now, cu)
    kinds = [(layer.attention, layer.window) for layer in cfg.layers if layer.attention]
    want = {("plain", "short"): (1 + 2 + 3 + 4 + 1 + 2 + 3 + 3 * 4) / 10,
            ("plain", "long"): (4 * 5 / 2 + 6 * 7 / 2) / 10,
            ("paired", "short"): (1 + 2 + 3 + 5 * 4 + 1 + 2 + 3 + 9 * 4) / 20}
    assert keys == pytest.approx([want[kind] for kind in kinds])


def test_flops_by_hand(cfg):
    """Two layers of width 12, one of them an MLP alone."""
    cfg = replace(cfg, heads=2, head_dim=6, mlp_dim=20, padded_vocab=32, layers=(tg.Layer("plain"), tg.Layer(None)))
    weights = (2 * 12 * 12) + (2 * 12 * 12) + 2 * (2 * 20 * 12) + 12 * 32  # q and k; v and o; two MLPs; the head
    scores = 2 * (2 * 2 * 6 * 7.5)                                         # two heads: q k^T and p v, with 7.5 keys
    assert step_time.flops_per_token(cfg, [7.5]) == 6 * weights + 3 * scores


def test_flops_of_the_record_are_those_of_its_banks():
    shapes, cfg = tg.param_shapes(tg.RECORD, 1), tg.RECORD
    unpadded = sum(map(math.prod, (shapes["qk_bank"], shapes["vo_bank"], shapes["lm_head"])))
    unpadded += 11 * math.prod(shapes["mlp_bank"][1:])
    assert step_time.flops_per_token(cfg, [0.0] * 10) == 6 * unpadded


@pytest.mark.slow
def test_what_is_printed(cpu, cfg, tmp_path, capsys, monkeypatch):
    """Made data, before and after the split, both shapes of work, two forms."""
    monkeypatch.chdir(tmp_path)
    assert bench("--stages", "0,2", "--against", "main_grad=false head_chunk=7") == 0
    out = capsys.readouterr().out
    assert "made tokens" in out and "A: main_grad=false head_chunk=7" in out and "matmul ceiling" in out
    (changed,) = [line for line in out.splitlines() if line.startswith("preset cpu; ")]
    assert "head_dim (32, 8)" in changed and "window_unit" not in changed and torch.__version__ in out
    ceiling = float(out.split("matmul ceiling: ")[1].split()[0]) * 1e12
    lines = lines_of(out)
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        number = {name: float(line[name]) for name in NUMBERS}
        assert all(value > 0 and math.isfinite(value) for value in number.values()), line
        assert float(line["wait"]) >= 0 and 0 < number["MFU"] < 1.2
        low, high = map(float, line["quartiles"].split(".."))
        assert low <= number["ms"] <= high
        assert number["ms"] == pytest.approx((number["first"] + number["second"]) / 2, abs=0.02)  # of the only pair
        assert number["tokens/s"] == pytest.approx(number["tokens"] / number["ms"] * 1000, rel=0.005 / number["ms"] + 1e-3)
        assert number["MFU"] == pytest.approx(number["tokens/s"] * number["MFLOP"] * 1e6 / ceiling, rel=1e-2, abs=1e-4)
        stage, work = line["work"].split(", ")
        tokens = cfg.stages[int(stage.split()[1])].tokens
        assert number["tokens"] == (tokens if work == "one GPU" else tokens / 8)
        assert ("ratio" in line) == (line["form"] == "A")
        if line["form"] == "A":
            low, high = map(float, line["ratio quartiles"].split(".."))
            assert 0 < low <= float(line["ratio"]) <= high


@pytest.mark.slow
def test_data_of_ones_own(cpu, tmp_path, capsys):
    make_corpus(tmp_path / "corpus")
    assert bench("--stages", "0", "--data", str(tmp_path / "corpus")) == 0
    out = capsys.readouterr().out
    assert f"data: 2 shards of {tmp_path / 'corpus'}" in out and len(lines_of(out)) == 2


@pytest.mark.parametrize("arguments, said", [
    (["--kernels"], "Triton kernels cannot be timed on a CPU"),
    (["--set", "attention=varlen"], "FlashAttention needs a GPU"),
    (["--against", "kernels=gram"], "the kernels need"),
    (["--set", "headz=2"], "did you mean heads"),
    (["--set", "padded_vocab=260"], "8 processes cannot share"),  # 8 ranks cannot share them
    (["--stages", "0,7"], "name stages with steps"),
    (["--stages", "3"], "name stages with steps"),
    (["--steps", "3"], "Adam updates every second step"),
    (["--data", "/nowhere"], "no train shards"),
    (["--kernel", "1"], "unknown option"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_refused_in_one_line(cpu, capsys, monkeypatch, arguments, said):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert bench(*arguments) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("step_time.py: error: ")
    assert "tokens/s" not in captured.out


@pytest.mark.slow
def test_too_little_memory_for_a_variant(cpu, cfg, shards, capsys, monkeypatch):
    """The variant is dropped, whether it is the one that fails or the base beside it; the base is timed."""
    device, real = torch.device("cpu"), step_time.Training.warm_up
    for failing in ("A", "base"):
        forms = [step_time.Form(name, cfg, tg.PLAIN) for name in ("base", "A", "B")]
        failed = []

        def warm_up(training, steps):
            if training.form.name == failing and not failed:
                failed.append(failing)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has")
            return real(training, steps)

        monkeypatch.setattr(step_time.Training, "warm_up", warm_up)
        left = step_time.time_stage(forms, 0, 8, shards, 2, device, 1e12)
        out = capsys.readouterr().out
        gone, stays = ("A", "B") if failing == "A" else ("B", "A")
        assert [form.name for form in left] == ["base", stays]
        assert [line["form"] for line in lines_of(out)] == ["base", stays]
        assert [line for line in out.splitlines() if "out of memory" in line] == [
            f"{gone}: out of memory beside the others; going on without it"]
    with pytest.raises(tg.UserError, match="out of memory"):
        monkeypatch.setattr(step_time.Training, "warm_up", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
        step_time.time_stage(forms[:1], 0, 8, shards, 2, device, 1e12)


# ------------------------------------------------------------------------------------------- one rank without the others

def real_shapes(rank, world, cfg, shards):
    """Of a real rank's parameters, state, micro-batches, and of what its exchange gives, in two steps."""
    return shapes_of(cfg, shards, tg.Exchange(rank, world))


def shapes_of(cfg, shards, exchange):
    model = tg.GPT(cfg, 8)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), exchange)
    batches = tg.Batches(tg.TrainLoader(cfg, shards, 0, 8, False), [tg.plan(cfg, 0), tg.plan(cfg, 1)])
    arrived, original = {}, optimizer.work

    def work(now, pending):
        def waiting(name, p):
            def finish(result):
                value = p.finish(result) if p.finish else result
                arrived[name] = tuple(value.shape), str(value.dtype)
                return value
            return p._replace(finish=finish)
        original(now, {name: waiting(name, p) for name, p in pending.items()})

    optimizer.work = work
    for _ in range(2):
        batch = batches.next()
        sizes = [len(m.inputs) for m in batch.micro_batches]
        tg.train_step(model, optimizer, batch)
    optimizer.finish()
    batches.close()
    state = {name: (tuple(t.shape), str(t.dtype)) for name, t in
             [*model.named_parameters(), *optimizer.tensors.items(), *optimizer.blocks.items(), *optimizer.room.items()]}
    finite = all(p.isfinite().all() for p in model.parameters())
    return state, arrived, sizes, optimizer.adam_steps, list(optimizer.touched), bool(finite)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["main_grad=true", "params.*.reduction=fp32", "delay_head_grad=true"])
def test_a_rank_alone_does_what_a_real_one_does(cfg, shards, workers, setting):
    cfg = tg.override(cfg, setting)
    if setting.startswith("params"):  # fp32 in rank order, dense and sparse
        cfg = tg.override(cfg, "params.value_embeds.exchange=reduce_scatter")
    alone = shapes_of(cfg, shards, step_time.Alone(0, 8))
    assert alone == workers(8, real_shapes, cfg, shards)[0]
    assert alone[-1] and alone[2] == [cfg.stages[0].tokens // 8]


def test_a_rank_alone_gets_its_own_rows():
    exchange = step_time.Alone(0, 8)
    touched = {"tokens": tg.Touched(torch.tensor([1, 2, 9, 30], dtype=torch.int32), [2, 0, 1, 0, 0, 0, 0, 1], 4)}
    route = exchange.route(touched, exchange.announce(touched))["tokens"]
    assert route.received == [2, 0, 0, 0, 0, 0, 0, 0] and route.numbers.wait().tolist() == [1, 2]
    block = torch.zeros(4, 3)
    grad = torch.arange(96.0).view(32, 3)
    got = exchange.reduce_rows("embed", grad, route, block).wait()
    assert got is block and torch.equal(got[1:3], grad[1:3] / 8) and not got[0].any() and not got[3].any()


@pytest.mark.slow
def test_weights_stay_finite_in_every_stage(cfg, shards):
    for stage, world in ((0, 1), (0, 8), (2, 8)):
        training = step_time.Training(step_time.Form("base", cfg, tg.PLAIN), stage, world, shards, 6, torch.device("cpu"))
        before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        training.warm_up(6)
        training.batches.close()
        training.optimizer.finish()
        for name, p in training.model.named_parameters():
            assert p.isfinite().all() and not torch.equal(p, before[name]), name
        # A rank updates its own block; the rest of a table or bank stays as it was.
        after, whole = training.optimizer.own("lm_head", training.model.lm_head), training.model.lm_head
        assert after.size(0) * world == whole.size(0)
        assert torch.equal(whole[after.size(0):], before["lm_head"][after.size(0):])
        assert torch.equal(training.model.embed, whole.T) == (stage < 2)


# --------------------------------------------------------------------------------------------------------------- kernels

def test_kernels_are_given_what_they_take(cfg, shards):
    """Every case of --kernels runs, with the plain forms in the kernels' place."""
    cfg = replace(cfg, kernels=tg.KERNEL_NAMES, attention="varlen", fp8=True)
    told = {}
    for name, shapes, plain, own, flops, moved in step_time.kernel_cases(cfg, tg.PLAIN, [0, 2], shards, torch.device("cpu")):
        assert (name, shapes) not in told and (flops > 0) != (moved > 0)
        plain()
        told[name, shapes] = own()
    assert {name for name, _ in told} == {*tg.PLAIN._fields} - {"attention", "compiled", "number", "fp8"} | {"varlen attention"}
    assert {str(out[1].dtype) for (name, _), out in told.items() if name == "softcap_loss"} == {
        "torch.float32", "torch.float8_e5m2"}
    shapes = [shape for name, shape in told if name == "gram"]
    assert sum(" of 8" in shape for shape in shapes) == sum(" of 1" in shape for shape in shapes) == 6
    assert [shape for name, shape in told if name == "sum_rows" and shape.startswith("bigram_embed")]
