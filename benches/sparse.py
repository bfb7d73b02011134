"""Why kernels of pruned layers stay dense: PyTorch's dense, sparse (CSR: cuSPARSE on a GPU) and 2:4 products of one layer.

    python benches/sparse.py [--device cuda] [--dtype bfloat16] [--batch 576] [--sparsity 0.9] [--sizes 128,...,4096]

It needs PyTorch. Prints milliseconds, medians of rounds in turns, for each size of y = x W^T; then, for the two largest, the ratio
of sparse to dense at more and more zeros. A product whose result differs from the dense one's is an error.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch.sparse import to_sparse_semi_structured

SWEEP = [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999]
ROUNDS = 15
# About how long a round of one product takes.
ROUND = 0.02


def seconds(device, work, repeats):
    """Of one call, mean of so many."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def medians(device, works):
    """Milliseconds of each, in turns."""
    repeats = []
    for work in works:
        seconds(device, work, 3)
        repeats.append(max(1, int(ROUND / seconds(device, work, 3))))
    rounds = [[seconds(device, *case) for case in zip(works, repeats)] for _ in range(ROUNDS)]
    return [1e3 * statistics.median(times) for times in zip(*rounds)]


def check(y, x, w):
    """Held against the product in f32, in the mean: sums of a thousand terms in bf16, as sparse kernels take them, are off by a few hundredths."""
    expected = x.float() @ w.float().t()
    error = ((y.float() - expected).norm() / expected.norm()).item()
    assert error <= 0.1, f"the result differs from the dense product's by {error:.0%}"


def layer(arguments, size, sparsity, with_two_four):
    """Milliseconds of the dense product, the sparse one and, where there is one, 2:4."""
    torch.manual_seed(size)
    make = lambda *shape: (torch.rand(shape, device=arguments.device) - 0.5).to(getattr(torch, arguments.dtype))
    x, w = make(arguments.batch, size), make(size, size)
    w *= torch.rand(size, size, device=arguments.device) >= sparsity
    csr = w.to_sparse_csr()
    dense = lambda: x @ w.t()
    # The sparse matrix stands first, as libraries want it: the result is y^T, and x^T is no copy.
    sparse = lambda: csr @ x.t()
    check(dense(), x, w)
    check(sparse().t(), x, w)
    works = [dense, sparse]
    if with_two_four:
        largest = w.view(-1, 4).abs().topk(2, dim=1).indices
        pruned = make(size, size) * torch.zeros_like(w).view(-1, 4).scatter(1, largest, 1).view(size, size)
        compressed = to_sparse_semi_structured(pruned)
        two_four = lambda: torch.nn.functional.linear(x, compressed)
        check(two_four(), x, pruned)
        works.append(two_four)
    return medians(arguments.device, works)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--batch", type=int, default=576)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--sizes", default="128,256,512,1024,2048,4096")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    if not on_gpu and arguments.dtype == "bfloat16":
        parser.error("PyTorch has no sparse products in bfloat16 on a CPU")
    sizes = sorted(int(size) for size in arguments.sizes.split(","))
    # Multiples of what its tensor cores take, and no f32 rounded to TF32.
    two_four = lambda size: on_gpu and arguments.dtype == "bfloat16" and size % 64 == 0
    print(f"y = x W^T, batch {arguments.batch}, {arguments.dtype}, {arguments.device}, PyTorch {torch.__version__}")
    print(f"\n| W | dense, ms | sparse at {arguments.sparsity:.0%} zeros | ratio | 2:4 | ratio |\n|---|---|---|---|---|---|")
    for size in sizes:
        dense, sparse, *rest = layer(arguments, size, arguments.sparsity, two_four(size))
        other = f"{rest[0]:.4f} | {rest[0] / dense:.2f}" if rest else "- | -"
        print(f"| {size} x {size} | {dense:.4f} | {sparse:.4f} | {sparse / dense:.2f} | {other} |", flush=True)
    print("\n| zeros | " + " | ".join(f"{size} x {size}" for size in sizes[-2:]) + " |\n|---|" + "---|" * len(sizes[-2:]))
    for sparsity in SWEEP:
        ratios = []
        for size in sizes[-2:]:
            dense, sparse = layer(arguments, size, sparsity, False)
            ratios.append(f"{sparse / dense:.2f}")
        print(f"| {sparsity:.1%} | " + " | ".join(ratios) + " |", flush=True)


main()
