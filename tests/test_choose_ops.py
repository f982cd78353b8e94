"""Which form of every operation a run gets, and what it is told where one cannot run: with the settings that would."""
import functools
import itertools
import re
import sys
import types
from dataclasses import replace

import pytest
import torch

import train_gpt as tg


def generator(seed):
    return torch.Generator().manual_seed(seed)


CUDA, HOST = torch.device("cuda"), torch.device("cpu")
MACHINES = [(HOST, None), *((CUDA, capability) for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)))]


def machine_id(value):
    return value.type if isinstance(value, torch.device) else value and "%d.%d" % value


@pytest.fixture
def setting(monkeypatch):
    """setting(interpreted, with_triton, with_compiler, with_fa3, with_windows): makes the machine such."""
    def activate(name):
        raise RuntimeError(f"no module for {name}")

    def varlen_attn(q, k, v): pass
    def windowed(q, k, v, scale=None, window_size=(-1, -1)): pass

    def make(interpreted=False, with_triton=True, with_compiler=True, with_fa3=False, with_windows=True):
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        monkeypatch.setattr(tg, "triton", types.SimpleNamespace() if with_triton else None)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(tg.shutil, "which", lambda name: "/bin/g++" if with_compiler and name == "g++" else None)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", (lambda name: None) if with_fa3 else activate,
                            raising=False)
        module = types.SimpleNamespace(varlen_attn=windowed if with_windows else varlen_attn)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    make()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):  # which choose_ops sets
        yield make


def proposals(error):
    """The settings that a refusal says would run."""
    return re.findall(r"--set ([^\s,]+)", str(error).split("this would run: ")[1])


def check_choice(cfg, device, capability):
    """What was asked for, or a refusal whose advice works. -> whether it was refused."""
    try:
        ops = tg.choose_ops(cfg, device, capability)
    except tg.UserError as e:
        assert "\n" not in str(e)
        if device is HOST or "--preset" in str(e):
            assert "--preset cpu" in str(e)
            tg.choose_ops(tg.CPU, device, capability)
        if "compute capability" in str(e):
            assert f"this GPU's compute capability is {capability[0]}.{capability[1]}" in str(e)
        if "--set" in str(e):
            for change in proposals(e):
                cfg = tg.override(cfg, change)
            tg.choose_ops(cfg, device, capability)
        return True
    forms = {field: form for name in cfg.kernels for field, form in tg.KERNELS[name].items()}
    for field in ("gram", "relu_square", "relu_square_grad", "softcap_loss", "sum_rows", "transpose_copy", "transpose_add"):
        assert getattr(ops, field) is forms.get(field, getattr(tg.PLAIN, field))
    assert ops.attention is (tg.attention if cfg.attention == "dense" else tg.flash_attention) and ops.fp8 == cfg.fp8
    assert (ops.compiled is tg.PLAIN.compiled) == (ops.number is tg.PLAIN.number) == (not cfg.compile)
    return False


FLOATS = ("bfloat16", "float32", "float64")
SHAPES = {"even": (), "vocabulary": ("padded_vocab=50300",), "chunk": ("head_chunk=1000",),
          "tokens": ("stages.1.tokens=262208",), "width": ("head_dim=132", "heads=2")}


def random_config(g):
    pick = lambda options: options[torch.randint(len(options), (), generator=g)]
    cfg = replace(tg.RECORD, dtype=pick(FLOATS), polar_dtype=pick(FLOATS), attention=pick(("dense", "varlen", "fa3")),
                  kernels=pick(((), tg.KERNEL_NAMES, pick([(name,) for name in tg.KERNEL_NAMES]))),
                  fp8=pick((True, False)), compile=pick((True, False)))
    if pick((True, False)):  # else few would be accepted
        cfg = replace(cfg, dtype="bfloat16", polar_dtype="bfloat16")
    return functools.reduce(tg.override, SHAPES[pick(["even", "even", *SHAPES])], cfg)


def check_choices(setting, machines, around, n):
    refused, g = [], generator(1)
    for machine in machines:
        for values in itertools.product(*around):
            setting(*values)
            refused += [check_choice(random_config(g), *machine) for _ in range(n)]
    assert 0 < sum(refused) < len(refused)


NO, YES, EITHER = (False,), (True,), (False, True)


@pytest.mark.parametrize("device, capability", MACHINES, ids=machine_id)
def test_every_refusal_says_what_would_run(setting, device, capability):
    check_choices(setting, [(device, capability)], (EITHER if device is HOST else NO, EITHER, EITHER, EITHER, YES), 15)


def test_every_refusal_says_what_would_run_with_the_interpreter_on_a_gpu(setting):
    check_choices(setting, MACHINES[1:], (YES, EITHER, EITHER, EITHER, YES), 8)


def test_every_refusal_says_what_would_run_without_windows(setting):
    check_choices(setting, MACHINES, (NO, EITHER, EITHER, EITHER, NO), 8)


@pytest.mark.parametrize("dtype, polar_dtype", [("float32", "bfloat16"), ("float64", "float64")])
def test_interpreted_kernels_are_for_float32(setting, dtype, polar_dtype):
    setting(interpreted=True)
    with pytest.raises(tg.UserError):
        tg.choose_ops(replace(tg.CPU, kernels=("gram",), dtype=dtype, polar_dtype=polar_dtype), HOST)


def test_record_runs_on_what_it_is_for(setting):
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        ops = tg.choose_ops(tg.RECORD, CUDA, capability)
        assert ops.gram is tg.triton_gram and ops.attention is tg.flash_attention and ops.fp8
    setting(with_fa3=True)
    assert tg.choose_ops(replace(tg.RECORD, attention="fa3"), CUDA, (9, 0)).attention is tg.flash_attention
    for capability in (None, (8, 0)):
        assert tg.choose_ops(tg.CPU, CUDA if capability else HOST, capability) == tg.PLAIN


def test_compile_widens_the_recompile_limit(setting):
    with torch._dynamo.config.patch(recompile_limit=3):
        tg.choose_ops(replace(tg.RECORD, compile=False), CUDA, (9, 0))
        assert torch._dynamo.config.recompile_limit == 3
        ops = tg.choose_ops(tg.RECORD, CUDA, (9, 0))
        assert torch._dynamo.config.recompile_limit >= 64
    assert ops.compiled(len) is ops.compiled(len) and ops.number(0.5).dtype == torch.float32


REFUSED = [  # machine's lacks, changes, device, capability, of the message: why; what would run
    ({}, [], HOST, None, "the kernels need a GPU", ["kernels=", "attention=dense"]),
    ({"interpreted": True}, ["attention=dense"], HOST, None, "right in fp32 only", ["dtype=float32", "polar_dtype=float32"]),
    ({}, [], CUDA, (8, 0), "FP8 needs compute capability 8.9 (RTX 40, H100) or newer", ["fp8=false"]),
    ({}, [], CUDA, (8, 6), "this GPU's compute capability is 8.6", ["fp8=false"]),
    ({}, ["attention=fa3"], CUDA, (9, 0), "FlashAttention-3 cannot be used (no module for FA3)", ["attention=varlen"]),
    ({"with_windows": False}, [], CUDA, (9, 0), "varlen_attn knows no window", ["attention=dense"]),
    ({"with_triton": False}, [], CUDA, (9, 0), "the kernels need the package triton", ["kernels="]),
    ({"with_compiler": False}, [], CUDA, (9, 0), "torch.compile needs a C++ compiler", ["compile=false", "kernels="]),
    ({}, ["dtype=float32"], CUDA, (9, 0), "the kernels are for bf16, not dtype=float32", ["kernels=", "attention=dense"]),
    ({}, ["polar_dtype=float32"], CUDA, (9, 0), "the kernels are for bf16", ["kernels="]),
    ({}, ["dtype=float64", "kernels=", "attention=dense"], HOST, None, "FP8 is for dtype bfloat16 or float32", ["fp8=false"]),
    ({}, ["padded_vocab=50300"], CUDA, (9, 0), "50300 is padded_vocab", ["fp8=false"]),
    ({}, ["head_chunk=1000"], CUDA, (9, 0), "1000 is head_chunk", ["fp8=false"]),
    ({}, ["stages.1.tokens=262208"], CUDA, (9, 0), "262208 tokens", ["fp8=false"]),
    ({}, ["head_dim=132", "heads=2"], CUDA, (9, 0), "264 is the model's width", ["fp8=false"])]


@pytest.mark.parametrize("machine, changes, device, capability, why, instead", REFUSED)
def test_refusals(setting, machine, changes, device, capability, why, instead):
    setting(**machine)
    cfg = functools.reduce(tg.override, changes, tg.RECORD)
    with pytest.raises(tg.UserError, match=re.escape(why)) as refusal:
        tg.choose_ops(cfg, device, capability)
    assert proposals(refusal.value) == instead
    assert check_choice(cfg, device, capability)


def test_a_gpu_that_is_too_old_is_told_of_the_cpu_preset(setting):
    for change in ("kernels=gram", "attention=varlen", "attention=fa3", "dtype=bfloat16"):
        cfg = tg.override(tg.CPU, change)
        with pytest.raises(tg.UserError, match="need compute capability 8.0 .* capability is 7.5; --preset cpu, .* would run"):
            tg.choose_ops(cfg, CUDA, (7, 5))
