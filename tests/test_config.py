"""Tests the config: overrides, presets, shapes, schedule, JSON; and that an import has no side effects."""

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import BIGRAMS, flatten
from launch import ROOT, SOURCE, WAIT
from saved_model import config_from_dict

# ---- overrides, presets, JSON ------------------------------------------------------------------------------

LM_HEAD = [row.name for row in tg.RECORD.params].index("lm_head")
OVERRIDES = {  # a setting of the record preset, and what it changes
    "adam_lr=0.01": {"['adam_lr']": 0.01},
    "data=some where/x=y": {"['data']": "some where/x=y"},
    "ngrams.orders=": {"['ngrams']['orders'][0]": None, "['ngrams']['orders'][1]": None},
    "stages.3.mtp=2,0.5": {"['stages'][3]['mtp'][0]": 2.0, "['stages'][3]['mtp'][1]": 0.5},
    "stages.*.windows.long=9": {
        f"['stages'][{i}]['windows']['long']": 9 for i in range(len(tg.RECORD.stages))
    },
    "params.lm_head.wd_mul=3": {f"['params'][{LM_HEAD}]['wd_mul']": 3.0},
    "layers.1.value=false": {"['layers'][1]['value']": False},
    "layers.1.attention=": {"['layers'][1]['attention']": ""},
}


@pytest.mark.parametrize("setting", OVERRIDES)
def test_override(setting):
    before = flatten(dataclasses.asdict(tg.RECORD))
    new = flatten(dataclasses.asdict(tg.override(tg.RECORD, setting)))
    changed = {name: new.get(name) for name in before | new if before.get(name) != new.get(name)}
    assert repr(changed) == repr(OVERRIDES[setting])


@pytest.mark.parametrize("preset", tg.PRESETS)
def test_presets_are_valid_and_survive_json(preset):
    cfg = tg.PRESETS[preset]
    assert cfg.preset == preset
    for world_size in (1, 2, 4, 8):
        tg.check_config(cfg, world_size)
    settings = "layers.1.value=false params.embed.betas=.1,.2 val_windows.long=9 ngrams.orders=2,4"
    other = tg.with_settings(cfg, settings.split())
    for written in (cfg, other):
        assert config_from_dict(json.loads(tg.config_json(written))) == written


# ---- shapes ------------------------------------------------------------------------------------------------


SHAPES = """\
qk_bank 12 256 768
narrow_qk_bank 30 128 768
vo_bank 14 768 768
mlp_bank 22 2816 768
embed 50304 768
lm_head 768 50304
value_embeds 50304 4 768
bigram_embed 377280 768
ve_gate_bank 3 6 12
smear_gate 1 12
post_lambdas 11 2
resid_lambdas 11 2
scalars 24
mudd_w1 2 64 768
mudd_w2 2 130 64
mudd_b2 2 14
mudd_gate_w1 2 64 768
mudd_gate_w2 2 23 64
mudd_gate_b2 2 23
mudd_gate_scale 1
pointer_bank 2 128 768
pointer_gain 1
pointer_sink 128
"""


@pytest.mark.pinned("the record preset")
@pytest.mark.parametrize("world_size", (1, 8, 64))
def test_param_shapes(world_size):
    """The record model with bigrams, its banks padded so that every rank owns equally many matrices."""
    shapes = {}
    for line in SHAPES.splitlines():
        name, *sizes = line.split()
        count, *others = map(int, sizes)
        if name in ("qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"):
            count = math.ceil(count / world_size) * world_size
        shapes[name] = (count, *others)
    assert tg.param_shapes(BIGRAMS, world_size) == shapes
    del shapes["bigram_embed"]  # a table of n-grams takes its place
    assert tg.param_shapes(tg.RECORD, world_size) == shapes


@pytest.mark.pinned("a parameter's initial value")
def test_initial_values():
    """Distributions, padding and tying, for any world size. The seed decides the values."""
    sizes = "heads=4 padded_vocab=512 ngrams.orders= ngrams.contexts= bigram_vocab_size=2560 pointer_dim=1024"
    cfg = tg.with_settings(tg.CPU, sizes.split())
    one = tg.GPT(cfg, 1, seed=5)
    eight = tg.GPT(cfg, 8, seed=5)
    other = tg.GPT(cfg, 1, seed=6)
    for name, p in eight.named_parameters():
        unpadded = getattr(one, name)
        assert p[: len(unpadded)].equal(unpadded) and not p[len(unpadded) :].any(), name
    unit = cfg.dim**-0.5
    bank_bound = math.sqrt(3) * 0.5 * unit
    for p, bound in (
        (one.qk_bank, bank_bound),
        (one.vo_bank, bank_bound),
        (one.mlp_bank[::2], bank_bound),
        (one.mudd_w1, unit),  # Kaiming's uniform distribution
        (one.mudd_gate_w1, unit),
        (one.pointer_bank, math.sqrt(3) * unit),
    ):
        assert 0.99 * bound < p.abs().max() <= bound and abs(p.mean()) < 0.01 * bound
        assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)
    assert one.lm_head.std().item() == pytest.approx(0.005, rel=0.02) and one.embed.equal(one.lm_head.T)
    assert one.value_embeds.std().item() == pytest.approx(0.01, rel=0.02)
    assert one.pointer_sink.std().item() == pytest.approx(1024**-0.5, rel=0.1)
    for name in "bigram_embed ve_gate_bank smear_gate mudd_w2 mudd_gate_w2".split():
        assert not getattr(one, name).any(), name
    assert not one.mlp_bank[1::2].any()
    root = math.sqrt(1.1)
    for p, values in (
        (one.mudd_b2[0] * 0.1, [0] * 6 + [2, 2, root, 1, 0, 0.05, root, 1]),
        (one.mudd_b2[1] * 0.1, [0, -0.5] + [0] * 12),
        (one.mudd_gate_scale, [0.1]),
        (one.pointer_gain, [1]),
        (one.scalars, [0.5, 1.0] * 11 + [0.0, -1.5]),
        (one.post_lambdas.flatten(), [1] * 22),
        (one.resid_lambdas.flatten(), [root] * 22),
    ):
        assert p.tolist() == pytest.approx(values, rel=1e-5)
    published = {"xsa": 0, "output": 0.25, "x0": 0, "ngram": 0.05, "skip": 0.5}
    for gates, biases in zip(one.gate_table, one.mudd_gate_b2 * 0.1):
        values = []
        for gate in gates:
            values += gate.columns * [published.get(gate.use, gate.initial)]
        assert biases.tolist() == pytest.approx(values + [0] * (len(biases) - len(values)))
    assert one.signs.abs().eq(1).all() and abs(one.signs.mean()) < 0.01
    assert one.signs.equal(eight.signs) and (one.longest_prefix == -1).all()
    assert not other.qk_bank.equal(one.qk_bank)


def test_initial_values_do_not_depend_on_other_parameters():
    """Checks a model without some parameters, from a table in another order."""
    model = tg.GPT(tg.CPU, seed=5)
    fewer = tg.GPT(replace(tg.CPU, mudd_weights=False, params=tg.CPU.params[::-1]), seed=5)
    for name, p in fewer.named_parameters():
        assert p.equal(getattr(model, name)), name
    assert fewer.signs.equal(model.signs)
    first = {bank.flatten()[0].item() for bank in (model.qk_bank, model.vo_bank, model.mlp_bank)}
    assert len(first) == 3


# ---- schedule ----------------------------------------------------------------------------------------------


SHORT = tg.override(BASE, "stages.*.steps=2")


@pytest.mark.parametrize(
    "cfg", [*tg.PRESETS.values(), SHORT, replace(BASE, stages=BASE.stages[:2], momentum_warmup=0)]
)
def test_any_schedule_has_a_plan_for_every_step(cfg):
    every = set(range(cfg.steps))
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    assert sum(p.batch_tokens for p in plans) == sum(s.steps * s.batch_tokens for s in cfg.stages)
    (untied,) = [step for step, plan in enumerate(plans) if plan.untie]
    assert untied % 2
    warmup = set(itertools.chain.from_iterable(tg.warmup_ranges(cfg)))
    own_update = {untied + 2} & every  # the first after untying
    assert {0, 1} | set(cfg.stage_starts) | own_update <= warmup <= every


def decay_and_count(average, steps):
    """Returns what is left of an average's first tick after a run, and how many ticks there are."""
    rates = tg.tick_rates(average, steps).values()
    return math.prod(1 - rate for rate in rates if rate < 1), len(rates)


*PARAMS, LAST_EMBEDDING = tg.PARAMS
IN_CODE = {
    "params.*.update_every": {"params": (*PARAMS, replace(LAST_EMBEDDING, update_every=(3, 3)))},
    "params.*.rows_by": {"params": (*PARAMS, replace(LAST_EMBEDDING, rows_by=""))},
    "layers.0.window": {"layers": (tg.Layer(window="longest"),)},
    "dtype": {"dtype": "float16"},
}


@pytest.mark.parametrize("name", IN_CODE)
def test_values_in_the_code_are_checked(name):
    """Checks what --set would refuse, too."""
    with pytest.raises(tg.UserError, match=name):
        tg.check_config(replace(BASE, **IN_CODE[name]), 1)


@pytest.mark.pinned("the schedule of a preset")
@pytest.mark.parametrize("preset", tg.PRESETS)
def test_half_the_length_is_the_same_schedule_in_half_the_steps(preset):
    cfg = tg.PRESETS[preset]
    half = tg.override(cfg, "length=0.5")
    names = "lr_mul momentum fast_beta fast_weight late_updates stage prefix sampled_columns".split()
    assert abs(half.steps - cfg.steps / 2) <= len(cfg.stages)
    assert half.two_momenta_from == round(cfg.two_momenta_from / 2)
    plans = [tg.plan_step(cfg, step) for step in range(cfg.steps)]
    for step in range(half.steps):
        plan = tg.plan_step(half, step)
        nearby = plans[max(0, 2 * step - 9) : 2 * step + 10]
        for name in names:
            near = [getattr(p, name) for p in nearby]
            now = getattr(plan, name)
            assert min(near) - 0.03 <= now <= max(near) + 0.03, (step, name)
    for before, after in zip(cfg.averages, half.averages):
        kept, ticks = decay_and_count(before, cfg.steps)
        kept_half, ticks_half = decay_and_count(after, half.steps)
        assert abs(ticks - 2 * ticks_half) <= 4 and kept_half == pytest.approx(kept, abs=0.02)
    assert config_from_dict(json.loads(tg.config_json(half))) == tg.override(half, "length=0.5") == half


def test_a_presets_length_is_applied_once_and_to_no_other(tmp_path):
    """To the script's tables, whatever length the preset has now; --set length is then relative to it."""
    edited, count = re.subn(r'(preset="cpu",)', r"\1 length=0.9,", SOURCE)
    edited = edited.replace("length: Annotated[float, 1e-3, 1e3] = 1.0", "length: float = 0.5")
    (tmp_path / "shorter.py").write_text(edited)
    spec = importlib.util.spec_from_file_location("shorter", tmp_path / "shorter.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    cpu = replace(tg.rescale(tg.CPU, 0.9), length=1.0)
    assert count == 1 and cpu.steps < tg.CPU.steps
    presets = module.PRESETS
    half = module.override(presets["cpu"], "length=0.5")
    assert module.config_json(presets["cpu"]) == tg.config_json(cpu)
    assert module.config_json(presets["words"]) == tg.config_json(tg.PRESETS["words"])
    assert module.config_json(half) == tg.config_json(tg.override(cpu, "length=0.5"))
    # Torch would replace an operation by one of the same name.
    assert torch.ops.train_gpt.write_grad.default is tg.write_grad_op


def test_no_cooldown_and_no_schedule():
    """A cooldown of zero steps drops to the final rate at once; without scheduled steps there is no other."""
    last = BASE.stages[-1]
    start = BASE.stage_starts[3]
    cfg = replace(BASE, cooldown_frac=0.0)
    rates = [tg.plan_step(cfg, step).lr_mul for step in (start - 1, start)]
    assert rates == [BASE.stages[2].lr_mul, last.lr_mul]
    empty = [replace(stage, steps=0) for stage in BASE.stages[:3]]
    only = replace(BASE, stages=(*empty, last))
    assert tg.plan_step(only, 5).lr_mul == pytest.approx(last.lr_mul)


# ---- import ------------------------------------------------------------------------------------------------

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
    if event in ("subprocess.Popen", "os.system", "os.mkdir", "os.remove", "os.rename"):
        seen.append((event, str(args)))
    if event in ("socket.connect", "socket.getaddrinfo"):
        seen.append((event, str(args)))
# Imported before watching: what these do is not the script's.
import argparse, concurrent.futures, tqdm, numpy, torch, torch.distributed as dist
import torch.nn.functional
argv = list(sys.argv)
environment, modules, threads = dict(os.environ), set(sys.modules), torch.get_num_threads()
sys.addaudithook(watch)
import train_gpt
assert sys.argv == argv and dict(os.environ) == environment
assert not torch.cuda.is_initialized() and not dist.is_initialized() and torch.get_num_threads() == threads
assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
root = os.path.dirname(os.path.abspath(train_gpt.__file__))
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
folders = {name: os.path.dirname(os.path.abspath(file)) for name, file in files.items() if file}
ours = [name for name, at in folders.items() if at.startswith(root) and "site-packages" not in at]
assert ours == ["train_gpt"], ours
assert not seen, seen
import threading
assert threading.active_count() == 1
print("quiet")
"""


@pytest.mark.slow
def test_import_does_nothing(tmp_path):
    command = [sys.executable, "-B", "-c", WATCH, "--preset", "nonsense"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RANK": "7", "WORLD_SIZE": "9"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=WAIT
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "quiet\n", "")
    assert list(tmp_path.iterdir()) == []


# The published values of the public record 92 (PR 360), and of record 89 (PR 342) where 92 changes nothing.
# "A" is the algorithm that both descend from (record 80).
FIELDS = """\
val_slices 40
val_slice_tokens 262144
padded_vocab 50304
heads 6
head_dim 128
mlp_dim 2816
mix_groups 12
mudd_dim 64
window_unit 128
attention_cap 2560
microbatches 8
sign_rows 8192
attn_scale 0.085
narrow_attn_scale 0.13
steps 1050
cooldown_frac 0.8
momentum_min 0.85
momentum_max 0.93
momentum_warmup 240
momentum_cooldown 50
late_updates_from 336
adam_lr 0.008
adam_eps 1e-10
adam_wd 0.005
bank_lr 0.023
bank_wd 2.25
bank_beta2 0.9
bank_margin 1.06
slow_rate 0.02
two_momenta_from 514
fast_beta 0.85
fast_weight 0.4385
"""  # of record 92; Adam's (A); but for ANVIL's margin, which README explains
NGRAMS = tg.Ngrams((2, 3), 42301440, 768, "bfloat16", (2, 4), 0.008 * 70, 0.95, 0.005 * 5)
# steps, tokens, longest document, windows, rate, weights of next tokens, of prefixes, candidates
STAGES = """\
(279, 131072, 896, (1, 3), 1.0, (1.0, 0.5, 0.25), (0.25,), (10240,))
(314, 262144, 2048, (3, 7), 1.52, (1.0, 0.5), (0.2, 0.15, 0.1, 0.05), (10240,))
(378, 393216, 3072, (5, 11), 1.73, (1.0,), (), (14336, 14336, 24576))
(59, 327680, 3072, (5, 11), 1.5793, (1.0,), (), ())
(20, 131072, 3072, (6, 13), 0.3, (1.0,), (), ())
"""
# Betas, factors of rate and decay, steps between updates at both cadences (record 89; record 92: 70 and 4)
ADAM = """\
scalars 0.9 0.99 5 0 2 2
smear_gate 0.9 0.99 0.01 0 2 2
ve_gate_bank 0.9 0.99 1 1 2 2
post_lambdas 0.9 0.95 1 0 2 2
resid_lambdas 0.9 0.95 5 0 2 2
mudd_w1 0.9 0.99 0.25 1 2 2
mudd_w2 0.9 0.99 0.25 1 2 2
mudd_b2 0.9 0.99 0.25 0 2 2
mudd_gate_w1 0.9 0.99 0.1 1 2 2
mudd_gate_w2 0.9 0.99 0.1 1 2 2
mudd_gate_b2 0.9 0.99 0.1 0 2 2
mudd_gate_scale 0.9 0.99 0.1 0 2 2
pointer_bank 0.9 0.99 1 1 2 2
pointer_gain 0.9 0.99 1 0 2 2
pointer_sink 0.9 0.99 1 0 2 2
lm_head 0.5 0.95 1 150 2 2
embed 0.5 0.95 1 150 2 2
bigram_embed 0.75 0.95 75 5 2 2
value_embeds 0.75 0.95 70 5 2 4
"""
# Record 92's layers: attention, window, value table, MLPs, and what else they have
LAYERS = """\
paired short 1: x0 ngram narrow_qk
plain short 1: x0 ngram narrow_qk narrow_v xsa value
paired short 1: x0 narrow_qk value
plain long 1: xsa gate key_shift
- short 1: x0 ngram
paired short 1: x0 ngram narrow_qk
- short 1:
- short 0: x0
plain short 2: narrow_qk narrow_v value
- short 1: ngram
plain long 1: gate key_shift mudd value
"""


@pytest.mark.pinned("the record preset")
def test_the_record_has_the_published_constants():
    cfg = tg.RECORD
    flags = "x0 ngram narrow_qk narrow_v xsa gate key_shift mudd value".split()
    for line in FIELDS.splitlines():
        name, value = line.split(" ", 1)
        assert str(getattr(cfg, name)) == value, name
    assert cfg.ngrams == NGRAMS
    assert (cfg.val_windows.short, cfg.val_windows.long) == (6, 20)
    for stage, line in zip(cfg.stages, STAGES.splitlines(), strict=True):
        windows = stage.windows.short, stage.windows.long
        sizes = stage.steps, stage.batch_tokens, stage.max_doc_len, windows
        assert str(sizes + (stage.lr_mul, stage.mtp, stage.prefix, stage.sampled_columns)) == line
    adam_lines = set()
    banks = set()
    for row in cfg.params:
        if row.optimizer == "adam":
            beta1, beta2 = row.betas
            early, late = row.update_every
            factors = f"{row.lr_mul:g} {row.wd_mul:g}"
            adam_lines.add(f"{row.name} {beta1:g} {beta2:g} {factors} {early} {late}")
        else:
            banks.add(row.name)
            assert (row.lr_mul, row.wd_mul, row.update_every) == (1, 1, (1, 1))
            matrix_lr_mul = ()
            if row.name == "mlp_bank":
                matrix_lr_mul = (1, 2)
            assert row.matrix_lr_mul == matrix_lr_mul
    assert adam_lines >= set(ADAM.splitlines())
    assert banks >= {"qk_bank", "narrow_qk_bank", "vo_bank", "mlp_bank"}
    for layer, expected in zip(cfg.layers, LAYERS.splitlines(), strict=True):
        words = [layer.attention or "-", layer.window, f"{layer.mlps}:"]
        for flag in flags:
            if getattr(layer, flag):
                words.append(flag)
        assert " ".join(words) == expected
    # The head: 23 sigmoid((logits + 5) / 7.5) (A). FP8, record 92: scales of e4m3, and of gradients in e5m2.
    assert cfg.softcap == tg.Softcap(23, 5, 7.5)
    assert (tg.FP8_ACT_MARGIN, tg.FP8_GRAD_MARGIN, tg.FP8_WEIGHT_MARGIN) == (1.80, 1.25, 1.12)
    assert (tg.FP8_MLP_H_SCALE, tg.FP8_MLP_DY_SCALE) == (1 / 16, 1 / 64)
    assert (tg.FP8_HEAD_X_SCALE, tg.FP8_HEAD_W_SCALE, tg.FP8_DLOGITS_SCALE) == (
        100 / 448,
        2 / 448,
        0.75 / 8 / 448,
    )
