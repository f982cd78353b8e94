"""Tests the loaders against a naive program: micro-batches, shard switches, validation, facts about files.

The files' errors are in test_bad_input.py.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE
from golden_inputs import batch_plan, random_documents, train_loader, val_loader, write_shard
from launch import WAIT, wrap

VOCAB, BOS = 257, 256


def config(folder, microbatches=8, **changes):
    return replace(BASE, data=str(folder), ngrams=tg.Ngrams(), microbatches=microbatches, **changes)


def make_shards(folder, rng, counts, split="train", max_doc_len=200):
    shards = []
    for i, count in enumerate(counts):
        tokens = random_documents(rng, count, VOCAB, BOS, max_doc_len)
        write_shard(folder / f"x_{split}_{i:06d}.bin", tokens, VOCAB, BOS)
        shards.append(tokens)
    return shards


def test_a_split_is_the_end_of_a_name(tmp_path):
    """Names before it, hidden ones too, may be anything; files that are no shards are left out."""
    train = [".a_val_1_train_000000.bin", "a_val_000000_train_1.bin", "b_train_000001.bin"]
    val = ["a_train_x_val_000000.bin"]
    others = ["._b_train_000001.bin", "b_train_.bin", "b_train_2.bin.tmp", "train_4.bin"]
    for name in train + val + others:
        (tmp_path / name).touch()
    for split, names in ("train", train), ("val", val):
        assert [path.name for path in tg.find_shards(str(tmp_path), split)] == names


# ------------------------------------------------------------------------------------------ the naive program


def naive_documents(shard):
    documents = []
    for token in shard:
        if token == BOS:
            documents.append([])
        if documents:
            documents[-1].append(int(token))
    return documents


def naive_batch(documents, first, T, count, max_doc_len):
    """Takes documents from number `first`, each cut to max_doc_len, for micro-batches of T + 1 tokens.

    Returns each one's tokens and the documents' starts in them, and the next document's number; None if
    documents run out.
    """
    batch = []
    for _ in range(count):
        tokens, starts = [], []
        while len(tokens) < T + 1:
            if first == len(documents):
                return None
            starts.append(len(tokens))
            tokens += documents[first][:max_doc_len]
            first += 1
        batch.append((tokens[: T + 1], starts))
    return batch, first


def naive_batches(shards, schedule, microbatches, epochs=1):
    """Yields the batches of a schedule [(batch_tokens, max_doc_len)] as lists of (tokens, starts)."""
    shards = [naive_documents(shard) for shard in shards] * epochs
    first = 0
    for batch_tokens, max_doc_len in schedule:
        found = None
        while found is None:
            if not shards:
                return
            found = naive_batch(shards[0], first, batch_tokens // microbatches, microbatches, max_doc_len)
            if found is None:  # the whole batch starts over in the next shard
                shards.pop(0)
                first = 0
        batch, first = found
        yield batch


def check_micro_batch(batch, tokens, starts):
    T = len(tokens) - 1
    assert batch.inputs.tolist() == tokens[:T] and batch.targets.tolist() == tokens[1:]
    assert batch.inputs.dtype == batch.cu_seqlens.dtype == torch.int32
    assert batch.targets.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == starts + [T] * (tg.cu_seqlens_capacity(T) - len(starts))


# ---------------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize("seed", range(4))
def test_micro_batches(tmp_path, seed):
    """Checks that 1, 2, 4 and 8 ranks share the same eight micro-batches, in a second epoch too.

    A loader that continues at another's position gives the same.
    """
    rng = np.random.default_rng(seed)
    shards = make_shards(tmp_path, rng, rng.integers(3000, 7000, 3), max_doc_len=int(rng.integers(20, 300)))
    cfg = config(tmp_path)
    schedule = [(int(8 * rng.integers(30, 90)), int(rng.integers(10, 250))) for _ in range(40)]
    want = list(naive_batches(shards, schedule, 8, epochs=40))  # up to one that fits in no shard
    loaders = {(rank, n): train_loader(cfg, rank, n) for n in (1, 2, 4, 8) for rank in range(n)}
    for (batch_tokens, max_doc_len), batch in zip(schedule, want):
        position = loaders[5, 8].position()
        loaders[5, 8].close()
        loaders[5, 8] = train_loader(cfg, 5, 8, position)
        assert position[:2] == loaders[0, 1].position()[:2]
        for (rank, world_size), loader in loaders.items():
            micro_batches = loader.micro_batches(batch_plan(batch_tokens, max_doc_len))
            for micro_batch, (tokens, starts) in zip(micro_batches, batch[rank::world_size], strict=True):
                assert micro_batch.max_seqlen == max_doc_len
                check_micro_batch(micro_batch, tokens, starts)
    assert loaders[0, 1].position()[0] >= 3  # a second epoch
    for loader in loaders.values():
        loader.close()


def test_more_ranks_than_micro_batches_give_each_rank_one():
    assert [tg.num_microbatches(BASE, world_size) for world_size in (1, 2, 4)] == [2, 2, 4]


def test_the_next_shard_is_the_next_by_name(tmp_path):
    """Checks files written out of order. A short shard, and text before the first BOS, are skipped.

    20 inputs need 21 tokens, and no more: a batch may end exactly with its shard.
    """
    cfg = config(tmp_path, microbatches=1)

    def document(fill, n):
        return [BOS] + [fill] * (n - 1)

    write_shard(tmp_path / "x_train_000010.bin", document(3, 21) + document(4, 21), VOCAB, BOS)
    write_shard(tmp_path / "x_train_000002.bin", document(2, 20), VOCAB, BOS)
    write_shard(tmp_path / "x_train_000001.bin", [9] * 8 + document(1, 30), VOCAB, BOS)
    loader = train_loader(cfg)
    for last in 1, 3, 4, 1, 3:
        (micro_batch,) = loader.micro_batches(batch_plan(20, 100))
        assert micro_batch.inputs[-1] == last
    assert loader.position()[:2] == (5, 1)
    with pytest.raises(tg.UserError, match="no training shard holds a batch of 70 tokens"):
        loader.micro_batches(batch_plan(70, 100))


@pytest.mark.parametrize("first_read", [1, 1500, 5000, *range(2, 900, 99)])
def test_a_runs_first_batches_need_only_the_first_tokens(tmp_path, monkeypatch, first_read):
    """Checks batches that begin while a thread reads the rest of the first shard: they are the same.

    The first tokens may end in any document, or between two.
    """
    shards = make_shards(tmp_path, np.random.default_rng(3), [9000, 4000])
    schedule = [(8 * 64, 50)] * 20
    want = list(naive_batches(shards, schedule, 8))
    at_once = len(list(naive_batches([shards[0][:first_read]], schedule, 8)))
    monkeypatch.setattr(tg, "FIRST_READ", first_read)
    may_read = threading.Event()

    def slow_read(read_shard, path, cfg, count=-1):
        if count == -1:
            assert may_read.wait(WAIT)
        return read_shard(path, cfg, count)

    wrap("read_shard", slow_read, monkeypatch.setattr)
    loader = train_loader(config(tmp_path))
    for i, micro_batches in enumerate(want):
        if i == at_once:
            may_read.set()
        found = loader.micro_batches(batch_plan(8 * 64, 50))
        for micro_batch, (tokens, starts) in zip(found, micro_batches, strict=True):
            check_micro_batch(micro_batch, tokens, starts)
    assert loader.position()[0] == 1


def test_more_documents_than_usual(tmp_path):
    """Checks that cu_seqlens grows, and that n documents need n + 1 entries."""
    cfg = config(tmp_path, microbatches=1)
    write_shard(tmp_path / "x_train_000001.bin", [BOS, 1] * 400, VOCAB, BOS)
    loader = train_loader(cfg)
    for documents, size in ((127, 128), (128, 256)):
        T = 2 * documents - 1
        cu_seqlens = loader.micro_batches(batch_plan(T, 10))[0].cu_seqlens.tolist()
        assert cu_seqlens == [*range(0, T, 2)] + [T] * (size - documents)


# ------------------------------------------------------------------------------------------------- validation


def test_validation_slices(tmp_path):
    """Checks that slices are consecutive across shards, of which the last is not needed."""
    shards = make_shards(tmp_path, np.random.default_rng(11), [333, 40, 500, 90], "val", max_doc_len=60)
    cfg = config(tmp_path, val_slices=6, val_slice_tokens=128)
    stream = np.concatenate(shards).tolist()
    loader = val_loader(cfg)
    batches = [loader.slice(i) for i in range(6)]  # a later one does not change an earlier one
    for number, batch in enumerate(batches):
        tokens = stream[128 * number : 128 * number + 129]
        starts = [i for i, token in enumerate(tokens[:128]) if token == BOS]
        check_micro_batch(batch, tokens, [0] + starts)
        assert batch.max_seqlen == max(np.diff([0, *starts, 128]))


# ---------------------------------------------------------------------------------------------------- folders


def test_what_the_validation_shards_hold(tmp_path):
    """Bytes per token are unknown if one shard does not say them. Slices need the last one's target, too."""
    make_shards(tmp_path, np.random.default_rng(3), [6000])
    write_shard(tmp_path / "x_val_000000.bin", [BOS] * 600, VOCAB, BOS, text_bytes=900)
    for text_bytes, want in (0, 0), (1100, 2.0):
        write_shard(tmp_path / "x_val_000001.bin", [BOS] * 400, VOCAB, BOS, text_bytes)
        for slice_tokens, slices in (333, 3), (500, 1):
            cfg = config(tmp_path, val_slices=9, val_slice_tokens=slice_tokens)
            data = tg.open_dataset(cfg)
            assert (data.bytes_per_token, data.val_slices) == (want, slices)
    found = set()
    for line in "61\n", "62\n":
        (tmp_path / "vocabulary.txt").write_text(line * VOCAB)
        for each in cfg, tg.override(cfg, "stages.0.prefix=0.1"):
            found.add(tg.open_dataset(each).fingerprint)
    assert len(found) == 3  # the vocabulary counts if prefixes are predicted


@pytest.mark.parametrize("size", [13024, 64 * 65536 + 12345])
def test_the_fingerprint_samples_all_of_a_file(tmp_path, size):
    """Checks the header, the first and the last byte, one in the middle of a small file; and the name."""
    data = np.random.default_rng(0).bytes(size)

    def fingerprint(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return tg.dataset_hash([path])

    found = {fingerprint("a.bin", data), fingerprint("b.bin", data)}
    for offset in 0, 24, 4096, size - 1:
        changed = bytearray(data)
        changed[offset] ^= 1
        found.add(fingerprint("a.bin", changed))
    assert len(found) == 6
