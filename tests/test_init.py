"""Tests --init: runs that start from the model of an earlier one, with real processes."""

import re
import shutil
import time
from dataclasses import replace

import pytest
import torch

import train_gpt as tg
from launch import Launch, SetGlobal, make_corpus, settings
from test_ngram_runs import closing_block, log_of

NGRAMS = ("ngrams.orders=2,3", "ngrams.rows=301", "ngrams.width=12")
STILL = ("adam_lr=0", "muon_lr=0", "ngrams.lr=0")
# As at the end of the run before, so that nothing changes on the way.
LAST = ("stages.*.windows.long=13", "stages.*.windows.short=6", "val_windows.long=13", "val_windows.short=6")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "corpus"
    make_corpus(folder, train=(9000, 9000))
    return folder


def cpu_track(cfg, world_size):
    """Replaces tg.track_of, for which these runs are too small: only --init is to keep them off a track."""
    return "cpu"


def start(folder, corpus, *arguments, change=(), world_size=2):
    arguments = ["--preset", "cpu", "--data", corpus, *settings("warmup=false", *change), *arguments]
    faults = dict.fromkeys(range(max(1, world_size)), SetGlobal("track_of", cpu_track))
    return Launch(folder, *arguments, world_size=world_size, faults=faults)


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    """Returns first(*change): it makes the folder of a run on two ranks that saved first.pt."""
    runs = {}

    def first(*change):
        if change not in runs:
            runs[change] = folder = tmp_path_factory.mktemp("first")
            with start(folder, corpus, "--save", "first.pt", change=change) as process:
                assert process.wait() == [0, 0], process.err
        return runs[change]

    return first


def go_on(folder, corpus, source, *arguments, change, world_size=1):
    """Runs from the model in `source`, and saves second.pt. Returns both models."""
    folder.mkdir(exist_ok=True)
    options = ["--init", source / "first.pt", "--save", "second.pt", *arguments]
    with start(folder, corpus, *options, change=change, world_size=world_size) as process:
        assert process.wait() == [0] * max(1, world_size), process.err
    return tg.load_model(str(source / "first.pt")), tg.load_model(str(folder / "second.pt"))


def table_of(model):
    return model.ngrams.rows.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size, change",
    [(0, ()), (4, ()), (0, (*NGRAMS, "ngrams.placement=host")), (2, (*NGRAMS, "warmup=true")), (4, NGRAMS)],
)
def test_training_starts_with_the_saved_weights(corpus, first, tmp_path, change, world_size):
    """On any number of ranks, with another seed: with rates of 0 the run ends as it began, in every bit."""
    saved = first(*(setting for setting in change if "warmup" not in setting))
    before, after = go_on(
        tmp_path / "x", corpus, saved, "--seed", 3, change=(*change, *STILL, *LAST[:2]), world_size=world_size
    )
    for name, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    if change:
        assert table_of(before) == table_of(after) and any(table_of(before))
    losses = [float(closing_block(log_of(folder))["val_loss"]) for folder in (saved, tmp_path / "x")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


@pytest.mark.slow
def test_a_new_schedule_goes_on_learning(corpus, first, tmp_path):
    """More stages and other lengths; the log names the model, and the run counts for no track."""
    change = ("stages.*.steps=4", "stages.*.lr_mul=0.5", "stages.0.batch_tokens=256")
    _, after = go_on(tmp_path / "x", corpus, first(), change=change, world_size=2)
    log = log_of(tmp_path / "x")
    begin, *_, end = (float(x) for x in re.findall(r"val_loss:(\S+)", log))
    assert float(closing_block(log_of(first()))["val_loss"]) == pytest.approx(begin, abs=0.1)
    assert end < begin - 0.02
    assert re.search(r"^init: \S*first\.pt \([0-9a-f]{16}\)$", log, re.MULTILINE)
    assert (tmp_path / "x/records/other/attempts").exists() and (first() / "records/cpu/attempts").exists()
    # Both were trained apart from the first step on, in spite of the tie that a new run begins with.
    before = tg.load_model(str(first() / "first.pt"))
    moved = [(after.get_parameter(n) - before.get_parameter(n)) for n in ("embed", "lm_head")]
    assert all(step.abs().max() > 0 for step in moved)
    assert not torch.equal(moved[0], moved[1].T)


@pytest.mark.slow
def test_rotary_goes_on_from_the_last_window(corpus, first, tmp_path):
    """So the loss before the first step is the last one; a third run goes on from the second."""
    windows = ("window_unit=2", *LAST[2:])
    source = first(*windows)
    last = closing_block(log_of(source))["val_loss"]
    for name in ("second", "third"):
        _, model = go_on(tmp_path / name, corpus, source, change=(*windows, *LAST[:2], *STILL))
        begin, *_, end = re.findall(r"val_loss:(\S+)", log_of(tmp_path / name))
        assert float(begin) == pytest.approx(float(last), abs=6e-5) == float(end)
        (tmp_path / name / "second.pt").rename(tmp_path / name / "first.pt")
        source = tmp_path / name
    assert model.cfg.past_windows == (18, 20, 22, 26) + (26,) * 4
    torch.testing.assert_close(
        model.rotary.scale, tg.load_model(str(first(*windows) / "first.pt")).rotary.scale
    )


@pytest.mark.parametrize("past", [(), (6, 10)])
def test_rotary_tables_are_those_of_one_schedule(past):
    """Of stages before and after a start from a saved model."""
    stages = [replace(tg.RECORD.stages[0], windows={"long": n, "short": 1}) for n in (3, 5, 4, 9)]
    cfg = replace(tg.RECORD, window_unit=2, stages=tuple(stages))
    later = replace(cfg, past_windows=past, stages=cfg.stages[len(past) :])
    whole, part = (tg.Rotary(c, 64, torch.device("cpu")) for c in (cfg, later))
    for stage in range(len(past), 4):
        whole.use_stage(stage)
        part.use_stage(stage - len(past))
        assert (
            part.scale == whole.scale
            and torch.equal(part.cos, whole.cos)
            and torch.equal(part.sin, whole.sin)
        )


@pytest.mark.slow
def test_untied_parameters_stay_apart(corpus, first, tmp_path):
    """Also where a new run's would be tied until its end."""
    before, after = go_on(
        tmp_path / "x", corpus, first(), change=("stages.2.steps=0", "stages.3.steps=0", *STILL)
    )
    assert torch.equal(before.embed, after.embed) and not torch.equal(after.embed, after.lm_head.T)


@pytest.mark.slow
def test_it_resumes_as_any_run_does(corpus, first, tmp_path):
    """To the same bits, if the model is still there; another model is another run."""
    source = first(*NGRAMS)
    change = (*NGRAMS, "stages.*.steps=4")
    every = ["--checkpoint-every", 4]
    go_on(tmp_path / "whole", corpus, source, *every, change=change, world_size=2)
    options = ["--init", source / "first.pt", *every, "--save", "second.pt"]
    (tmp_path / "part").mkdir()
    with start(tmp_path / "part", corpus, *options, change=change) as process:
        while not list((tmp_path / "part").glob("records/*/*/*.checkpoint/step*8")) and process.running:
            time.sleep(0.05)
        process.kill()
    resume = [*options, "--resume", "records/other/attempts"]
    other = shutil.copytree(source, tmp_path / "other") / "first.pt"
    saved = torch.load(other)
    saved["weights"]["embed"] += 1
    torch.save(saved, other)
    with start(tmp_path / "part", corpus, *resume, "--init", other, change=change) as process:
        assert process.wait() == [1, 1]
    assert " is of another run (there, here): init (" in process.final_output["err"]
    with start(tmp_path / "part", corpus, *resume, change=change) as process:
        assert process.wait() == [0, 0], process.err
    whole, part = (tg.load_model(str(tmp_path / name / "second.pt")) for name in ("whole", "part"))
    assert all(map(torch.equal, whole.state_dict().values(), part.state_dict().values()))
    assert table_of(whole) == table_of(part)


@pytest.mark.slow
def test_the_state_of_untied_parameters_is_their_own(corpus, first):
    """Also after the step that unties a new run's, whose copy begins with its target's state."""
    path = str(first() / "first.pt")
    cfg = tg.load_model(path).cfg
    model = tg.GPT(cfg)
    optimizer = tg.Optimizer(cfg, dict(model.named_parameters()), tg.Exchange(0, 1))
    tg.start_from(path, model, optimizer)
    loader = tg.TrainLoader(cfg, tg.open_dataset(cfg).train, 0, 1)
    plans = [tg.plan_step(cfg, step) for step in range(tg.untie_step(cfg) + 1)]
    batches = tg.Prefetcher(loader, plans, tg.Exchange(0, 1))
    for plan in plans:
        tg.train_step(model, optimizer, batches.next())
    loader.close()
    assert plan.untie
    (target, name), *_ = optimizer.tied_copy.items()
    for key, value in optimizer.state[target].items():
        if torch.is_tensor(value):
            assert not torch.equal(value, optimizer.state[name][key].T), key


@pytest.mark.parametrize(
    "setting",
    ["vocab_size=256", "padded_vocab=272", "bos_id=255", "bigram_vocab_size=640", "sign_rows=32", "heads=4"]
    + ["head_dim=12", "mlp_dim=64", "layers.1.xsa=false", "mudd_dim=8", "mudd_gates=false"]
    + ["ngrams.orders=3,4", "ngrams.hashes=3", "ngrams.rows=302", "ngrams.width=16"],
)
def test_all_that_shapes_or_reads_the_weights_must_fit(first, setting):
    path = str(first(*NGRAMS) / "first.pt")
    cfg = tg.load_model(path).cfg
    assert re.fullmatch("[0-9a-f]{16}", tg.check_init(path, cfg)[0])
    with pytest.raises(tg.UserError, match=f"another model .*: {setting.partition('=')[0]}[. ]"):
        tg.check_init(path, tg.override(cfg, setting))


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--init", "no.pt"],
            "cannot load no.pt: No such file or directory; give a file that --save of this ",
        ),
        (["--init", "corpus.txt"], "cannot load corpus.txt: "),
        (["--set", "head_dim=12"], "another model (there, here): head_dim (8, 12); give the options it had"),
        (["--set", "layers.1.xsa=false"], "another model (there, here): layers.1.xsa (True, False); "),
        (["--set", "sign_rows=32", "--set", "mudd_dim=8"], "here): sign_rows (64, 32); mudd_dim (64, 8); "),
        (["--set", "ngrams.orders=2,4"], "another model (there, here): ngrams.orders.1 (3, 4); "),
        (["--set", "ngrams.orders=2,3,4"], "another model (there, here): ngrams.orders.2 (None, 4); "),
    ],
)
def test_what_does_not_fit_gets_one_line(corpus, first, tmp_path, options, message):
    """Before anything is trained or logged, on every rank."""
    (tmp_path / "corpus.txt").write_text("no model")
    options = options if "--init" in options else ["--init", first(*NGRAMS) / "first.pt", *options]
    with start(tmp_path, corpus, *options, change=NGRAMS) as process:
        assert process.wait() == [1, 1]
    (line,) = process.final_output["err"].splitlines()
    assert line.startswith("train_gpt.py: error: ") and message in line
    assert not (tmp_path / "records").exists()
