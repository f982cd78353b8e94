"""Checks the hash of n-grams and the index of rows against plain Python.

test_ngram_table.py compares whole runs with a table on every rank, test_distributed.py the bytes sent.
"""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt as tg
from configs import BASE

# ------------------------------------------------------------------------------------------------- the hash


def python_hash(gram, rows, sign_rows):
    """Hashes one n-gram, its last token first, in Python's integers; returns its row and its row of signs."""
    low = 2**32 - 1
    h = 0
    for token in gram:
        h = (h + token) * 0x9E3779B1 & low
    sign = ((h * 0x27D4EB2F & low) >> 16) * sign_rows >> 16
    for shift, factor in (16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1):
        h = (h ^ h >> shift) * factor & low
    return h % (rows - 1), sign


def python_rows(tokens, ngrams, sign_rows):
    """Returns the rows and the rows of signs of every position, by ranges. Before the text are zeros."""
    size = ngrams.rows_per_order
    rows, signs = [], []
    for i, n in enumerate(ngrams.orders):
        padded = [0] * (n - 1) + tokens
        rows.append([])
        signs.append([])
        for t in range(len(tokens)):
            gram = padded[t : t + n]
            row, sign = python_hash(gram[::-1], size, sign_rows)
            if t < n - 1:  # it begins before the text
                row = size - 1
            rows[-1].append(i * size + row)
            signs[-1].append(sign)
    return rows, signs


@pytest.mark.parametrize("rows", [3, 97, 1 << 26])
def test_the_hash_is_pythons(rows):
    """Checks texts that cross documents, the largest token, and texts shorter than an n-gram."""
    rng = random.Random(1)
    for orders, sign_rows in ((2,), 1), ((3, 2), 0), ((2, 3, 4, 5), 8192):
        for T in (1, 2, 4, 300):
            tokens = [rng.choice([0, 1, 7, 255, 256, 50256, 65535]) for _ in range(T)]
            ngrams = tg.Ngrams(orders, rows)
            got, signs = tg.hash_ngrams(np.array(tokens, np.int32), ngrams, sign_rows, 0)
            want_rows, want_signs = python_rows(tokens, ngrams, sign_rows)
            assert got.dtype == torch.int32
            assert got.tolist() == want_rows
            if sign_rows == 0:
                assert signs is None
            else:
                assert signs.tolist() == want_signs


def test_micro_batches_have_rows_and_signs_of_bigrams():
    """Of the inputs alone. (test_ngram_table.py has a model's n-grams.)"""
    cfg = replace(BASE, ngrams=tg.Ngrams(), bigram_vocab_size=360, sign_rows=50)
    tokens = np.random.default_rng(8).integers(0, 60, 38).astype(np.uint16)
    batch = tg.make_micro_batch(tokens, np.array([7, 20]), 30, cfg)
    rows, signs = python_rows(tokens[:-1].tolist(), tg.Ngrams((2,), 360), 50)
    assert (batch.hashed_rows.tolist(), batch.sign_ids.tolist()) == (rows, signs)


# ---------------------------------------------------------------------------------------------- the contexts

BOS = 256


def word(document, t):
    """Returns the word up to token t: ASCII letters, digits, _, and the bytes of other letters."""
    begin = t + 1
    while re.match(rb"[\w\x80-\xff]", bytes([document[begin - 1] % BOS])):
        begin -= 1
    return document[begin : t + 1]


def above(document, t):
    """Returns token t, and the one above the token after it."""
    lines = [[]]
    for token in document[1 : t + 1]:  # after BOS
        lines[-1].append(token)
        if token == ord("\n"):
            lines.append([])
    column = len(lines[-1])
    if len(lines) == 1 or column >= len(lines[-2]):
        return document[t], None
    return document[t], lines[-2][column]


def copy(document, t):
    """Returns the token after the last occurrence of the longest end that occurred before, and its length."""
    for length in reversed(tg.COPY_LENGTHS):
        for end in range(t, length - 1, -1):  # an earlier occurrence: document[end - length : end]
            if length <= t + 1 and document[end - length : end] == document[t + 1 - length : t + 1]:
                return document[end], length
    return None


@pytest.mark.parametrize("describe", [word, above, copy])
def test_tokens_with_equal_contexts_have_equal_rows(describe):
    """Checks that a context's numbers are equal if and only if the contexts are."""
    rng = random.Random(5)
    pieces = [b"a", b"ab", b"_b9", b" ", b"\n", b"\n", b"  ", b".", "\u00e9".encode(), b"(ab, ab)"]
    documents = [[BOS, *b"".join(rng.choices(pieces, k=80))] for _ in range(6)] + [[BOS], [BOS, 10]]
    tokens = np.array(sum(documents, []), np.uint32)
    numbers = iter(tg.CONTEXTS[describe.__name__](tokens, BOS).tolist())
    number_of = {}
    for document in documents:
        for t in range(len(document)):
            context = str(describe(document, t))
            number = next(numbers)
            assert number_of.setdefault(context, number) == number, context
    assert len(set(number_of.values())) == len(number_of) > 20


def test_contexts_have_ranges_of_rows_after_those_of_orders():
    ngrams = tg.Ngrams((2, 3), 1000, contexts=("copy", "word"))
    tokens = np.array([BOS, *b"an apple, an apple"], np.uint16)
    rows, signs = tg.hash_ngrams(tokens, ngrams, 50, BOS)
    assert rows.shape == signs.shape == (4, len(tokens))
    assert (rows // 1000 == torch.arange(4)[:, None]).all()
    plain, _ = tg.hash_ngrams(tokens, replace(ngrams, contexts=()), 50, BOS)
    assert torch.equal(rows[:2], plain)
    for T in range(1, len(tokens)):  # no row depends on a later token
        assert torch.equal(tg.hash_ngrams(tokens[:T], ngrams, 50, BOS)[0], rows[:, :T])


# ---------------------------------------------------------------------------------------------- the segments


def python_index(ranges):
    """Returns Segments' first three lists, ids, perm and offsets, of rows by range and position."""
    ids, perm, offsets = [], [], [0]
    for rows in ranges:
        for row_id in sorted(set(rows)):
            ids.append(row_id)
            perm += [t for t, row in enumerate(rows) if row == row_id]
            offsets.append(len(perm))
    return [ids, perm, offsets]


LARGEST = 2**31 - 1


@pytest.mark.parametrize("high", [1, 300, 65_537, LARGEST // 3])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (3, 2), (3, 300)])
def test_segments(shape, high):
    """Checks one range and several, with signs, which follow the positions; within a row these ascend."""
    rng = np.random.default_rng(4)
    ids = tg.int32(rng.integers(0, high, shape) + high * np.arange(shape[0])[:, None])
    signs = tg.int32(rng.integers(0, 8192, shape))
    index = tg.make_segments(ids, signs)
    assert [part.tolist() for part in index[:3]] == python_index(ids.tolist())
    assert {part.dtype for part in index} == {torch.int32}
    assert torch.equal(index.sign_ids.view(shape), signs.gather(1, index.perm.view(shape).long()))
    assert torch.equal(tg.ids_by_position(index, shape), ids)


def test_no_segments():
    nothing = tg.make_segments(tg.int32(tg.EMPTY_INT32))
    assert [part.tolist() for part in nothing[:3]] == [[], [], [0]]


class ReturningCollectives(tg.Collectives):
    """Sends everything back to this rank."""

    def all_to_all(self, kind, name, rows, input_splits, output_splits, out=None):
        return tg.Pending(rows)


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_slots_of_ngrams_are_their_places_in_the_exchange(world_size):
    """Checks rows in any order, of which some ranks may own none."""
    for rows in [], [5], [0, 3, 24], [9, 1, 2, 30, 16, 7, LARGEST]:
        plan, slots = tg.route_ngrams(ReturningCollectives(0, world_size), np.array(rows, np.int32))
        by_owner = [[row for row in rows if row % world_size == rank] for rank in range(world_size)]
        assert plan.input_splits == [len(owned) for owned in by_owner]
        assert plan.row_ids.tolist() == sum(by_owner, [])
        assert plan.local_row_ids.tolist() == [row // world_size for row in plan.row_ids.tolist()]
        assert slots.dtype == torch.int32
        assert plan.row_ids[slots].tolist() == rows


def test_a_rank_has_room_for_all_rows_between_two_updates():
    """Each of its tokens in four steps may touch a row of each range, but a range may have fewer rows."""
    ngrams = replace(BASE.ngrams, update_every=(2, 4))
    ranges = len(ngrams.orders)
    tokens = 4 * max(stage.batch_tokens for stage in BASE.stages) // 2
    for rows in (tokens - 1, tokens + 1):
        cfg = replace(BASE, ngrams=replace(ngrams, rows_per_order=rows))
        touched, block = tg.ngram_sizes(cfg, 2)
        assert touched == ranges * min(tokens, rows) and 2 * block - ranges * rows in (0, 1)
