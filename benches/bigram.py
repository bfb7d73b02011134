#!/usr/bin/env python3
"""The loss of a bigram model on held-out tokens: what a network must be below before it has learnt more than pairs.

    python benches/bigram.py TRAIN.bin HELD-OUT.bin [TOKENS ...]

Token files are u16, as `espalier tokenize` writes them. Counts are of the first TOKENS of TRAIN (all of them where none is
given), smoothed as Kneser and Ney do it: a discount of 0.75 goes to how many different tokens each token follows. Needs numpy.
"""
import sys

import numpy as np

DISCOUNT = 0.75


def bigram_loss(train, held_out, vocab):
    """Mean negative log-likelihood of each token given the one before, in nats."""
    pairs, counts = np.unique(train[:-1] * vocab + train[1:], return_counts=True)
    before = np.bincount(train[:-1], minlength=vocab)
    followers = np.bincount(pairs // vocab, minlength=vocab)
    preceded = np.bincount(pairs % vocab, minlength=vocab) + 0.01
    unseen = preceded / preceded.sum()
    first, second = held_out[:-1], held_out[1:]
    wanted = first * vocab + second
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[at] == wanted, counts[at], 0)
    total = np.maximum(before[first], 1)
    p = np.maximum(count - DISCOUNT, 0) / total + DISCOUNT * followers[first] / total * unseen[second]
    p = np.where(before[first] == 0, unseen[second], p)
    return -np.log(p).mean()


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    train, held_out = (np.fromfile(path, dtype="<u2").astype(np.int64) for path in sys.argv[1:3])
    vocab = int(max(train.max(), held_out.max())) + 1
    for tokens in [int(text) for text in sys.argv[3:]] or [len(train)]:
        print(f"{min(tokens, len(train)):>12,} tokens: {bigram_loss(train[:tokens], held_out, vocab):.4f} nats a token")


if __name__ == "__main__":
    main()
