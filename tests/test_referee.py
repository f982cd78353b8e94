"""Tests records/referee.py by cheating: edits of the script that each break a rule, and honest ones.

An edit replaces a text that the script has exactly once.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import referee
import rules

import train_gpt as tg
from launch import TINY, make_corpus

SCRIPT = Path(tg.__file__)
# A run of a second: two micro-batches, n-grams, and what TINY has.
SETTINGS = """
microbatches=2 val_slice_tokens=128 ngrams.orders=2,3 ngrams.rows_per_order=512 ngrams.width=16
""".split()
NO_POINTER = ["pointer_dim=0"]
OF_A_LOSS = ("causal", "a probability", "targets are only looked up")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(30000, 6000))  # a run must not come to a shard's last quarter
    return folder


def edited(folder, *edits):
    """Writes a copy of the script with each (old, new) text replaced. Returns its path."""
    text = SCRIPT.read_text(encoding="utf-8")
    for old, new in edits:
        count = text.count(old)
        assert count == 1, f"train_gpt.py has {old!r} {count} times: give this edit another text to replace"
        text = text.replace(old, new)
    script = folder / "train_gpt.py"
    script.write_text(text, encoding="utf-8")
    return script


MAIN = 'if __name__ == "__main__":\n'


def make_tiny(*settings):
    """Returns the edit by which the preset `cpu` has SETTINGS and `settings`."""
    loop = f"for setting in {TINY + SETTINGS + list(settings)}:\n"
    return MAIN, loop + '    PRESETS["cpu"] = override(PRESETS["cpu"], setting)\n\n' + MAIN


@pytest.fixture
def judge(corpus, tmp_path):
    """Returns judge(script, only): it returns what the referee says by rule, of these rules alone."""
    runs = tmp_path / "runs"
    runs.mkdir()

    def judge(script, only=referee.RULES, log=None, data=corpus):
        return rules.judge(rules.Case(script, "cpu", runs, data, log), only)

    return judge


# What the head computes in validation, and a step of the timed loop: several edits begin there.
LOSSES = "losses.append(next_token_losses(logits, micro_batch.targets[chunk], chunk_pointer, cfg.softcap))"
STEP = "        losses.push(done, train_step(model, optimizer, batch, batches.peek))\n"
BUILD = "    model, optimizer = build(cfg, backend, comm, args.seed)\n"
CROSS_ENTROPY = 'return F.cross_entropy(z, targets, reduction="none")'
MEAN_OF_SLICES = "return comm.all_reduce(losses).wait().mean().item()"

# By the rule that they break: what is replaced by what.
CHEATS = {
    "causal": {
        "attention sees one token ahead": [
            "(keys <= positions.view(-1, tile, 1))",
            "(keys <= positions.view(-1, tile, 1) + 1)",
        ],
        "keys come from the token after": [
            "torch.cat([passthrough[:1], passthrough[:-1]])",
            "torch.cat([passthrough[1:], passthrough[-1:]])",
        ],
        "the next token is smeared into this one": [
            "torch.cat([embed[:1], embed[1:] + share * embed[:-1]])",
            "torch.cat([embed[:-1] + share * embed[1:], embed[-1:]])",
        ],
        "n-grams are hashed with the token to come": [
            "hash_ngrams(tokens[:-1], hashed",
            "hash_ngrams(tokens[1:], hashed",
        ],
        "the stream is centred over all positions": [
            "        return lm_head_input(x, self",
            "        x = x - x.mean(0)\n        return lm_head_input(x, self",
        ],
    },
    "targets are only looked up": {
        "targets choose the head's columns": [
            LOSSES,
            "columns = micro_batch.targets[chunk].unique()\n"
            "            own = torch.searchsorted(columns, micro_batch.targets[chunk])\n"
            "            losses.append(next_token_losses(logits[:, columns], own, None, cfg.softcap))",
        ],
    },
    "a probability": {
        "a mixture that sums to 1.02": [
            "p_head = p_vocab * (not_gate + gate * p_sink)\n",
            "p_head = p_vocab * (0.02 + not_gate + gate * p_sink)\n",
        ],
        "a softmax over the target and few others": [
            CROSS_ENTROPY,
            "own = z.gather(1, targets[:, None])\n"
            "        return torch.cat([own, z[:, ::5]], 1).logsumexp(1) - own[:, 0]",
        ],
        "a document's first token costs nothing": [
            "        return torch.cat(losses)\n",
            "        return torch.cat(losses).masked_fill(micro_batch.targets == cfg.bos_id, 0.0)\n",
        ],
        "losses are divided by the temperature": [CROSS_ENTROPY, CROSS_ENTROPY + " / 1.02"],
    },
    "validation is not trained on": {
        "the validation shard is among the training shards": [
            'train = find_shards(cfg.data, "train")',
            'train = find_shards(cfg.data, "val") + find_shards(cfg.data, "train")',
        ],
        "validation trains": [MEAN_OF_SLICES, "model.lm_head.data.mul_(1.001)\n    " + MEAN_OF_SLICES],
        "weights follow the validation's loss": [
            STEP,
            STEP + "        model.scalars.data.add_(closing_loss(training) * 1e-5)\n",
            "def train(\n",
            "def closing_loss(training):\n"
            "    return float(training.val.tokens.sum() % 997)\n\n\n"
            "def train(\n",
        ],
    },
    "the whole validation": {
        "half of the slices": [
            "slices = slices or model.cfg.val_slices",
            "slices = slices or max(1, model.cfg.val_slices // 2)",
        ],
        "the mean of the best slices": [
            MEAN_OF_SLICES,
            "return comm.all_reduce(losses).wait().sort().values[: slices - 1].mean().item()",
        ],
        "the easiest documents first": [
            "paths])[:need]\n",
            "paths])[:need]\n"
            "        starts = np.flatnonzero(self.tokens == cfg.bos_id)\n"
            "        parts = sorted(np.split(self.tokens, starts), key=len)\n"
            "        self.tokens = np.concatenate(parts)\n",
        ],
        "the training text": ["ValLoader(cfg, data.val)", "ValLoader(cfg, data.train)"],
        "a lower loss in the log": ["        loss = validate(", "        loss = 0.99 * validate("],
    },
    "the track's constants": {
        "one slice": ["    val_slices=128,", "    val_slices=1,"],
        "a higher target": ["    target=1.07,", "    target=3.5,"],
    },
    "each token once": {
        "a second pass over the first documents": [
            "        firsts = self.advance(plan",
            "        if plan.step == cfg.steps // 2:\n"
            "            self.document = 0\n"
            "        firsts = self.advance(plan",
        ],
        "each batch twice through the model": [
            "for micro_batch in batch.micro_batches:",
            "for micro_batch in 2 * batch.micro_batches:",
        ],
    },
    "warm-up is undone": {
        "a warm-up that stays": ["    restore(before, model, optimizer)\n", ""],
        "momentum of the warm-up stays": [
            "    restore(before, model, optimizer)\n",
            "    kept = map_tensors(torch.clone, optimizer.params['lm_head'].state)\n"
            "    restore(before, model, optimizer)\n"
            "    for t, saved in zip(tree_leaves(optimizer.params['lm_head'].state), tree_leaves(kept)):\n"
            "        t.copy_(saved)\n",
        ],
        "steps before the clock": [
            BUILD,
            BUILD + "    loader = TrainLoader(cfg, data.train, rank, world_size)\n"
            "    early = Prefetcher(loader, [plan_step(cfg, step) for step in range(2)], loader_comm)\n"
            "    for _ in range(2):\n"
            "        train_step(model, optimizer, early.next(), early.peek)\n"
            "    loader.close()\n",
        ],
    },
    "the clock": {
        "it stops in the optimizer": [
            "    bar = progress_bar(total=cfg.steps",
            "    update = optimizer.step\n\n"
            "    def step(*arguments):\n"
            "        with clock.paused():\n"
            "            update(*arguments)\n"
            "            time.sleep(0.1)\n\n"
            "    optimizer.step = step\n"
            "    bar = progress_bar(total=cfg.steps",
        ],
        "it is slow": ["yield 1000 * (stopped", "yield 700 * (stopped"],
        "it starts after the first steps": [
            STEP,
            STEP + "        if step == 2:\n            clock.began = clock.synchronized()\n",
        ],
    },
    "reproducible": {
        "the seed is the time": [
            '        """Sets all parameters to their initial',
            '        seed = time.time_ns()\n        """Sets all parameters to their initial',
        ],
    },
}
WITHOUT_POINTER = {
    "targets choose the head's columns",
    "a softmax over the target and few others",
    "losses are divided by the temperature",
}


@pytest.mark.slow
@pytest.mark.parametrize("rule,name", [(rule, name) for rule in CHEATS for name in CHEATS[rule]])
def test_cheat_is_caught_by_its_rule(rule, name, judge, tmp_path):
    texts = CHEATS[rule][name]
    settings = []
    if name in WITHOUT_POINTER:
        settings += NO_POINTER
    if rule in OF_A_LOSS:  # needs a trained model, and nothing else of its run
        settings += ["warmup=false", "val_slices=1"]
    edits = list(zip(texts[::2], texts[1::2]))
    if rule != "the track's constants":
        edits.append(make_tiny(*settings))
    assert judge(edited(tmp_path, *edits), [rule])[rule].startswith("broken: ")


# Several edits, or settings, at once: to judge a script by all rules takes 20 s.
HONEST_EDITS = {
    "another activation, another optimizer and a learned scale": [
        "return F.linear(h, fc).relu_().square()",
        "return F.linear(h, fc).relu_().square().mul_(0.5)",
        "return (2 * dy @ proj.T).mul_(root)",
        "return (dy @ proj.T).mul_(2**0.5 * root)",
        "update = step_size * lr_mul * exp_avg / (exp_avg_sq.sqrt() + eps)",
        "update = 0.1 * step_size * lr_mul * exp_avg.sign()",
        "        return lm_head_input(x",
        "        return (1 + self.scalars[-1]) * lm_head_input(x",
    ],
}
HONEST_SETTINGS = {
    "the script as it is": [],
    "a wider model without a pointer": ["head_dim=16", "mlp_dim=48", *NO_POINTER],
    "another softcap and schedule": [
        "softcap.scale=15",
        "stages.*.batch_tokens=512",
        "stages.*.mtp=1,0.5,0.2",
    ],
    "no n-grams, and one micro-batch": ["ngrams.orders=", "microbatches=1"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", [*HONEST_EDITS, *HONEST_SETTINGS])
def test_honest_edits_pass(name, judge, tmp_path):
    texts = HONEST_EDITS.get(name, [])
    settings = HONEST_SETTINGS.get(name, [])
    script = edited(tmp_path, *zip(texts[::2], texts[1::2]), make_tiny(*settings))
    found = judge(script)
    del found["the log's script"]  # there is no log
    del found["the track's constants"]  # a tiny preset has others
    wrong = {rule: result for rule, result in found.items() if not result.startswith("ok")}
    assert not wrong, "\n".join(f"{rule}: {result}" for rule, result in wrong.items())


@pytest.mark.slow
def test_slices_that_are_equal_count_each(corpus, judge, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    tokens = np.memmap(next(data.glob("*_val_*.bin")), "<u2", "r+", 1024)
    tokens[:] = np.resize(tokens[:128], len(tokens))
    rule = "the whole validation"
    assert judge(edited(tmp_path, make_tiny()), [rule], data=data)[rule].startswith("ok")


def test_verdict_is_read_as_it_was_written(tmp_path):
    results = dict.fromkeys(referee.RULES, "ok: 768 tokens")
    path = tmp_path / referee.FILE_NAME
    path.write_text(f"script: my train.py sha256 {64 * 'a'}\npreset: cpu\n\n{referee.table(results)}")
    verdict = referee.read_verdict(path)
    assert verdict == (64 * "a", "cpu", results)
    assert verdict.passed


@pytest.mark.parametrize("result", ["broken: ok", "okay"])
def test_verdict_needs_every_rule(result, tmp_path):
    path = tmp_path / referee.FILE_NAME
    table = referee.table(dict.fromkeys(referee.RULES, "ok") | {"the clock": result})
    path.write_text(table)
    assert not referee.read_verdict(path).passed
    path.write_text(re.sub(".*the clock.*\n", "", table))
    assert not referee.read_verdict(path).passed
    path.write_bytes(b"\xff\x00script: ")
    assert referee.read_verdict(path) == ("", "", {})


def test_verdict_and_tracks_need_no_package():
    command = [sys.executable, "-S", "-c", "import referee, tracks"]
    subprocess.run(command, cwd=SCRIPT.parent / "records", check=True)


def write_log(folder, script):
    """Writes the beginning of a log of a script."""
    log = folder / "seed0_0123456789ab.txt"
    log.write_text(script.read_text() + f"\n{'=' * 100}\ncommit: unknown\n")
    return log


def commit(folder):
    git = "git init -q && git add train_gpt.py && git -c user.name=a -c user.email=a@b commit -q -m a"
    subprocess.run(git, shell=True, cwd=folder, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


def test_log_has_the_script_of_its_commit(judge, tmp_path, monkeypatch):
    script = edited(tmp_path)
    log = write_log(tmp_path, script)
    text = log.read_text()
    committed = text.replace("commit: unknown", f"commit: {commit(tmp_path)} (clean)")
    monkeypatch.setenv("GIT_DIR", "/tmp")
    answers = {
        committed: "ok",
        text: "not shown: there is no commit unknown:./train_gpt.py",
        text.replace("target=1.07", "target=1.08"): "broken: the log has another script",
    }
    for content, answer in answers.items():
        log.write_text(content)
        assert judge(script, ["the log's script"], log)["the log's script"].startswith(answer)


def test_log_with_other_constants_is_caught(judge, tmp_path):
    script = edited(tmp_path)
    log = write_log(tmp_path, script)
    config = dataclasses.asdict(tg.PRESETS["cpu"]) | {"val_slices": 64}
    log.write_text(f"{log.read_text()}config: {json.dumps(config)}\n")
    found = judge(script, ["the track's constants"], log)
    assert found == {"the track's constants": "broken: val_slices is 64, not 128"}


def test_script_without_the_functions_is_not_shown(judge, tmp_path):
    script = edited(tmp_path, ["class ValLoader:", "class ValidationLoader:"])
    found = judge(script, ["causal", "the clock"])
    assert "has no attribute 'ValLoader'" in found["the clock"]
    assert found["causal"] == "not shown: RuntimeError: the run `normal` failed"


@pytest.fixture
def root(corpus, tmp_path, monkeypatch):
    """Makes tmp_path the repository of referee.py, which has the data."""
    shutil.copytree(corpus, tmp_path / "data/local")
    monkeypatch.setattr(referee, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text("1 / 0")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("result, place", [("ok", "."), ("broken: a", "records/cpu/attempts")])
def test_table_is_written_beside_the_log(root, monkeypatch, capsys, result, place):
    """Without a log it is among the attempts. A broken rule is the exit status."""
    monkeypatch.setattr(rules, "CHECKS", {rule: lambda case: result for rule in referee.RULES})
    script = edited(root)
    arguments = [str(script)]
    if place == ".":
        arguments += ["--log", str(write_log(root, script))]
    with pytest.raises(SystemExit) as stop:
        referee.main(arguments)
    path = root / place / referee.FILE_NAME
    verdict = referee.read_verdict(path)
    assert stop.value.code == (not verdict.passed) == (result != "ok")
    assert verdict.script_hash == hashlib.sha256(script.read_bytes()).hexdigest()
    written = path.read_text().splitlines()
    assert set(written[-len(referee.RULES) :]) < set(capsys.readouterr().out.splitlines())


def test_another_file_of_that_name_stays(root):
    (root / "log.txt").touch()
    (root / referee.FILE_NAME).write_text("notes")
    with pytest.raises(SystemExit, match="another kind of file is there"):
        referee.main([str(SCRIPT), "--log", str(root / "log.txt")])
    assert (root / referee.FILE_NAME).read_text() == "notes"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["none.py"], "none.py"),
        ([str(SCRIPT.with_name("README.md"))], "README.md is no Python script"),
        (["failing.py"], "imported: ZeroDivisionError: division by zero"),
        ([str(SCRIPT), "--log", "none.txt"], "none.txt"),
        ([str(SCRIPT), "--preset", "words"], "data/words is not there; ./run.sh --preset words makes it"),
    ],
)
def test_what_is_not_there_is_one_line(arguments, message, root):
    with pytest.raises(SystemExit) as stop:
        referee.main(arguments)
    assert message in stop.value.code and "\n" not in stop.value.code
