"""Data: slices against a naive program, shard switches, validation slices, what is known of the files. Their errors are in
test_bad_input.py."""
import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from golden_inputs import next_batch, random_documents, write_shard

VOCAB, START = 257, 256


def config(folder, **changes):
    return replace(tg.CPU, data=str(folder), **changes)


def make_shards(folder, rng, counts, split="train", longest=200):
    folder.mkdir(exist_ok=True)
    shards = [random_documents(rng, n, VOCAB, START, longest) for n in counts]
    for i, tokens in enumerate(shards):
        write_shard(folder / f"x_{split}_{i:06d}.bin", tokens, VOCAB, START)
    return shards


# ------------------------------------------------------------------------------------------------------ naive oracle

def naive_documents(shard):
    documents = []
    for token in shard:
        if token == START:
            documents.append([])
        if documents:
            documents[-1].append(int(token))
    return documents


def naive_slice(documents, at, T, longest):
    """Documents in order from number `at`, each cut at `longest`, until there are T + 1 tokens; the last piece cut to fit.
    -> tokens, start of each document in them, the next document; None when the documents do not suffice."""
    tokens, starts = [], []
    while len(tokens) < T + 1:
        if at == len(documents):
            return None
        starts.append(len(tokens))
        for token in documents[at][:longest]:
            if len(tokens) < T + 1:
                tokens.append(token)
        at += 1
    return tokens, starts, at


def naive_batches(shards, schedule, slices):
    """All batches of the schedule [(tokens, longest)], each a list of (tokens, starts); ends with the data."""
    shards = iter([naive_documents(s) for s in shards])
    documents, at = next(shards), 0
    for tokens, longest in schedule:
        while True:
            batch, here = [], at
            for _ in range(slices):
                piece = naive_slice(documents, here, tokens // slices, longest)
                if piece is None:
                    break
                batch.append(piece[:2])
                here = piece[2]
            if len(batch) == slices:
                break
            try:
                documents, at = next(shards), 0  # the whole batch starts over
            except StopIteration:
                return
        at = here
        yield batch


def naive_bigram(tokens, rows):
    wrap = lambda x: (x + 2**31) % 2**32 - 2**31
    return [rows - 1] + [(wrap(36313 * b) ^ wrap(27191 * a)) % (rows - 1) for a, b in zip(tokens, tokens[1:])]


def check_micro_batch(batch, tokens, starts, cfg):
    T = len(tokens) - 1
    assert batch.inputs.tolist() == tokens[:T] and batch.targets.tolist() == tokens[1:]
    assert (batch.inputs.dtype, batch.targets.dtype, batch.bigram.dtype, batch.cu_seqlens.dtype) == \
        (torch.int32, torch.int64, torch.int32, torch.int32)
    assert batch.bigram.tolist() == naive_bigram(tokens[:T], cfg.bigram_rows)
    slots = cfg.doc_slots or tg.doc_slots(T)
    assert batch.cu_seqlens.tolist() == starts + [T] * (slots - len(starts))


# ------------------------------------------------------------------------------------------------------------ slices

@pytest.mark.parametrize("seed", range(6))
def test_slices(tmp_path, seed):
    """Random documents and shards, batch sizes that change; at worlds 1, 2, 4, 8 the ranks' slices are the same eight."""
    rng = np.random.default_rng(seed)
    shards = make_shards(tmp_path, rng, rng.integers(3000, 7000, 3), longest=int(rng.integers(20, 300)))
    cfg = config(tmp_path)
    schedule = [(int(8 * rng.integers(30, 90)), int(rng.integers(10, 250))) for _ in range(40)]
    want = list(naive_batches(shards, schedule, 8))
    assert 5 < len(want) < 40  # the data ends in this schedule, and not at once
    loaders = {(world, rank): tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, world, False)
               for world in (1, 2, 4, 8) for rank in range(world)}
    for (tokens, longest), batch in zip(schedule, want):
        for (world, rank), loader in loaders.items():
            own = next_batch(loader, tokens, longest)
            assert len(own) == 8 // world
            for m, micro_batch in enumerate(own):
                assert micro_batch.longest == longest
                check_micro_batch(micro_batch, *batch[m * world + rank], cfg)
    for loader in loaders.values():
        with pytest.raises(tg.UserError, match=f"ran out after {sum(t for t, _ in schedule[:len(want)]):,} tokens.*add training shards"):
            next_batch(loader, *schedule[len(want)])
        loader.close()


@pytest.mark.parametrize("seed", range(4))
def test_batches_are_counted_as_the_loader_draws_them(tmp_path, seed):
    """As many as the naive program cuts, and the loader delivers; of documents longer than what is used of them. With more ranks
    than slices other ones are cut."""
    rng, counts = np.random.default_rng(seed), []
    shards = make_shards(tmp_path, rng, rng.integers(9000, 15000, 3), longest=int(rng.integers(30, 900)))
    stages = [replace(stage, steps=int(rng.integers(1, 3)), tokens=int(16 * rng.integers(10, 30)), longest=int(rng.integers(20, 400)))
              for stage in tg.CPU.stages]
    for more, world in itertools.product((0, 60), (1, 16)):
        cfg = config(tmp_path, stages=(replace(stages[0], steps=stages[0].steps + more), *stages[1:]))
        plans, paths = [tg.plan(cfg, step) for step in range(cfg.steps)], tg.find_shards(cfg.data, "train")
        want = len(list(naive_batches(shards, [(now.tokens, now.longest) for now in plans], max(8, world))))
        counts.append((tg.count_batches(cfg, paths, world), cfg.steps))
        assert counts[-1][0] == want
        loader = tg.TrainLoader(cfg, paths, 0, world, False)
        for now in plans[:want]:
            next_batch(loader, now.tokens, now.longest)
        if want < cfg.steps:
            with pytest.raises(tg.DataRanOut):
                next_batch(loader, plans[want].tokens, plans[want].longest)
        loader.close()
    assert {count < steps for count, steps in counts} == {True, False}


def test_counting_reads_as_far_as_the_schedule_goes(tmp_path):
    """The shard behind that would be refused."""
    make_shards(tmp_path, np.random.default_rng(0), [9000, 9000])
    write_shard(tmp_path / "x_train_000009.bin", [START] + 40 * [300], VOCAB, START)
    cfg, paths = config(tmp_path), tg.find_shards(str(tmp_path), "train")
    short = replace(cfg, stages=tuple(replace(stage, steps=1, tokens=800) for stage in cfg.stages))
    assert tg.count_batches(short, paths, 1) == 4
    with pytest.raises(tg.UserError, match="token 300"):
        tg.count_batches(cfg, paths, 1)


def test_more_ranks_than_slices_give_each_rank_one(tmp_path):
    rng = np.random.default_rng(7)
    shards = make_shards(tmp_path, rng, [9000])
    cfg = config(tmp_path, slices=2)
    want = next(naive_batches(shards, [(4 * 64, 50)], 4))
    for rank in range(4):
        (own,) = next_batch(tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), rank, 4, False), 4 * 64, 50)
        check_micro_batch(own, *want[rank], cfg)


def test_the_next_shard_is_the_next_by_name(tmp_path):
    """Files written out of order; a shard too short for a batch is passed over; text before the first start token is not used."""
    cfg = config(tmp_path, slices=1)
    document = lambda fill, n: [START] + [fill] * (n - 1)
    write_shard(tmp_path / "x_train_000010.bin", document(3, 30) + document(4, 30), VOCAB, START)
    write_shard(tmp_path / "x_train_000002.bin", document(2, 5), VOCAB, START)
    write_shard(tmp_path / "x_train_000001.bin", [9] * 8 + document(1, 30), VOCAB, START)
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, False)
    assert [next_batch(loader, 20, 100)[0].inputs[-1].item() for _ in range(3)] == [1, 3, 4]


def test_a_batch_may_end_exactly_with_its_shard(tmp_path):
    """T + 1 tokens are enough for T, one fewer is not."""
    cfg = config(tmp_path, slices=1)
    for size, good in ((21, True), (20, False)):
        write_shard(tmp_path / "x_train_000001.bin", [START] + [1] * (size - 1), VOCAB, START)
        loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, False)
        if good:
            assert next_batch(loader, 20, 100)[0].inputs.numel() == 20
        else:
            with pytest.raises(tg.UserError, match="ran out after 0 tokens"):
                next_batch(loader, 20, 100)


def test_doc_slots():
    assert [tg.doc_slots(T) for T in (16384, 32768, 49152)] == [64, 96, 128]
    assert [tg.doc_slots(T) for T in (1, 512, 38399, 38400, 38700, 262144)] == [128, 128, 128, 128, 256, 896]


def test_too_many_documents(tmp_path):
    cfg = config(tmp_path, slices=1)
    write_shard(tmp_path / "x_train_000001.bin", [START] * 400, VOCAB, START)
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, False)
    with pytest.raises(tg.UserError, match="a slice of 200 tokens has 201 documents.*room for 127.*--set doc_slots=256"):
        next_batch(loader, 200, 10)
    loader = tg.TrainLoader(replace(cfg, doc_slots=256), tg.find_shards(cfg.data, "train"), 0, 1, False)
    assert next_batch(loader, 200, 10)[0].cu_seqlens.tolist() == list(range(200)) + [200] * 56


def test_slots_just_suffice(tmp_path):
    """n documents need n + 1 entries; the last of them may be empty, when only its first token, a target, is in the slice."""
    cfg = config(tmp_path, slices=1, doc_slots=6)
    write_shard(tmp_path / "x_train_000001.bin", [START, 1] * 40, VOCAB, START)
    loader = tg.TrainLoader(cfg, tg.find_shards(cfg.data, "train"), 0, 1, False)
    assert next_batch(loader, 8, 10)[0].cu_seqlens.tolist() == [0, 2, 4, 6, 8, 8]
    with pytest.raises(tg.UserError, match="has 6 documents"):
        next_batch(loader, 10, 10)


# -------------------------------------------------------------------------------------------------------- validation

@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_validation_slices(tmp_path, world):
    """Consecutive, across shards; each slice on one rank, whatever the world; documents bounded at start tokens."""
    rng = np.random.default_rng(11)
    shards = make_shards(tmp_path, rng, [333, 40, 500], "val", longest=60)
    cfg = config(tmp_path, val_slices=6, val_slice_tokens=128)
    stream, seen = [int(t) for t in np.concatenate(shards)], []
    for rank in range(world):
        loader = tg.ValLoader(cfg, tg.find_shards(cfg.data, "val"), rank, world, False)
        own = []
        for number, batch in loader:  # each is good until the next but one
            tokens = stream[128 * number:128 * number + 129]
            starts = [i for i, token in enumerate(tokens[:128]) if token == START]
            check_micro_batch(batch, tokens, [0] + starts, cfg)
            assert batch.longest == max(np.diff([0, *starts, 128])) and number % world == rank
            own.append(number)
        assert [number for number, _ in loader] == own  # it can be run over again
        seen += own
    assert sorted(seen) == list(range(6))


# ------------------------------------------------------------------------------------------------------------- folders

@pytest.fixture
def folder(tmp_path):
    """A good small folder and a config for it."""
    rng = np.random.default_rng(3)
    make_shards(tmp_path, rng, [3000, 3000])
    make_shards(tmp_path, rng, [600], "val")
    stages = tuple(replace(stage, steps=1, tokens=800, longest=100) for stage in tg.CPU.stages)
    return config(tmp_path, stages=stages, val_slices=2, val_slice_tokens=256)


def test_good_data(folder):
    data = tg.find_data(folder)
    assert [p.name for p in data.train] == ["x_train_000000.bin", "x_train_000001.bin"] and len(data.val) == 1
    assert data.bytes_per_token == 0
    assert "6000 training tokens in 2 shards, 600 for validation" in data.fingerprint and folder.data not in data.fingerprint


def test_a_folder_with_brackets_in_its_name(folder, tmp_path):
    odd = tmp_path / "a[1]*"
    odd.mkdir()
    for path in tmp_path.glob("*.bin"):
        path.rename(odd / path.name)
    assert len(tg.find_data(replace(folder, data=str(odd))).train) == 2


def change(folder, offset, data):
    path = next(p for p in sorted(tg.Path(folder.data).glob("*_train_000001.bin")))
    words = bytearray(path.read_bytes())
    words[offset:offset + len(data)] = data
    path.write_bytes(bytes(words))
    return path


def test_a_header_without_vocabulary_means_gpt2(tmp_path):
    tokens = [50256] + [5] * 999
    for split in ("train", "val"):
        write_shard(tmp_path / f"x_{split}_0.bin", tokens)
    cfg = replace(tg.RECORD, data=str(tmp_path), stages=tuple(replace(s, steps=1, tokens=80) for s in tg.RECORD.stages),
                  val_slices=1, val_slice_tokens=100)
    assert len(tg.find_data(cfg).train) == 1


def test_bytes_per_token(folder):
    rng = np.random.default_rng(4)
    path = tg.Path(folder.data) / "x_val_000001.bin"
    write_shard(path, random_documents(rng, 400, VOCAB, START), VOCAB, START, text_bytes=900)
    assert tg.find_data(folder).bytes_per_token == 0  # unknown of one shard: unknown
    write_shard(tg.Path(folder.data) / "x_val_000000.bin", random_documents(rng, 600, VOCAB, START), VOCAB, START, text_bytes=1100)
    assert tg.find_data(folder).bytes_per_token == 2.0


# ------------------------------------------------------------------------------------------------------- fingerprint

def test_fingerprint(folder):
    first = tg.find_data(folder).fingerprint
    assert tg.find_data(folder).fingerprint == first
    seen = {first}
    for offset in (1024, 1024 + 3001, 1024 + 5999, 24):  # first and last byte of the tokens, between them, the header
        path = change(folder, 0, b"")
        before = path.read_bytes()
        change(folder, offset, bytes([before[offset] ^ 1]))
        seen.add(tg.fingerprint_of([path]))
        path.write_bytes(before)
    assert len(seen) == 5
    path.rename(path.with_name("x_train_000009.bin"))
    assert tg.find_data(folder).fingerprint != first


def test_fingerprint_of_a_large_file_reads_all_of_it_in_places(tmp_path):
    """First and last bytes count whatever the size."""
    path = tmp_path / "big.bin"
    size = 64 * 65536 + 12345
    data = bytearray(hashlib.sha256(b"x").digest() * (size // 32 + 1))[:size]
    seen = set()
    for at in (None, 0, size - 1):
        copy = bytearray(data)
        if at is not None:
            copy[at] ^= 1
        path.write_bytes(copy)
        seen.add(tg.fingerprint_of([path]))
    assert len(seen) == 3
