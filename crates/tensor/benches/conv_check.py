"""The card's convolutions against PyTorch's, layer by layer: microseconds and ratios, above 1 where ours is faster.

    python3 crates/tensor/benches/conv_check.py BENCH      BENCH: the built benchmark cuda_conv

PyTorch runs as it comes: eager, images channels first, TF32 allowed in f32, algorithms by cuDNN's own ranking, and
not asked to repeat bit for bit. In the weight's gradient neither side counts the bias's.
"""
import json, subprocess, sys, time
import torch

lines = subprocess.run([sys.argv[1], "--bench", "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
ours = {}
for line in map(json.loads, lines):
    ours.setdefault((line["net"], tuple(line["layer"]), line["pass"]), {})[line["way"]] = line["us"]


def measure(work, runs=20):
    for _ in range(3):
        work()
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            work()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / runs)
    return best * 1e6


def torch_times(layer, dtype):
    side, c, o, kernel, stride, padding = layer
    x = torch.randn(128, c, side, side, device="cuda", dtype=dtype)
    w, b = torch.randn(o, c, kernel, kernel, device="cuda", dtype=dtype), torch.randn(o, device="cuda", dtype=dtype)
    dy = torch.randn_like(torch.nn.functional.conv2d(x, w, b, stride, padding))
    backward = lambda mask: torch.ops.aten.convolution_backward(dy, x, w, [o], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)
    return {
        "forward": measure(lambda: torch.nn.functional.conv2d(x, w, b, stride, padding)),
        "input": measure(lambda: backward([True, False, False])),
        "weight": measure(lambda: backward([False, True, False])),
    }


ways = ["own f32", "cuDNN tf32", "own bf16", "cuDNN bf16"]
print(f"{'microseconds, batch 128':<38}" + "".join(f"{way:>11}" for way in ways) + f"{'torch tf32':>12}{'ratio':>7}{'torch bf16':>12}{'ratio':>7}")
layers = {}
for net, layer, name in ours:
    if layer not in layers:
        layers[layer] = torch_times(layer, torch.float32), torch_times(layer, torch.bfloat16)
    f32, bf16 = (times[name] for times in layers[layer])
    mine = ours[net, layer, name]
    side, c, o, kernel, stride, _ = layer
    label = f"{net} {side}^2 {c} to {o}, {kernel}/{stride} {name}"
    print(f"{label:<38}" + "".join(f"{mine[way]:>11.1f}" for way in ways)
          + f"{f32:>12.1f}{f32 / mine['cuDNN tf32']:>6.2f}x{bf16:>12.1f}{bf16 / mine['cuDNN bf16']:>6.2f}x", flush=True)
