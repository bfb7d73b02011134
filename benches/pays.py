#!/usr/bin/env python3
"""Where pruning pays: validation loss of dense and pruned byte-level GPTs over the length of training, on one GPU.

    python benches/corpus.py --work DIR --bpe DIR --versions benches/corpus.json
    python benches/pays.py run --binary espalier --work DIR [--only REGEX] [--seconds 570]
    python benches/pays.py parity --binary espalier --work DIR --peers DIR [--only REGEX] [--seconds 570]
    python benches/pays.py show --work DIR [--out docs/pays.svg]

The text is that of `benches/corpus.py`: DIR/train.txt, DIR/held-out.txt (whole packages that training never sees) and DIR/manifest.json. To be carried to another
machine, the texts may be compressed (`xz`); they are unpacked where they are needed.

`run` trains the rows that DIR/pays.jsonl lacks, one after the other: dense 6 x 384; its 80 and 90 % by gradual pruning, RigL and ELSA; dense networks of as many
weights as these keep, and of as many bytes of training state as RigL has at its peak (gradual and ELSA hold more than dense training until they have pruned). The
learning rate of each (and gradual's `by_density`, ELSA's penalty) is searched at the shortest length, and the best is taken at the others. Length is counted in bytes for each parameter of the dense network,
the same for all; text that is shorter is gone through more than once, and the table says how often. --rates tries other peak rates at longer lengths too. After --seconds it stops (a run under way is saved and resumed
by the next call) and exits with 3 if rows are left. --only picks rows by their names, as `--list` prints them.

`parity` trains 12 x 768 for 900 steps, dense and pruned gradually to 90 %, here and by the peer torch_gradual.py: three seeds each, on the same 512 windows of held-out text, into DIR/parity.jsonl.
"""
import argparse, json, lzma, math, os, re, shutil, signal, subprocess, sys, time
from html import escape

from curves import COLOURS, number, ticks

# Layers, width, context, batch; `--small` is for trying the program on a processor.
SIZES = {False: (6, 384, 1024, 32), True: (2, 64, 32, 4)}
HEAD = {False: 64, True: 32}
LENGTHS, SHORTEST = [5, 20, 80, 200], 5
RATES = [6e-4, 1.2e-3, 2.4e-3]
SEEDS = {5: [1], 20: [1, 2], 80: [1], 200: [1]}


class Stopped(Exception):
    """No time is left."""


def corpus(work):
    """What DIR/manifest.json says of the text; the text itself is unpacked if it is compressed."""
    for name in ("train.txt", "held-out.txt"):
        path = os.path.join(work, name)
        if not os.path.exists(path):
            if not os.path.exists(path + ".xz"):
                raise SystemExit(f"{path} is missing: benches/corpus.py writes it")
            with lzma.open(path + ".xz") as packed, open(path + ".part", "wb") as file:
                shutil.copyfileobj(packed, file)
            os.rename(path + ".part", path)
    with open(os.path.join(work, "manifest.json")) as file:
        totals = json.load(file)["totals"]
    return {split: {key: totals[split][key] for key in ("packages", "bytes")} for split in totals}


class Table:
    """Lines of JSON, one a row that is done."""

    def __init__(self, path):
        self.path, self.rows = path, {}
        if os.path.exists(path):
            with open(path) as file:
                for line in file:
                    if line.endswith("\n"):
                        row = json.loads(line)
                        self.rows[row["row"]] = row

    def add(self, row):
        self.rows[row["row"]] = row
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


def said(settings):
    """Settings without their sections."""
    return " ".join(setting.partition(".")[2] for setting in settings)


def parameters(layers, width, context):
    return layers * (12 * width**2 + 13 * width) + (256 + context) * width + 2 * width


class Bench:
    def __init__(self, options):
        self.options, self.end = options, time.time() + options.seconds
        self.table = Table(os.path.join(options.work, "pays.jsonl"))
        self.layers, self.width, self.context, self.batch = SIZES[options.small]
        self.dense = parameters(self.layers, self.width, self.context)
        self.lengths = options.lengths or LENGTHS
        self.corpus = corpus(options.work)
        self.write_run_file()
        self.networks = list(self.find_networks())

    def write_run_file(self):
        options, path = self.options, os.path.join(self.options.work, "run.toml")
        # At once: another process may be reading it, with rows of its own to train.
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(f"""[model]
name = "gpt"
context = {self.context}
[data]
kind = "text"
path = "train.txt"
validation_path = "held-out.txt"
[train]
batch = {self.batch}
precision = "bf16"
clip = 1.0
eval_samples = 512
log_every = 50
[optimizer]
name = "adamw"
beta2 = 0.95
weight_decay = 0.1
[learning_rate]
schedule = "cosine"
warmup = 100
[checkpoint]
last = false
[device]
kind = "{options.device}"
threads = {int(options.small)}
""")
        os.replace(file.name, path)

    def command(self, settings, *more):
        sets = [argument for setting in settings for argument in ("--set", setting)]
        return [self.options.binary, "train", os.path.join(self.options.work, "run.toml"), *sets, *more]

    def shape(self, layers, width):
        return [f"model.layers={layers}", f"model.width={width}", f"model.heads={max(1, width // HEAD[self.options.small])}"]

    def planned(self, settings):
        """The summary of a run that is not made."""
        command = self.command([*settings, "train.steps=1000"], "--dry-run", "--json")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)

    def small_shape(self, wanted, measure):
        """The dense network, shaped about as the large one is, of which `measure` is nearest to a number."""
        unit, ratio = HEAD[self.options.small] // 2, self.width / self.layers
        shapes = [(layers, width) for layers in range(1, self.layers + 1) for width in range(2 * unit, self.width + 1, unit)
                  if 0.6 * ratio <= width / layers <= 1.7 * ratio and width % HEAD[self.options.small] == 0]
        return min(shapes, key=lambda shape: abs(math.log(measure(*shape) / wanted)))

    def find_networks(self):
        """Name, what sets it apart, and what is searched besides the rate."""
        large = self.shape(self.layers, self.width)
        yield "dense", large, []
        each = None
        for sparsity in (0.9, 0.8):
            percent = f"{100 * sparsity:.0f} %"
            pruned = [*large, f"prune.sparsity={sparsity}"]
            yield f"gradual {percent}", [*pruned, "prune.method=gradual", "prune.every=20"], [["learning_rate.by_density=0.3"]]
            yield f"rigl {percent}", [*pruned, "prune.method=rigl"], []
            yield f"elsa {percent}", [*pruned, "prune.method=elsa"], [[f"prune.penalty={penalty}"] for penalty in (0.003, 0.001, 0.0003)]
            kept = self.dense - sparsity * 12 * self.layers * self.width**2
            layers, width = self.small_shape(kept, lambda layers, width: parameters(layers, width, self.context))
            yield f"dense, weights of {percent}", self.shape(layers, width), []
            rigl = self.planned([*pruned, "prune.method=rigl"])["state_peak"]["before"]["predicted"]
            each = each or self.planned(large)["state_peak"]["before"]["predicted"] / self.dense
            layers, width = self.small_shape(rigl, lambda layers, width: each * parameters(layers, width, self.context))
            yield f"dense, memory of {percent}", self.shape(layers, width), []

    def trials(self, network, extras, length):
        """The settings that a network is tried with, as far as they are known: at the shortest length rates, twice the largest or half of the smallest while that is
        the best, and then what else is searched, at the best of them; at longer ones the best of these, and the rates that were asked for."""
        if length != min(self.lengths):
            best = self.best(network, extras)
            if not best:
                return []
            others = [[f"learning_rate.peak={rate:g}", *best[1:]] for rate in self.options.rates]
            return [best, *(trial for trial in others if trial != best)]
        rates, trial = list(RATES), lambda rate: [f"learning_rate.peak={rate:g}"]
        while True:
            found = {rate: self.table.rows.get(self.name(network, length, 1, trial(rate))) for rate in rates}
            if not all(found.values()):
                return [trial(rate) for rate in rates]
            best = min(rates, key=lambda rate: found[rate]["loss"])
            if best == max(rates) and best < 1e-2:
                rates.append(2 * best)
            elif best == min(rates) and best > 1e-4:
                rates.append(best / 2)
            else:
                return [trial(rate) for rate in rates] + [trial(best) + extra for extra in extras]

    def best(self, network, extras):
        """The settings with the least loss at the shortest length, once all have been tried."""
        trials = self.trials(network, extras, min(self.lengths))
        found = [self.table.rows.get(self.name(network, min(self.lengths), 1, trial)) for trial in trials]
        return min(found, key=lambda row: row["loss"])["settings"] if all(found) else None

    def name(self, network, length, seed, trial):
        return f"{network}, {length} bytes, seed {seed}, {said(trial)}"

    def rows(self):
        """Every row that can be named by now: those of longer runs once the rate is known."""
        for length in self.lengths:
            for network, settings, extras in self.networks:
                for seed in SEEDS.get(length, [1]) if length != min(self.lengths) else [1]:
                    for trial in self.trials(network, extras, length):
                        yield self.name(network, length, seed, trial), network, length, seed, settings, trial

    def run(self):
        if self.options.list:
            for name, *_ in self.rows():
                print(("done  " if name in self.table.rows else "      ") + name)
            return
        # What is found decides what is next.
        while row := next((row for row in self.rows() if row[0] not in self.table.rows and re.search(self.options.only, row[0])), None):
            try:
                self.train(*row)
            except Stopped:
                print("rows are left: the same command goes on", flush=True)
                raise SystemExit(3)

    def train(self, name, network, length, seed, settings, trial):
        steps = round(length * self.dense / (self.batch * self.context))
        folder = os.path.join(self.options.work, "runs", re.sub(r"[^A-Za-z0-9.]+", "-", name))
        settings = [*settings, *trial, f"train.steps={steps}", f"seed={seed}", f"train.eval_every={max(1, steps // 10)}"]
        resume = ["--resume"] if os.path.exists(os.path.join(folder, "run.toml")) else []
        summary = self.until_the_end(self.command(settings, "--out", folder, "--json", *resume))
        row = dict(row=name, network=network, length=length, seed=seed, settings=trial, loss=summary["validation"]["loss"],
                   **{key: summary[key] for key in ("steps", "parameters", "kept", "sparsity", "step_ms", "tokens_per_s", "trained_on", "state_peak", "device")},
                   corpus=self.corpus)
        self.table.add(row)
        shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
        print(f"{name}: {row['loss']:.4f} nats a byte, {steps} steps of {row['step_ms']:.1f} ms, {row['trained_on']['epochs']:.2f} epochs", flush=True)

    def until_the_end(self, command):
        """The JSON of a command; if time is over before it ends it is asked to save and stop."""
        if time.time() + 20 > self.end:
            raise Stopped
        done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, error = done.communicate(timeout=max(1, self.end - 15 - time.time()))
        except subprocess.TimeoutExpired:
            done.send_signal(signal.SIGINT)
            done.communicate()
            raise Stopped from None
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{error[-3000:]}")
        return json.loads(out)


class Parity(Bench):
    """Ours and the peer's, the same recipe."""

    def __init__(self, options):
        super().__init__(options)
        self.table = Table(os.path.join(options.work, "parity.jsonl"))
        # As much held out as the peer evaluates: of more, each would take other windows.
        self.text, context = os.path.join(os.path.abspath(options.work), "parity"), 64 if options.small else 1024
        os.makedirs(self.text, exist_ok=True)
        with open(os.path.join(options.work, "held-out.txt"), "rb") as held_out, open(os.path.join(self.text, "val.txt"), "wb") as file:
            file.write(held_out.read(512 * context + 1))
        if not os.path.exists(os.path.join(self.text, "train.txt")):
            os.symlink(os.path.join("..", "train.txt"), os.path.join(self.text, "train.txt"))

    def rows(self):
        for seed in (1, 2, 3):
            for what, sparsity in (("dense", 0.0), ("90 %", 0.9)):
                for who in ("espalier", "torch"):
                    yield f"{who}, {what}, seed {seed}", who, sparsity, seed

    def run(self):
        for name, who, sparsity, seed in self.rows():
            if self.options.list:
                print(("done  " if name in self.table.rows else "      ") + name)
            elif re.search(self.options.only, name) and name not in self.table.rows:
                try:
                    loss = (self.ours if who == "espalier" else self.theirs)(sparsity, seed)
                except Stopped:
                    print("rows are left: the same command goes on", flush=True)
                    raise SystemExit(3)
                self.table.add(dict(row=name, who=who, sparsity=sparsity, seed=seed, loss=loss))
                print(f"{name}: {loss:.4f}", flush=True)
        rows = self.table.rows.values()
        for sparsity in (0.0, 0.9):
            means = {}
            for who in ("espalier", "torch"):
                losses = [row["loss"] for row in rows if row["who"] == who and row["sparsity"] == sparsity]
                if losses:
                    means[who] = sum(losses) / len(losses)
                    print(f"{100 * sparsity:.0f} %, {who}: mean {means[who]:.4f} of {', '.join(f'{loss:.4f}' for loss in losses)}")
            if len(means) == 2:
                print(f"  ours - torch's: {means['espalier'] - means['torch']:+.4f}")

    def ours(self, sparsity, seed):
        steps, (layers, width, heads, context, batch) = (60, (2, 32, 2, 64, 4)) if self.options.small else (900, (12, 768, 12, 1024, 32))
        pruned = [f"prune.sparsity={sparsity}", "prune.method=gradual", "prune.every=20"] if sparsity else []
        settings = [f"model.layers={layers}", f"model.width={width}", f"model.heads={heads}", f"model.context={context}", f"train.batch={batch}",
                    f"train.steps={steps}", f"seed={seed}", f"data.validation_path={self.text}/val.txt", "learning_rate.peak=1.2e-3", *pruned]
        folder = os.path.join(self.options.work, "runs", f"parity-{sparsity}-{seed}-{os.getpid()}")
        return self.until_the_end(self.command(settings, "--out", folder, "--json"))["validation"]["loss"]

    def theirs(self, sparsity, seed):
        device, steps = ("cpu", 60) if self.options.small else ("cuda", 900)
        command = [sys.executable, os.path.join(self.options.peers, "torch_gradual.py"), device, str(steps), "0.25", "0.75", "1.2e-3", str(sparsity),
                   self.text, str(seed)]
        # It cannot be resumed: it is begun where it can end.
        if time.time() + self.options.torch_seconds > self.end:
            raise Stopped
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return float(re.findall(r"val ([0-9.]+)", done.stdout)[-1])


def label(network):
    """The name of a network, for people."""
    for short, long in [("dense, weights of", "dense, as many weights as"), ("dense, memory of", "dense, as much state as RigL at"), ("rigl", "RigL"), ("elsa", "ELSA")]:
        network = network.replace(short, long)
    return network


def panel(curves, x0, width, title):
    """Loss over bytes a dense parameter, on a logarithmic axis. curves: name -> [(length, mean, least, most, settings)]."""
    height, left, right, top = 380, 58, 12, 40
    below = 78 + 16 * len(curves)
    xs = sorted({point[0] for points in curves.values() for point in points})
    losses = [point[1] for points in curves.values() for point in points]
    low, high = min(losses), max(losses)
    low, high = low - 0.05 * (high - low + 0.01), high + 0.05 * (high - low + 0.01)
    first, last = math.log(xs[0] * 0.85), math.log(xs[-1] * 1.18)
    across = lambda x: x0 + left + (math.log(x) - first) / (last - first) * (width - left - right)
    up = lambda loss: top + (high - loss) / (high - low) * (height - top)
    out = [f'<text x="{x0 + left}" y="22" class="title">{escape(title)}</text>']
    for loss in ticks(low, high, 8):
        out.append(f'<line x1="{x0 + left}" x2="{x0 + width - right}" y1="{up(loss):.1f}" y2="{up(loss):.1f}" class="grid"/>')
        out.append(f'<text x="{x0 + left - 7}" y="{up(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    for x in xs:
        out.append(f'<line x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{height}" y2="{height + 4}" class="axis"/>')
        out.append(f'<text x="{across(x):.1f}" y="{height + 18}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<path d="M{x0 + left} {top}V{height}H{x0 + width - right}" class="axis"/>')
    out.append(f'<text x="{x0 + left + (width - left - right) / 2:.1f}" y="{height + 38}" text-anchor="middle">bytes for each parameter of the dense network</text>')
    for i, (name, points) in enumerate(curves.items()):
        colour, dashed = COLOURS[i % len(COLOURS)], ' stroke-dasharray="5 4"' if name.startswith("dense") else ""
        path = " ".join(f"{across(x):.1f},{up(mean):.1f}" for x, mean, *_ in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashed}/>')
        for x, mean, least, most, _ in points:
            out.append(f'<circle cx="{across(x):.1f}" cy="{up(mean):.1f}" r="3" fill="{colour}"/>')
            if most > least:
                out.append(f'<line x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{up(least):.1f}" y2="{up(most):.1f}" stroke="{colour}"/>')
        y = height + 62 + 16 * i
        out.append(f'<line x1="{x0 + left}" x2="{x0 + left + 26}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2.5"{dashed}/>')
        out.append(f'<text x="{x0 + left + 34}" y="{y}">{escape(label(name))}</text>')
    return out, height + below


def show(options):
    """A table, and a picture with a panel for each sparsity."""
    rows = list(Table(os.path.join(options.work, "pays.jsonl")).rows.values())
    if not rows:
        raise SystemExit(f"{options.work}/pays.jsonl has no rows")
    text, lengths = rows[0]["corpus"], sorted({row["length"] for row in rows})
    best, rates = {}, {}
    for row in rows:
        if row["length"] == lengths[0]:
            rates.setdefault(row["network"], set()).add(row["settings"][0])
            if row["loss"] <= best.get(row["network"], row)["loss"]:
                best[row["network"]] = row
    # Not of a network whose rate has still to be found.
    found, order = [name for name in rates if len(rates[name]) >= len(RATES)], lambda name: (name != "dense", "80 %" in name, name.startswith("dense"), name)
    points = {}
    for name in sorted(found, key=order):
        for length in lengths:
            # By settings: the best at this length, where others than that of the shortest were tried.
            losses = {}
            for row in rows:
                if row["network"] == name and row["length"] == length:
                    losses.setdefault(said(row["settings"]), []).append(row["loss"])
            if losses:
                settings, of_seeds = min(losses.items(), key=lambda item: sum(item[1]) / len(item[1]))
                points.setdefault(name, []).append((length, sum(of_seeds) / len(of_seeds), min(of_seeds), max(of_seeds), settings))
    print(f"{text['train']['bytes']:,} unique bytes of {text['train']['packages']} packages, validated on {text['held-out']['bytes']:,} bytes of "
          f"{text['held-out']['packages']} others; nats a byte\n")
    epochs = {row["length"]: row["trained_on"]["epochs"] for row in rows}
    print("| network | weights kept | peak of training state, after | best at the shortest length | " + " | ".join(f"{x} bytes a parameter ({epochs[x]:.2f} epochs)" for x in lengths) + " |")
    print("|---" * (len(lengths) + 4) + "|")
    megabytes = lambda of: f"{of['measured'] / 1e6:.1f}"
    for name, curve in points.items():
        row, at = best[name], {x: of_length for x, *of_length in curve}
        usual = said(row["settings"])
        kept = row["trained_on"]["tokens"] / row["trained_on"]["per_kept_parameter"] if row["trained_on"]["tokens"] else row["kept"]
        cell = lambda x: "-" if x not in at else f"{at[x][0]:.4f}" + (f" ({at[x][1]:.4f} to {at[x][2]:.4f})" if at[x][2] > at[x][1] else "") + \
            (f" with {at[x][3]}" if at[x][3] != usual else "")
        print(f"| {label(name)} | {kept:,.0f} | {megabytes(row['state_peak']['before'])} MB, {megabytes(row['state_peak']['after'])} MB | "
              f"{usual} | " + " | ".join(cell(x) for x in lengths) + " |")
    if options.out:
        wide, parts, tall, x = 460, [], 0, 0
        for percent in ("80 %", "90 %"):
            curves = {name: curve for name, curve in points.items() if name == "dense" or percent in name}
            if len(curves) > 1:
                part, height = panel(curves, x, wide, f"{percent}: validation loss, nats a byte")
                parts, tall, x = parts + part, max(tall, height), x + wide
        with open(options.out, "w") as file:
            file.write("\n".join([
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{x}" height="{tall}" viewBox="0 0 {x} {tall}" font-family="Helvetica, Arial, sans-serif" font-size="12.5">',
                "<style>.grid{stroke:#e3e3e3;stroke-width:1}.axis{stroke:#555;stroke-width:1;fill:none}text{fill:#222}.title{font-size:15px;font-weight:bold}</style>",
                f'<rect width="{x}" height="{tall}" fill="#fff"/>', *parts, "</svg>"]) + "\n")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("run", "parity", "show"))
    arguments.add_argument("--work", required=True)
    arguments.add_argument("--binary", default="espalier")
    arguments.add_argument("--device", default="cuda")
    arguments.add_argument("--peers", help="the folder with torch_gradual.py")
    arguments.add_argument("--only", default="", help="a regular expression for the names of rows")
    arguments.add_argument("--lengths", type=int, nargs="+", help="bytes for each parameter of the dense network")
    arguments.add_argument("--rates", type=float, nargs="+", default=[], help="other peak rates to try at longer lengths, besides the best at the shortest")
    arguments.add_argument("--seconds", type=float, default=1e6, help="stop after so long")
    arguments.add_argument("--torch-seconds", type=float, default=200, help="how long a run of the peer takes at most")
    arguments.add_argument("--list", action="store_true", help="print the rows, and train none")
    arguments.add_argument("--small", action="store_true", help="a tiny network, to try the program")
    arguments.add_argument("--out", help="the picture")
    options = arguments.parse_args()
    {"run": lambda options: Bench(options).run(), "parity": lambda options: Parity(options).run(), "show": show}[options.what](options)


if __name__ == "__main__":
    main()
