"""Makes hub/pruned.safetensors: what pruning while it trains does to the tiny GPT-2 of hub/gpt2, step by step in PyTorch, for tests/train/hub/pruned.rs.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python pruned.py

Weights are dense and multiplied by masks, gradients are masked before they are clipped, and AdamW keeps dense moments, as a plain program has it; all in f64. Every
step is over the same 16 tokens. Cases:
    gradual     magnitudes per layer on a cubic schedule; `density`: the same with every rate divided by density to the power of 0.3
    rigl        smallest weights for largest gradients; grown weights start at 0, their first moment at 0, their second at the mean of those that stay
    elsa        ADMM: the pull joins the gradient after clipping, z is the top of v (x + u)^2 every three steps; at the end the top of v x^2 stays
A file holds `tokens`, and of each case `CASE/losses` (one a step), `CASE/after/NAME` (weights at the end), and `rigl/first/NAME` (the mask it starts with, bits).
No choice may hang on rounding: the seed is the first one of which the last weight that stays and the first that goes are never nearer than one part in 10^4.
"""

import copy
import math
import platform
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

STEPS, WARMUP, PEAK, SPARSITY, START, END = 20, 4, 0.01, 0.75, 5, 15
here = Path(__file__).parent / "hub"
START_MODEL = GPT2LMHeadModel.from_pretrained(here / "gpt2", attn_implementation="eager").double().train()


class TooNear(Exception):
    """Rounding to f32 could decide."""


def best(scores, count):
    """The mask of the largest scores."""
    ordered = scores.flatten().sort(descending=True).values
    if 0 < count < len(ordered) and ordered[count - 1] - ordered[count] < 1e-4 * ordered[count - 1]:
        raise TooNear
    return scores >= ordered[count - 1] if count else torch.zeros_like(scores, dtype=torch.bool)


class Run:
    def __init__(self):
        self.model = copy.deepcopy(START_MODEL)
        self.named = {name.removeprefix("transformer."): p for name, p in self.model.named_parameters()}
        self.candidates = {name: p for name, p in self.named.items() if p.dim() > 1 and name.startswith("h.")}
        self.masks = {}
        split = {True: [], False: []}
        for p in self.named.values():
            split[p.dim() > 1].append(p)
        groups = [dict(params=split[True], weight_decay=0.1), dict(params=split[False], weight_decay=0.0)]
        self.adamw = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)
        self.losses = []

    def density(self):
        of = lambda name, p: self.masks[name].sum().item() if name in self.masks else p.numel()
        return sum(of(name, p) for name, p in self.candidates.items()) / sum(p.numel() for p in self.candidates.values())

    def backward(self):
        self.model.zero_grad()
        loss = F.cross_entropy(self.model(tokens[None, :-1]).logits[0], tokens[1:])
        loss.backward()
        return loss.item()

    def mask_weights(self):
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.named[name].mul_(mask)

    def step(self, by_density=0.0, pull=lambda: None):
        number = len(self.losses)
        behind = (number - WARMUP) / (STEPS - WARMUP)
        lr = PEAK * (number + 1) / WARMUP if number < WARMUP else PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * behind)))
        for group in self.adamw.param_groups:
            group["lr"] = lr * self.density() ** -by_density
        self.losses.append(self.backward())
        for name, mask in self.masks.items():
            self.named[name].grad.mul_(mask)
        norm = sum(p.grad.pow(2).sum() for p in self.named.values()).sqrt()
        for p in self.named.values():
            p.grad.mul_(min(1.0, 1.0 / norm))
        pull()
        self.adamw.step()
        self.mask_weights()

    def save(self, case):
        out[f"{case}/losses"] = np.array(self.losses, dtype=np.float32)
        for name, p in self.named.items():
            out[f"{case}/after/{name}"] = np.ascontiguousarray(p.detach().numpy().astype(np.float32))


def gradual(case, by_density):
    run = Run()
    for taken in range(STEPS):
        if START <= taken <= END and ((taken - START) % 3 == 0 or taken == END):
            sparsity = SPARSITY * (1 - (1 - (taken - START) / (END - START)) ** 3)
            for name, p in run.candidates.items() if sparsity > 0 else ():
                kept = p.abs() * run.masks.get(name, 1)
                run.masks[name] = best(kept.detach(), math.floor((1 - sparsity) * p.numel() + 0.5))
            run.mask_weights()
        run.step(by_density)
    run.save(case)


def rigl():
    run = Run()
    for name, p in run.candidates.items():
        run.masks[name] = (torch.randperm(p.numel(), generator=generator) < p.numel() // 4).reshape(p.shape)
        bits = np.packbits(run.masks[name].numpy().ravel(), bitorder="little")
        out[f"rigl/first/{name}"] = np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)
    run.mask_weights()
    for taken in range(STEPS):
        if taken > 0 and taken % 3 == 0 and taken < 0.75 * STEPS:
            fraction = 0.3 / 2 * (1 + math.cos(math.pi * taken / (0.75 * STEPS)))
            run.backward()
            for name, p in run.candidates.items():
                mask, state = run.masks[name], run.adamw.state[p]
                moving = math.floor(fraction * mask.sum().item() + 0.5)
                staying = best((p.abs() * mask).detach(), int(mask.sum()) - moving)
                new = staying | best(p.grad.abs() * ~staying, moving)
                grown, stays = new & ~mask, new & mask
                state["exp_avg"][~stays] = 0
                state["exp_avg_sq"][grown] = state["exp_avg_sq"][stays].mean()
                run.masks[name] = new
            run.mask_weights()
        run.step()
    run.save("rigl")


def elsa():
    run, penalty, z, u = Run(), 0.05, {}, {}
    kept = lambda p: math.floor((1 - SPARSITY) * p.numel() + 0.5)

    def pull():
        for name in z:
            p = run.named[name]
            p.grad.add_(penalty * (p.detach() - z[name] + u[name]))

    for taken in range(STEPS):
        for name, p in run.candidates.items() if START <= taken <= END else ():
            x = p.detach().clone()
            v = run.adamw.state[p]["exp_avg_sq"] if taken else None
            if taken == END:
                run.masks[name] = best(v * x**2, kept(p))
                z.pop(name), u.pop(name)
            elif taken == START:
                z[name], u[name] = x * best(x.abs(), kept(p)), torch.zeros_like(x)
            elif (taken - START) % 3 == 0:
                w = x + u[name]
                z[name] = w * best(v * w**2, kept(p))
                u[name] = w - z[name]
        run.mask_weights()
        run.step(pull=pull)
    run.save("elsa")


for seed in range(100_000):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 40, (17,), generator=generator)
    out = {"tokens": tokens.numpy().astype(np.uint8)}
    try:
        gradual("gradual", 0.0)
        gradual("density", 0.3)
        rigl()
        elsa()
        break
    except TooNear:
        continue
metadata = dict(torch=torch.__version__, python=platform.python_version(), numpy=np.__version__, seed=str(seed))
save_file(out, here / "pruned.safetensors", metadata)
print(seed, {name: out[name][[0, -1]] for name in out if name.endswith("losses")})
