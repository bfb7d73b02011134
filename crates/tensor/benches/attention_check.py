"""The attention kernels against PyTorch: errors, repeatability, and times as ratios against its backends.

Needs an NVIDIA GPU with PyTorch and CuPy:  python3 crates/tensor/benches/attention_check.py [--errors]

An error is |ours - exact| / |exact| over a whole tensor, exact being float64 on the same bf16 inputs. It may be
at most 1.5 times what PyTorch's flash backend has on them, or BOUND, and each run is made twice and must repeat
bit for bit. Times are medians over runs of many launches; a ratio above 1 means ours is faster.
"""

import pathlib
import sys

import cupy
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SOURCE = pathlib.Path(__file__).parent.parent / "src/ops/attention.cu"
BOUND = 6e-3
ODD = [(1, 1, 1), (2, 3, 63), (1, 2, 64), (2, 2, 129), (1, 5, 257), (2, 3, 1000)]  # batch, heads, seq
SIZES = {  # name: batch, heads, seq, head
    "124M": (32, 12, 1024, 64),
    "350M": (16, 16, 1024, 64),
    "1.3B": (8, 16, 1024, 128),
    "13B": (2, 40, 2048, 128),
}


class Attention:
    """The three kernels of one head size, launched as their module says."""

    def __init__(self, head, module=None):
        self.head = head
        if module is None:
            module = cupy.RawModule(code=SOURCE.read_text(), options=(f"-DHEAD={head}", "--std=c++17"), backend="nvrtc")
        self.module = module
        words = cupy.ndarray((3, 3), cupy.int32, module.get_global("attention_geometry"))
        names = ["attention_forward", "attention_backward_query", "attention_backward_key"]
        self.kernels = {}
        for name, (rows, threads, shared) in zip(names, words.get().tolist()):
            kernel = module.get_function(name)
            kernel.max_dynamic_shared_size_bytes = shared
            self.kernels[name] = (kernel, rows, threads, shared)

    def launch(self, name, tensors, batch, heads, seq):
        kernel, rows, threads, shared = self.kernels[name]
        pointers = [cupy.uint64(t.data_ptr()) for t in tensors]
        kernel((-(-seq // rows) * heads * batch,), (threads,), (*pointers, cupy.int32(seq), cupy.int32(heads)), shared_mem=shared)

    def forward(self, t):
        self.launch("attention_forward", [t.qkv, t.y, t.logsumexp], *t.shape)

    def backward_query(self, t):
        self.launch("attention_backward_query", [t.qkv, t.y, t.dy, t.logsumexp, t.rows, t.dqkv], *t.shape)

    def backward_key(self, t):
        self.launch("attention_backward_key", [t.qkv, t.dy, t.rows, t.dqkv], *t.shape)

    def run(self, t):
        self.forward(t)
        self.backward_query(t)
        self.backward_key(t)


class Tensors:
    """Fresh random inputs; outputs full of NaN, so that what is not written shows."""

    def __init__(self, batch, heads, seq, head, spread=1.0):
        self.shape = (batch, heads, seq)
        self.qkv = (spread * torch.randn(batch, seq, 3, heads, head, device="cuda")).bfloat16()
        self.dy = torch.randn(batch, seq, heads * head, device="cuda").bfloat16()
        self.y = torch.full_like(self.dy, float("nan"))
        self.dqkv = torch.full_like(self.qkv, float("nan"))
        self.logsumexp = torch.full((batch, heads, seq), float("nan"), device="cuda")
        self.rows = torch.full((batch, heads, seq, 2), float("nan"), device="cuda")

    def results(self):
        dq, dk, dv = self.dqkv.unbind(2)
        return {"y": self.y, "lse": self.logsumexp, "dq": dq, "dk": dk, "dv": dv}

    def parts(self, kind=torch.bfloat16):
        """Query, key, value and dy as [batch, heads, seq, head], the first three as leaves."""
        batch, heads, seq = self.shape
        q, k, v = (x.transpose(1, 2).to(kind).detach().requires_grad_() for x in self.qkv.unbind(2))
        return q, k, v, self.dy.view(batch, seq, heads, -1).transpose(1, 2).to(kind)

    def named(self, out, lse, grads):
        flat = out.transpose(1, 2).reshape(self.y.shape)
        return {"y": flat, "lse": lse, **{n: g.transpose(1, 2) for n, g in zip(["dq", "dk", "dv"], grads)}}

    def exact(self):
        q, k, v, dy = self.parts(torch.float64)
        seq = self.shape[2]
        hidden = torch.ones(seq, seq, dtype=torch.bool, device="cuda").triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.named(out.detach(), scores.logsumexp(-1).detach(), torch.autograd.grad(out, (q, k, v), dy))

    def peer(self, backend):
        q, k, v, dy = self.parts()
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.named(out.detach(), None, torch.autograd.grad(out, (q, k, v), dy))


def error(got, exact):
    if got is None:
        return 0.0
    exact = exact.double()
    # A gradient that is zero but for rounding (one token has no choice to learn) is held to 1 % of a unit.
    size = max(exact.norm().item(), 1e-2 * exact.numel() ** 0.5)
    return ((got.double() - exact).norm() / size).item()


def check(attention, batch, heads, seq, spread=1.0, exact_of=None):
    """The errors of ours and of PyTorch's flash backend, and what is wrong with ours if anything is."""
    t = exact_of[0] if exact_of else Tensors(batch, heads, seq, attention.head, spread)
    for x in (t.y, t.dqkv, t.logsumexp, t.rows):
        x.fill_(float("nan"))
    attention.run(t)
    ours = {n: x.clone() for n, x in t.results().items()}
    attention.run(t)
    torch.cuda.synchronize()
    repeats = all(torch.equal(ours[n], x) for n, x in t.results().items())
    exact, peer = exact_of[1:] if exact_of else (t.exact(), t.peer(SDPBackend.FLASH_ATTENTION))
    errors = {n: (error(ours[n], exact[n]), error(peer[n], exact[n])) for n in exact}
    wrong = [n for n, (a, b) in errors.items() if not a <= max(BOUND, 1.5 * b)]
    if not repeats:
        wrong.append("does not repeat")
    return errors, wrong


def milliseconds(f, launches=20, runs=5):
    for _ in range(3):
        f()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(launches):
            f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / launches)
    return sorted(times)[runs // 2]


def peer_times(t, backend):
    q, k, v, dy = t.parts()
    with sdpa_kernel(backend):
        forward = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        both = lambda: torch.autograd.grad(forward(), (q, k, v), dy)
        with torch.no_grad():
            alone = milliseconds(forward)
        return alone, milliseconds(both)


def errors_table(attentions):
    failed = False
    print(f"{'head':>4} {'batch':>5} {'heads':>5} {'seq':>5}   error of y, lse, dq, dk, dv: ours (PyTorch flash)")
    for head, attention in attentions.items():
        for shape, spread in [(s, 1.0) for s in ODD] + [(ODD[-1], 4.0)]:
            errors, wrong = check(attention, *shape, spread)
            failed |= bool(wrong)
            numbers = "  ".join(f"{a:.1e} ({b:.1e})" for a, b in errors.values())
            print(f"{head:4} {shape[0]:5} {shape[1]:5} {shape[2]:5}   {numbers}   {'WRONG: ' + ', '.join(wrong) if wrong else 'ok'}")
    return failed


def times_table(attentions):
    print("model   ms: forward, dq, dk+dv, sum   TFLOP/s forward, backward   sum against: flash, cuDNN (their forward, sum)")
    for name, (batch, heads, seq, head) in SIZES.items():
        t, attention = Tensors(batch, heads, seq, head), attentions[head]
        steps = [milliseconds(lambda: f(t)) for f in (attention.forward, attention.backward_query, attention.backward_key)]
        total = milliseconds(lambda: attention.run(t))
        flops = 2 * batch * heads * seq * seq * head / 1e9
        peers = [peer_times(t, b) for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)]
        against = "   ".join(f"{both / total:.2f}x ({alone:.3f}, {both:.3f})" for alone, both in peers)
        print(f"{name:>5}   {steps[0]:.3f} {steps[1]:.3f} {steps[2]:.3f} {total:.3f}   {flops / steps[0]:.0f} {2.5 * flops / (steps[1] + steps[2]):.0f}   {against}")


if __name__ == "__main__":
    attentions = {head: Attention(head) for head in (32, 64, 80, 96, 128)}
    failed = errors_table(attentions)
    if "--errors" not in sys.argv:
        times_table(attentions)
    sys.exit(failed)
