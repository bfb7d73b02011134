"""Makes surface.safetensors: what the loss around two small networks is like, for tests/train/measure.rs.

    pip install torch==2.15.0 safetensors==0.8.0 numpy==2.4.6
    python surface.py

Everything is computed in f64 from definitions alone: the Hessian element by element and its eigenvalues by LAPACK, gradients of single samples one by
one, and the highest point of a box by looking at all of its corners where the loss is convex.

"cnn": a convolution, ReLU, max pool and a linear layer, dense and with masks. The seed is the first one of which no ReLU and no pool is so near a kink,
at any point that is looked at, that rounding to f32 could decide otherwise. "linear": one linear layer, whose loss is convex.

    pixels/NET u8 [count, rows, columns], labels/NET u8 [count]
    start/NET/NAME    weights where the step begins; of pruned ones nothing is meant
    after/CASE/NAME   where it ends, and where all but the smoothness is measured            CASE is cnn-dense, cnn-masked or linear
    mask/NAME         bits of the kept weights, the first in the lowest bit; padded to words of 32 bits
    metadata "truth"  for each CASE the numbers
"""

import itertools
import json
import platform

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F

EPSILON = 0.02
NEAREST = 2e-5


def standard(pixels):
    values = pixels.numpy().astype(np.float64)
    return torch.from_numpy(((values - values.mean()) / values.std()).astype(np.float32)).double()[:, None]


def images(generator, count, size, classes):
    labels = torch.arange(count) % classes
    pixels = torch.randint(0, 128, (count, size, size), generator=generator)
    pixels += torch.randint(0, 128, (classes, size, size), generator=generator)[labels]
    return pixels.to(torch.uint8), labels


class Network:
    """A function of a flat vector of parameters."""

    def __init__(self, layers, pixels, labels, generator):
        self.model, self.labels, self.x = nn.Sequential(*layers).double(), labels, standard(pixels)
        self.start = {}
        for name, parameter in self.model.named_parameters():
            fan = parameter[0].numel() if parameter.dim() > 1 else 1
            scale = 1.5 * fan ** -0.5 if parameter.dim() > 1 else 0.2
            self.start[name] = (torch.randn(parameter.shape, generator=generator) * scale).double()

    def flat(self, tensors):
        return torch.cat([tensors[name].reshape(-1) for name in self.start])

    def tensors(self, flat):
        sizes = [t.numel() for t in self.start.values()]
        return {n: p.reshape(t.shape) for (n, t), p in zip(self.start.items(), flat.split(sizes))}

    def loss(self, flat, picks=slice(None)):
        logits = torch.func.functional_call(self.model, self.tensors(flat), (self.x[picks],))
        return F.cross_entropy(logits, self.labels[picks])

    def gradient(self, flat, picks=slice(None)):
        flat = flat.detach().requires_grad_()
        return torch.autograd.grad(self.loss(flat, picks), flat)[0]

    def kinks(self, flat):
        """How near the pass is to one: inputs of ReLU to 0, the two largest of a window to each other."""
        x, nearest, tensors = self.x, float("inf"), self.tensors(flat)
        for i, layer in enumerate(self.model):
            own = {n.removeprefix(f"{i}."): t for n, t in tensors.items() if n.startswith(f"{i}.")}
            if isinstance(layer, nn.ReLU):
                nearest = min(nearest, x.abs().min().item())
            if isinstance(layer, nn.MaxPool2d):
                windows = x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).sort(-1).values
                # Where the largest is a closed ReLU, nothing passes whichever is taken.
                gap = (windows[..., -1] - windows[..., -2])[windows[..., -1] > 0]
                nearest = min(nearest, gap.min().item())
            x = torch.func.functional_call(layer, own, (x,)) if own else layer(x)
        return nearest

    def measure(self, mask):
        """All numbers for the space of the weights that a mask keeps, and where the step ends."""
        start = (self.flat(self.start) * mask).float().double()
        after = (start - 0.3 * self.gradient(start) * mask).float().double()
        way = after - start
        before = self.gradient(start) * mask
        points = [start + share / 10 * way for share in range(11)]
        change = lambda i: ((self.gradient(points[i]) * mask - before).norm() / (i / 10 * way.norm())).item()
        smoothness = max((change(i), i / 10) for i in range(1, 11))
        kept = mask.nonzero().ravel()
        hessian = torch.autograd.functional.hessian(self.loss, after)[kept][:, kept]
        count = len(self.labels)
        single = torch.stack([self.gradient(after, slice(i, i + 1))[kept] for i in range(count)])
        variance = single.var(0, unbiased=True).sum().item()
        gradient = self.gradient(after)[kept]
        truth = dict(
            loss=self.loss(after).item(), gradient=gradient.norm().item(), smoothness=smoothness[0], share=smoothness[1],
            length=way.norm().item(), eigenvalues=torch.linalg.eigvalsh(hessian).tolist(), variance=variance,
            # |G|^2 of the mean has the variance of `count` samples in it.
            signal=gradient.norm().item() ** 2 - variance / count, highest=self.highest(after, mask),
        )
        return truth, after, min(self.kinks(point) for point in points + [after])

    def highest(self, middle, mask):
        """The highest loss of the box: of all corners where they can be counted, otherwise the best of many ascents."""
        side = EPSILON * (middle.abs() + 1) * mask
        if mask.sum() <= 16:
            with torch.no_grad():
                return max(self.loss(middle + side * torch.tensor(s).double()).item() for s in itertools.product([-1, 1], repeat=len(mask)))
        generator = torch.Generator().manual_seed(3)
        best = -float("inf")
        for _ in range(20):
            point = middle + side * (2 * torch.rand(len(mask), generator=generator).double() - 1)
            for step in range(100):
                point = point + side * self.gradient(point).sign() * (0.5 * 0.95**step)
                point = torch.minimum(torch.maximum(point, middle - side), middle + side)
                best = max(best, self.loss(point).item())
        return best


def cnn(seed):
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = images(generator, 24, 6, 4)
    layers = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)]
    network = Network(layers, pixels, labels, generator)
    weights = {n: t for n, t in network.start.items() if t.dim() > 1}
    masks = {n: torch.rand(t.shape, generator=generator) < 0.5 for n, t in weights.items()}
    return network, pixels, labels, masks


def linear():
    generator = torch.Generator().manual_seed(5)
    pixels, labels = images(generator, 24, 2, 3)
    return Network([nn.Flatten(), nn.Linear(4, 3)], pixels, labels, generator), pixels, labels


def main():
    torch.set_num_threads(1)
    out, truths = {}, {}

    def store(prefix, network, flat):
        for name, tensor in network.tensors(flat).items():
            out[f"{prefix}/layers.{name}"] = np.ascontiguousarray(tensor.numpy().astype(np.float32))

    for seed in range(1000):
        network, pixels, labels, masks = cnn(seed)
        ones = {n: torch.ones_like(t) for n, t in network.start.items()}
        cases = {"cnn-dense": network.flat(ones), "cnn-masked": network.flat({n: masks.get(n, ones[n]).double() for n in ones})}
        start = network.flat(network.start).float().double()
        points = [start * mask for mask in cases.values()]
        if min(network.kinks(point) for point in points) < NEAREST:
            continue
        measured = {case: network.measure(mask) for case, mask in cases.items()}
        if min(nearest for _, _, nearest in measured.values()) > NEAREST:
            break
    for case, (truth, after, nearest) in measured.items():
        truths[case] = truth
        store("after/" + case, network, after)
    for name, mask in masks.items():
        bits = np.packbits(mask.numpy().ravel(), bitorder="little")
        out[f"mask/layers.{name}"] = np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)
    store("start/cnn", network, network.flat(network.start))
    out |= {"pixels/cnn": pixels.numpy(), "labels/cnn": labels.to(torch.uint8).numpy()}

    network, pixels, labels = linear()
    flat = network.flat(network.start)
    truths["linear"], after, _ = network.measure(torch.ones_like(flat))
    store("start/linear", network, flat)
    store("after/linear", network, after)
    out |= {"pixels/linear": pixels.numpy(), "labels/linear": labels.to(torch.uint8).numpy()}

    print(f"seed {seed}, the nearest kink {min(n for _, _, n in measured.values()):.1e}")
    for case, truth in truths.items():
        ends = truth["eigenvalues"][0], truth["eigenvalues"][-1]
        print(case, {n: v for n, v in truth.items() if n != "eigenvalues"}, "eigenvalues from %.4g to %.4g" % ends)
    metadata = dict(
        torch=torch.__version__, numpy=np.__version__, python=platform.python_version(), truth=json.dumps(truths),
        epsilon=str(EPSILON),
    )
    save_file(out, "surface.safetensors", metadata)


if __name__ == "__main__":
    main()
