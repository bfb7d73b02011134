#!/usr/bin/env python3
"""Time to a result, predicted and measured: a study's steps times a planned step, beside training to the goal at a batch and with seeds that the study has not seen.

    python benches/time_to_result.py studies/gpt-small.toml --work DIR [--binary espalier] [--device cuda] [--seconds 60]
    python benches/time_to_result.py out/w3 --work DIR --device cuda --cluster h200.toml          # a study that is already there
    python benches/time_to_result.py studies/gpt-small.toml --work DIR --device cpu --ranks 1,2 --set search.trials=6 --set search.seeds=3

STUDY is a study file, which is run for at most --seconds (what it has by then is used; the same command goes on), or the folder of a study. Several may be named.
Without --cluster the machine is measured before each row (`bench compute`, and `bench comm` for several ranks or cores); steps are timed right behind it. With --calibrate the rates of
--cluster, or of a machine that is measured once, are refitted (`plan --calibrate`) to short dense runs at the two batches of the study around the one that is predicted, as an owner
would do with the machine at hand: these runs and that whose step is predicted take turns, since shared cores change their speed by half within minutes, and medians count.
For each sparsity and number of ranks
`espalier plan --study` predicts; then the fastest layout is trained to the study's goal from --seeds, with the hyperparameters of the two nearest cells,
between which they are interpolated in logarithms, as the batch is. Time is that of steps alone, evaluations left out, on both sides. --batch 0 takes the power of two in the middle of the
widest gap between the study's batches.

A K* is the least of many trials, and a new run has no such luck: ask the study to repeat its best trials (`--set search.seeds=9 --set search.finalists=3`), of which the
steadiest then counts.
"""
import argparse, json, math, os, signal, statistics, subprocess, sys, time, tomllib

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("study", nargs="+")
arguments.add_argument("--work", required=True, type=os.path.abspath)
arguments.add_argument("--binary", default="target/release/espalier")
arguments.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
arguments.add_argument("--cluster")
arguments.add_argument("--calibrate", action="store_true", help="refit the cluster's rates to short runs at batches of the study")
arguments.add_argument("--ranks", default="1")
arguments.add_argument("--batch", type=int, default=0)
arguments.add_argument("--seeds", default="1001,1002,1003")
arguments.add_argument("--seconds", type=float, default=60, help="of each study")
arguments.add_argument("--reuse", action="store_true", help="read runs that an earlier sitting of the same study, binary and layouts trained in --work to the goal (their bits would be the same); steps are timed again")
arguments.add_argument("--slower", type=float, default=4, help="a run is given up after so many times the predicted steps")
arguments.add_argument("--set", action="append", default=[], help="overrides of the study file")
options = arguments.parse_args()
# Steps of a run whose steps are timed: so many, and all of those to the result, but for slow steps no more than fill so many seconds.
SHORTEST, SECONDS, FEWEST = 200, 5, 30
# Turns of runs that are timed, each with the next of the seeds: kernels of a core skip zeros, and how many a gradient has may depend on the seed.
TURNS = 5
BINARY = os.path.abspath(options.binary) if os.path.exists(options.binary) else options.binary


def espalier(*words, check=True, limit=None):
    """A command's line of JSON; after `limit` seconds it is interrupted, and says what it has."""
    process = subprocess.Popen([BINARY, *words], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL if "--json" in words else None)
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    if check and process.returncode not in (0, 130):
        sys.exit(f"{' '.join(words)}: exit code {process.returncode}")
    lines = (out or "").strip().splitlines()
    return json.loads(lines[-1]) if lines and "--json" in words else None


def studied(name):
    """The folder of a study, and what its file says."""
    folder = name
    if os.path.isfile(name):
        folder = os.path.join(options.work, os.path.splitext(os.path.basename(name))[0])
        settings = [word for change in [f"run.device.kind={options.device}", *options.set] for word in ("--set", change)]
        espalier("study", name, "--out", folder, *settings, "--json", limit=options.seconds)
    with open(os.path.join(folder, "study.json")) as file:
        record = json.load(file)
    study = tomllib.loads(record["study"])
    data = study["run"].get("data", {})
    for key in ("path", "validation_path", "tokenizer"):
        if isinstance(data.get(key), str):
            data[key] = os.path.join(record["beside"], data[key])
    return folder, study


def toml(table):
    """Tables of tables of plain values."""
    top = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for name, section in table.items():
        if isinstance(section, dict):
            top += [f"[{name}]"] + [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    return "\n".join(top) + "\n"


def between(cells, batch):
    """Hyperparameters at a batch: on the line between those of the nearest cells, of their steadiest trials where best ones were repeated, all in logarithms."""
    chosen = lambda cell: cell["steadiest"] or cell["best"]
    cells = sorted((cell for cell in cells if cell["k_star"]), key=lambda cell: cell["batch"])
    below = [cell for cell in cells if cell["batch"] <= batch] or cells[:1]
    above = [cell for cell in cells if cell["batch"] >= batch] or cells[-1:]
    low, high = below[-1], above[0]
    along = 0.0 if low is high else math.log(batch / low["batch"]) / math.log(high["batch"] / low["batch"])
    fields = {field: value for field, value in chosen(low).items() if field != "lr"}
    mixed = lambda a, b: math.exp((1 - along) * math.log(a) + along * math.log(b)) if a > 0 and b > 0 else (1 - along) * a + along * b
    # One minus a momentum is what is searched in logarithms.
    near_one = lambda field: field.endswith(("momentum", "beta1", "beta2"))
    return {f: 1 - mixed(1 - v, 1 - chosen(high)[f]) if near_one(f) else mixed(v, chosen(high)[f]) for f, v in fields.items()}


def reached_at(out, goal):
    """The step at which a run was at the goal; none where it has not been."""
    metrics = os.path.join(out, "metrics.jsonl")
    if not os.path.exists(metrics):
        return None
    with open(metrics) as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return next((line["step"] for line in lines if "validation" in line and goal(line["validation"])), None)


def trained(run, out, goal):
    """Steps to the goal; none where it was not reached."""
    if options.reuse and (reached := reached_at(out, goal)):
        return reached
    subprocess.run(["rm", "-rf", out])
    log = open(out + ".log", "w")
    process = subprocess.Popen([BINARY, "train", run, "--out", out], stdout=log, stderr=log)
    while (reached := reached_at(out, goal)) is None and process.poll() is None:
        time.sleep(0.05)
    reached = reached or reached_at(out, goal)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    process.wait()
    log.close()
    return reached


def step_seconds(runs, stems, steps):
    """Of each run the median step, and the folder of that turn. No run is evaluated on the way: after each evaluation the first steps wait for what otherwise is queued ahead."""
    timed = [[] for _ in runs]
    seeds = options.seeds.split(",")
    for turn in range(TURNS):
        for run, stem, count, turns in zip(runs, stems, steps, timed):
            folder = f"{stem}-timed-{turn}"
            subprocess.run(["rm", "-rf", folder])
            never = [word for field in ("steps", "eval_every", "log_every") for word in ("--set", f"train.{field}={count}")]
            seed = f"seed={seeds[turn % len(seeds)]}"
            turns.append((1e-3 * espalier("train", run, "--out", folder, *never, "--set", seed, "--json")["step_ms"], folder))
    return [sorted(turns)[TURNS // 2] for turns in timed]


def run_file(study, stem, batch, sparsity, seed, fields, **train):
    """A run of the study at some batch and sparsity, written to STEM.toml."""
    run = json.loads(json.dumps(study["run"]))
    run["seed"] = seed
    run.setdefault("train", {}).update(batch=batch, **train)
    run.setdefault("device", {})["kind"] = options.device
    run["checkpoint"] = {"last": False}
    if sparsity == 0:
        run.pop("prune", None)
    else:
        run["prune"]["sparsity"] = sparsity
    for field, value in fields.items():
        section, _, key = field.partition(".")
        run.setdefault(section, {})[key] = value
    with open(stem + ".toml", "w") as file:
        file.write(toml(run))
    return stem + ".toml"


def refitted(folders, cluster, out):
    """The cluster with rates refitted to runs."""
    if os.path.exists(out):
        os.remove(out)
    fitted = espalier("plan", "--calibrate", *folders, "--cluster", cluster, "-o", out, "--json")
    for run in fitted["runs"]:
        print(f"to refit: a step of {run['measured_ms']:.3f} ms, predicted {run['predicted_ms']:.3f}, refitted {run['calibrated_ms']:.3f}", file=sys.stderr)
    return out


def lay_out(run, cluster, number):
    """The run with the fastest layout."""
    laid_out = run.removesuffix(".toml") + "-laid-out.toml"
    espalier("plan", run, "--cluster", cluster, "--gpus", str(number), "--apply", laid_out, "--force", "--json")
    return laid_out


def measure_machine(number):
    """The machine as it is now."""
    cluster = os.path.join(options.work, "cluster.toml")
    if os.path.exists(cluster):
        os.remove(cluster)
    espalier("bench", "compute", "--device", options.device, "-o", cluster, "--json")
    # The cores of a machine are several devices, and a file of them wants their link.
    if number > 1 or options.device == "cpu":
        espalier("bench", "comm", "--device", options.device, "-o", cluster, "--json")
    return cluster


def predicted(study, folder, batch, sparsity, number, cluster):
    """The time to the result at a batch; none where the study has no steps for it."""
    saved = os.path.join(options.work, f"{study['name']}-plan")
    plan = espalier("plan", "--study", folder, "--cluster", cluster, "--gpus", str(number), "--batches", str(batch), "--save", saved, "--force", "--json")
    return next((point for point in plan["time_to_result"] if point["sparsity"] == sparsity), None)


def timed_row(cluster, predict, run_of, around, stem):
    """What is predicted of a row, the cluster file by which it is laid out, and seconds of a step. `around` makes runs to which the cluster is refitted, each with a stem, steps and a batch."""
    for attempt in range(3):
        point = predict(cluster)
        if point is None:
            return None
        # A step takes as long as its batch is large, nearly.
        shortened = lambda steps, batch: max(FEWEST, min(max(SHORTEST, steps), int(SECONDS * point["batch"] / (point["step_seconds"] * batch))))
        timed = [*around(cluster), (run_of(point, cluster), stem, point["steps"], point["batch"])]
        runs, stems, steps = zip(*((run, stem, shortened(steps, batch)) for run, stem, steps, batch in timed))
        *others, (each, _) = step_seconds(runs, stems, steps)
        if not others:
            return point, cluster, each
        cluster = refitted([folder for _, folder in others], cluster, f"{stem}-fitted-{attempt}.toml")
        again = predict(cluster)
        if again["described"] == point["described"]:
            break
    return again, cluster, each


def check(name):
    folder, study = studied(name)
    goal_field, goal_value = next(iter(study["goal"].items()))
    goal = lambda validation: (1 - validation["accuracy"] if goal_field == "error" else validation["loss"]) <= goal_value
    every = study["search"].get("eval_every", 16)
    summary = espalier("report", folder, "--json")
    batches = sorted({cell["batch"] for cell in summary["cells"]})
    gaps = list(zip(batches, batches[1:]))
    low, high = max(gaps, key=lambda pair: pair[1] / pair[0]) if gaps else (batches[0], batches[0])
    batch = options.batch or 2 ** round(math.log2(math.sqrt(low * high)))
    low, high = max([other for other in batches if other < batch], default=batches[0]), min([other for other in batches if other > batch], default=batches[-1])
    if batch in batches:
        print(f"{study['name']}: batch {batch} is in the study; choose another with --batch")
    numbers = list(map(int, options.ranks.split(",")))
    dense = [cell for cell in summary["cells"] if cell["sparsity"] == 0]
    cluster = options.cluster or (measure_machine(max(numbers)) if options.calibrate else None)
    print(f"{study['name']}, batch {batch} (not among {batches}), seeds {options.seeds}, to a validation {goal_field} of {goal_value}")
    print("| sparsity | ranks | layout | K* | steps predicted (interval) | steps measured | step ms predicted | measured | s predicted (interval) | s measured, median | measured/predicted |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for sparsity, number in [(sparsity, number) for sparsity in sorted({cell["sparsity"] for cell in summary["cells"]}) for number in numbers]:
        fields = between([cell for cell in summary["cells"] if cell["sparsity"] == sparsity], batch)
        first = os.path.join(options.work, f"{study['name']}-{sparsity}-{batch}-{number}")

        def run_of(seed, point, now):
            steps = every * math.ceil(options.slower * point["steps"] / every)
            run = run_file(study, f"{first}-{seed}", batch, sparsity, seed, fields, steps=steps, eval_every=every, log_every=every)
            return lay_out(run, now, number)

        def around(now):
            for cell in (cell for cell in dense if options.calibrate and cell["batch"] in (low, high)):
                stem = f"{first}-beside-{cell['batch']}"
                run = run_file(study, stem, cell["batch"], 0, 1, between(dense, cell["batch"]))
                yield lay_out(run, now, number), stem, cell["k_star"], cell["batch"]

        seeds = list(map(int, options.seeds.split(",")))
        predict = lambda now: predicted(study, folder, batch, sparsity, number, now)
        row = timed_row(cluster or measure_machine(number), predict, lambda point, now: run_of(seeds[0], point, now), around, first)
        if row is None:
            continue
        point, now, each = row
        found = []
        for seed in seeds:
            out = f"{first}-{seed}"
            found.append(trained(run_of(seed, point, now), out, goal))
        interval = point["steps_interval"]
        shown = f"{point['k_star']} | {point['steps']}" + (f" ({interval[0]} to {interval[1]})" if interval else "")
        seconds, step_ms = 3600 * point["hours"], 1e3 * point["step_seconds"]
        ends = [3600 * hours for hours in point["hours_interval"]] if interval else None
        within = f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
        # A run that did not reach the goal is slower than all that did.
        steps = statistics.median(steps or math.inf for steps in found)
        counted = ", ".join(str(steps or "not") for steps in found)
        measured = each * steps
        inside = "" if not ends else " (inside)" if ends[0] <= measured <= ends[1] else " (outside)"
        print(f"| {sparsity} | {number} | {point['described']} | {shown} | {counted} | {step_ms:.3f} | {1e3 * each:.3f} | {seconds:.2f}{within} | {measured:.2f}{inside} | {measured / seconds:.2f} |", flush=True)


os.makedirs(options.work, exist_ok=True)
for name in options.study:
    check(name)
