#!/usr/bin/env python3
"""The planner against this machine: every layout of so many ranks for five small models, run in turns, beside what was predicted.

    espalier bench compute && espalier bench comm        # writes cluster.toml, which runs find in the current folder
    python benches/planner.py --rounds 3
    python benches/planner.py --only resnet8 --save measured.json    # one model; what was measured is kept, and added to what the file has
    python benches/planner.py --load measured.json                   # predicted anew, by another cluster.toml or another program

Prints for each layout the shortest step of the rounds and the predicted one, and bytes by the ledger beside the plan's; for each model what it
costs to take the layout that was predicted to be the fastest."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

TEXT = '[data]\nkind = "arithmetic"\ncount = 4000\nvalidation = 0.05\n'
SHAPES = '[data]\nkind = "shapes"\ncount = 600\nvalidation = 0.1\n'
TRAIN = "[train]\nsteps = {steps}\nbatch = 16\nmicro_batches = 4\nlog_every = 1\neval_samples = 4\n{more}\n[checkpoint]\nlast = false\n"


def gpt(layers, width, heads):
    return f'[model]\nname = "gpt"\nlayers = {layers}\nwidth = {width}\nheads = {heads}\ncontext = 64\n'


MODELS = {
    "gpt 4 x 256": (gpt(4, 256, 4) + TEXT, ""),
    "gpt 8 x 128": (gpt(8, 128, 4) + TEXT, ""),
    "gpt 4 x 256, 90 % pruned": (gpt(4, 256, 4) + TEXT, '[prune]\nmethod = "random"\nsparsity = 0.9\n'),
    "gpt 4 x 256, bf16": (gpt(4, 256, 4) + TEXT, ""),
    "resnet8": ('[model]\nname = "resnet8"\n' + SHAPES, ""),
}


def layouts(ranks, images):
    """Every way to write the number of ranks as a product over the axes."""
    found = []
    for pipeline in (p for p in range(1, ranks + 1) if ranks % p == 0):
        for tensor in (t for t in range(1, ranks // pipeline + 1) if ranks // pipeline % t == 0):
            for spatial in (s for s in range(1, ranks // pipeline // tensor + 1) if ranks // pipeline // tensor % s == 0):
                if spatial == 1 or images:
                    found.append({"data": ranks // pipeline // tensor // spatial, "pipeline": pipeline, "tensor": tensor, "spatial": spatial})
    return found


def run(binary, folder, text, layout, more=()):
    """What a run says at its end, or why there is none."""
    path = os.path.join(folder, "run.toml")
    sections = "[parallel]\n" + "".join(f"{axis} = {n}\n" for axis, n in layout.items())
    micro = max(1, 4 // layout["data"])
    with open(path, "w") as file:
        file.write(text.replace("micro_batches = 4", f"micro_batches = {micro}") + sections)
    out = os.path.join(folder, "out")
    done = subprocess.run([binary, "train", path, "--out", out, "--json", *more], capture_output=True, text=True)
    if done.returncode != 0:
        return None, done.stderr.strip().splitlines()[-1]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    if os.path.exists(os.path.join(out, "metrics.jsonl")):
        result["step_ms"] = from_step_to_step(os.path.join(out, "metrics.jsonl"))
    subprocess.run(["rm", "-rf", out])
    return result, None


def from_step_to_step(path):
    """The median time from the end of one step to that of the next, in ms: a rank's own clock stops between steps, while others may have its core."""
    with open(path) as file:
        times = [line["time"] for line in map(json.loads, file) if "loss" in line]
    between = sorted(after - before for before, after in zip(times, times[1:]))
    return 1e3 * between[len(between) // 2]


def measure(binary, folder, text, images, arguments):
    """The shortest step of each layout, over rounds in which each has a turn; or why it does not run."""
    found = {}
    for _ in range(arguments.rounds):
        for layout in layouts(arguments.ranks, images):
            key = " x ".join(f"{axis} {n}" for axis, n in layout.items() if n > 1)
            result, why = run(binary, folder, text, layout)
            if result is None:
                found.setdefault(key, why)
            elif not isinstance(found.get(key), dict) or result["step_ms"] < found[key]["step_ms"]:
                found[key] = result
    return found


def predict_again(binary, folder, text, found):
    """The same with what the program predicts now."""
    for result in found.values():
        if isinstance(result, dict):
            layout = {axis: result["layout"][axis] for axis in ("data", "pipeline", "tensor", "spatial")}
            planned, why = run(binary, folder, text, layout, ["--dry-run"])
            if planned is None:
                sys.exit(f"{layout}: {why}")
            result["predicted"] = planned["predicted"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", default="target/release/espalier")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="of a run; ten times as many of a CNN, whose steps are that short")
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--save", help="a file for what was measured")
    parser.add_argument("--load", help="a file that --save wrote: nothing is run, and all is predicted anew")
    arguments = parser.parse_args()
    binary = os.path.abspath(arguments.binary)
    kept = {}
    for path in filter(os.path.exists, filter(None, [arguments.load or arguments.save])):
        with open(path) as file:
            kept = json.load(file)
    step_errors, memory_errors = [], []
    print("| model | layout | step ms | predicted | error | bytes | predicted | error |\n|---|---|---|---|---|---|---|---|")
    regrets = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, prune) in MODELS.items():
            if not name.startswith(arguments.only) or arguments.load and name not in kept:
                continue
            more = 'precision = "bf16"' if "bf16" in name else ""
            steps = arguments.steps * (10 if "resnet" in name else 1)
            text = model + TRAIN.format(steps=steps, more=more) + prune
            if arguments.load:
                predict_again(binary, folder, text, kept[name])
            else:
                kept[name] = measure(binary, folder, text, "resnet" in name, arguments)
            found = kept[name]
            rows = []
            for key, result in found.items():
                if isinstance(result, str):
                    print(f"| {name} | {key} | | | {result} | | | |")
                    continue
                memory = [kind for kind in result["memory"].values() if kind["predicted"] is not None]
                measured, planned = (sum(kind[which] for kind in memory) for which in ("measured", "predicted"))
                predicted = (result.get("predicted") or {}).get("step_ms")
                memory_errors.append(abs(planned / measured - 1))
                if predicted is None:
                    continue
                error = predicted / result["step_ms"] - 1
                step_errors.append(abs(error))
                rows.append((predicted, result["step_ms"], key))
                print(f"| {name} | {key} | {result['step_ms']:.1f} | {predicted:.1f} | {100 * error:+.0f} % | {measured:,} | {planned:,} | {100 * (planned / measured - 1):+.1f} % |")
            if rows:
                chosen, best = min(rows), min(rows, key=lambda row: row[1])
                regrets.append((name, chosen[2], best[2], chosen[1] / best[1] - 1))
    if arguments.save:
        with open(arguments.save, "w") as file:
            json.dump(kept, file)
    print(f"\nsteps: {len(step_errors)} layouts, mean error {100 * sum(step_errors) / len(step_errors):.0f} %, most {100 * max(step_errors):.0f} %")
    print(f"memory: {len(memory_errors)} layouts, most {100 * max(memory_errors):.1f} %")
    for name, chosen, best, regret in regrets:
        print(f"{name}: predicted fastest {chosen}, fastest {best}, regret {100 * regret:.1f} %")


if __name__ == "__main__":
    main()
