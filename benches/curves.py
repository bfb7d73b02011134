#!/usr/bin/env python3
"""Validation loss of several runs over steps and over time: a picture (SVG, drawn here) and a table (Markdown).

    python benches/curves.py --out docs/quality.svg "GPT-2 124M: dense=out/dense" "GPT-2 124M: gradual 90 %=out/gradual" ...
    python benches/curves.py --out docs/quality-124m.svg --over steps "GPT-2 124M: dense=out/dense" ...    # for a page 600 pixels wide

Each argument is `ROW: NAME=RUN`, RUN a run folder or its metrics.jsonl; runs of one ROW share a pair of panels. Time is training time: what
was spent on evaluating is taken out. A ring marks where a run reached its final sparsity. Between two evaluations the loss is taken to
be linear, in the table's equal times as in the picture.
"""
import argparse, json, math, os
from html import escape

COLOURS = ["#1b4965", "#c1440e", "#4a7c2c", "#7b4b94", "#8a6d1d", "#2a9d8f"]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, GAP = 500, 350, 62, 62, 54, 50, 20


class Run:
    """One run's evaluations: (step, seconds of training, loss)."""

    def __init__(self, argument):
        label, _, path = argument.rpartition("=")
        self.row, _, self.name = label.rpartition(": ")
        path = os.path.join(path, "metrics.jsonl") if os.path.isdir(path) else path
        with open(path) as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        self.points, self.sparsities, self.rates, evaluating, last = [], [], [], 0.0, 0.0
        for line in lines:
            if "validation" in line:
                # Where the file has no time of an evaluation, it is the last step's, with evaluations before it.
                end = line.get("time", last)
                evaluating += end - last
                self.points.append((line["step"], end - evaluating, line["validation"]["loss"]))
                last = end
            elif "loss" in line:
                last = line["time"]
                self.sparsities.append((line["step"], line.get("sparsity") or 0.0))
                self.rates.append(line.get("tokens_per_s") or line.get("images_per_s") or 0.0)
        if not self.points:
            raise SystemExit(f"{path} has no validation loss")

    @property
    def sparsity(self):
        return self.sparsities[-1][1] if self.sparsities else 0.0

    def pruned_at(self):
        """The step at which the final sparsity was there, as far as it was logged; none of a dense run."""
        if self.sparsity == 0:
            return None
        return next(step for step, sparsity in self.sparsities if sparsity >= self.sparsity - 1e-5)

    def at(self, axis, x):
        """The loss at a step (axis 0) or time (1); none outside of what was measured."""
        for a, b in zip(self.points, self.points[1:]):
            if a[axis] <= x <= b[axis]:
                share = (x - a[axis]) / (b[axis] - a[axis]) if b[axis] > a[axis] else 1.0
                return a[2] + share * (b[2] - a[2])
        return None

    def time_of(self, step):
        xs = [(0, 0.0)] + [(point[0], point[1]) for point in self.points]
        for a, b in zip(xs, xs[1:]):
            if a[0] <= step <= b[0]:
                return a[1] + (b[1] - a[1]) * (step - a[0]) / (b[0] - a[0])
        return xs[-1][1]


def ticks(low, high, wanted):
    """Round numbers, about `wanted` of them."""
    rough = (high - low) / wanted
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(x):
    return f"{x:,.0f}" if abs(x - round(x)) < 1e-9 else f"{x:g}"


def panel(runs, colours, axis, x0, y0, low, high):
    """One pair of axes: steps or seconds across, loss upwards, perplexity at the right."""
    most = max(run.points[-1][axis] for run in runs)
    across = lambda x: x0 + LEFT + x / most * (WIDTH - LEFT - RIGHT)
    up = lambda loss: y0 + TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)
    left, right, top, bottom = across(0), across(most), up(high), up(low)
    out = []
    for loss in ticks(low, high, 8):
        out.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{up(loss):.1f}" y2="{up(loss):.1f}" class="grid"/>')
        out.append(f'<text x="{left - 7:.1f}" y="{up(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        perplexity = math.exp(loss)
        out.append(f'<text x="{right + 7:.1f}" y="{up(loss) + 4:.1f}">{perplexity:.{0 if perplexity >= 20 else 1}f}</text>')
    for x in ticks(0, most, 7):
        out.append(f'<line x1="{across(x):.1f}" x2="{across(x):.1f}" y1="{bottom:.1f}" y2="{bottom + 4:.1f}" class="axis"/>')
        out.append(f'<text x="{across(x):.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{number(x)}</text>')
    out.append(f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}V{top:.1f}" class="axis"/>')
    out.append(f'<text x="{(left + right) / 2:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">{("steps", "seconds of training")[axis]}</text>')
    out.append(f'<text x="{left - 7:.1f}" y="{top - 10:.1f}" text-anchor="end">loss</text>')
    out.append(f'<text x="{right + 7:.1f}" y="{top - 10:.1f}">perpl.</text>')
    for run in runs:
        colour = colours[run.name]
        points = [(p[axis], p[2]) for p in run.points]
        inside = [(x, loss) for x, loss in points if loss <= high]
        first = points.index(inside[0]) if inside else 0
        if first > 0:  # enters through the top
            (xa, a), (xb, b) = points[first - 1], points[first]
            inside.insert(0, (xa + (xb - xa) * (a - high) / (a - b), high))
        path = " ".join(f"{across(x):.1f},{up(loss):.1f}" for x, loss in inside)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>')
        step = run.pruned_at()
        if step is not None:
            x = step if axis == 0 else run.time_of(step)
            loss = run.at(axis, x)
            if loss is not None and loss <= high:
                out.append(f'<circle cx="{across(x):.1f}" cy="{up(loss):.1f}" r="4.5" fill="#fff" stroke="{colour}" stroke-width="1.8"/>')
    return out


def draw(rows, axes):
    """A row of panels for each model; with one axis the row is as wide as one panel, and names have a line of their own."""
    legend = 0 if len(axes) > 1 else 22
    tall = HEIGHT + legend
    width, height = len(axes) * (WIDTH + GAP) - GAP, len(rows) * tall + 8
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12.5">',
           "<style>.grid{stroke:#e3e3e3;stroke-width:1}.axis{stroke:#555;stroke-width:1;fill:none}text{fill:#222}.title{font-size:15px;font-weight:bold}</style>",
           f'<rect width="{width}" height="{height}" fill="#fff"/>']
    names = list(dict.fromkeys(run.name for runs in rows.values() for run in runs))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    for i, (row, runs) in enumerate(rows.items()):
        y0 = i * tall
        low = min(loss for run in runs for _, _, loss in run.points)
        # The steep beginning is cut off: what is asked is where the curves end.
        shown = [loss for run in runs for step, _, loss in run.points if step >= 0.2 * run.points[-1][0]]
        high = max(shown)
        low, high = low - 0.04 * (high - low), high + 0.02 * (high - low)
        x = LEFT
        out.append(f'<text x="{x}" y="{y0 + 22}" class="title">{escape(row)}: validation</text>')
        x += 0 if legend else 9 * len(row) + 120
        for run in runs:
            colour, y = colours[run.name], y0 + legend
            out.append(f'<line x1="{x}" x2="{x + 22}" y1="{y + 17}" y2="{y + 17}" stroke="{colour}" stroke-width="2.5"/>')
            out.append(f'<text x="{x + 28}" y="{y + 22}">{escape(run.name)}</text>')
            x += 50 + 7 * len(run.name)
        for i, axis in enumerate(axes):
            out += panel(runs, colours, axis, i * (WIDTH + GAP), y0 + legend, low, high)
    return "\n".join(out + ["</svg>"]) + "\n"


def table(row, runs):
    cell = lambda loss: "-" if loss is None else f"{loss:.3f} ({math.exp(loss):.2f})"
    steps = min(run.points[-1][0] for run in runs)
    seconds = min(run.points[-1][1] for run in runs)
    at_steps = [round(steps * part) for part in (0.25, 0.5, 0.75)] + [steps]
    at_times = [seconds * part for part in (0.5, 1.0)]
    rate = lambda run: sorted(run.rates)[len(run.rates) // 2] if run.rates else 0.0
    print(f"\n**{row}**, validation loss (perplexity)\n")
    print("| | sparsity, from step | " + " | ".join(f"after {step} steps" for step in at_steps) + " | "
          + " | ".join(f"after {time:.0f} s" for time in at_times) + " | all of it | tokens/s |")
    print("|---" * (len(at_steps) + len(at_times) + 4) + "|")
    for run in runs:
        pruned = "dense" if run.sparsity == 0 else f"{100 * run.sparsity:.1f} %, {run.pruned_at()}"
        losses = [cell(run.at(0, step)) for step in at_steps] + [cell(run.at(1, time)) for time in at_times]
        print(f"| {run.name} | {pruned} | " + " | ".join(losses) + f" | {run.points[-1][1]:.0f} s | {rate(run):,.0f} |")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", help="the picture")
    arguments.add_argument("--over", choices=("steps", "time", "both"), default="both", help="what the picture has across")
    arguments.add_argument("runs", nargs="+", metavar="ROW: NAME=RUN")
    options = arguments.parse_args()
    rows = {}
    for run in map(Run, options.runs):
        rows.setdefault(run.row, []).append(run)
    if options.out:
        with open(options.out, "w") as file:
            file.write(draw(rows, {"steps": (0,), "time": (1,), "both": (0, 1)}[options.over]))
    for row, runs in rows.items():
        table(row, runs)


if __name__ == "__main__":
    main()
