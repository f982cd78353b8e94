"""Tests evals/generate.py, loss.py and export.py, on random models and on the model of a run with n-grams."""

import codecs
import json
import math
import re
import shutil
import zipfile
from functools import partial
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
from golden_inputs import ALONE, generator, read_golden, same_bits, write_shard
from launch import Launch, make_corpus, settings
from saved_model import config_from_dict, load_model, read_config
from test_ngram_runs import NGRAMS, one_log
from test_resume import closing_block, make_config

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
        process.succeed()
        (folder / "screen.txt").write_text(process.out)
    return folder


@pytest.fixture(autouse=True)
def here(run, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.setattr(generate, "ROOT", run)


def randomize(model):
    """Makes every parameter of a model matter. What one gets does not depend on which others there are."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.1 * torch.randn(p.shape, generator=tg.seeded(name, 0))


def change(saved, **settings):
    """Returns a saved model with other settings."""
    return saved | {"config": json.dumps(json.loads(saved["config"]) | settings)}


def save(path, model, fingerprint=""):
    """Saves a model as a run of one process does."""
    tg.save_model(path, model, "0123456789ab", ALONE, fingerprint)


def random_model(run, *change):
    """Returns a model with bigrams, at its last stage."""
    cfg = make_config(run / "corpus", "dtype=float32", "ngrams.orders=", *change)
    model = tg.GPT(cfg)
    randomize(model)
    model.use_rotary(len(cfg.stages) - 1)
    return model


# ---- the distribution --------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("change", ["", "padded_vocab=258", "pointer_dim=0"])
def test_a_tokens_distribution_is_the_training_forwards(run, change):
    """At every position of a micro-batch's first document, with all that a model can have; windows end there,
    the pointer's too. So a loss depends on no later token. With one column for the pointer's gate, and no
    padding, probabilities sum to one.

    Of a later document, the first rows of bigrams and the smear read the token before BOS.
    """
    if change:
        model = random_model(run, "window_unit=2", "pointer_val_window=9", change)
    else:
        model = load_model("m.pt")
        assert all(isinstance(block, np.memmap) for block in model.ngrams.blocks)
        randomize(model)
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
        p = probs[tokens[i + 1]]
        later = f"p is {p} without later tokens, {expected[i]} with them: records/referee.py says more"
        torch.testing.assert_close(p, expected[i], rtol=0, atol=1e-6, msg=later)
        assert probs.shape == (cfg.vocab_size,)  # so neither padding nor the pointer's column can be drawn
        if change == "padded_vocab=258":
            assert probs.sum() == pytest.approx(1, abs=1e-6)


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
    for name in ("m.pt", "m.pt.ngrams0", "empty.pt"):
        assert tg.output_file(name) == run / name


@pytest.mark.pinned("the list of settings, which saved models have,")
@pytest.mark.parametrize("preset", ["record", "cpu", "words"])
def test_settings_of_an_earlier_script_are_read_by_their_new_names(preset):
    """Reads what commit 1cdcaab saved. Shapes and initial values, code in text there, are never run.

    A name that is not read raises an error, so these are the names that could be taken for each other.
    """
    golden = read_golden("saved_configs")[preset]
    old = golden["config"]
    for row in old["params"]:
        row["shape"] = row["init"] = "__import__('os').mkdir('run_by_a_model')"
    try:
        cfg = read_config(json.dumps(old))
    except tg.UserError as error:  # it names a new field
        pytest.fail(str(error), pytrace=False)
    assert not Path("run_by_a_model").exists()
    assert (cfg.late_updates_from, cfg.two_momenta_from) == (old["second_cadence_from"], old["rails_step"])
    for layer, before in zip(cfg.layers, old["layers"], strict=True):
        assert (layer.ngram, layer.mudd) == (before["bigram"], before["connections"])
    assert ("cast_and_transpose" in cfg.kernels) == ("both_layouts" in old["kernels"])
    assert [list(shape) for shape in tg.param_shapes(cfg, 1).values()] == golden["shapes"]


def test_settings_that_earlier_models_lack_are_added(monkeypatch):
    """As they were in effect; also a field of Layer. Switches were off."""
    values = json.loads(tg.config_json(tg.RECORD))
    for name in saved_model.ADDED.keys() & values.keys() | {"cuda_graphs"}:
        del values[name]
    for layer in values["layers"]:
        del layer["mlps"], layer["narrow_v"]
    with pytest.raises(tg.UserError, match="no setting layers.mlps; .* give it an entry of ADDED"):
        config_from_dict(values)
    monkeypatch.setitem(saved_model.ADDED, "layers.mlps", 2)
    cfg = config_from_dict(values)
    assert all(layer.mlps == 2 and layer.narrow_v is False for layer in cfg.layers)
    assert (cfg.pointer_dim, cfg.softcap, cfg.cuda_graphs) == (0, tg.Softcap(23.0, 5.0, 7.5), False)


@pytest.fixture
def copied(run, tmp_path):
    """Returns the path of a copy of the run's model."""
    for path in run.glob("m.pt*"):
        shutil.copy(path, tmp_path)
    return str(tmp_path / "m.pt")


def test_a_table_that_is_not_the_models_is_one_line(copied):
    """Damaged anywhere, too short, missing, or another rank's or run's. An earlier script's has no CRC-32."""
    table = Path(f"{copied}.ngrams1")
    content = table.read_bytes()
    wrong = [content[:-1], content[:-20] + b"0123456789ab" + content[-8:]]
    wrong.append(Path(f"{copied}.ngrams0").read_bytes())
    for at in 0, -21:
        damaged = bytearray(content)
        damaged[at] ^= 1
        wrong.append(damaged)
    for found in wrong:
        table.write_bytes(found)
        with pytest.raises(tg.UserError, match=f"^{table} is damaged, or another model's; [^;\n]*$"):
            load_model(copied)
    table.write_bytes(content[:-8])
    load_model(copied)
    table.unlink()
    with pytest.raises(tg.UserError, match=f"^cannot read {table}[^\n]*$"):
        load_model(copied)


def test_a_link_to_a_model(copied, tmp_path):
    """Its rows are beside the model; or, if the model was saved through the link, beside the link."""
    link = tmp_path / "link.pt"
    link.symlink_to(copied)
    load_model(link)
    for rank in 0, 1:
        shutil.copy(f"{copied}.ngrams{rank}", f"{link}.ngrams{rank}")
        Path(f"{copied}.ngrams{rank}").write_bytes(b"another model's")
    load_model(link)


def make_small(saved):
    """Shows one number as each of the tensors, all of the right shapes."""
    weights = {name: torch.zeros(1).expand(t.shape) for name, t in saved["weights"].items()}
    return saved | {"weights": weights}


def diverge(saved):
    saved["weights"]["scalars"][-1] = math.inf
    return saved


HOSTILE = {
    "lacks: 'gain'; a changed copy": partial(change, gain=1),
    "lacks: 'no_such_one'": partial(change, params=[vars(tg.ParamSpec("no_such_one", 1, 0))]),
    "scalars is not finite": diverge,
    "larger than the file": make_small,
    "2147483646 tokens in a sequence": partial(change, val_slice_tokens=2147483646),
    "attention scores": partial(change, val_slice_tokens=1 << 20, window_unit=1 << 30),
    "tokens in an n-gram": partial(change, ngrams=vars(tg.Ngrams((2, 1 << 30), 301, 12))),
    "0 steps": partial(change, stages=[]),
    "'id'": lambda saved: saved.pop("id") and saved,
    "do not have the shapes": partial(change, heads=1 << 20),
    "mlp_dim cannot be 8": partial(change, mlp_dim="8"),
    "vocab_size": partial(change, vocab_size=-1),
    "recursion": lambda saved: saved | {"config": "[" * 100_000},
    "division": lambda saved: saved | {"ranks": 0},
    "another program": lambda saved: [saved],
}


@pytest.mark.parametrize("reason", HOSTILE)
def test_what_a_file_holds_is_checked_before_memory_is_taken(copied, reason):
    torch.save(HOSTILE[reason](torch.load(copied)), copied)
    with pytest.raises(tg.UserError, match=f"^(cannot (load|read) )?{copied}: [^\n]*{reason}[^\n]*$"):
        load_model(copied)


def test_a_long_schedule_takes_no_memory(copied, capsys):
    """Nor is a model of another script refused; a line says what it is."""
    saved = torch.load(copied) | {"script": "0123456789ab"}
    saved["config"] = re.sub(r'"(steps|window)": \d+', rf'"\1": {2**31 - 1}', saved["config"])
    torch.save(saved, copied)
    load_model(copied)
    assert "(sha256 0123456789ab)" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ("compressed", "bytearray"))
def test_a_file_that_would_take_more_memory_than_its_size_is_not_unpickled(copied, reason):
    with zipfile.ZipFile(copied) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(copied, "w") as file:
        for name, content in entries.items():
            if name.endswith("/data.pkl") and reason == "compressed":
                file.writestr(name, content + bytes(1 << 20), zipfile.ZIP_DEFLATED)
            elif name.endswith("/data.pkl"):
                # 64 GiB. torch finds the entry in capitals, too.
                pickled = b"\x80\x02cbuiltins\nbytearray\n(\x8a\x05\0\0\0\0\x10tR."
                file.writestr(name.replace("pkl", "PKL"), pickled)
            else:
                file.writestr(name, content)
    with pytest.raises(tg.UserError, match=f"^cannot read {copied}: [^\n]*{reason}[^\n]*$"):
        load_model(copied)


# Temperature, top_k, top_p, and what the weights of four tokens then are in proportion to.
DRAWS = [
    (2, 3, 1, (50**0.5, 30**0.5, 15**0.5, 0)),
    (1, 0, 0.7, (50, 30, 0, 0)),
    (0.5, 3, 0.8, (2500, 900, 0, 0)),
]


def test_tokens_are_drawn_by_temperature_top_k_and_top_p():
    order = [3, 0, 2, 1]
    draws = 2000
    g = generator(0)
    logits = torch.empty(4, dtype=torch.double)
    logits[order] = torch.tensor([50.0, 30, 15, 5]).double().log()
    for temperature, top_k, top_p, weights in DRAWS:
        drawn = [generate.choose(logits, g, temperature, top_k, top_p) for _ in range(draws)]
        shares = np.bincount(drawn, minlength=4)[order] / draws
        p = np.array(weights) / sum(weights)
        assert (abs(shares - p) <= 5 * np.sqrt(p * (1 - p) / draws)).all()
    assert generate.choose(logits, g, 0) == 3


# ---- generation --------------------------------------------------------------------------------------------


def test_the_context_is_the_longest_document_of_training(run):
    """Which is max_doc_len, or what a micro-batch holds. A document ends where the model ends it."""
    cfg = make_config(run / "corpus", *NGRAMS, "stages.3.max_doc_len=30", "stages.0.max_doc_len=30")
    assert [generate.max_context(c) for c in (cfg, BASE)] == [40, 512]
    prompt = [256] + list(range(30, 60))
    drawn = list(range(1, 21))
    contexts = []

    def next_token_probs(tokens):
        """Draws 1, 2, 3, ..., 20, and then BOS."""
        contexts.append(list(tokens))
        return torch.eye(cfg.vocab_size)[(drawn + [cfg.bos_id])[len(contexts) - 1]]

    model = SimpleNamespace(cfg=cfg, next_token_probs=next_token_probs)
    assert list(generate.generate(model, prompt, 20, temperature=0)) == drawn
    assert contexts == [(prompt + drawn)[: 31 + i][-40:] for i in range(20)]
    assert list(generate.generate(model, prompt, 20, temperature=0)) == []


def test_the_command_continues_the_prompt(capsys, monkeypatch):
    """Given as an argument, in a file, or on standard input; the seed repeats it."""

    def generated(command):
        generate.main(f"m.pt {command} --tokens 30".split())
        return capsys.readouterr().out

    text = generated("abc")
    assert text.startswith("abc") and len(text) > len("abc\n")
    Path("prompt.txt").write_bytes(codecs.BOM_UTF8 + b"abc")
    assert generated("--prompt-file prompt.txt") == text
    monkeypatch.setattr("sys.stdin", open("prompt.txt"))
    assert generated("-") == text != generated("abc --seed 1")
    monkeypatch.setattr(generate, "generate", lambda *args, **options: [])
    generate.main(["m.pt"])
    assert capsys.readouterr().err.endswith("by its own choice; give a prompt, or another --seed\n")


def test_gpt2s_tokens_come_from_the_datas_folder(run, tmp_path, monkeypatch, capsys):
    """Relative to the checkout, not to the current folder, and the one of the training, if there was one.
    Without single bytes, tiktoken would panic.
    """
    model = str(run / "gpt2.pt")
    numbers = "ngrams.orders=", "vocab_size=50257", "padded_vocab=50304", "bos_id=50256"
    save(model, tg.GPT(make_config("gpt2", *numbers)))
    tokens = [bytes([255 - i]) for i in range(256)]
    tokens += [i.to_bytes(2, "big") for i in range(256, 50256)] + [b""]
    (run / "gpt2").mkdir()
    tt.write_token_bytes(run / "gpt2", tokens)
    save("other.pt", load_model(model))
    monkeypatch.chdir(tmp_path)
    _, encoding = generate.load(model)
    assert tt.token_bytes(encoding) == tokens and encoding.eot_token == 50256
    assert encoding._pat_str == r50k_pat_str
    Path("long.txt").write_text("ab" * 400)
    loss.main([model, "long.txt"])
    assert " 401 tokens, 800 bytes, 1 passages" in capsys.readouterr().out  # with the BOS that ends it
    (run / "gpt2/vocabulary.txt").write_text("ff\n" * 50257)
    with pytest.raises(SystemExit, match="^generate.py: vocabulary.txt lacks tokens of single bytes"):
        generate.main([model, "a"])
    with pytest.raises(tg.UserError, match="is not the vocabulary"):
        generate.load(str(run / "other.pt"))


BAD = """
generate no.pt -> cannot read no.pt
generate screen.txt -> cannot read screen.txt
generate bos.pt -> BOS is 97
generate m.pt --prompt-file no.txt -> there is no no.txt
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
loss no.pt long.txt ./long.txt -> long.txt is named twice
loss m.pt corpus/tiny_val_000000.bin --slices 3:6 -> has 5 slices
loss m.pt even.bin --slices 0:2 -> has 1 slices
loss m.pt even.bin --slices 3:3 -> FIRST:END
loss m.pt no.txt -> there is no no.txt
loss m.pt empty.txt -> has no text
loss m.pt bos.bin --slices 0:1 -> has no text
loss m.pt latin.txt -> latin.txt:1: not UTF-8
loss m.pt long.txt --field body -> long.txt has no JSON object on each line
loss m.pt empty.bin -> not a whole token shard
loss m.pt gpt2.bin -> 50257
loss m.pt empty.txt --passage-bytes 3 -> from 4
loss m.pt a.csv -> a.csv:1: a table
export m.pt m.pt -> m.pt: another kind of file is there
export no.pt ./m.pt.ngrams1 -> m.pt.ngrams1: another kind of file is there
export no.pt empty.bin -> cannot read no.pt
export no.pt no/a.safetensors -> no folder for it
"""


def test_bad_input_gets_one_line(run, capsys):
    for name in ("empty.txt", "empty.bin", "a.csv"):
        (run / name).write_text("")
    (run / "gpt2.bin").write_bytes(tt.shard_header(2, 50257, 50256) + bytes(4))
    (run / "latin.txt").write_bytes(b"\xe9")
    (run / "long.txt").write_text("abc")
    write_shard(run / "bos.bin", [256] * 257, 257, 256)
    write_shard(run / "even.bin", [256] + [97] * 511, 257, 256)  # the second slice lacks its last target
    huge = random_model(run)
    with torch.no_grad():
        huge.vo_bank *= 1e38
    save("huge.pt", huge)
    save("bos.pt", random_model(run, "bos_id=97"))
    for case in BAD.strip().splitlines():
        command, reason = case.split(" -> ")
        script, *arguments = command.split()
        with pytest.raises(SystemExit) as error:
            globals()[script].main(arguments)
        line = error.value.code
        if not isinstance(line, str):  # argparse has printed the reason
            line = capsys.readouterr().err.splitlines()[-1]
        assert reason in line and "\n" not in line, case
    load_model("m.pt")


# ---- the end of a run --------------------------------------------------------------------------------------


def test_a_run_ends_with_three_texts(run):
    """On the screen, when the log is complete and the model saved."""
    screen = (run / "screen.txt").read_text()
    texts = re.findall(r"^sample: (.+)$", screen, re.MULTILINE)
    assert len(texts) == 3 == len(set(texts))
    assert "\nsample:" not in one_log(run)


def test_the_texts_are_drawn_at_temperature_0_8_by_the_seed(run, tmp_path, monkeypatch, capsys):
    model, log = random_model(run, "samples=20"), tg.RunLog(tmp_path / "log")
    probs = torch.tensor([4**0.8, 1])  # odds of 4 at this temperature
    monkeypatch.setattr(model, "next_token_probs", lambda tokens: probs)
    texts = []
    for seed in 0, 0, 1:
        tg.print_samples(model, [b"a", b"b"] * 129, seed, log)
        texts.append("".join(re.findall("sample: 'a(.*)'", capsys.readouterr().out)))  # it begins with BOS
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 2000
    assert texts[0].count("a") / 2000 == pytest.approx(0.8, abs=0.04)


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
    command = "m.pt corpus/tiny_val_000000.bin"
    nats = losses_of(capsys, command)[0]
    assert nats == pytest.approx(float(closing_block(one_log(run))["val_loss"]), abs=6e-5)
    each = [losses_of(capsys, f"{command} --slices {i}:{i + 1}")[0] for i in range(5)]
    last = losses_of(capsys, f"{command} --slices 2:5")[0]
    assert (nats, last) == pytest.approx((np.mean(each[:3]), np.mean(each[2:])), abs=1e-4)


@pytest.mark.numeric
def test_a_texts_loss_is_that_of_its_passages(run, capsys):
    """Each after BOS, with the BOS that ends it; in nats per token, and bits per byte of the text.

    The windows are the last, which are longer than the last stage's, in a passage longer than both.
    """
    model = random_model(run, "window_unit=2", "val_slice_tokens=256")
    save("narrow.pt", model)
    words = ["abc", "", "gf\u00e9", "d" * 90, "fedcba"]  # the fourth becomes two passages
    Path("five.jsonl").write_text("".join(json.dumps({"body": word}) + "\n" for word in words))
    passages = [part for word in words if word for part in tt.cut_passages(word.encode(), 60)]
    assert len(passages) > 4
    tokens = [256]
    for passage in passages:
        tokens += [*passage, 256]
    tokens = np.array(tokens)
    batch = tg.make_micro_batch(tokens, np.flatnonzero(tokens[:-1] == 256), 61, model.cfg)

    def loss_with(windows):
        windows = tg.window_tokens(model.cfg, windows)
        return model.token_losses(batch, windows).double().sum().item()

    total = loss_with(model.cfg.val_windows)
    count = len(tokens) - 1
    size = len("".join(words).encode())
    nats, _, bits, _, *counts = losses_of(capsys, "narrow.pt five.jsonl --field body --passage-bytes 60")
    assert abs(total - loss_with(model.cfg.stages[-1].windows)) > 1e-4
    assert loss.document_losses(model, tokens, np.ones(257))[0].sum() == pytest.approx(total, abs=1e-4)
    assert counts == [count, size, len(passages)]
    assert (nats, bits) == pytest.approx((total / count, total / size / math.log(2)), abs=6e-5)


def test_parts_of_a_text_hold_every_target_once():
    """They end at documents' ends, unless a document is longer than a part."""
    tokens = np.arange(100, 118)
    tokens[[0, 4, 6, 15, 17]] = 256
    parts = [part.tolist() for part in loss.cut_text(tokens, 256, 6)]
    assert parts == [tokens[:7].tolist(), tokens[6:13].tolist(), tokens[12:].tolist()]


def test_the_standard_error_of_three_documents():
    """By hand: residuals of -3, -1 and 4 sevenths."""
    mean_and_error = loss.ratio(np.array([3.0, 5, 4]), np.array([2.0, 3, 2]))
    assert mean_and_error == pytest.approx((12 / 7, math.sqrt(3 / 2 * 26 / 49) / 7))


# ---- export ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("m", "bigrams"))
def test_an_exported_model_is_the_saved_one(run, name):
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
    assert same_bits(tensors, dict(expected))
