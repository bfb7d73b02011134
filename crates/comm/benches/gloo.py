"""The peer of all_reduce.rs: PyTorch's gloo with a process a rank, on the same sizes, measured the same way.

    python crates/comm/benches/gloo.py [MiB]

Each process has one thread for torch; gloo brings its own. The time of a round is that of its slowest rank; medians of all
rounds count, the shortest stands in brackets.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 15


def rank_main(rank, ranks, mib, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for dtype in (torch.float32, torch.bfloat16):
        for elements in ((mib << 20) // dtype.itemsize, 256):
            data = torch.zeros(elements, dtype=dtype)
            repeat = 1 if elements > 256 else 100
            rounds = []
            for measured in range(ROUNDS + 1):
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeat):
                    dist.all_reduce(data)
                dist.barrier()
                seconds = torch.tensor([(time.perf_counter() - start) / repeat], dtype=torch.float64)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if measured:
                    rounds.append(seconds.item())
            if rank == 0:
                results.put((str(dtype).removeprefix("torch."), elements, ranks, rounds))
    dist.destroy_process_group()


def main():
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    print(f"gloo, torch {torch.__version__}: all_reduce (sum) of {mib} MiB and of 256 elements a rank")
    print(f"{'type':<10} {'ranks':>5} {'ms':>18} {'us for 256':>11}")
    for ranks in (2, 4):
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_main, (ranks, mib, 29500 + os.getpid() % 1000, results), ranks)
        rows = [results.get() for _ in range(4)]
        for (dtype, _, _, large), (_, _, _, small) in zip(rows[::2], rows[1::2]):
            both = f"{statistics.median(large) * 1e3:.2f} ({min(large) * 1e3:.2f})"
            print(f"{dtype:<10} {ranks:>5} {both:>18} {statistics.median(small) * 1e6:>11.1f}")


if __name__ == "__main__":
    main()
