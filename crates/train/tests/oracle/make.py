"""Makes gpt.safetensors, llama.safetensors and cnn.safetensors: what PyTorch says of three small networks, for tests/train/oracle.rs;
flow.safetensors: GraSP's product with the Hessian, by double backward in f64, for tests/train/prune/flow.rs;
and resnet8.safetensors: one pass forward and back of the network of Lee et al. (2021), for tests/train/oracle/resnet8.rs.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python make.py [gpt llama cnn flow resnet8]

The GPT-2 is Hugging Face's, the other networks are of torch.nn's layers, with torch's own attention. Everything that the tests compare with was computed in f64
("truth"); PyTorch's own f32, or bf16 with sums over micro-batches in f32, computed beside it, says how far from that a good program
may be, and the tests allow a multiple of it (the file's metadata, "own/..."). Weights begin as numbers that bf16 has.

A file holds, under the names that checkpoints have, filters of convolutions channels last as ours are in memory:
    init/NAME             the weights, before pruning
    mask/NAME             bits, one a weight, the first in the lowest bit; padded to words of 32 bits
    tokens | pixels, labels   micro-batches: u8 [micro_batch, ...]; a pixel is (u8 - 128) / 64
    CASE/logits, CASE/loss    of micro-batch 0                                CASE is dense or masked
    CASE/gradient/NAME        of the mean loss of micro-batch 0
    CASE/after/NAME           weights after three steps of AdamW, over micro-batches 0, 1, 2; running statistics too
    CASE/sum/NAME             the gradient of the mean loss over all micro-batches
    CASE/after_sums/NAME      masters after three steps of AdamW over all micro-batches, each taken at masters rounded to bf16
"""

import json
import platform
import sys

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

ADAMW = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6)
DECAY = 0.1
KEPT = 0.3


def ours(tensor):
    """Filters as they are in our memory: channels last."""
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


def bits(mask):
    """Of a mask or of signs, 32 in a word."""
    packed = np.packbits(ours(mask).numpy().ravel(), bitorder="little")
    return np.pad(packed, (0, -len(packed) % 4)).view(np.uint32)


class Residual(nn.Module):
    def __init__(self, branch, shortcut):
        super().__init__()
        self.branch, self.shortcut = nn.Sequential(*branch), nn.Sequential(*shortcut)

    def forward(self, x):
        return self.branch(x) + self.shortcut(x)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        conv = lambda i, o, k, s: nn.Conv2d(i, o, k, stride=s, padding=k // 2, bias=False)
        branch = [conv(8, 12, 3, 2), nn.BatchNorm2d(12), nn.ReLU(), conv(12, 12, 3, 1), nn.BatchNorm2d(12)]
        shortcut = [conv(8, 12, 1, 2), nn.BatchNorm2d(12)]
        pool = [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(
            conv(3, 8, 3, 1), nn.BatchNorm2d(8), nn.ReLU(), Residual(branch, shortcut), nn.ReLU(), *pool
        )
        # Pools and the flattening are two layers of ours: a max pool and a global mean.
        self.layers.append(nn.Linear(12, 5))

    def forward(self, x):
        return self.layers(x)

    @staticmethod
    def names(name):
        return name.replace("layers.8.", "layers.7.")


class Llama(nn.Module):
    """A layer as Llama has it, but for learnt positions: RMS norm, grouped queries, SwiGLU, no biases."""

    HEADS, KV_HEADS, WIDTH, HIDDEN = 4, 2, 16, 24

    def __init__(self):
        super().__init__()
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        norm = lambda: nn.RMSNorm(self.WIDTH, eps=1e-6)
        shared = self.WIDTH // self.HEADS * self.KV_HEADS
        self.wte, self.wpe = nn.Embedding(24, self.WIDTH), nn.Embedding(16, self.WIDTH)
        self.norm_1, self.norm_2, self.norm_f = norm(), norm(), norm()
        self.q, self.k, self.v = linear(self.WIDTH, self.WIDTH), linear(self.WIDTH, shared), linear(self.WIDTH, shared)
        self.o = linear(self.WIDTH, self.WIDTH)
        self.gate, self.up = linear(self.WIDTH, self.HIDDEN), linear(self.WIDTH, self.HIDDEN)
        self.down = linear(self.HIDDEN, self.WIDTH)
        self.head = linear(self.WIDTH, 24)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        h = self.norm_1(x)
        split = lambda t, heads: t.unflatten(-1, (heads, -1)).transpose(1, 2)
        q, k, v = split(self.q(h), self.HEADS), split(self.k(h), self.KV_HEADS), split(self.v(h), self.KV_HEADS)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm_f(x))

    @staticmethod
    def names(name):
        places = dict(
            wte="0", wpe="1", norm_1="2.branch.0", q="2.branch.1.branches.0.0", k="2.branch.1.branches.1.0",
            v="2.branch.1.branches.2.0", o="2.branch.3", norm_2="3.branch.0", gate="3.branch.1.branches.0.0",
            up="3.branch.1.branches.1.0", down="3.branch.2", norm_f="4", head="5",
        )
        module, parameter = name.split(".")
        return f"layers.{places[module]}.{parameter}"


def gpt():
    config = GPT2Config(
        vocab_size=24, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def is_matrix(name, parameter):
    """What is decayed, and pruned unless it is an embedding."""
    return parameter.dim() > 1


class Oracle:
    """One network: how it is built, its micro-batches, and how a batch becomes logits and a loss."""

    def __init__(self, file, build, rename, batches, run):
        self.file, self.build, self.rename, self.batches, self.run = file, build, rename, batches, run
        self.out, self.own = {}, {}
        model = build()
        generator = torch.Generator().manual_seed(7)
        self.init, self.masks = {}, {}
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan = parameter[0].numel() if parameter.dim() > 1 else 1
            # Wide enough that softmaxes and gates are far from their starts.
            value = noise * (fan ** -0.5 if parameter.dim() > 1 else 0.1)
            if parameter.dim() == 1 and name.endswith("weight"):
                value = 1 + value
            self.init[name] = value.bfloat16().float()
            pruned = is_matrix(name, parameter) and "wte" not in name and "wpe" not in name
            if pruned:
                self.masks[name] = torch.rand(parameter.shape, generator=generator) < KEPT

    def model(self, dtype, masks, weights=None):
        model = self.build().to(dtype).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_((weights or self.init)[name] * masks.get(name, 1))
        return model

    def save(self, name, tensor):
        self.out[name] = np.ascontiguousarray(tensor.detach().double().numpy().astype(np.float32))

    def named(self, prefix, tensors, masks):
        for name, tensor in tensors.items():
            tensor = ours(tensor * masks.get(name, 1))
            if name in masks:
                # Of pruned weights nothing is said.
                tensor = tensor[ours(masks[name])]
            self.save(prefix + self.rename(name), tensor)

    def gradient(self, dtype, masks, batches, weights=None):
        """The gradient of the mean loss, each micro-batch's rounded to `dtype` and summed in at least f32."""
        model, sums = self.model(dtype, masks, weights), {}
        for batch in batches:
            logits, loss = self.run(model, batch, dtype)
            model.zero_grad()
            (loss / len(batches)).backward()
            for name, parameter in model.named_parameters():
                wide = parameter.grad.double() if dtype == torch.float64 else parameter.grad.float()
                sums[name] = sums[name] + wide if name in sums else wide.clone()
        return logits, loss, sums

    def steps(self, dtype, masks):
        model = self.model(dtype, masks)
        split = {True: [], False: []}
        for name, parameter in model.named_parameters():
            split[is_matrix(name, parameter)].append(parameter)
        groups = [dict(params=split[True], weight_decay=DECAY), dict(params=split[False], weight_decay=0.0)]
        adamw = torch.optim.AdamW(groups, **ADAMW)
        for batch in self.batches[:3]:
            model.zero_grad()
            self.run(model, batch, dtype)[1].backward()
            for name, parameter in model.named_parameters():
                parameter.grad *= masks.get(name, 1)
            adamw.step()
        after = {name: p.detach() for name, p in model.named_parameters()}
        running = {name: b for name, b in model.named_buffers() if "running" in name}
        return after, running

    def mixed_steps(self, dtype, masks):
        """Three steps over all micro-batches at once: passes in `dtype` at weights rounded to bf16, everything else wide."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        masters = {name: (value * masks.get(name, 1)).to(wide).requires_grad_() for name, value in self.init.items()}
        split = {True: [], False: []}
        for name, master in masters.items():
            split[is_matrix(name, master)].append(master)
        groups = [dict(params=split[True], weight_decay=DECAY), dict(params=split[False], weight_decay=0.0)]
        adamw = torch.optim.AdamW(groups, **ADAMW)
        for _ in range(3):
            rounded = {name: master.detach().bfloat16().float() for name, master in masters.items()}
            _, _, sums = self.gradient(dtype, masks, self.batches, rounded)
            for name, master in masters.items():
                master.grad = sums[name].to(wide) * masks.get(name, 1)
            adamw.step()
        return {name: master.detach() for name, master in masters.items()}

    def compare(self, label, truth, other, masks, base=None):
        """The largest relative error of a tensor; those of small norm are measured against the whole."""
        kept = {n: masks.get(n, torch.ones_like(t, dtype=torch.bool)) for n, t in truth.items()}
        norm = {n: (t.double() - (base[n].double() if base else 0))[kept[n]].norm().item() for n, t in truth.items()}
        whole = sum(x * x for x in norm.values()) ** 0.5
        error = {n: (truth[n].double() - other[n].double())[kept[n]].norm().item() for n in truth}
        worst = max(error[n] / max(norm[n], 0.01 * whole) for n in truth)
        total = sum(x * x for x in error.values()) ** 0.5 / whole
        self.own[label] = dict(worst=worst, total=total)
        print(f"{self.file} {label}: worst tensor {worst:.2e}, all {total:.2e}")

    def make(self):
        full, single, half = torch.float64, torch.float32, torch.bfloat16
        for name, value in self.init.items():
            self.save("init/" + self.rename(name), ours(value))
        for name, mask in self.masks.items():
            self.out["mask/" + self.rename(name)] = bits(mask)
        for case, masks in [("dense", {}), ("masked", self.masks)]:
            logits, loss, gradient = self.gradient(full, masks, self.batches[:1])
            own_logits, own_loss, own = self.gradient(single, masks, self.batches[:1])
            self.compare(f"{case}/gradient", gradient, own, masks)
            self.compare(f"{case}/logits", {"": logits}, {"": own_logits}, {})
            self.save(f"{case}/logits", logits)
            self.save(f"{case}/loss", loss.reshape(1))
            self.named(f"{case}/gradient/", gradient, masks)
            after, running = self.steps(full, masks)
            own, own_running = self.steps(single, masks)
            start = {name: value * masks.get(name, 1) for name, value in self.init.items()}
            self.compare(f"{case}/after", after, own, masks, start)
            if running:
                self.compare(f"{case}/running", running, own_running, {})
            self.named(f"{case}/after/", after, masks)
            self.named(f"{case}/after/", running, {})
            _, _, total = self.gradient(full, masks, self.batches)
            _, _, own = self.gradient(half, masks, self.batches)
            self.compare(f"{case}/sum", total, own, masks)
            self.named(f"{case}/sum/", total, masks)
            after, own = self.mixed_steps(full, masks), self.mixed_steps(half, masks)
            self.compare(f"{case}/after_sums", after, own, masks, start)
            self.named(f"{case}/after_sums/", after, masks)
        import transformers

        metadata = dict(
            torch=torch.__version__, transformers=transformers.__version__, numpy=np.__version__, python=platform.python_version(),
            adamw=json.dumps(dict(ADAMW, weight_decay=DECAY)), own=json.dumps(self.own),
        )
        save_file(self.out, self.file + ".safetensors", metadata)


class Gate(nn.ReLU):
    """A ReLU that notes how near its inputs come to the kink."""

    nearest = float("inf")

    def forward(self, x):
        Gate.nearest = min(Gate.nearest, x.detach().abs().min().item())
        return super().forward(x)


def flow():
    """Twenty convolutions with batch norm: along the gradient, such a network bends more than any other of its size.

    The seed is the first one of which no ReLU is so near its kink that rounding to f32 could open or close it: then the
    truth of f64 is the truth for everybody.
    """
    depth, width, count, temperature = 20, 8, 20, 200.0
    labels = torch.arange(count) % 10
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 128, (count, 8, 8), generator=generator)
        pixels = (pixels + torch.randint(0, 128, (10, 8, 8), generator=generator)[labels]).to(torch.uint8).numpy()
        layers = []
        for i in range(depth):
            conv = nn.Conv2d(width if i else 1, width, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(width), Gate()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Linear(width, 10)]
        weights = {f"layers.{i}.weight": layer for i, layer in enumerate(layers) if isinstance(layer, (nn.Conv2d, nn.Linear))}
        out = {}
        with torch.no_grad():
            for name, layer in weights.items():
                sign = torch.rand(layer.weight.shape, generator=generator) < 0.5
                scale = np.float32(0.01 if isinstance(layer, nn.Linear) else (2 / (9 * width)) ** 0.5)
                layer.weight.copy_(torch.where(sign, float(scale), -float(scale)))
                out["positive/" + name] = bits(sign)
                out["scale/" + name] = np.array([scale])
            layers[-1].bias.zero_()
        layers.insert(-1, nn.Flatten())
        model = nn.Sequential(*layers).double().train()
        x = torch.from_numpy(((pixels - pixels.mean()) / pixels.std()).astype(np.float32)).double()[:, None]
        Gate.nearest = float("inf")
        loss = F.cross_entropy(model(x) / temperature, labels)
        if Gate.nearest > 1.5e-5:
            break
    parameters = [layer.weight for layer in weights.values()]
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    dot = sum((g * g.detach()).sum() for g in gradient)
    for name, product in zip(weights, torch.autograd.grad(dot, parameters)):
        out["flow/" + name] = np.ascontiguousarray(ours(product).numpy().astype(np.float32))
    print(f"flow: seed {seed}, the nearest kink {Gate.nearest:.1e}")
    out |= dict(pixels=pixels, labels=labels.to(torch.uint8).numpy())
    save_file(out, "flow.safetensors", dict(torch=torch.__version__, temperature=str(temperature), seed=str(seed)))


class ResNet8(nn.Module):
    """As the program of Lee et al. has it: convolutions pad as TensorFlow's SAME, at stride 2 by nothing before and
    one pixel behind; the shortcut of a block that widens is the average pool of relu(x) and zero channels."""

    def __init__(self):
        super().__init__()
        conv = lambda i, o, s: nn.Conv2d(i, o, 3, stride=s)
        self.conv, self.fc = conv(3, 16, 1), nn.Linear(64, 10)
        for n, (i, o) in enumerate([(16, 16), (16, 32), (32, 64)], 1):
            block = nn.Module()
            block.conv1, block.conv2 = conv(i, o, 1 if i == o else 2), conv(o, o, 1)
            setattr(self, f"block{n}", block)

    @staticmethod
    def same(conv, x):
        sides = (0, 1, 0, 1) if conv.stride[0] == 2 else (1, 1, 1, 1)
        return conv(F.pad(x, sides))

    def forward(self, x):
        x = self.same(self.conv, x)
        for block in [self.block1, self.block2, self.block3]:
            active = F.relu(x)
            y = self.same(block.conv2, F.relu(self.same(block.conv1, active)))
            grown = y.shape[1] - x.shape[1]
            x = y + (F.pad(F.avg_pool2d(active, 2), (0, 0, 0, 0, 0, grown)) if grown else x)
        return self.fc(F.relu(x).mean((2, 3)))


def resnet8():
    """Weights are a rule that the test knows, so the file has none; of gradients it has those of the biases and of
    three weights, through which all others pass."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (4, 8, 12, 3), generator=generator)
    labels = torch.tensor([3, 0, 9, 5])
    x = ((pixels.double() - 128) / 64).permute(0, 3, 1, 2)
    results = {}
    for dtype in [torch.float64, torch.float32]:
        model = ResNet8().double()
        with torch.no_grad():
            for number, (_, p) in enumerate(sorted(model.named_parameters())):
                scale = (2 / p[0].numel()) ** 0.5 if p.dim() > 1 else 0.1
                i = torch.arange(p.numel())
                noise = ((i * 7919 + number * 104729) % 1009 - 504).double() / 504
                p.copy_((noise * scale).float().double().reshape(p.shape))
        model = model.to(dtype)
        logits = model(x.to(dtype))
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        kept = {n: p.grad for n, p in model.named_parameters() if p.dim() == 1 or n.startswith(("conv.", "fc.", "block2.conv1."))}
        results[dtype] = dict(logits=logits.detach(), loss=loss.detach().reshape(1), **kept)
    truth, own = results[torch.float64], results[torch.float32]
    worst = max(((truth[n] - own[n].double()).norm() / truth[n].norm()).item() for n in truth)
    print(f"resnet8: the worst tensor in f32 {worst:.2e}, loss {truth['loss'].item():.4f}")
    out = {"dense/" + (n if n in ("logits", "loss") else "gradient/" + n): ours(t).float().contiguous().numpy() for n, t in truth.items()}
    out |= dict(pixels=pixels.to(torch.uint8).numpy()[None], labels=labels.to(torch.uint8).numpy()[None])
    save_file(out, "resnet8.safetensors", dict(torch=torch.__version__, own=json.dumps(dict(worst=worst))))


def main(wanted):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(11)

    # A chain of tokens that a model can learn from: the gradients of micro-batches then have much in common.
    steps = torch.randint(0, 3, (256, 16), generator=generator)
    tokens = torch.cat([torch.randint(0, 24, (256, 1), generator=generator), steps + 1], 1).cumsum(1) % 24

    def language(model, batch, dtype):
        ids = torch.from_numpy(batch.astype(np.int64))[None]
        logits = model(ids[:, :-1])
        logits = getattr(logits, "logits", logits)
        return logits[0], F.cross_entropy(logits[0], ids[0, 1:])

    ids = tokens.to(torch.uint8).numpy()
    oracle = Oracle("gpt", gpt, lambda name: name.removeprefix("transformer."), list(ids), language)
    oracle.out["tokens"] = ids
    if "gpt" in wanted:
        oracle.make()

    oracle = Oracle("llama", Llama, Llama.names, list(ids[:64]), language)
    oracle.out["tokens"] = ids[:64].copy()
    if "llama" in wanted:
        oracle.make()

    pixels = torch.randint(0, 256, (64, 4, 8, 8, 3), generator=generator)
    labels = torch.randint(0, 5, (64, 4), generator=generator)
    # A class shows as one colour, brighter in one half of the image.
    for i in range(64):
        for j in range(4):
            c = int(labels[i, j])
            pixels[i, j, :, (c % 2) * 4 : (c % 2) * 4 + 4, c % 3] //= 4

    def images(model, batch, dtype):
        x, y = batch
        x = ((torch.from_numpy(x).to(dtype) - 128) / 64).permute(0, 3, 1, 2)
        logits = model(x)
        return logits, F.cross_entropy(logits, torch.from_numpy(y).long())

    pixels, labels = pixels.to(torch.uint8).numpy(), labels.to(torch.uint8).numpy()
    oracle = Oracle("cnn", Cnn, Cnn.names, list(zip(pixels, labels)), images)
    oracle.out |= dict(pixels=pixels, labels=labels)
    if "cnn" in wanted:
        oracle.make()


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["gpt", "llama", "cnn", "flow", "resnet8"]
    main(wanted)
    if "flow" in wanted:
        flow()
    if "resnet8" in wanted:
        resnet8()
