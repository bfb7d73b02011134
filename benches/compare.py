#!/usr/bin/env python3
"""Espalier beside PyTorch: the same training steps and the same products, interleaved, as ratios of medians.

    cargo build --release && cargo bench -p espalier-tensor --bench matmul --no-run
    python benches/compare.py --peers DIR [--rounds 5] [--only gpt-f32,resnet8] [--device cuda]
    python benches/compare.py --peers DIR --dry-run [--device cuda]

With --dry-run nothing is measured and neither a card nor torch is needed: each of our run files is checked and completed by
`espalier train --dry-run`, and a line of JSON for each work says what would be run.

Memory is the peak resident set of the whole process on the CPU, the interpreter and PyTorch's libraries included (some 400 MB before the
first tensor); on a card it is the peak of what tensors take. In bf16 the peer runs as most people run PyTorch: autocast over f32 parameters,
which AdamW needs no master copy of; ours keeps bf16 weights, bf16 gradients and an f32 master copy (Llama: its low 16 bits).
DIR holds torch_gpt.py, torch_llama.py, torch_cnn.py and torch_vision.py; the interpreter that runs this must have torch (and torchvision).
Networks of 224 x 224 pixels stand beside torchvision's, channels last, compiled or not: whichever is faster in the first round. Ours have
their images in memory as bytes and standardise each batch; the peer has one batch, made beforehand.
An absolute time means little on a shared machine; a ratio taken in one interleaved run means something, and the range over rounds says how much.
"""
import argparse, array, atexit, glob, json, os, random, shutil, struct, subprocess, sys, tempfile

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(here)
arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--peers", required=True, type=os.path.abspath)  # programs run in a folder of their own
arguments.add_argument("--rounds", type=int, default=5, help="at least 3")
arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
arguments.add_argument("--threads", type=int, default=os.cpu_count())
arguments.add_argument("--only", default="")
arguments.add_argument("--dry-run", action="store_true", help="say what would be run")
arguments.add_argument("--work", type=os.path.abspath, help="a new folder for data and runs, which is kept; a temporary one without")
arguments.add_argument("--binary", default=os.path.join(root, "target/release/espalier"))
options = arguments.parse_args()
if options.rounds < 3:
    arguments.error("--rounds must be at least 3: a ratio of fewer says nothing about how far it moves")
for program in ("torch_gpt.py", "torch_llama.py", "torch_cnn.py", "torch_vision.py"):
    if not os.path.isfile(os.path.join(options.peers, program)):
        arguments.error(f"--peers: there is no {program} in {options.peers}")
options.binary = os.path.abspath(options.binary)
if options.work:
    os.mkdir(work := options.work)
else:
    work = tempfile.mkdtemp(prefix="espalier-compare-")
    atexit.register(shutil.rmtree, work, ignore_errors=True)
random = random.Random(0)


def run(command, wanted=lambda line: True):
    """Runs a program that prints JSON lines; returns the last one wanted, with the program's peak resident memory."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=work)
    out, err = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} failed:\n{err}")
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    result = next(line for line in reversed(lines) if wanted(line))
    result["rss"] = usage.ru_maxrss * 1024
    return result


def run_file(name, text):
    path = os.path.join(work, name + ".toml")
    with open(path, "w") as file:
        file.write(text)
    return path


def ours(name, text, steps):
    text += f"\n[device]\nkind = \"{options.device}\"\nthreads = {options.threads}\n"
    path, folder = run_file(name, text), os.path.join(work, name)
    # A checkpoint is no part of what is compared, and those of a few rounds fill a disk.
    return [options.binary, "train", path, "--json", "--out", folder, "--set", f"train.steps={steps}",
            "--set", "train.eval_samples=8", "--set", "checkpoint.last=false"]


def measure(command, wanted=lambda line: True):
    if "--out" in command:
        shutil.rmtree(command[command.index("--out") + 1], ignore_errors=True)
    return run(command, wanted)


def fastest(commands, unit):
    """Runs a peer, or several forms of one: what the fastest came to, and `which` it is."""
    commands = commands if isinstance(commands[0], list) else [commands]
    return max(({**measure(command), "which": i} for i, command in enumerate(commands)), key=lambda result: result[unit])


def peer(program, *flags):
    fixed = ["--device", options.device, "--threads", str(options.threads)]
    return [sys.executable, os.path.join(options.peers, program), *fixed, *flags]


def tokens(path, vocab, batch, seq):
    """Those of 40 batches; of four where nothing is trained."""
    count = batch * (seq + 1) * (4 if options.dry_run else 40)
    ids = array.array("H", random.randbytes(2 * count))
    if vocab < 65536:
        ids = array.array("H", (id % vocab for id in ids))
    if sys.byteorder == "big":
        ids.byteswap()
    with open(os.path.join(work, path), "wb") as file:
        ids.tofile(file)


# Few where nothing is trained; a step of a run is one of 128.
PICTURES = 200 if options.dry_run else 2000


def idx(folder, count, size):
    os.makedirs(os.path.join(work, folder), exist_ok=True)
    with open(os.path.join(work, folder, "train-images-idx3-ubyte"), "wb") as file:
        file.write(struct.pack(">4i", 0x803, count, size, size) + random.randbytes(count * size * size))
    with open(os.path.join(work, folder, "train-labels-idx1-ubyte"), "wb") as file:
        file.write(struct.pack(">2i", 0x801, count) + bytes(label % 10 for label in random.randbytes(count)))


def cifar(folder, count):
    os.makedirs(os.path.join(work, folder), exist_ok=True)
    with open(os.path.join(work, folder, "data_batch_1.bin"), "wb") as file:
        for image in range(count):
            file.write(bytes([image % 10]) + random.randbytes(3072))


def language_model(program, name, precision, model, sizes, *flags, optimizer="", steps):
    """Both sides at `sizes`, which are named as the peer's flags; `model` is the run file's section."""
    vocab, seq, batch = (sizes[key] for key in ("vocab", "seq", "batch"))
    tokens(name + ".bin", min(vocab, 65536), batch, seq)
    text = f"""
[model]
{model}
layers = {sizes["layers"]}
heads = {sizes["heads"]}
width = {sizes["width"]}
context = {seq}
vocab = {vocab}
[data]
kind = "tokens"
path = "{name}.bin"
[train]
batch = {batch}
precision = "{precision}"
[optimizer]
name = "adamw"
{optimizer}
[learning_rate]
peak = 3e-4
"""
    shape = [word for key, value in sizes.items() for word in ("--" + key, str(value))]
    return (ours(name, text, steps), peer(program, "--precision", precision, *shape, *flags), "tokens_per_s")


def gpt(name, precision, layers, heads, width, vocab, seq, batch, *flags, steps=14):
    sizes = dict(layers=layers, heads=heads, width=width, vocab=vocab, seq=seq, batch=batch)
    return language_model("torch_gpt.py", name, precision, 'name = "gpt"', sizes, *flags, steps=steps)


def llama(name, precision, layers, heads, kv, width, ffn, vocab, seq, batch, *flags, optimizer="", steps=14):
    sizes = dict(layers=layers, heads=heads, kv=kv, width=width, ffn=ffn, vocab=vocab, seq=seq, batch=batch)
    model = f'name = "llama"\nkv_heads = {kv}\nhead_dim = 64\ninner = {ffn}\nrotary_base = 5e5'
    return language_model("torch_llama.py", name, precision, model, sizes, *flags, optimizer=optimizer, steps=steps)


def cnn(name, model, data, peer_name=None, steps=40, model_fields=""):
    text = f"""
[model]
name = "{model}"
{model_fields}
[data]
{data}
[train]
batch = 128
[optimizer]
name = "momentum"
[learning_rate]
peak = 0.01
"""
    return (ours(name, text, steps), peer("torch_cnn.py", "--net", peer_name or name, "--batch", "128"), "images_per_s")


def vision(name, net, precision="bf16", model_fields="", steps=25):
    text = f"""
[model]
name = "{name.removesuffix("-f32")}"
classes = 1000
{model_fields}
[data]
kind = "shapes"
count = {4 if options.dry_run else 320}
size = 224
[train]
batch = 128
precision = "{precision}"
[optimizer]
name = "momentum"
[learning_rate]
peak = 0.01
"""
    eager = [sys.executable, os.path.join(options.peers, "torch_vision.py"), "--net", net, "--precision", precision, "--batch", "128"]
    return (ours(name, text, steps), [eager, [*eager, "--compile"]], "images_per_s")


TORCH_MATMUL = """
import json, sys, time, torch
m, k, n, dtype, threads = *map(int, sys.argv[1:4]), sys.argv[4], int(sys.argv[5])
torch.set_num_threads(threads)
t = torch.float32 if dtype == "f32" else torch.bfloat16
a, b = torch.randn(m, k).to(t), torch.randn(k, n).to(t)
for _ in range(3): torch.matmul(a, b)
times = []
for _ in range(20):
    start = time.perf_counter(); torch.matmul(a, b); times.append(time.perf_counter() - start)
print(json.dumps({"median": 2e-9 * m * n * k / sorted(times)[10]}))
"""


def matmul(m, k, n, dtype):
    pattern = os.path.join(root, "target/release/deps/matmul-*[0-9a-f]")
    built = sorted(glob.glob(pattern), key=os.path.getmtime) or [pattern]
    if built == [pattern] and not options.dry_run:
        sys.exit("build the product benchmark first: cargo bench -p espalier-tensor --bench matmul --no-run")
    ours = [built[-1], "--bench", "--json", "--only", dtype, "--threads", str(options.threads), "--seconds", "0.2"]
    same = lambda line: (line["kind"], line["m"], line["n"], line["k"]) == ("nn", m, n, k)
    theirs = [sys.executable, "-c", TORCH_MATMUL, str(m), str(k), str(n), dtype, str(options.threads)]
    return (ours, theirs, "median", same)


small = (4, 8, 512, 8192, 256, 8)
small_llama = (4, 8, 2, 512, 1536, 8192, 256, 8)
cpu_cases = {
    "matmul-f32-2048x512x8192": lambda: matmul(2048, 512, 8192, "f32"),
    "matmul-f32-1024": lambda: matmul(1024, 1024, 1024, "f32"),
    "matmul-bf16-2048x512x8192": lambda: matmul(2048, 512, 8192, "bf16"),
    "matmul-bf16-1024": lambda: matmul(1024, 1024, 1024, "bf16"),
    "gpt-f32": lambda: gpt("gpt-f32", "f32", *small),
    "gpt-bf16": lambda: gpt("gpt-bf16", "bf16", *small),
    "gpt-bf16-compiled": lambda: gpt("gpt-bf16-compiled", "bf16", *small, "--compile"),
    "llama-f32": lambda: llama("llama-f32", "f32", *small_llama),
    "llama-bf16": lambda: llama("llama-bf16", "bf16", *small_llama),
    "simple-cnn": lambda: (idx("mnist", PICTURES, 28), cnn("simple-cnn", "simple-cnn", 'kind = "idx"\npath = "mnist"'))[1],
    "resnet8": lambda: (cifar("cifar", PICTURES), cnn("resnet8", "resnet8", 'kind = "cifar10"\npath = "cifar/data_batch_1.bin"'))[1],
    "vgg16": lambda: (cifar("cifar", PICTURES), cnn("vgg16", "vgg-16", 'kind = "cifar10"\npath = "cifar/data_batch_1.bin"',
                                                model_fields="batch_norm = true", steps=8 if options.device == "cpu" else 40))[1],
}
large = {
    "gpt2-124m": (12, 12, 768, 50304, 1024, 32),
    "gpt2-350m": (24, 16, 1024, 50304, 1024, 16),
    "gpt-774m": (36, 20, 1280, 50304, 1024, 8),
    "gpt-1.3b": (24, 16, 2048, 50304, 1024, 8),
    # Not those that everybody quotes: long sequences, where attention weighs; few tokens, where launches do; a small model.
    "gpt-1.3b-4x2048": (24, 16, 2048, 50304, 2048, 4),
    "gpt2-124m-8x4096": (12, 12, 768, 50304, 4096, 8),
    "gpt2-124m-4x256": (12, 12, 768, 50304, 256, 4),
    "gpt-10m": (6, 6, 384, 256, 256, 64),
}
cuda_cases = {name: (lambda name=name, sizes=sizes: gpt(name, "bf16", *sizes, "--compile", steps=30)) for name, sizes in large.items()}
# The shapes of SmolLM2-135M, Qwen2.5-0.5B and Llama-3.2-1B.
llamas = {
    "llama-135m": (30, 9, 3, 576, 1536, 49152, 1024, 32),
    "llama-0.5b": (24, 14, 2, 896, 4864, 151936, 1024, 8),
    "llama-1.2b": (16, 32, 8, 2048, 8192, 128256, 1024, 8),
}
# The low 16 bits of f32 masters beside bf16 weights are the same numbers in half the memory; moments in bf16 are not the same numbers.
low_bits = 'master = "low-bits"'
cuda_cases |= {name: (lambda name=name, sizes=sizes: llama(name, "bf16", *sizes, "--compile", optimizer=low_bits, steps=30))
               for name, sizes in llamas.items()}
cuda_cases["llama-1.2b-bf16-moments"] = lambda: llama(
    "llama-1.2b-bf16-moments", "bf16", *llamas["llama-1.2b"], "--compile", optimizer=low_bits + '\nmoments = "bf16"', steps=30)
cuda_cases |= {name: cpu_cases[name] for name in ("simple-cnn", "resnet8", "vgg16")}
cuda_cases |= {
    "resnet-50": lambda: vision("resnet-50", "resnet50"),
    "resnet-50-f32": lambda: vision("resnet-50-f32", "resnet50", "f32"),
    "resnet-18": lambda: vision("resnet-18", "resnet18"),
    "vgg-19": lambda: vision("vgg-19", "vgg19_bn", model_fields="batch_norm = true"),
    "wide-resnet-101-2": lambda: vision("wide-resnet-101-2", "wide_resnet101_2"),
    "alexnet": lambda: vision("alexnet", "alexnet"),
}
cases = cpu_cases if options.device == "cpu" else cuda_cases
memory = "rss" if options.device == "cpu" else "peak_bytes"
units = {"median": "GFLOP/s", "tokens_per_s": "tokens/s", "images_per_s": "images/s"}
chosen = [name for name in options.only.split(",") if name] or list(cases)
unknown = [name for name in chosen if name not in cases]
if unknown:
    arguments.error(f"--only takes {', '.join(cases)}, not {', '.join(unknown)}")
if options.dry_run:
    for name in chosen:
        mine, theirs, unit, *_ = cases[name]()
        first, *others = theirs if isinstance(theirs[0], list) else [theirs]
        line = {"name": name, "ours": mine, "theirs": first, "unit": units[unit], "rounds": options.rounds} | ({"or": others} if others else {})
        if unit != "median":
            # Few pictures are drawn where nothing is trained, and a batch is not larger than all of them.
            planned = run([*mine, "--dry-run", *(["--set", "train.batch=2"] if unit == "images_per_s" else [])])
            line |= {key: planned[key] for key in ("parameters", "precision", "layout")}
        print(json.dumps(line), flush=True)
    sys.exit()
median = lambda values: sorted(values)[len(values) // 2]
print(f"{'work':<28}{'ours':>12}{'torch':>12}{'ratio':>8}{'rounds':>15}   {'unit':<14}{'memory':>10}{'torch':>11}{'ratio':>8}")
for name in chosen:
    mine, theirs, unit, *wanted = cases[name]()
    pairs = [(measure(mine, *wanted), fastest(theirs, unit))]
    if isinstance(theirs[0], list):
        theirs = theirs[pairs[0][1]["which"]]
    pairs += [(measure(mine, *wanted), measure(theirs)) for _ in range(options.rounds - 1)]
    a, b = median([p[0][unit] for p in pairs]), median([p[1][unit] for p in pairs])
    x, y = median([p[0][memory] for p in pairs]), median([p[1][memory] for p in pairs])
    ratios = [p[0][unit] / p[1][unit] for p in pairs]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(f"{name:<28}{a:>12.1f}{b:>12.1f}{a / b:>7.2f}x{spread:>15}   {units.get(unit, unit):<14}{x / 2**20:>7.0f} MB{y / 2**20:>8.0f} MB{x / y:>7.2f}x", flush=True)
