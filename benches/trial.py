#!/usr/bin/env python3
"""Trials of a study beside PyTorch: steps a second of simple-cnn or resnet8 with momentum, and a look at the 6000 or 5000 held-out images.

    cargo bench -p espalier-study --bench trial --no-run
    python benches/trial.py --peers DIR [--rounds 5] [--batch 64] [--trials 1,2]
    python benches/trial.py --peers DIR --device cuda --trials 1,4,8,16,24,32
    python benches/trial.py --peers DIR --device cuda --trials 1,8,16 --network resnet8 --batch 128

On the CPU PyTorch and each of our trials have one thread; on a GPU PyTorch runs one trial eagerly, as most people do, and ours run beside each
other, a stream each. A round measures PyTorch, each number of trials, and PyTorch again; the round that is reported is the steadiest, the one
whose two measurements of PyTorch differ least, and beside it stands the median of all rounds. DIR holds torch_cnn.py; the interpreter that
runs this must have torch. PyTorch's step works on one batch that stays where it is; ours gathers each batch from the data set.
"""
import argparse, glob, json, os, subprocess, sys, time

here = os.path.dirname(os.path.abspath(__file__))
arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--peers", type=os.path.abspath)
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
arguments.add_argument("--trials", default="1")
arguments.add_argument("--network", choices=["simple-cnn", "resnet8"], default="simple-cnn")
arguments.add_argument("--batch", type=int, default=64)
arguments.add_argument("--steps", type=int, default=0, help="timed steps of each measurement; 0: 32 on the CPU, 2000 on a GPU")
arguments.add_argument("--sparsity", type=float, default=0.0)
arguments.add_argument("--binary", help="the program that --bench trial builds, found below target/release where left out")
arguments.add_argument("--torch-look", action="store_true", help="only time PyTorch's look at the held-out images")
options = arguments.parse_args()
options.steps = options.steps or (32 if options.device == "cpu" else 2000)
HELD_OUT = {"simple-cnn": 6000, "resnet8": 5000}


def networks():
    """The networks of torch_cnn.py, which times one as soon as it is imported."""
    with open(os.path.join(options.peers, "torch_cnn.py")) as file:
        source = file.read()
    names = {}
    exec(source[:source.index("p = argparse")], names)
    return names["nets"]


def torch_look():
    """Seconds that PyTorch takes to judge the held-out images, in batches of 500."""
    import torch, torch.nn.functional as F

    if options.device == "cpu":
        torch.set_num_threads(1)
    network, count = networks()[options.network], HELD_OUT[options.network]
    model = network().to(options.device).eval()
    images = torch.randn(count, *network.shape, device=options.device)
    labels = torch.randint(0, 10, (count,), device=options.device)

    def look():
        wrong = loss = 0
        for x, y in zip(images.split(500), labels.split(500)):
            logits = model(x)
            wrong += (logits.argmax(1) != y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
        return wrong.item(), loss.item()

    with torch.no_grad():
        look()
        times = []
        for _ in range(3 if options.device == "cpu" else 20):
            start = time.perf_counter()
            look()
            times.append(time.perf_counter() - start)
    print(json.dumps(dict(look_ms=sorted(times)[len(times) // 2] * 1e3)))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def binary():
    built = glob.glob(os.path.join(here, "../target/release/deps/trial-*"))
    programs = [path for path in built if os.access(path, os.X_OK) and not path.endswith(".d")]
    return max(programs, key=os.path.getmtime) if programs else sys.exit("cargo bench -p espalier-study --bench trial --no-run builds the program")


def peer():
    threads = ["--threads", "1"] if options.device == "cpu" else []
    count = str(min(options.steps, 300))
    step = run(sys.executable, os.path.join(options.peers, "torch_cnn.py"), "--net", options.network, "--device", options.device, "--batch",
               str(options.batch), "--steps", count, *threads)
    look = run(sys.executable, os.path.abspath(__file__), "--torch-look", "--device", options.device, "--peers", options.peers, "--network", options.network)
    return dict(steps_per_s=1e3 / step["step_ms"], looks_per_s=1e3 / look["look_ms"], version=step["peer"])


def ours(program, trials):
    return run(program, "--network", options.network, "--device", options.device, "--trials", str(trials), "--batch", str(options.batch), "--steps", str(options.steps),
               "--sparsity", str(options.sparsity))


def main():
    program, counts = options.binary or binary(), [int(count) for count in options.trials.split(",")]
    if not options.peers or not os.path.isfile(os.path.join(options.peers, "torch_cnn.py")):
        arguments.error("--peers must be the folder of torch_cnn.py")
    rounds = []
    for _ in range(options.rounds):
        before, measured, after = peer(), [ours(program, count) for count in counts], peer()
        mean = {key: (before[key] + after[key]) / 2 for key in ("steps_per_s", "looks_per_s")}
        rounds.append(dict(torch=mean, ours=measured, spread=abs(before["steps_per_s"] / after["steps_per_s"] - 1), version=before["version"]))
    rounds.sort(key=lambda one: one["spread"])
    best = rounds[0]

    def ratios(key, place):
        return sorted(one["ours"][place][key] / one["torch"][key] for one in rounds)

    print(f"{options.network}, momentum, f32, batch {options.batch}, sparsity {options.sparsity}, {options.device}, {best['version']}; "
          f"{options.rounds} rounds, the steadiest (spread {100 * best['spread']:.1f} %)")
    print("| what runs | trial-steps/s | over PyTorch (median, range) | looks/s | over PyTorch (median) |\n|---|---|---|---|---|")
    print(f"| PyTorch, one trial | {best['torch']['steps_per_s']:.1f} | 1 | {best['torch']['looks_per_s']:.2f} | 1 |")
    for place, count in enumerate(counts):
        one, steps, looks = best["ours"][place], ratios("steps_per_s", place), ratios("looks_per_s", place)
        ratio = [one[key] / best["torch"][key] for key in ("steps_per_s", "looks_per_s")]
        print(f"| {count} of ours | {one['steps_per_s']:.1f} | {ratio[0]:.2f} ({steps[len(steps) // 2]:.2f}, {steps[0]:.2f} to {steps[-1]:.2f}) | "
              f"{one['looks_per_s']:.2f} | {ratio[1]:.2f} ({looks[len(looks) // 2]:.2f}) |")
    print(json.dumps(rounds))


torch_look() if options.torch_look else main()
