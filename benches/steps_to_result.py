#!/usr/bin/env python3
"""K* of W1 by another program: many trials of simple-cnn side by side in PyTorch on a card, after the protocol of Lee et al. (ICLR 2021).

    python benches/steps_to_result.py --data DIR [--batch 256] [--sparsity 0.9] [--pixels standard|centred] [--trials 34] [--rates 0.03 0.7]

DIR holds MNIST's two training files, unzipped. Nothing of Espalier is used: a judge of `espalier study studies/w1.toml` from outside. Held-out images are
the first tenth of NumPy's shuffle of seed 0, as in the authors' program; weights start from a truncated normal over the fan-in; SNIP's
scores are over all training images, biases are pruned with weights. Rates are spread evenly in the logarithm: the paper's 100 trials over four decades have 34
between 0.03 and 0.7. Ends two validations after the first trial has reached the goal.
"""
import argparse, os, time
import numpy as np, torch, torch.nn.functional as F

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--data", required=True)
arguments.add_argument("--batch", type=int, default=256)
arguments.add_argument("--sparsity", type=float, default=0.0)
arguments.add_argument("--pixels", choices=["standard", "centred"], default="standard")
arguments.add_argument("--trials", type=int, default=34)
arguments.add_argument("--rates", type=float, nargs=2, default=[0.03, 0.7])
arguments.add_argument("--steps", type=int, default=2000)
arguments.add_argument("--goal", type=float, default=0.02)
arguments.add_argument("--every", type=int, default=16)
arguments.add_argument("--device", default="cuda")
options = arguments.parse_args()
trials, device = options.trials, options.device
LEARNT = 54_000


def read():
    """Images and labels, held out first."""
    def file(name, skip):
        return np.fromfile(os.path.join(options.data, name), np.uint8)[skip:]

    pixels = file("train-images-idx3-ubyte", 16).reshape(-1, 28, 28).astype(np.float32) / 255
    pixels -= pixels.mean(dtype=np.float64)
    if options.pixels == "standard":
        pixels /= pixels.std(dtype=np.float64)
    order = list(range(len(pixels)))
    np.random.RandomState(0).shuffle(order)
    labels = file("train-labels-idx1-ubyte", 8).astype(np.int64)
    return torch.tensor(pixels[order], device=device), torch.tensor(labels[order], device=device)


def initial(shape, fan):
    """The weights of every trial: [trials, *shape]."""
    deviation = fan**-0.5 / 0.87962566103423978
    def one(trial):
        random = torch.Generator().manual_seed(1000 * trial + fan)
        bound = 2 * deviation
        return torch.nn.init.trunc_normal_(torch.empty(shape), 0, deviation, -bound, bound, generator=random)
    return torch.stack([one(trial) for trial in range(trials)]).to(device)


def convolve(x, weight, bias):
    """x: [trials, batch, channels, h, w], every trial with weights of its own: patches, then one product a trial."""
    batch, side = x.shape[1], x.shape[3] - 4
    patches = x.unfold(3, 5, 1).unfold(4, 5, 1).permute(0, 2, 5, 6, 1, 3, 4).reshape(trials, weight.shape[2], -1)
    y = torch.bmm(weight, patches) + bias[:, :, None]
    return y.view(trials, weight.shape[1], batch, side, side).transpose(1, 2)


def pooled(x):
    y = F.max_pool2d(F.relu(x).reshape(-1, *x.shape[2:]), 2)
    return y.view(*x.shape[:2], *y.shape[1:])


def logits(p, x):
    x = pooled(convolve(x[:, :, None], p[0], p[3]))
    x = pooled(convolve(x, p[1], p[4]))
    return torch.bmm(x.flatten(2), p[2].transpose(1, 2)) + p[5][:, None]


def gradients(p, x, y):
    losses = F.cross_entropy(logits(p, x).flatten(0, 1), y.flatten(), reduction="none")
    return torch.autograd.grad(losses.sum() / y.shape[1], p)


def for_all(x):
    return x[None].expand(trials, *x.shape)


def snip(p, x, y):
    """Masks of what is kept, by the magnitude of w dL/dw over all that is learnt from."""
    total = [torch.zeros_like(q) for q in p]
    for at in range(0, LEARNT, 250):
        for sum, g in zip(total, gradients(p, for_all(x[at : at + 250]), for_all(y[at : at + 250]))):
            sum += g
    scores = torch.cat([(g * q).abs().flatten(1) for g, q in zip(total, p)], 1).detach()
    kept = scores.topk(round(scores.shape[1] * (1 - options.sparsity)), 1).indices
    mask = torch.zeros_like(scores).scatter_(1, kept, 1.0)
    return [m.view_as(q) for m, q in zip(mask.split([q[0].numel() for q in p], 1), p)]


def wrong(p, x, y):
    """Images that each trial gets wrong."""
    count, bad = max(50, 40_000 // trials), torch.zeros(trials, device=device)
    for at in range(0, len(x), count):
        out = logits(p, for_all(x[at : at + count]))
        bad += ((out.argmax(2) != y[None, at : at + count]) | ~out.isfinite().all(2)).sum(1)
    return bad.tolist()


began = time.time()
images, labels = read()
held_out, images = images[: len(images) - LEARNT], images[len(images) - LEARNT :]
held_labels, labels = labels[: len(labels) - LEARNT], labels[len(labels) - LEARNT :]
p = [initial((32, 25), 25), initial((64, 800), 800), initial((10, 1024), 1024)]
p = [q.requires_grad_() for q in p + [torch.zeros(trials, n, device=device) for n in (32, 64, 10)]]
rates = np.geomspace(*options.rates, trials)
np.random.RandomState(3).shuffle(rates)
rate = [torch.tensor(rates, device=device, dtype=torch.float32).view(-1, *[1] * (q.dim() - 1)) for q in p]
masks = snip(p, images, labels) if options.sparsity else [1] * len(p)
with torch.no_grad():
    for q, mask in zip(p, masks):
        q *= mask
orders, random = [np.empty(0, np.int64)] * trials, [np.random.RandomState(7 + trial) for trial in range(trials)]
reached, step = {}, 0
while step < options.steps and (not reached or step < min(reached.values()) + 2 * options.every):
    step += 1
    for trial in range(trials):
        while len(orders[trial]) < options.batch:
            orders[trial] = np.concatenate([orders[trial], random[trial].permutation(LEARNT)])
    picks = torch.as_tensor(np.stack([order[: options.batch] for order in orders]), device=device)
    orders = [order[options.batch :] for order in orders]
    found = gradients(p, images[picks], labels[picks])
    with torch.no_grad():
        for q, g, mask, r in zip(p, found, masks, rate):
            q -= r * mask * g
        if step % options.every == 0:
            for trial, bad in enumerate(wrong(p, held_out, held_labels)):
                if bad <= options.goal * len(held_out):
                    reached.setdefault(trial, step)
best = sorted((steps, round(float(rates[trial]), 4)) for trial, steps in reached.items())[:4]
print(f"batch {options.batch}, sparsity {options.sparsity}, {options.pixels} pixels, {trials} trials: "
      f"K* {best[0][0] if best else f'above {step}'}; steps and rates {best}; {time.time() - began:.0f} s", flush=True)
