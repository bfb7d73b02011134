"""How fast models of several sizes write, on the processor or a card: `espalier bench generate`, in turns, medians of rounds.

    cargo build --release && python benches/generate.py [--device cuda] [--rounds 3]

Prints one row a model: tokens for each second, bytes that a token reads, and what share of the bandwidth of the same run that is.
"""

import argparse
import json
import statistics
import subprocess

# Layers, width, heads.
MODELS = {"0.12B": (12, 768, 12), "0.35B": (24, 1024, 16), "1.0B": (18, 2048, 16), "6.6B": (32, 4096, 32)}


def measure(program, device, precision, shape):
    layers, width, heads = shape
    shape = ["--layers", layers, "--width", width, "--heads", heads, "--vocab", 50257]
    command = [program, "bench", "generate", "--json", "--device", device, "--precision", precision, *map(str, shape)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--program", default="target/release/espalier")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--models", default="0.12B,0.35B,1.0B")
    arguments = arguments.parse_args()
    cases = [(name, precision) for name in arguments.models.split(",") for precision in ["bf16", "f32"]]
    seen = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for name, precision in cases:
            seen[name, precision].append(measure(arguments.program, arguments.device, precision, MODELS[name]))
    print("| model | format | prompt tokens/s | tokens/s | GB a token | GB/s | of the bandwidth |")
    print("|---|---|---|---|---|---|---|")
    for (name, _), reports in seen.items():
        median = lambda field: statistics.median(report[field] for report in reports)
        print(
            f"| {name} | {reports[0]['format']} | {median('prompt_tokens_per_s'):.0f} | {median('tokens_per_s'):.1f} "
            f"| {median('bytes_per_token') / 1e9:.3f} | {median('bytes_per_s') / 1e9:.1f} | {median('share_of_bandwidth'):.2f} |"
        )


main()
