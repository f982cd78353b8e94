"""Tests evals/generate.py, loss.py and export.py, on random models and on the model of a run with n-grams."""

import gzip
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import tiktoken
import torch

import tokenize_text as tt
import train_gpt as tg
from golden_inputs import write_shard
from launch import Launch, make_corpus, settings
from test_config import ROOT
from test_ngram_runs import closing_block, log_of, make_config

sys.path.insert(0, str(ROOT / "evals"))
import export
import generate
import loss

NGRAMS = ("ngrams.orders=2,3", "ngrams.rows=301", "ngrams.width=12")
NO_PREFIXES = ("stages.*.prefix=",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the folder of a run of 3 slices of 256 tokens, on two ranks, with n-grams; its corpus has 5.

    It predicts no prefixes, as the `cpu` preset, and has another seed than the default.
    """
    folder = tmp_path_factory.mktemp("run")
    make_corpus(folder / "corpus", val=5 * 256 + 1)
    change = settings("warmup=false", "samples=3", *NO_PREFIXES, *NGRAMS)
    arguments = ["--preset", "cpu", "--data", "corpus", *change, "--seed", 3, "--save", "m.pt"]
    with Launch(folder, *arguments, world_size=2) as process:
        assert process.wait() == [0, 0], process.err
    (folder / "screen.txt").write_text(process.final_output["out"])
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


# ---- the distribution --------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.parametrize("ngrams", [False, True])
def test_a_tokens_distribution_is_the_training_forwards(run, ngrams):
    """At every position of a micro-batch's first document, with all that a model can have; windows end there.

    Of a later document, the first rows of bigrams and the smear read the token before BOS.
    """
    if ngrams:
        model = tg.load_model("m.pt")
    else:
        cfg = make_config(run / "corpus", "ngrams.orders=", "window_unit=2")
        model = tg.GPT(cfg)
        model.rotary.use_stage(len(cfg.stages) - 1)
    randomize(model)
    cfg, rng = model.cfg, np.random.default_rng(0)
    lengths = [40, 7, 5]
    tokens = np.concatenate([[cfg.bos_id, *rng.integers(97, 104, n - 1)] for n in lengths] + [[0]])
    batch = tg.make_micro_batch(tokens, np.cumsum([0, *lengths[:-1]]), max(lengths), 8, cfg)
    windows = tg.window_tokens(cfg, cfg.val_windows)
    assert ngrams or windows["long"] == 40 and windows["short"] == 12
    x = model.hidden_states(batch, windows, None if ngrams else {})
    expected = model.logits(x)[:, : cfg.vocab_size].softmax(1)
    document = tokens[:40].tolist()
    for i in range(40):
        probs = model.next_token_logits(document[: i + 1]).softmax(0)
        torch.testing.assert_close(probs, expected[i], rtol=0, atol=1e-6)
    assert expected[:40].std(0).max() > 1e-4  # positions differ


def test_a_loaded_model_computes_as_the_saved_one(run):
    """In every bit, also by its rotary angles and attention's scale, which are those of the last stage."""
    cfg = make_config(run / "corpus", "ngrams.orders=")
    model = tg.GPT(cfg)
    randomize(model)
    model.rotary.use_stage(len(cfg.stages) - 1)
    tg.save_model("random.pt", model)
    text = [256, *range(97, 104)]
    expected = model.next_token_logits(text)
    assert torch.equal(tg.load_model("random.pt").next_token_logits(text), expected)
    model.rotary.use_stage(len(cfg.stages) - 2)
    assert not torch.equal(model.next_token_logits(text), expected)


def test_rows_of_ngrams_come_from_the_mapped_file():
    model, text = tg.load_model("m.pt"), [256, 97, 98, 99]
    before = model.next_token_logits(text)
    assert isinstance(model.ngrams.rows, np.memmap)
    model.ngrams = model.ngrams._replace(rows=np.zeros_like(model.ngrams.rows))
    assert (model.next_token_logits(text) - before).abs().max() > 1e-4


def allowed(probs, temperature, top_k, top_p):
    """Returns by brute force the tokens that may be drawn, with their probabilities, from a list."""
    ranked = sorted(range(len(probs)), key=lambda i: -probs[i])[: top_k or None]
    weights = {i: probs[i] ** (1 / temperature) for i in ranked}
    total, kept, share = sum(weights.values()), {}, 0.0
    for i in ranked:
        if share >= top_p:
            break
        kept[i] = weights[i]
        share += weights[i] / total
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


@pytest.mark.parametrize(
    "options", [(1, 0, 1), (0.5, 0, 1), (2, 5, 1), (1, 0, 0.6), (0.7, 6, 0.8), (2, 4, 0.8), (1, 1, 1)]
)
def test_tokens_are_drawn_by_temperature_top_k_and_top_p(options):
    temperature, top_k, top_p = options
    rng, draws = np.random.default_rng(1), 4000
    probs = rng.dirichlet(np.full(9, 0.7))
    logits, generator = torch.from_numpy(np.log(probs)) + 3, torch.Generator().manual_seed(0)
    drawn = [generate.choose(logits, generator, temperature, top_k, top_p) for _ in range(draws)]
    expected = allowed(probs.tolist(), temperature, top_k, top_p)
    assert set(drawn) <= set(expected) and len(expected) >= (2 if top_k != 1 else 1)
    for token, p in expected.items():
        assert abs(drawn.count(token) / draws - p) < 5 * math.sqrt(p * (1 - p) / draws) + 1e-12


def test_temperature_zero_draws_the_likeliest():
    logits = torch.randn(50)
    assert generate.choose(logits, torch.Generator(), 0) == logits.argmax()


# ---- generation --------------------------------------------------------------------------------------------


class Recorder:
    """Has logits that follow the context's last token and length, and keeps the contexts."""

    def __init__(self, cfg, end=None):
        self.cfg, self.contexts, self.end = cfg, [], end

    def next_token_logits(self, tokens):
        self.contexts.append(list(tokens))
        token = self.cfg.bos_id if len(self.contexts) == self.end else len(self.contexts)
        return torch.nn.functional.one_hot(torch.tensor(token), self.cfg.vocab_size).float()


def test_the_context_is_the_longest_document_of_training(run):
    """Which is max_doc_len, or what a micro-batch holds."""
    cfg = make_config(run / "corpus", "stages.3.max_doc_len=30", "stages.0.max_doc_len=30")
    longest = [min(stage.max_doc_len, stage.batch_tokens // cfg.microbatches) for stage in cfg.stages]
    assert generate.max_context(cfg) == max(longest) == 40
    assert (generate.max_context(tg.CPU), generate.max_context(tg.RECORD)) == (512, 3072)
    model, tokens = Recorder(cfg), [256, *range(30, 60)]
    new = list(generate.generate(model, tokens, 20, temperature=0))
    assert new == list(range(1, 21))
    text = tokens + new
    assert model.contexts == [text[: 31 + i][-40:] for i in range(20)]


def test_it_ends_where_the_model_ends_the_document(run):
    model = Recorder(make_config(run / "corpus"), end=4)
    assert list(generate.generate(model, [256], 9, temperature=0)) == [1, 2, 3]


def generated(capsys, *arguments):
    generate.main(["m.pt", *arguments])
    return capsys.readouterr().out


def test_the_command_continues_the_prompt(capsys, monkeypatch):
    """Given as an argument, in a file, or on standard input; the seed repeats it."""
    text = generated(capsys, "abc", "--tokens", "30")
    assert text.startswith("abc") and len(text) > len("abc\n")
    (generate.ROOT / "prompt.txt").write_text("abc")
    assert generated(capsys, "--prompt-file", "prompt.txt", "--tokens", "30") == text
    monkeypatch.setattr("sys.stdin", open("prompt.txt"))
    assert generated(capsys, "-", "--tokens", "30") == text
    assert generated(capsys, "abc", "--tokens", "30", "--seed", "1") != text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["no.pt"],
            "cannot read no.pt: ",
        ),
        (["screen.txt"], "cannot read screen.txt: "),
        (["m.pt", "--prompt-file", "no.txt"], "No such file or directory: 'no.txt'"),
        (["m.pt", "x", "--prompt-file", "m.pt"], "argument --prompt-file: not allowed with argument PROMPT"),
        (["m.pt", "--prompt-file", "m.pt"], "m.pt is not UTF-8: "),
        (["m.pt", "--top-p", "0"], "0: give a number from 1e-09 to 1"),
        (["m.pt", "--top-p", "1.1"], "1.1: give a number from 1e-09 to 1"),
        (["m.pt", "--temperature", "-1"], "-1: give a number from 0 to 1e+09"),
        (["m.pt", "--tokens", "2.5"], "argument --tokens: invalid int value: '2.5'"),
        (["m.pt", "--tokens", "0"], "argument --tokens: 0: give a number from 1 to 1e+09"),
    ],
)
def test_bad_input_of_generate_gets_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        generate.main(arguments)
    line = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in line and "\n" not in line


def merges(count):
    """Returns a vocabulary of all bytes and `count` merges of earlier tokens, and BOS."""
    rng = np.random.default_rng(0)
    tokens = [bytes([i]) for i in rng.permutation(256)]
    while len(tokens) < 256 + count:
        a, b = (tokens[i] for i in rng.integers(max(0, len(tokens) - 300), len(tokens), 2))
        if a + b not in tokens and len(a + b) < 5:
            tokens.append(a + b)
    return [*tokens, b""]


def test_a_vocabulary_file_gives_the_encoding_it_was_written_from(tmp_path):
    tokens = merges(400)
    tt.write_token_bytes(tmp_path, tokens)
    encoding = tt.get_encoding("gpt2", tmp_path / tt.VOCABULARY)
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks, special = {token: i for i, token in enumerate(tokens[:-1])}, {"<|endoftext|>": 656}
    same = tiktoken.Encoding("same", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ids = encoding.encode_ordinary(text)
    assert ids == same.encode_ordinary(text) and max(ids) > 255
    assert encoding.decode(ids) == text and encoding.eot_token == 656
    assert tt.token_bytes(encoding) == tokens


def test_gpt2s_tokens_come_from_the_datas_folder(run, tmp_path, monkeypatch, capsys):
    """Relative to the checkout, not to the current folder. Their passages are long, those of bytes short."""
    numbers = ("vocab_size=50257", "padded_vocab=50304", "bos_id=50256")
    tg.save_model("gpt2.pt", tg.GPT(make_config("gpt2", "ngrams.orders=", *numbers)))
    pairs = [bytes([i, j]) for i in range(256) for j in range(256)][: 50256 - 256]
    tokens = [*(bytes([255 - i]) for i in range(256)), *pairs, b""]
    (run / "gpt2").mkdir()
    tt.write_token_bytes(run / "gpt2", tokens)
    monkeypatch.chdir(tmp_path)
    _, encoding = generate.load(str(run / "gpt2.pt"))
    assert tt.token_bytes(encoding) == tokens
    Path("long.txt").write_text("ab" * 400)
    for name, count in (("gpt2", 401), ("m", 802)):  # with the BOS that ends a passage
        loss.main([str(run / f"{name}.pt"), "long.txt"])
        assert f" {count} tokens, 800 bytes, " in capsys.readouterr().out


# ---- the end of a run --------------------------------------------------------------------------------------


def test_a_run_ends_with_three_texts(run):
    """On the screen, when the log is complete and the model saved."""
    screen = (run / "screen.txt").read_text()
    texts = re.findall(r"^sample: (.+)$", screen, re.MULTILINE)
    assert len(texts) == 3 == len(set(texts))
    assert "\nsample:" not in log_of(run)


class Screen:
    def __init__(self):
        self.lines = []

    def print0(self, line, file):
        assert not file
        self.lines.append(line)


def test_the_texts_are_drawn_at_temperature_0_8_by_the_seed(run, monkeypatch):
    cfg, texts = make_config(run / "corpus", "ngrams.orders=", "samples=20"), []
    model, logits = tg.GPT(cfg), torch.full((257,), -torch.inf)
    logits[97], logits[98] = 0.8 * math.log(4), 0  # odds of 4 at this temperature
    monkeypatch.setattr(model, "next_token_logits", lambda tokens: logits)
    for seed in (0, 0, 1):
        screen = Screen()
        tg.print_samples(model, [b"a" if i == 97 else b"b" for i in range(257)], seed, screen)
        texts.append("".join(line.removeprefix("sample: 'b").removesuffix("'") for line in screen.lines))
    assert texts[0] == texts[1] != texts[2] and all(len(text) == 2000 for text in texts)
    assert texts[0].count("a") / 2000 == pytest.approx(0.8, abs=0.04)


# ---- losses ------------------------------------------------------------------------------------------------


def losses_of(capsys, *arguments):
    """Returns the numbers of each line: nats, their error, bits, their error, tokens, bytes, passages."""
    loss.main(["m.pt", *arguments])
    lines = capsys.readouterr().out.splitlines()
    number = r"(\d[\d,]*(?:\.\d+)?|nan)"
    form = f"{number} \\+- {number} nats per token, {number} \\+- {number} bits per byte: .*, "
    form += f"{number} tokens, {number} bytes, {number} passages"
    return [[float(x.replace(",", "")) for x in re.fullmatch(form, line).groups()] for line in lines]


def test_a_shards_loss_is_the_runs(run, capsys):
    ((nats, *_, tokens, size, documents),) = losses_of(capsys, "corpus/tiny_val_000000.bin")
    assert nats == pytest.approx(float(closing_block(log_of(run))["val_loss"]), abs=6e-5)
    stream = tt.read_tokens(run / "corpus/tiny_val_000000.bin")[1:769]
    assert (tokens, size) == (768, (stream < 256).sum())
    assert documents >= (stream == 256).sum()


def test_slices_are_those_named(capsys):
    """Losses of parts, also of slices that the run never read, average to those of the whole."""
    shard = "corpus/tiny_val_000000.bin"
    each = [losses_of(capsys, shard, "--slices", f"{i}:{i + 1}")[0][0] for i in range(5)]
    assert len(set(each)) > 3
    for first, end in ((0, 3), (1, 3), (3, 5), (0, 5)):
        ((nats, *_),) = losses_of(capsys, shard, "--slices", f"{first}:{end}")
        assert nats == pytest.approx(sum(each[first:end]) / (end - first), abs=1e-4)


@pytest.mark.numeric
def test_a_texts_loss_is_that_of_its_passages(capsys):
    """Each after BOS, with the BOS that ends it; in nats per token, and bits per byte of the text."""
    words = [b"abc", b"", "gfé".encode(), b"d" * 30, b"fedcba"]
    texts = [word.decode() for word in words]
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    with gzip.open("five.jsonl.gz", "wt") as file:
        file.write(lines)
    model = tg.load_model("m.pt")
    passages = [passage for word in words if word for passage in tt.cut_passages(word, 8)]
    tokens = np.array([token for passage in passages for token in (256, *passage)] + [256])
    batch = tg.make_micro_batch(tokens, np.flatnonzero(tokens[:-1] == 256), 9, 32, model.cfg)
    windows = tg.window_tokens(model.cfg, model.cfg.val_windows)
    total = model.token_losses(batch, windows).double().sum().item()
    count, parts = len(tokens) - 1, len(passages)
    size = sum(map(len, words))
    arguments = ["five.jsonl.gz", "--field", "body", "--passage-bytes", "8"]
    ((nats, _, bits, _, *counts),) = losses_of(capsys, *arguments)
    assert counts == [count, size, parts] and parts > 4
    assert nats == pytest.approx(total / count, abs=6e-5)
    assert bits == pytest.approx(total / size / math.log(2), abs=6e-5)


def test_losses_are_those_of_the_last_windows(run):
    """Which are longer than the last stage's, in a document longer than both."""
    cfg = make_config(run / "corpus", "ngrams.orders=", "window_unit=2")
    model = tg.GPT(cfg)
    randomize(model)
    tokens = np.array([256, *np.random.default_rng(0).integers(97, 104, 60), 256])
    batch = tg.make_micro_batch(tokens, np.zeros(1, int), 61, 8, cfg)
    last, stages = (
        model.token_losses(batch, tg.window_tokens(cfg, windows)).double().numpy().mean()
        for windows in (cfg.val_windows, cfg.stages[-1].windows)
    )
    nats, *_ = loss.document_losses(model, tokens, np.ones(257))
    assert nats.sum() / 61 == pytest.approx(last, abs=1e-6) and abs(last - stages) > 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_a_text_hold_every_target_once(seed):
    """They end at documents' ends, unless a document is longer than a part."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 40)
    tokens = np.concatenate([[256, *rng.integers(0, 256, n - 1)] for n in lengths] + [[256]])
    size = int(rng.integers(6, 30))
    parts = list(loss.cut_text(tokens, 256, size))
    assert np.concatenate([part[1:] for part in parts]).tolist() == tokens[1:].tolist()
    assert all(1 < len(part) <= size + 1 for part in parts)
    begins = np.cumsum([0] + [len(part) - 1 for part in parts[:-1]])
    inside = [begin for begin in begins if tokens[begin] != 256]
    assert bool(inside) <= (lengths.max() > size)
    for part, following in zip(parts, parts[1:]):  # as few as that allows
        document = [*np.flatnonzero(following[1:] == 256) + 1, len(following) - 1][0]
        assert following[0] != 256 or len(part) - 1 + document > size


def test_the_standard_error_of_three_documents():
    """By hand: residuals of -3, -1 and 4 sevenths. Bits and their error have the same unit."""
    nats, sizes = np.array([3.0, 5, 4]), np.array([2.0, 3, 2])
    mean, error = loss.ratio(nats, sizes)
    assert (mean, error) == pytest.approx((12 / 7, math.sqrt(3 / 2 * 26 / 49) / 7))
    expected = f"{mean / math.log(2):.4f} +- {error / math.log(2):.4f} bits per byte"
    assert expected in loss.report(np.stack([nats, sizes, sizes]), "x")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["corpus/tiny_val_000000.bin", "--slices", "3:6"], "has 5 slices of 256 tokens, not 6"),
        (["even.bin", "--slices", "0:2"], "even.bin has 1 slices of 256 tokens, not 2"),
        (["corpus/tiny_val_000000.bin", "--slices", "3:3"], "'3:3' is not FIRST:END"),
        (["no.txt"], "No such file or directory: 'no.txt'"),
        (["empty.txt"], "empty.txt has no text"),
        (["latin.txt"], "latin.txt:1: not UTF-8 (byte 0xe9)"),
        (["five.jsonl"], "five.jsonl:1: no text under 'text'"),
        (["empty.bin"], "empty.bin: not a whole token shard"),
        (["gpt2.bin"], "gpt2.bin has a vocabulary of 50257 tokens, the model 257"),
        (["empty.txt", "--passage-bytes", "3"], "3: give a number from 4 to 1e+09"),
    ],
)
def test_bad_input_of_loss_gets_one_line(run, capsys, arguments, message):
    for name in ("empty.txt", "empty.bin"):
        (run / name).write_text("")
    (run / "gpt2.bin").write_bytes(tt.shard_header(2, 50257, 50256) + bytes(4))
    (run / "latin.txt").write_bytes("é".encode("latin-1"))
    (run / "five.jsonl").write_text('{"body": "x"}\n')
    write_shard(run / "even.bin", [256] + [97] * 511, 257, 256)  # the second slice lacks its last target
    with pytest.raises(SystemExit) as error:
        loss.main(["m.pt", *arguments])
    line = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err.splitlines()[-1]
    assert message in line and "\n" not in line


# ---- export ------------------------------------------------------------------------------------------------


def test_an_exported_model_is_the_saved_one(run, capsys):
    """In names, shapes, dtypes and every bit, with its table and config."""
    cfg = make_config(run / "corpus", "dtype=bfloat16", "ngrams.orders=")
    tg.save_model("bigrams.pt", tg.GPT(cfg))
    for name in ("m", "bigrams"):
        export.main([f"{name}.pt", f"{name}.safetensors"])
        with safetensors.safe_open(f"{name}.safetensors", "pt") as file:
            config, tensors = file.metadata()["config"], {key: file.get_tensor(key) for key in file.keys()}
        model = tg.load_model(f"{name}.pt")
        assert tg.config_from_dict(json.loads(config)) == model.cfg
        expected = model.state_dict()
        if name == "m":
            expected["ngrams"] = torch.from_file("m.pt.ngrams", size=602 * 12, dtype=torch.float32).view(
                602, 12
            )
        assert tensors.keys() == expected.keys()
        for key, value in expected.items():
            assert tensors[key].dtype == value.dtype and torch.equal(tensors[key], value), key
        shapes = {line.split()[0]: line.split(None, 2)[2] for line in capsys.readouterr().out.splitlines()}
        assert shapes == {key: str(tuple(value.shape)) for key, value in expected.items()}


@pytest.mark.parametrize("out", ["m.pt", "./m.pt", "m.pt.ngrams"])
def test_an_export_never_replaces_the_model(run, out):
    before = [(run / name).read_bytes() for name in ("m.pt", "m.pt.ngrams")]
    with pytest.raises(SystemExit, match="is the model itself; choose another name"):
        export.main(["m.pt", out])
    assert before == [(run / name).read_bytes() for name in ("m.pt", "m.pt.ngrams")]
