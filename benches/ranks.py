"""Throughput of several data-parallel ranks against one rank, with the same total batch and the same threads.

    python benches/ranks.py [--binary target/release/espalier] [--rounds 7] [--steps 60] [--mpirun mpirun]

Every round runs each layout once, one after the other; what is printed is the median over rounds of the ratio to one rank
in the same round, so that what else the machine does falls on all alike. Beside it stands the ratio of processor time, which
hardly depends on what else the machine does: one rank's over all ranks', start included. With --mpirun the binary must be built with
--features mpi, and ranks are processes too. A ratio of 1 means that sharing the batch costs nothing: ranks compute with
smaller matrices, and add up gradients while they do.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile

GPT = """
    [model]
    name = "gpt"
    layers = 3
    heads = 4
    width = 128
    context = 64
    [data]
    kind = "arithmetic"
    [train]
    batch = 16
"""

MODELS = {
    "gpt (3 layers of 128, context 64, batch 16)": GPT,
    "gpt, 90 % pruned": GPT + '[prune]\nmethod = "magnitude"\nsparsity = 0.9\n',
    "resnet8 (32 x 32, batch 64)": """
        [model]
        name = "resnet8"
        [data]
        kind = "shapes"
        count = 1000
        [train]
        batch = 64
    """,
}


def throughput(command, folder, settings):
    """Samples or tokens a second of one run, and the seconds of processor time that it took."""
    out = tempfile.mkdtemp(dir=folder)
    words = command + ["train", "run.toml", "--json", "--out", os.path.join(out, "run")]
    for setting in settings:
        words += ["--set", setting]
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environment.update(OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(words)} failed:\n{result.stderr}")
    summary = json.loads(result.stdout.splitlines()[-1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return summary["tokens_per_s"] or summary["images_per_s"], processor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", default="target/release/espalier")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpirun", help="also run ranks as processes under this launcher")
    arguments = parser.parse_args()
    binary, ranks = os.path.abspath(arguments.binary), arguments.ranks

    common = [f"train.steps={arguments.steps}", "train.eval_samples=1", "checkpoint.last=false", "device.kind=cpu"]
    threads = common + [f"device.threads={ranks}"]
    layouts = {"one rank": ([binary], threads), f"{ranks} threads": ([binary], threads + [f"parallel.data={ranks}"])}
    if arguments.mpirun:
        layouts[f"{ranks} processes"] = ([arguments.mpirun, "-n", str(ranks), binary], common + ["device.threads=1"])

    print(f"{arguments.rounds} rounds of {arguments.steps} steps, {ranks} threads in all; medians")
    print(f"{'model':<46}{'layout':<14}{'a second':>12}{'of one rank':>13}{'processor':>11}")
    for name, text in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "run.toml"), "w") as file:
                file.write(text)
            rounds = [
                {layout: throughput(command, folder, settings) for layout, (command, settings) in layouts.items()}
                for _ in range(arguments.rounds)
            ]
        for layout in layouts:
            speed = statistics.median(one[layout][0] for one in rounds)
            ratio = statistics.median(one[layout][0] / one["one rank"][0] for one in rounds)
            processor = statistics.median(one["one rank"][1] / one[layout][1] for one in rounds)
            print(f"{name:<46}{layout:<14}{speed:>12.0f}{ratio:>13.2f}{processor:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
