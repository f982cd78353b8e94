"""Tests select_backend: the config's implementations on each machine, or an error that names a setting."""

import ast
import types
from dataclasses import replace

import pytest
import torch

import train_gpt as tg

CUDA, HOST = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def set_machine(monkeypatch):
    """Returns a function that fakes what select_backend looks for on a machine."""

    def set_machine(interpreted="0", triton=types, fa3=False, capability=(9, 0)):
        def activate(name):
            if not fa3:
                raise RuntimeError(f"no module for {name}")

        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        monkeypatch.setattr(tg, "triton", triton)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate, raising=False)

    set_machine()
    return set_machine


def test_presets_run_on_their_machines(set_machine):
    for capability in ((8, 9), (9, 0), (12, 0)):
        set_machine(capability=capability)
        backend = tg.select_backend(tg.RECORD, CUDA)
        assert backend.pointer is tg.triton_pointer and backend.attention is tg.flash_attention
        assert backend.fp8
    set_machine(fa3=True)
    assert tg.select_backend(replace(tg.RECORD, attention_impl="fa3"), CUDA).attention is tg.flash_attention
    set_machine(capability=(8, 0))
    assert tg.select_backend(tg.CPU, CUDA) == tg.TORCH_BACKEND


def test_a_cpus_mlps_are_in_bf16_where_that_is_faster(monkeypatch):
    off, fp64 = replace(tg.CPU, bf16_mlp=False), replace(tg.CPU, dtype="float64")
    for has_amx, dtype in (True, torch.bfloat16), (False, None):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda answer=has_amx: answer)
        assert tg.select_backend(off, HOST) == tg.select_backend(fp64, HOST) == tg.TORCH_BACKEND
        assert tg.select_backend(tg.CPU, HOST).mlp_dtype == dtype


def test_only_a_table_is_not_autotuned(monkeypatch):
    """Checks what torch.compile is given: autotuning would copy the table of n-grams."""
    monkeypatch.setattr(torch, "compile", lambda function, options, **_: options["triton.autotune_pointwise"])
    compiler = tg.configure_compiler(tg.RECORD)
    assert compiler(tg.adam_update.__wrapped__) and not compiler(tg.row_adam_update.__wrapped__)


UNSUPPORTED = """\
{"capability": (7, 5)} | | the kernels need | kernels=
{"capability": None} | | the kernels need | kernels=
{"capability": (9, 0), "triton": None} | | the kernels need | kernels=
{"capability": (9, 0)} | dtype=float32 | the kernels need | kernels=
{"capability": (9, 0)} | bank_dtype=float32 | the kernels need | kernels=
{"capability": None, "interpreted": "1"} | bank_dtype=float32 attention_impl=dense | kernels need | kernels=
{"capability": (9, 0)} | pointer_dim=48 | the pointer's kernel needs | pointer_dim=128
{"capability": None} | kernels= | FlashAttention needs | attention_impl=dense
{"capability": (7, 5)} | kernels= | FlashAttention needs | attention_impl=dense
{"capability": (9, 0)} | kernels= dtype=float32 | FlashAttention needs | attention_impl=dense
{"capability": (8, 6)} | | FP8 needs | fp8=false
{"capability": (9, 0)} | attention_impl=fa3 | no module for FA3 | attention_impl=varlen
"""  # the machine; settings; the reason; what avoids it


@pytest.mark.parametrize("case", UNSUPPORTED.splitlines())
def test_unsupported_settings(set_machine, case):
    """The error names one setting; with it there is none, or another reason."""
    machine, settings, reason, fix = map(str.strip, case.split("|"))
    machine = ast.literal_eval(machine)
    set_machine(**machine)
    device = CUDA if machine["capability"] else HOST
    cfg = tg.with_settings(tg.RECORD, settings.split())
    with pytest.raises(tg.UserError, match=f"{reason}.*--set {fix}$"):
        tg.select_backend(cfg, device)
    try:
        tg.select_backend(tg.override(cfg, fix), device)
    except tg.UserError as error:
        assert reason not in str(error)
