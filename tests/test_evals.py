"""Tests evals/generate.py, loss.py and export.py, on random models and on the model of a run with n-grams."""

import codecs
import gzip
import json
import math
import re
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch
from tiktoken_ext.openai_public import r50k_pat_str

import export
import generate
import hellaswag  # noqa: F401
import loss
import saved_model
import tokenize_text as tt
import train_gpt as tg
from configs import BASE
from golden_inputs import write_shard
from launch import Launch, make_corpus, settings
from saved_model import config_from_dict, load_model, read_config
from test_ngram_runs import NGRAMS, one_log
from test_resume import closing_block, make_config

GOLDEN = Path(__file__).parent / "golden"
TEXT = [256, 97, 98, 99, 100, 101, 102, 103]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of 3 slices of 256 tokens, on two ranks, with n-grams; its corpus has 5.

    It predicts no prefixes, as the `cpu` preset, and has another seed than the default.
    """
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus", val=5 * 256 + 1)
    change = settings("warmup=false", "samples=3", "stages.*.prefix=", *NGRAMS)
    arguments = "--preset cpu --data corpus --seed 3 --save m.pt".split() + change
    with Launch(folder, *arguments, world_size=2) as process:
        assert process.wait() == [0, 0], process.err
        (folder / "screen.txt").write_text(process.out)
    return folder


@pytest.fixture(autouse=True)
def here(run, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setattr(generate, "ROOT", run)


def randomize(model):
    """Makes every parameter of a model matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)


def save(path, model):
    """Saves a model as a run of one process does."""
    tg.save_model(path, model, "0123456789ab", tg.Exchange(0, 1))


def random_model(run, *change):
    """Returns a model with bigrams, at its last stage."""
    cfg = make_config(run / "corpus", "dtype=float32", "ngrams.orders=", *change)
    model = tg.GPT(cfg)
    randomize(model)
    model.use_rotary(len(cfg.stages) - 1)
    return model


# ---- the distribution --------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("ngrams", [False, True])
def test_a_tokens_distribution_is_the_training_forwards(run, ngrams):
    """At every position of a micro-batch's first document, with all that a model can have; windows end there.

    Of a later document, the first rows of bigrams and the smear read the token before BOS.
    """
    if ngrams:
        model = load_model("m.pt")
        assert all(isinstance(block, np.memmap) for block in model.ngrams.blocks)
        randomize(model)
    else:
        model = random_model(run, "window_unit=2")
    cfg = model.cfg
    starts = np.array([0, 40, 47])  # of documents of 40, 7 and 5 tokens
    tokens = np.random.default_rng(0).integers(97, 104, 53)
    tokens[starts] = cfg.bos_id
    batch = tg.make_micro_batch(tokens, starts, 40, cfg)
    windows = tg.window_tokens(cfg, cfg.val_windows)
    expected = (-model.token_losses(batch, windows)).exp()
    document = tokens[:40].tolist()
    for i in range(40):
        probs = model.next_token_probs(document[: i + 1])
        torch.testing.assert_close(probs[tokens[i + 1]], expected[i], rtol=0, atol=1e-6)
        assert probs.shape == (cfg.vocab_size,)  # so neither padding nor the pointer's column can be drawn


def test_a_loaded_model_computes_as_the_saved_one(run):
    """In every bit, also by its rotary angles and attention's scale, which are those of the last stage."""
    model = random_model(run)
    save("random.pt", model)
    expected = model.next_token_probs(TEXT)
    assert torch.equal(load_model("random.pt").next_token_probs(TEXT), expected)
    model.use_rotary(2)
    assert not torch.equal(model.next_token_probs(TEXT), expected)


def test_a_model_may_take_the_place_of_another(run):
    """Or of an empty file, as mktemp makes. (test_bad_input.py has what it may not replace.)"""
    Path("empty.pt").touch()
    for name in ("m.pt", "m.pt.ngrams0", "m.pt.ngrams1", "empty.pt", "new.pt"):
        assert tg.output_file(name) == run / name


def test_a_model_of_an_earlier_script_loads(run):
    """Loads one from before the copy pointer and the settings of the softcap."""
    model = random_model(run, "pointer_dim=0", "softcap.scale=23", "softcap.shift=5")
    save("before.pt", model)
    saved = torch.load("before.pt")
    config = json.loads(saved["config"])
    fields = [name for name in config if name.startswith(("pointer", "softcap"))]
    assert len(fields) == 4
    for name in fields:
        del config[name]
    config["delay_head_grad"] = False
    rows = []
    for row in config["params"]:
        if not row["name"].startswith("pointer"):
            rows.append(row | {"tied_to": ""})
    config["params"] = rows
    torch.save(saved | {"config": json.dumps(config)}, "before.pt")
    assert torch.equal(load_model("before.pt").next_token_probs(TEXT), model.next_token_probs(TEXT))


# Settings that were renamed since, with their rows, and today's names.
RENAMED = {
    "second_cadence_from": "late_updates_from",
    "rails_step": "two_momenta_from",
    "mudd_connections": "mudd_weights",
    "ngrams.every": "ngrams.update_every",
    "layers.10.connections": "layers.10.mudd",
    "layers.1.bigram": "layers.1.ngram",
    "stages.2.candidates": "stages.2.sampled_columns",
    "endings.0.rate": "averages.0.rate",
    "params.21.every": "params.21.update_every",
    "params.0.work": "params.0.update_order",
}


def value_at(settings, name):
    """Returns what a nest of JSON has under a name with dots."""
    for part in name.split("."):
        if part.isdigit():
            part = int(part)
        settings = settings[part]
    return settings


def all_values(settings):
    """Returns all values of a nest of JSON, in its order."""
    if isinstance(settings, dict):
        settings = [value for name, value in settings.items() if name not in ("shape", "init")]
    if not isinstance(settings, list):
        return [{"both_layouts": "cast_and_transpose"}.get(settings, settings)]
    values = []
    for part in settings:
        values += all_values(part)
    return values


@pytest.mark.parametrize("preset", ["record", "cpu", "words"])
def test_settings_of_an_earlier_script_are_read_by_their_new_names(preset):
    """Reads what commit 1cdcaab saved. Shapes and initial values, code in text there, are left out."""
    golden = json.loads((GOLDEN / "saved_configs.json").read_text())[preset]
    old = golden["config"]
    cfg = read_config(json.dumps(old))
    new = json.loads(tg.config_json(cfg))
    for before, now in RENAMED.items():
        assert value_at(old, before) == value_at(new, now), now
    values = iter(all_values(new))  # in the same order, with those of settings that the old config lacks
    for value in all_values(old):
        assert value == "gram" or value in values, value  # a kernel that is gone
    assert [list(shape) for shape in tg.param_shapes(cfg, 1).values()] == golden["shapes"]


def test_a_setting_that_earlier_models_lack_is_added(monkeypatch):
    """A new setting, and a new field of Layer."""
    values = json.loads(tg.config_json(tg.CPU))
    del values["heads"]
    for layer in values["layers"]:
        del layer["narrow_v"]
    with pytest.raises(KeyError, match="no layers.narrow_v; if it is new, ADDED in evals/saved_model.py"):
        config_from_dict(values | {"heads": 2})
    monkeypatch.setattr(saved_model, "ADDED", saved_model.ADDED | {"layers.narrow_v": True, "heads": 4})
    cfg = config_from_dict(values)
    assert cfg.heads == 4 and all(layer.narrow_v for layer in cfg.layers)


def test_a_model_that_is_too_old_names_the_commits_that_load(run):
    """Before 1b4b4c9 the kind of a layer without attention was null."""
    save("old.pt", random_model(run))
    saved = torch.load("old.pt")
    layers = [row | {"attention": row["attention"] or None} for row in json.loads(saved["config"])["layers"]]
    torch.save(change(saved, layers=layers), "old.pt")
    with pytest.raises(tg.UserError, match="^cannot load old.pt: .* before commit 1b4b4c9 .* run's log"):
        load_model("old.pt")


def test_text_of_a_saved_model_is_never_run(run):
    """A shape or an initial value may be any text: it is not looked at."""
    model = random_model(run)
    save("code.pt", model)
    saved = torch.load("code.pt")
    config = json.loads(saved["config"])
    for row in config["params"]:
        row["shape"] = row["init"] = "__import__('os').mkdir('run_by_a_model')"
    torch.save(saved | {"config": json.dumps(config)}, "code.pt")
    load_model("code.pt")
    assert not Path("run_by_a_model").exists()
    assert "eval(" not in Path(tg.__file__).read_text().replace(".eval(", "")


@pytest.mark.parametrize(
    "change", [{"heads": 1 << 20}, {"sign_rows": 65536}, {"mlp_dim": "8"}, {"vocab_size": -1}, {"lr": 1}]
)
def test_settings_that_do_not_fit_the_weights_are_one_line(run, change):
    """Says so before memory is taken."""
    save("other.pt", random_model(run))
    saved = torch.load("other.pt")
    config = json.loads(saved["config"]) | change
    torch.save(saved | {"config": json.dumps(config)}, "other.pt")
    with pytest.raises(tg.UserError, match=r"^cannot load other.pt: .*; give a file that --save"):
        load_model("other.pt")


@pytest.mark.parametrize("at", (0, 1000, -21))
def test_a_damaged_table_is_one_line(run, tmp_path, at):
    """Wherever it is. A table of an earlier script has no CRC-32 after the run's id."""
    for path in run.glob("m.pt*"):
        shutil.copy(path, tmp_path)
    table = tmp_path / "m.pt.ngrams1"
    run_id = torch.load("m.pt")["id"].encode()
    content = table.read_bytes()
    assert content[-20:] == run_id + b"%08x" % zlib.crc32(content[:-20], 1)  # 1: the rank
    model = load_model(str(tmp_path / "m.pt"))
    assert torch.equal(model.next_token_probs([256]), load_model("m.pt").next_token_probs([256]))
    damaged = bytearray(content)
    damaged[at] ^= 1
    table.write_bytes(damaged)
    with pytest.raises(tg.UserError, match=f"^{table} is damaged, or another model's; [^;\n]*$"):
        load_model(str(tmp_path / "m.pt"))
    table.write_bytes(content[:-8])
    load_model(str(tmp_path / "m.pt"))


def test_tables_of_other_ranks_are_one_line(run, tmp_path):
    for path in run.glob("m.pt*"):
        shutil.copy(path, tmp_path)
    shutil.copy(tmp_path / "m.pt.ngrams0", tmp_path / "m.pt.ngrams1")
    with pytest.raises(tg.UserError, match=r"ngrams1 is damaged, or another model's; "):
        load_model(str(tmp_path / "m.pt"))


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("name", ("embed", "scalars"))
def test_a_model_that_diverged_is_one_line(run, name, value):
    model = random_model(run)
    with torch.no_grad():
        getattr(model, name).view(-1)[-1] = value
    save("diverged.pt", model)
    for script in generate, loss:
        with pytest.raises(SystemExit, match=f"diverged.pt: {name} is not finite"):
            script.main(["diverged.pt", "x"])


def make_small(saved):
    """Shows one number as each of the tensors, all of the right shapes."""
    number = torch.zeros(1)
    weights = {}
    for name, t in saved["weights"].items():
        weights[name] = number.expand(t.shape)
    return saved | {"weights": weights}


def change(saved, **settings):
    return saved | {"config": json.dumps(json.loads(saved["config"]) | settings)}


HOSTILE = {
    "larger than the file": make_small,
    "sequences of 2147483646 tokens": lambda saved: change(saved, val_slice_tokens=2147483646),
    "'list' object": lambda saved: saved | {"weights": [1]},
    "recursion": lambda saved: saved | {"config": "[" * 100_000},
    "integer": lambda saved: saved | {"ranks": "2"},
    "division": lambda saved: saved | {"ranks": 0},
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_what_a_file_holds_is_checked_before_memory_is_taken(run, tmp_path, reason):
    for path in run.glob("m.pt*"):
        shutil.copy(path, tmp_path)
    model = str(tmp_path / "m.pt")
    torch.save(HOSTILE[reason](torch.load("m.pt")), model)
    with pytest.raises(tg.UserError, match=f"^cannot load {model}: ") as error:
        load_model(model)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


DRAWS = {  # temperature, top_k, top_p: weights of the likeliest tokens
    (1, 0, 1): (50, 30, 15, 5),
    (0.5, 0, 1): (2500, 900, 225, 25),
    (2, 3, 1): (50**0.5, 30**0.5, 15**0.5),
    (1, 0, 0.7): (50, 30),
    (0.5, 3, 0.8): (2500, 900),
    (1, 1, 1): (1,),
}


def test_tokens_are_drawn_by_temperature_top_k_and_top_p():
    order = [3, 0, 2, 1]
    draws = 4000
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(4, dtype=torch.double)
    logits[order] = torch.tensor([50.0, 30, 15, 5]).double().log()
    for (temperature, top_k, top_p), weights in DRAWS.items():
        counts = np.zeros(4)
        for _ in range(draws):
            counts[generate.choose(logits, generator, temperature, top_k, top_p)] += 1
        shares = counts[order] / draws
        p = np.zeros(4)
        p[: len(weights)] = weights
        p /= p.sum()
        assert (abs(shares - p) <= 5 * np.sqrt(p * (1 - p) / draws)).all()
    assert generate.choose(logits, generator, 0) == 3


# ---- generation --------------------------------------------------------------------------------------------


def recorder(cfg, contexts, end=0):
    """Returns a model that draws 1, 2, 3, ... and BOS as number `end`; it keeps the contexts."""

    def next_token_probs(tokens):
        contexts.append(list(tokens))
        token = len(contexts)
        if token == end:
            token = cfg.bos_id
        return torch.eye(cfg.vocab_size)[token]

    return SimpleNamespace(cfg=cfg, next_token_probs=next_token_probs)


def test_the_context_is_the_longest_document_of_training(run):
    """Which is max_doc_len, or what a micro-batch holds. A document ends where the model ends it."""
    cfg = make_config(run / "corpus", *NGRAMS, "stages.3.max_doc_len=30", "stages.0.max_doc_len=30")
    assert [generate.max_context(c) for c in (cfg, BASE)] == [40, 512]
    prompt = [256] + list(range(30, 60))
    drawn = list(range(1, 21))
    text = prompt + drawn
    contexts = []
    assert list(generate.generate(recorder(cfg, contexts), prompt, 20, temperature=0)) == drawn
    assert contexts == [text[: 31 + i][-40:] for i in range(20)]
    assert list(generate.generate(recorder(cfg, [], 4), [256], 9, temperature=0)) == [1, 2, 3]


def test_a_vocabulary_that_is_none_is_one_line(run, tmp_path, monkeypatch):
    """Of another size, no text, or without single bytes, of which tiktoken would panic."""
    numbers = "ngrams.orders=", "vocab_size=50257", "padded_vocab=50304", "bos_id=50256"
    save("odd.pt", tg.GPT(make_config("odd", *NGRAMS, *numbers)))
    (run / "odd").mkdir()
    for content, reason in (("00\n", "1 tokens"), ("x\n", "hexadecimal"), ("ff\n" * 50257, "single bytes")):
        (run / "odd/vocabulary.txt").write_text(content)
        with pytest.raises(SystemExit, match=f"^generate.py: .*vocabulary.txt.*{reason}"):
            generate.main(["odd.pt", "a"])


def test_the_command_continues_the_prompt(capsys, monkeypatch):
    """Given as an argument, in a file, or on standard input; the seed repeats it."""

    def generated(command):
        generate.main(f"m.pt {command} --tokens 30".split())
        return capsys.readouterr().out

    text = generated("abc")
    assert text.startswith("abc") and len(text) > len("abc\n")
    Path("prompt.txt").write_text("abc")
    assert generated("--prompt-file prompt.txt") == text
    Path("marked.txt").write_bytes(codecs.BOM_UTF8 + b"abc")
    assert generated("--prompt-file marked.txt") == text
    monkeypatch.setattr("sys.stdin", open("prompt.txt"))
    assert generated("-") == text != generated("abc --seed 1")


def test_a_text_that_the_model_ended_is_named(capsys, monkeypatch):
    """One of two: it draws nine tokens each, and the other ends after three."""

    def drawn(model, tokens, count, seed, **options):
        yield from range(count if seed else 3)

    monkeypatch.setattr(generate, "generate", drawn)
    for samples, ended in (("1", ["the model ended 1 of 1 texts early, by its own choice"]), ("2", None)):
        generate.main(["m.pt", "a", "--tokens", "9", "--samples", samples])
        lines = capsys.readouterr().err.splitlines()
        assert lines[1:] == (ended or ["the model ended 1 of 2 texts early, by its own choice"])
    generate.main(["m.pt", "a", "--tokens", "9", "--seed", "1"])
    assert "ended" not in capsys.readouterr().err


def test_gpt2s_tokens_come_from_the_datas_folder(run, tmp_path, monkeypatch, capsys):
    """Relative to the checkout, not to the current folder. Their passages are long, those of bytes short."""
    numbers = "ngrams.orders=", "vocab_size=50257", "padded_vocab=50304", "bos_id=50256"
    save("gpt2.pt", tg.GPT(make_config("gpt2", *NGRAMS, *numbers)))
    tokens = [bytes([255 - i]) for i in range(256)]
    for pair in range(256 * 256 - 50_000, 256 * 256):
        tokens.append(pair.to_bytes(2, "big"))
    tokens.append(b"")
    (run / "gpt2").mkdir()
    tt.write_token_bytes(run / "gpt2", tokens)
    monkeypatch.chdir(tmp_path)
    _, encoding = generate.load(str(run / "gpt2.pt"))
    assert tt.token_bytes(encoding) == tokens and encoding.eot_token == 50256
    assert encoding._pat_str == r50k_pat_str
    Path("long.txt").write_text("ab" * 400)
    for name, count in (("gpt2", 401), ("m", 802)):  # with the BOS that ends a passage
        loss.main([str(run / f"{name}.pt"), "long.txt"])
        assert f" {count} tokens, 800 bytes, " in capsys.readouterr().out


BAD = """
generate no.pt -> cannot read no.pt
generate screen.txt -> cannot read screen.txt
generate m.pt --prompt-file no.txt -> No such file
generate m.pt x --prompt-file m.pt -> not allowed
generate m.pt --prompt-file m.pt -> not UTF-8
generate m.pt \udcff -> not UTF-8
generate m.pt --top-p 0 -> 1e-09 to 1
generate m.pt --top-p 1.1 -> 1e-09 to 1
generate m.pt --temperature nan -> from 0
generate m.pt --tokens 0 -> from 1
generate no.pt --temperature 0 --samples 2 -> --temperature 0 draws nothing
generate no.pt --temperature 0 --top-p 0.5 -> --temperature 0 draws nothing
loss no.pt latin.txt --slices 0:1 -> --slices is for shards
loss no.pt bos.bin --field body -> are for texts, not shards
loss no.pt bos.bin even.bin --passage-bytes 9 -> are for texts, not shards
loss huge.pt long.txt -> a loss is not finite
loss huge.pt bos.bin --slices 0:1 -> a loss is not finite
hellaswag huge.pt --file items.jsonl --limit 1 -> a loss is not finite
loss m.pt corpus/tiny_val_000000.bin --slices 3:6 -> has 5 slices
loss m.pt even.bin --slices 0:2 -> has 1 slices
loss m.pt even.bin --slices 3:3 -> FIRST:END
loss m.pt no.txt -> No such file
loss m.pt empty.txt -> has no text
loss m.pt bos.bin --slices 0:1 -> has no text
loss m.pt latin.txt -> latin.txt:1: not UTF-8
loss m.pt five.jsonl -> five.jsonl:1: no text
loss m.pt empty.bin -> not a whole token shard
loss m.pt gpt2.bin -> 50257
loss m.pt empty.txt --passage-bytes 3 -> from 4
loss m.pt a.csv -> a.csv:1: a table
loss m.pt one.txt -> one.txt:1: one JSON value
export m.pt m.pt -> m.pt: another kind of file is there
export no.pt ./m.pt.ngrams1 -> m.pt.ngrams1: another kind of file is there
export no.pt empty.bin -> cannot read no.pt
export no.pt no/a.safetensors -> no folder for it
"""


def test_bad_input_gets_one_line(run, capsys):
    for name in ("empty.txt", "empty.bin", "a.csv"):
        (run / name).write_text("")
    (run / "one.txt").write_text('{"text": "x"}')
    (run / "gpt2.bin").write_bytes(tt.shard_header(2, 50257, 50256) + bytes(4))
    (run / "latin.txt").write_bytes(b"\xe9")
    (run / "five.jsonl").write_text('{"body": "x"}\n')
    write_shard(run / "bos.bin", [256] * 257, 257, 256)
    write_shard(run / "even.bin", [256] + [97] * 511, 257, 256)  # the second slice lacks its last target
    (run / "long.txt").write_text("abc")
    (run / "items.jsonl").write_text('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 0}')
    huge = random_model(run)
    with torch.no_grad():
        huge.vo_bank *= 1e38
    save("huge.pt", huge)
    models = {path: path.read_bytes() for path in run.glob("m.pt*")}
    for case in BAD.strip().splitlines():
        command, reason = case.split(" -> ")
        script, *arguments = command.split()
        with pytest.raises(SystemExit) as error:
            globals()[script].main(arguments)
        line = error.value.code
        if not isinstance(line, str):  # argparse has printed the reason
            line = capsys.readouterr().err.splitlines()[-1]
        assert reason in line and "\n" not in line, case
    assert models == {path: path.read_bytes() for path in run.glob("m.pt*")}


# ---- the end of a run --------------------------------------------------------------------------------------


def test_a_run_ends_with_three_texts(run):
    """On the screen, when the log is complete and the model saved."""
    screen = (run / "screen.txt").read_text()
    texts = re.findall(r"^sample: (.+)$", screen, re.MULTILINE)
    assert len(texts) == 3 == len(set(texts))
    assert "\nsample:" not in one_log(run)


def test_the_texts_are_drawn_at_temperature_0_8_by_the_seed(run, tmp_path, monkeypatch, capsys):
    model, log = random_model(run, "samples=20"), tg.RunLog(tmp_path / "log")
    probs = torch.zeros(257)
    probs[97], probs[98] = 4**0.8, 1  # odds of 4 at this temperature
    monkeypatch.setattr(model, "next_token_probs", lambda tokens: probs)

    def draw(seed):
        tg.print_samples(model, [b"a" if i == 97 else b"b" for i in range(257)], seed, log)
        return "".join(re.findall("sample: 'b(.*)'", capsys.readouterr().out))

    text = draw(0)
    assert text == draw(0) != draw(1) and len(text) == 2000
    assert text.count("a") / 2000 == pytest.approx(0.8, abs=0.04)


# ---- losses ------------------------------------------------------------------------------------------------


def losses_of(capsys, command):
    """Returns a line's numbers: nats, their error, bits, their error, tokens, bytes, passages."""
    loss.main(command.split())
    number = r"(\d[\d,]*(?:\.\d+)?|nan)"
    form = f"{number} \\+- {number} nats per token, {number} \\+- {number} bits per byte: .*, "
    form += f"{number} tokens, {number} bytes, {number} passages\n"
    found = re.fullmatch(form, capsys.readouterr().out)
    return [float(number.replace(",", "")) for number in found.groups()]


def test_a_shards_loss_is_the_runs(run, capsys):
    """Losses of parts, also of slices that the run never read, average to those of the whole."""
    shard = "corpus/tiny_val_000000.bin"
    nats, _, _, _, tokens, size, documents = losses_of(capsys, f"m.pt {shard}")
    assert nats == pytest.approx(float(closing_block(one_log(run))["val_loss"]), abs=6e-5)
    stream = tt.read_tokens(run / shard)[1:769]
    assert (tokens, size) == (768, (stream < 256).sum()) and documents >= (stream == 256).sum()
    each = [losses_of(capsys, f"m.pt {shard} --slices {i}:{i + 1}")[0] for i in range(5)]
    last = losses_of(capsys, f"m.pt {shard} --slices 2:5")[0]
    assert len(set(each)) > 3
    assert (nats, last) == pytest.approx((sum(each[:3]) / 3, sum(each[2:]) / 3), abs=1e-4)


@pytest.mark.numeric
def test_a_texts_loss_is_that_of_its_passages(run, capsys):
    """Each after BOS, with the BOS that ends it; in nats per token, and bits per byte of the text.

    The windows are the last, which are longer than the last stage's, in a passage longer than both.
    """
    model = random_model(run, "window_unit=2", "val_slice_tokens=256")
    words = ["abc", "", "gf\u00e9", "d" * 90, "fedcba"]
    save("narrow.pt", model)
    tokens = []
    passages = 0
    with gzip.open("five.jsonl.gz", "wt") as file:
        for word in words:
            file.write(json.dumps({"body": word}) + "\n")
            if word:
                for passage in tt.cut_passages(word.encode(), 60):
                    tokens += [256] + list(passage)
                    passages += 1
    assert passages > 4
    tokens = np.array(tokens + [256])
    batch = tg.make_micro_batch(tokens, np.flatnonzero(tokens[:-1] == 256), 61, model.cfg)

    def loss_with(windows):
        windows = tg.window_tokens(model.cfg, windows)
        return model.token_losses(batch, windows).double().sum().item()

    total = loss_with(model.cfg.val_windows)
    assert abs(total - loss_with(model.cfg.stages[-1].windows)) > 1e-4
    nats = loss.document_losses(model, tokens, np.ones(257))[0]
    assert nats.sum() == pytest.approx(total, abs=1e-4)
    count = len(tokens) - 1
    size = len("".join(words).encode())
    found = losses_of(capsys, "narrow.pt five.jsonl.gz --field body --passage-bytes 60")
    nats, _, bits, _ = found[:4]
    assert found[4:] == [count, size, passages]
    assert (nats, bits) == pytest.approx((total / count, total / size / math.log(2)), abs=6e-5)


def test_parts_of_a_text_hold_every_target_once():
    """They end at documents' ends, unless a document is longer than a part."""
    rng = np.random.default_rng(0)
    for size in (6, 9, 13, 29):
        tokens = rng.integers(0, 256, 260)
        tokens[0] = tokens[-1] = 256
        at = 0
        while at < 240:
            at += int(rng.integers(1, 12))
            tokens[at] = 256
        starts = np.flatnonzero(tokens == 256)
        parts = list(loss.cut_text(tokens, 256, size))
        assert np.concatenate([part[1:] for part in parts]).tolist() == tokens[1:].tolist()
        begin = 0
        for part in parts:  # each as long as that allows
            fits = starts[(starts > begin) & (starts <= begin + size)]
            end = begin + size
            if len(fits):
                end = fits.max()
            assert begin + len(part) - 1 == end
            begin = end


def test_the_standard_error_of_three_documents():
    """By hand: residuals of -3, -1 and 4 sevenths. Bits and their error have the same unit."""
    nats = np.array([3.0, 5, 4])
    sizes = np.array([2.0, 3, 2])
    mean, error = loss.ratio(nats, sizes)
    assert (mean, error) == pytest.approx((12 / 7, math.sqrt(3 / 2 * 26 / 49) / 7))
    expected = f"{mean / math.log(2):.4f} +- {error / math.log(2):.4f} bits per byte"
    assert expected in loss.report(np.stack([nats, sizes, sizes]), "x")


# ---- export ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("m", "bigrams"))
def test_an_exported_model_is_the_saved_one(run, capsys, name):
    """In names, shapes, dtypes and every bit, with its table and config."""
    save("bigrams.pt", random_model(run, "dtype=bfloat16"))
    export.main([f"{name}.pt", f"{name}.safetensors"])
    with safetensors.safe_open(f"{name}.safetensors", "pt") as file:
        config = file.metadata()["config"]
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    model = load_model(f"{name}.pt")
    assert config_from_dict(json.loads(config)) == model.cfg
    expected = model.state_dict()
    if name == "m":
        expected["ngrams"] = model.ngrams.fetch(torch.arange(301 * model.cfg.ngrams.rows_per_token))
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert tensors[key].dtype == value.dtype and torch.equal(tensors[key], value), key
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(expected)
    for line in lines:
        key, _, shape = line.split(None, 2)
        assert shape == str(tuple(expected[key].shape))
