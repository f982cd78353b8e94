"""Config: overrides, checks, shapes, presets, and what importing the script does (nothing)."""
import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train_gpt as tg
from launch import WAIT

ROOT = Path(tg.__file__).resolve().parent
WORLDS = (1, 2, 4, 8, 16, 64)


# --------------------------------------------------------------------------------------------------------- overrides

@pytest.mark.parametrize("setting, get, want", [
    ("adam_lr=0.01", lambda c: c.adam_lr, 0.01),
    ("adam_lr=1e-3", lambda c: c.adam_lr, 0.001),
    ("adam_lr=2", lambda c: c.adam_lr, 2.0),
    ("slices=16", lambda c: c.slices, 16),
    ("warmup=false", lambda c: c.warmup, False),
    ("warmup=OFF", lambda c: c.warmup, False),
    ("warmup=1", lambda c: c.warmup, True),
    ("data=some where/x=y", lambda c: c.data, "some where/x=y"),
    ("final_windows=3,4", lambda c: c.final_windows, (3, 4)),
    ("scatter_order=a,b", lambda c: c.scatter_order, ("a", "b")),
    ("stages.0.steps=10", lambda c: c.stages[0].steps, 10),
    ("stages.3.mtp_start=1,0.5", lambda c: c.stages[3].mtp_start, (1.0, 0.5)),
    ("stages.1.mtp_end=1", lambda c: c.stages[1].mtp_end, (1.0,)),
    ("params.embed.wd_mul=3", lambda c: {p.name: p for p in c.params}["embed"].wd_mul, 3.0),
    ("params.0.lr_mul=7", lambda c: c.params[0].lr_mul, 7.0),
    ("params.lm_head.betas=.1,.2", lambda c: {p.name: p for p in c.params}["lm_head"].betas, (0.1, 0.2)),
    ("layers.1.value=none", lambda c: c.layers[1].value, None),
    ("layers.1.value=4", lambda c: c.layers[1].value, 4),
    ("layers.1.attention=None", lambda c: c.layers[1].attention, None),
    ("layers.1.attention=paired", lambda c: c.layers[1].attention, "paired"),
], ids=lambda x: x if isinstance(x, str) else "")
def test_override(setting, get, want):
    before = dataclasses.asdict(tg.RECORD)
    got = get(tg.override(tg.RECORD, setting))
    assert got == want and type(got) is type(want)
    assert dataclasses.asdict(tg.RECORD) == before


def test_an_override_changes_one_thing():
    new = dataclasses.asdict(tg.override(tg.RECORD, "stages.2.lr_mul=9"))
    old = dataclasses.asdict(tg.RECORD)
    old["stages"][2]["lr_mul"] = 9.0
    assert new == old


# ------------------------------------------------------------------------------------------------------------ checks

@pytest.mark.parametrize("preset", tg.PRESETS)
def test_presets_are_valid(preset):
    cfg = tg.PRESETS[preset]
    assert cfg.preset == preset
    for world in (1, 2, 4, 8):
        tg.check_config(cfg, world)
    assert len(cfg.layers) == 11 and len(cfg.stages) == 4  # every role, every stage
    assert cfg.layers == tg.LAYERS


@pytest.mark.parametrize("preset, world, near", [
    ("record", 3, "2 or 4"), ("record", 6, "4 or 8"), ("cpu", 5, "4 or 8"), ("cpu", 3, "2 or 4")])
def test_worlds_that_cannot_share_are_refused(preset, world, near):
    with pytest.raises(tg.UserError) as error:
        tg.check_config(tg.PRESETS[preset], world)
    assert f"world of {world}" in str(error.value)
    for n in near.split(" or "):
        assert f" {n} " in str(error.value)
        tg.check_config(tg.PRESETS[preset], int(n))  # what it advises is true


# ------------------------------------------------------------------------------------------------------------ shapes

@pytest.mark.parametrize("world", WORLDS)
def test_param_shapes(world):
    """The sizes of the record model, padded so that every rank owns as much as the others."""
    shapes = tg.param_shapes(tg.RECORD, world)
    up = lambda n, m: math.ceil(n / m) * m
    assert shapes == {
        "qk_bank": (up(60, world), 256, 768), "vo_bank": (up(20, world), 768, 768),
        "mlp_bank": (up(22, math.lcm(2, world)) // 2, 2, 3072, 768),
        "embed": (50304, 768), "lm_head": (768, 50304), "value_embeds": (50304, 5, 768), "bigram_embed": (251520, 768),
        "attn_gate_bank": (10, 6, 12), "ve_gate_bank": (5, 6, 12), "smear_gate": (1, 12), "skip_gate": (1, 12),
        "post_lambdas": (11, 2), "resid_lambdas": (11, 2), "x0_lambdas": (11,), "bigram_lambdas": (11,), "scalars": (25,)}
    for name in ("qk_bank", "vo_bank"):
        assert shapes[name][0] % world == 0
    assert 2 * shapes["mlp_bank"][0] % world == 0
    assert set(shapes) == {row.name for row in tg.PARAMS}


def test_no_matrix_is_padding_that_need_not_be():
    """12 layers have 24 MLP matrices, which 8 ranks share as they are."""
    cfg = replace(tg.RECORD, layers=(*tg.LAYERS, tg.Layer()))
    assert tg.param_shapes(cfg, 8)["mlp_bank"][:2] == (12, 2) and tg.param_shapes(tg.RECORD, 1)["mlp_bank"][:2] == (11, 2)


def test_no_cooldown_and_no_schedule():
    """A cooldown of zero steps falls to the final rate at once; without scheduled steps there is only that."""
    cfg = replace(tg.CPU, cooldown=0.0)
    assert tg.plan(cfg, 600).lr_mul == cfg.stages[2].lr_mul * 0 + cfg.stages[3].lr_mul
    assert tg.plan(cfg, 601).lr_mul == pytest.approx(cfg.final_lr)
    only = replace(cfg, stages=tuple(replace(stage, steps=0) for stage in cfg.stages[:3]) + cfg.stages[3:])
    assert tg.plan(only, 5).lr_mul == pytest.approx(cfg.final_lr)


def test_initial_values():
    """Of a small model: distributions, padding, tying; the same from any world size; another seed, other values."""
    cfg = replace(tg.CPU, heads=4, padded_vocab=512, bigram_rows=2560)
    models = {world: tg.GPT(cfg, world, seed=5) for world in (1, 8)}
    for model in models.values():
        model.requires_grad_(False)
    one, bound = models[1], math.sqrt(3) * 0.5 * cfg.dim ** -0.5
    for name, p in models[8].named_parameters():
        first = dict(one.named_parameters())[name]
        assert p[:len(first)].equal(first) and not p[len(first):].any(), name
    assert models[8].qk_bank.size(0) == 40 and models[8].vo_bank.size(0) == 24
    for p in (one.qk_bank, one.vo_bank, one.mlp_bank[:, 0]):
        assert 0.99 * bound < p.abs().max() <= bound and abs(p.mean()) < 0.01 * bound
        assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert not one.mlp_bank[:, 1].any()
    assert one.lm_head.std().item() == pytest.approx(0.005, rel=0.02) and one.embed.equal(one.lm_head.T)
    assert one.value_embeds.std().item() == pytest.approx(0.01, rel=0.02)
    for name in ("bigram_embed", "attn_gate_bank", "ve_gate_bank", "smear_gate", "skip_gate", "x0_lambdas"):
        assert not getattr(one, name).any()
    assert (one.post_lambdas == 1).all() and one.resid_lambdas.allclose(one.post_lambdas * math.sqrt(1.1))
    assert one.bigram_lambdas.allclose(one.bigram_lambdas * 0 + 0.05)
    assert one.scalars.tolist() == pytest.approx([0.5, 1.0] * 11 + [0.0, 0.5, -1.5])
    assert not tg.GPT(cfg, 1, seed=6).qk_bank.equal(one.qk_bank) and tg.GPT(cfg, 1, seed=5).qk_bank.equal(one.qk_bank)


# ---------------------------------------------------------------------------------------------------------- schedule

@pytest.mark.parametrize("cfg", [tg.CPU, replace(tg.CPU, stages=tuple(replace(s, steps=2) for s in tg.CPU.stages)),
                                 replace(tg.CPU, stages=tg.CPU.stages[:2]), replace(tg.CPU, momentum_warmup=0)])
def test_any_schedule_has_a_plan_for_every_step(cfg):
    plans = [tg.plan(cfg, step) for step in range(cfg.steps)]
    assert [p.step for p in plans] == list(range(cfg.steps))
    assert all(0 < p.lr_mul <= 2 and cfg.momentum_low - 1e-9 <= p.momentum <= cfg.momentum_high + 1e-9 for p in plans)
    splits = [p.step for p in plans if p.split]
    assert len(splits) == (len(cfg.stages) > 2) and all(step % 2 for step in splits)
    assert sum(p.tokens for p in plans) == tg.train_tokens(cfg)
    assert set(tg.warmup_steps(cfg)) >= {0, 1} and max(tg.warmup_steps(cfg)) < cfg.steps
    assert all(start in tg.warmup_steps(cfg) for start in cfg.stage_starts)


def test_validation_steps():
    assert [s for s in range(1480) if tg.validates(tg.RECORD, s)] == [0, 250, 500, 750, 1000, 1250]
    assert not any(tg.validates(replace(tg.RECORD, val_every=0), s) for s in range(1480))


# -------------------------------------------------------------------------------------------------------------- json

@pytest.mark.parametrize("cfg", [tg.RECORD, tg.CPU, tg.override(tg.override(tg.CPU, "layers.1.value=none"), "params.embed.betas=.1,.2")])
def test_config_survives_json(cfg):
    again = tg.config_from_dict(json.loads(tg.config_json(cfg)))
    assert again == cfg
    assert hash(again) == hash(cfg)  # tuples again, no lists


@pytest.mark.parametrize("name, kind", [("bos", "Config"), ("start_token", "Config"), ("windows", "Stage"), ("lr_mul", "Stage")])
def test_another_scripts_config_is_refused(name, kind):
    """A field that is unknown here, or missing there: the default in its place would be another model."""
    values = json.loads(tg.config_json(tg.CPU))
    place = values if kind == "Config" else values["stages"][1]
    if place.pop(name, None) is None:
        place[name] = 1
    with pytest.raises(tg.UserError, match=f"a saved {kind} and this script's differ in {name}; use the script that saved it"):
        tg.config_from_dict(values)


# ------------------------------------------------------------------------------------------------------------ import

WATCH = r"""
import os, sys
seen = []
def watch(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        mode, flags = args[1], args[2]
        writes = isinstance(mode, str) and set(mode) & set("wax+")
        writes = writes or isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes and os.fsdecode(args[0]) != os.devnull:
            seen.append(("write", os.fsdecode(args[0])))
    if event in ("subprocess.Popen", "os.system", "os.mkdir", "os.remove", "os.rename", "socket.connect", "socket.getaddrinfo"):
        seen.append((event, str(args)))
import argparse, concurrent.futures, tqdm, numpy, torch, torch.distributed as dist  # what they do is theirs
import torch.nn.functional
argv = list(sys.argv)
environment, modules, threads = dict(os.environ), set(sys.modules), torch.get_num_threads()
sys.addaudithook(watch)
import train_gpt
assert sys.argv == argv and dict(os.environ) == environment
assert not torch.cuda.is_initialized() and not dist.is_initialized() and torch.get_num_threads() == threads
assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
root = os.path.dirname(os.path.abspath(train_gpt.__file__))
ours = [n for n, m in sys.modules.items() if (f := getattr(m, "__file__", None)) and os.path.dirname(os.path.abspath(f)).startswith(root)
        and "site-packages" not in f]
assert ours == ["train_gpt"], ours
assert not seen, seen
import threading
assert threading.active_count() == 1
print("quiet")
"""


@pytest.mark.slow
def test_import_does_nothing(tmp_path):
    result = subprocess.run([sys.executable, "-B", "-c", WATCH, "--preset", "nonsense"], cwd=tmp_path, text=True, capture_output=True,
                            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RANK": "7", "WORLD_SIZE": "9"}, timeout=WAIT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "quiet\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_file_is_enough(tmp_path):
    """The script, copied alone into an empty folder, starts."""
    copy = tmp_path / "my_copy.py"
    copy.write_text((ROOT / "train_gpt.py").read_text(encoding="utf-8"), encoding="utf-8")
    result = subprocess.run([sys.executable, str(copy), "-h"], cwd=tmp_path, text=True, capture_output=True, timeout=WAIT)
    assert result.returncode == 0 and "--preset" in result.stdout
