"""Tests select_backend: the config's implementations on each machine, or an error with settings that run."""

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
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
MACHINES = [(HOST, None), *((CUDA, capability) for capability in CAPABILITIES)]


def machine_id(value):
    return value.type if isinstance(value, torch.device) else value and "%d.%d" % value


@pytest.fixture
def set_machine(monkeypatch):
    """Returns a function that fakes what select_backend looks for on a machine."""

    def fail_to_activate(name):
        raise RuntimeError(f"no module for {name}")

    def varlen_attn(q, k, v):
        pass

    def varlen_attn_with_windows(q, k, v, scale=None, window_size=(-1, -1)):
        pass

    def set_machine(
        interpreted=False, with_triton=True, with_compiler=True, with_fa3=False, with_windows=True
    ):
        monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
        monkeypatch.setattr(tg, "triton", types.SimpleNamespace() if with_triton else None)
        monkeypatch.delenv("CXX", raising=False)
        found = {"g++": "/bin/g++"} if with_compiler else {}
        monkeypatch.setattr(tg.shutil, "which", found.get)
        activate = (lambda name: None) if with_fa3 else fail_to_activate
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)
        function = varlen_attn_with_windows if with_windows else varlen_attn
        module = types.SimpleNamespace(varlen_attn=function)
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)

    set_machine()
    # select_backend sets the limit; this restores it.
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield set_machine


def proposals(error):
    """Returns the settings that an error says would run."""
    return re.findall(r"--set ([^\s,]+)", str(error).split("this would run: ")[1])


def check_selection(cfg, device, capability):
    """Checks that the backend is what the config names, or that the error's advice works.

    Returns whether there was an error.
    """
    try:
        backend = tg.select_backend(cfg, device, capability)
    except tg.UserError as e:
        assert "\n" not in str(e)
        if device is HOST or "--preset" in str(e):
            assert "--preset cpu" in str(e)
            tg.select_backend(tg.CPU, device, capability)
        if "compute capability" in str(e):
            assert re.search(r"this GPU's( compute capability)? is %d\.%d\b" % capability, str(e))
        if "--set" in str(e):
            for setting in proposals(e):
                cfg = tg.override(cfg, setting)
            tg.select_backend(cfg, device, capability)
        return True
    chosen = {field: function for name in cfg.kernels for field, function in tg.KERNELS[name].items()}
    plain = tg.TORCH_BACKEND
    for field in {field for functions in tg.KERNELS.values() for field in functions}:
        assert getattr(backend, field) is chosen.get(field, getattr(plain, field))
    assert backend.attention is (tg.attention if cfg.attention == "dense" else tg.flash_attention)
    assert backend.fp8 == cfg.fp8
    assert (backend.compiled is plain.compiled) == (backend.scalar is plain.scalar) == (not cfg.compile)
    return False


DTYPES = ("bfloat16", "float32", "float64")
SHAPES = {
    "even": (),
    "vocabulary": ("padded_vocab=50300",),
    "chunk": ("head_chunk=1000",),
    "tokens": ("stages.1.batch_tokens=262208",),
    "width": ("head_dim=132", "heads=2"),
}


def random_config(g):
    def pick(options):
        return options[torch.randint(len(options), (), generator=g)]

    cfg = replace(
        tg.RECORD,
        dtype=pick(DTYPES),
        muon_dtype=pick(DTYPES),
        attention=pick(("dense", "varlen", "fa3")),
        kernels=pick(((), tuple(tg.KERNELS), pick([(name,) for name in tg.KERNELS]))),
        fp8=pick((True, False)),
        compile=pick((True, False)),
    )
    if pick((True, False)):  # else few would be accepted
        cfg = replace(cfg, dtype="bfloat16", muon_dtype="bfloat16")
    return functools.reduce(tg.override, SHAPES[pick(["even", "even", *SHAPES])], cfg)


def check_random_configs(set_machine, machines, arguments, n):
    """Checks n configs on each machine, for each combination of set_machine's `arguments`."""
    failed, g = [], generator(1)
    for device, capability in machines:
        for values in itertools.product(*arguments):
            set_machine(*values)
            failed += [check_selection(random_config(g), device, capability) for _ in range(n)]
    assert 0 < sum(failed) < len(failed)


NO, YES, EITHER = (False,), (True,), (False, True)


@pytest.mark.parametrize("device, capability", MACHINES, ids=machine_id)
def test_every_error_proposes_what_runs(set_machine, device, capability):
    interpreted = EITHER if device is HOST else NO
    arguments = (interpreted, EITHER, EITHER, EITHER, YES)
    check_random_configs(set_machine, [(device, capability)], arguments, 15)


def test_every_error_proposes_what_runs_with_the_interpreter_on_a_gpu(set_machine):
    check_random_configs(set_machine, MACHINES[1:], (YES, EITHER, EITHER, EITHER, YES), 8)


def test_every_error_proposes_what_runs_without_windows(set_machine):
    check_random_configs(set_machine, MACHINES, (NO, EITHER, EITHER, EITHER, NO), 8)


@pytest.mark.parametrize("dtype, muon_dtype", [("float32", "bfloat16"), ("float64", "float64")])
def test_interpreted_kernels_are_for_float32(set_machine, dtype, muon_dtype):
    set_machine(interpreted=True)
    with pytest.raises(tg.UserError):
        tg.select_backend(replace(tg.CPU, kernels=("gram",), dtype=dtype, muon_dtype=muon_dtype), HOST)


def test_presets_run_on_their_machines(set_machine):
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        backend = tg.select_backend(tg.RECORD, CUDA, capability)
        assert backend.gram is tg.triton_gram and backend.attention is tg.flash_attention and backend.fp8
    set_machine(with_fa3=True)
    fa3 = tg.select_backend(replace(tg.RECORD, attention="fa3"), CUDA, (9, 0))
    assert fa3.attention is tg.flash_attention
    for capability in (None, (8, 0)):
        assert tg.select_backend(tg.CPU, CUDA if capability else HOST, capability) == tg.TORCH_BACKEND


def test_compile_raises_the_recompile_limit(set_machine):
    with torch._dynamo.config.patch(recompile_limit=3):
        tg.select_backend(replace(tg.RECORD, compile=False), CUDA, (9, 0))
        assert torch._dynamo.config.recompile_limit == 3
        backend = tg.select_backend(tg.RECORD, CUDA, (9, 0))
        assert torch._dynamo.config.recompile_limit >= 64
    assert backend.compiled(len) is backend.compiled(len) and backend.scalar(0.5).dtype == torch.float32


# fmt: off
UNSUPPORTED = [  # what the machine lacks, settings, device, capability, the reason, the proposed settings
    ({}, [], HOST, None, "the kernels need a GPU", ["kernels=", "attention=dense"]),
    ({"interpreted": True}, ["attention=dense"], HOST, None,
     "right in fp32 only", ["dtype=float32", "muon_dtype=float32"]),
    ({}, [], CUDA, (8, 0), "FP8 needs compute capability 8.9 (RTX 40, H100) or newer", ["fp8=false"]),
    ({}, [], CUDA, (8, 6), "this GPU's compute capability is 8.6", ["fp8=false"]),
    ({}, ["attention=fa3"], CUDA, (9, 0),
     "FlashAttention-3 cannot be used (no module for FA3)", ["attention=varlen"]),
    ({"with_windows": False}, [], CUDA, (9, 0), "varlen_attn has no window", ["attention=dense"]),
    ({"with_triton": False}, [], CUDA, (9, 0), "the kernels need the package triton", ["kernels="]),
    ({"with_compiler": False}, [], CUDA, (9, 0),
     "torch.compile needs a C++ compiler", ["kernels=", "compile=false"]),
    ({}, ["dtype=float32"], CUDA, (9, 0),
     "the kernels are for bf16, not dtype=float32", ["kernels=", "attention=dense"]),
    ({}, ["muon_dtype=float32"], CUDA, (9, 0), "the kernels are for bf16", ["kernels="]),
    ({}, ["dtype=float64", "kernels=", "attention=dense"], HOST, None,
     "FP8 is for dtype bfloat16 or float32", ["fp8=false"]),
    ({}, ["padded_vocab=50300"], CUDA, (9, 0), "padded_vocab is 50300", ["fp8=false"]),
    ({}, ["head_chunk=1000"], CUDA, (9, 0), "head_chunk is 1000", ["fp8=false"]),
    ({}, ["stages.1.batch_tokens=262208"], CUDA, (9, 0), "a micro-batch of stage 1 is 32776", ["fp8=false"]),
    ({}, ["head_dim=132", "heads=2"], CUDA, (9, 0), "the model's width is 264", ["fp8=false"]),
    ({}, ["mlp_dim=3080"], CUDA, (9, 0), "mlp_dim is 3080", ["fp8=false"]),
]
# fmt: on


@pytest.mark.parametrize("machine, settings, device, capability, reason, proposed", UNSUPPORTED)
def test_unsupported_settings(set_machine, machine, settings, device, capability, reason, proposed):
    set_machine(**machine)
    cfg = functools.reduce(tg.override, settings, tg.RECORD)
    with pytest.raises(tg.UserError, match=re.escape(reason)) as error:
        tg.select_backend(cfg, device, capability)
    assert proposals(error.value) == proposed
    assert check_selection(cfg, device, capability)


def test_an_old_gpu_gets_the_cpu_preset_proposed(set_machine):
    message = "need compute capability 8.0 .* capability is 7.5; --preset cpu, .* would run"
    for setting in ("kernels=gram", "attention=varlen", "attention=fa3", "dtype=bfloat16"):
        with pytest.raises(tg.UserError, match=message):
            tg.select_backend(tg.override(tg.CPU, setting), CUDA, (7, 5))
