#!/usr/bin/env python3
"""Espalier beside PyTorch on people's own pictures, with all that comes before a step.

    python benches/pictures.py folder --work DIR [--count 20000] [--nets resnet18,resnet50] [--rounds 3] [--workers 16]
    python benches/pictures.py cifar --data DIR --work DIR [--epochs 30] [--seeds 1,2]
    python benches/pictures.py decode --work DIR [--count 400]          (no GPU: decoding and resampling alone, one thread)

`folder` makes COUNT JPEGs of ImageNet's sizes in 20 classes (Pillow; once) and trains networks on them at 224 x 224, batch 128, bf16:
ours with its cache on disk and without one (each picture decoded in every step), torchvision's ImageFolder with DataLoader workers, random
resized crops and flips, bytes to the GPU and standardised there, channels last, autocast, cuDNN's search. Rounds are interleaved; rates are
images a second of a round's later steps, ratios are of medians. `cifar` trains resnet-18 with pad 4, crop and flip on CIFAR-10's binary
files by `runs/cifar.toml` and by the same recipe in PyTorch, and compares accuracies on the test set. Needs torch, torchvision, Pillow and numpy, and a release binary (--binary).
"""
import argparse, json, math, os, shutil, statistics, subprocess, sys, time
from multiprocessing import Pool

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
NAMES = {"resnet18": "resnet-18", "resnet34": "resnet-34", "resnet50": "resnet-50", "alexnet": "alexnet", "vgg16": "vgg-16"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("mode", choices=["folder", "cifar", "decode", "torch-folder", "torch-cifar"])
parser.add_argument("--work", type=os.path.abspath, required=True, help="a folder for pictures, caches and runs, which is kept")
parser.add_argument("--data", type=os.path.abspath, help="the folder of CIFAR-10's .bin files")
parser.add_argument("--binary", type=os.path.abspath, default=os.path.join(ROOT, "target/release/espalier"))
parser.add_argument("--nets", default="resnet18,resnet50")
parser.add_argument("--net", default="resnet50")
parser.add_argument("--seeds", default="1")
parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this program, not to measure")
for name, default in dict(count=20000, rounds=3, workers=16, batch=128, steps=140, warmup=40, epochs=30, seed=1).items():
    parser.add_argument("--" + name, type=int, default=default)
options = parser.parse_args()
pictures = os.path.join(options.work, f"pictures-{options.count}")


def make_one(number):
    """A JPEG with shapes of many scales and some noise, as large as ImageNet's: 500 x 375 in most cases, about 100 kB."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(number)
    width, height = [(500, 375), (375, 500), (500, 333), (640, 480), (400, 300)][number % 5]
    total = np.zeros((height, width, 3), np.float32)
    for scale in (4, 12, 40, 120):
        coarse = random.integers(0, 256, (scale * height // width + 1, scale, 3), dtype=np.uint8)
        total += np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.float32) * (4 / scale) ** 0.5
    total = (total - total.min()) * (230 / (total.max() - total.min())) + random.integers(-12, 13, total.shape, dtype=np.int8)
    split = "val" if number // 20 % 40 == 0 else "train"
    path = os.path.join(pictures, split, f"class-{number % 20:02}", f"{number:06}.jpg")
    Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return os.path.getsize(path)


def make():
    if os.path.isfile(done := os.path.join(pictures, "complete")):
        return
    for split in ("train", "val"):
        for label in range(20):
            os.makedirs(os.path.join(pictures, split, f"class-{label:02}"), exist_ok=True)
    start = time.time()
    with Pool(options.workers) as pool:
        sizes = pool.map(make_one, range(options.count), chunksize=50)
    open(done, "w").close()
    print(f"made {options.count} JPEGs, {sum(sizes) / 1e9:.2f} GB, {sum(sizes) / len(sizes) / 1e3:.0f} kB each, in {time.time() - start:.0f} s", flush=True)


def last_json(command):
    found = subprocess.run(command, capture_output=True, text=True, cwd=options.work)
    if found.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{found.stdout}\n{found.stderr}")
    return json.loads([line for line in found.stdout.splitlines() if line.startswith("{")][-1]), found.stderr


def ours(net, cache):
    """Images a second of the later steps, and seconds before the first."""
    folder = os.path.join(options.work, f"run-{net}-{cache}")
    shutil.rmtree(folder, ignore_errors=True)
    run_file = os.path.join(options.work, f"{net}-{cache}.toml")
    cached = f'cache_path = "{options.work}/cache"\n' if cache == "disk" else ""
    with open(run_file, "w") as file:
        file.write(f"""[model]
name = "{NAMES[net]}"
[data]
kind = "images"
path = "{pictures}"
cache = "{cache}"
{cached}[train]
steps = {options.warmup + options.steps}
batch = {options.batch}
precision = "bf16"
eval_samples = 8
log_every = {math.gcd(options.warmup, options.steps)}
[optimizer]
name = "momentum"
[learning_rate]
peak = 0.01
schedule = "constant"
[checkpoint]
last = false
[device]
kind = "{options.device}"
""")
    start = time.time()
    result, said = last_json([options.binary, "train", run_file, "--json", "--out", folder])
    wall = time.time() - start
    times = [json.loads(line) for line in open(os.path.join(folder, "metrics.jsonl"))]
    times = {line["step"]: line["time"] for line in reversed(times) if "loss" in line}
    first, last = options.warmup, options.warmup + options.steps
    seconds = times[last] - times[first]
    return options.batch * options.steps / seconds, wall - times[last], result["loss"]


def wait():
    import torch

    if options.device == "cuda":
        torch.cuda.synchronize()


def torch_folder():
    import torch, torchvision
    from torchvision import transforms

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    transform = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
    data = torchvision.datasets.ImageFolder(os.path.join(pictures, "train"), transform)
    loader = torch.utils.data.DataLoader(
        data, options.batch, shuffle=True, num_workers=options.workers, pin_memory=options.device == "cuda", drop_last=True, persistent_workers=True, prefetch_factor=4)
    model = getattr(torchvision.models, options.net)(num_classes=20).to(options.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    mean, std = (torch.tensor(values, device=options.device).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    step, start = 0, 0.0
    while True:
        for x, y in loader:
            if step == options.warmup:
                wait()
                start = time.perf_counter()
            x, y = x.to(options.device, non_blocking=True), y.to(options.device, non_blocking=True)
            x = ((x.float() - mean) / std).to(memory_format=torch.channels_last)
            with torch.autocast(options.device, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == options.warmup + options.steps:
                wait()
                seconds = time.perf_counter() - start
                print(json.dumps(dict(images_per_s=options.batch * options.steps / seconds, loss=loss.item(), torch=torch.__version__)))
                return


def folder():
    os.makedirs(options.work, exist_ok=True)
    make()
    print(f"{options.count} JPEGs, batch {options.batch}, bf16, {options.workers} workers, {os.cpu_count()} cores, {options.rounds} rounds; images a second")
    for net in options.nets.split(","):
        rates = dict(disk=[], none=[], torch=[])
        for round in range(options.rounds):
            for cache in ("disk", "none"):
                rate, before, _ = ours(net, cache)
                rates[cache].append(rate)
                print(f"  {net} round {round + 1}: ours, cache {cache}: {rate:.0f}/s, {before:.1f} s before and after the steps", flush=True)
            command = [sys.executable, os.path.abspath(__file__), "torch-folder", "--work", options.work, "--net", net]
            command += [f"--{name}={getattr(options, name)}" for name in ("count", "workers", "batch", "steps", "warmup", "device")]
            rates["torch"].append(last_json(command)[0]["images_per_s"])
            print(f"  {net} round {round + 1}: torchvision: {rates['torch'][-1]:.0f}/s", flush=True)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratios = {name: medians[name] / medians["torch"] for name in ("disk", "none")}
        print(json.dumps(dict(work=f"{net} from a folder", **{k: round_(v) for k, v in medians.items()}, ratio_disk=round_(ratios["disk"]), ratio_none=round_(ratios["none"]), rounds=rates)), flush=True)


def round_(value):
    return float(f"{value:.4g}")


def torch_cifar():
    import numpy as np
    import torch, torchvision

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(options.seed)

    def read(names):
        raw = np.concatenate([np.fromfile(os.path.join(options.data, name), np.uint8).reshape(-1, 3073) for name in names])
        return torch.from_numpy(raw[:, 1:].reshape(-1, 3, 32, 32).copy()).to(options.device), torch.from_numpy(raw[:, 0].astype(np.int64)).to(options.device)

    x, y = read([f"data_batch_{i}.bin" for i in range(1, 6)])
    test_x, test_y = read(["test_batch.bin"])
    mean, std = x.float().mean((0, 2, 3), keepdim=True), x.float().std((0, 2, 3), keepdim=True)
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    torch.nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = torch.nn.Identity()
    model = model.to(options.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    batch, per_epoch = 128, len(x) // 128
    total, warm, step = options.epochs * per_epoch, per_epoch, 0
    start = time.perf_counter()
    for _ in range(options.epochs):
        model.train()
        order = torch.randperm(len(x), device=options.device)
        for i in range(per_epoch):
            rate = 0.1 * (step + 1) / warm if step < warm else 0.05 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            pick = order[i * batch:][:batch]
            padded = torch.nn.functional.pad(x[pick], (4, 4, 4, 4))
            top, left = torch.randint(0, 9, (2, batch), device=options.device)
            rows = (top[:, None] + torch.arange(32, device=options.device))[:, None, :, None]
            columns = left[:, None] + torch.arange(32, device=options.device)
            flip = torch.rand(batch, device=options.device) < 0.5
            columns = torch.where(flip[:, None], columns.flip(1), columns)[:, None, None, :]
            images = torch.arange(batch, device=options.device)[:, None, None, None]
            crop = padded[images, torch.arange(3, device=options.device)[None, :, None, None], rows, columns]
            crop = ((crop.float() - mean) / std).to(memory_format=torch.channels_last)
            with torch.autocast(options.device, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(crop), y[pick])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    wait()
    seconds = time.perf_counter() - start
    model.eval()
    right = 0
    with torch.no_grad(), torch.autocast(options.device, dtype=torch.bfloat16):
        for i in range(0, len(test_x), 1000):
            logits = model(((test_x[i:i + 1000].float() - mean) / std).to(memory_format=torch.channels_last))
            right += (logits.argmax(1) == test_y[i:i + 1000]).sum().item()
    print(json.dumps(dict(accuracy=right / len(test_x), seconds=seconds, images_per_s=total * batch / seconds)))


def cifar():
    os.makedirs(options.work, exist_ok=True)
    found = dict(ours=[], torch=[])
    for seed in options.seeds.split(","):
        out = os.path.join(options.work, f"cifar-{seed}")
        shutil.rmtree(out, ignore_errors=True)
        result, _ = last_json([
            options.binary, "train", os.path.join(ROOT, "runs/cifar.toml"), "--json", "--out", out, "--set", f"seed={seed}",
            "--set", f"train.epochs={options.epochs}", "--set", f"data.path={options.data}",
            "--set", f"data.validation_path={options.data}/test_batch.bin", "--set", f"device.kind={options.device}"])
        found["ours"].append(100 * result["validation"]["accuracy"])
        print(f"seed {seed}, ours: {found['ours'][-1]:.2f} %, {result['images_per_s']:.0f} images/s", flush=True)
        command = [sys.executable, os.path.abspath(__file__), "torch-cifar", "--work", options.work, "--data", options.data, "--seed", seed, "--epochs", str(options.epochs), "--device", options.device]
        theirs, _ = last_json(command)
        found["torch"].append(100 * theirs["accuracy"])
        print(f"seed {seed}, torch: {found['torch'][-1]:.2f} %, {theirs['images_per_s']:.0f} images/s", flush=True)
    means = {name: statistics.mean(values) for name, values in found.items()}
    print(json.dumps(dict(work="resnet-18 on CIFAR-10, crop and flip", epochs=options.epochs, **means, difference=means["ours"] - means["torch"], seeds=found)))


def decode():
    """Pillow (libjpeg-turbo) on one thread: read, decode, crop, resample; ours by `cargo bench -p espalier-data --bench pictures DIR`."""
    import random
    from PIL import Image

    make()
    files = [os.path.join(at, name) for at, _, names in os.walk(pictures) for name in names if name.endswith(".jpg")]
    for work in ("decode", "decode and resize a random box to 224"):
        start = time.perf_counter()
        for path in files:
            picture = Image.open(path).convert("RGB")
            if work != "decode":
                w, h = picture.size
                left, top = random.randrange(w // 4), random.randrange(h // 4)
                picture.crop((left, top, left + 3 * w // 4, top + 3 * h // 4)).resize((224, 224), Image.Resampling.BILINEAR)
        seconds = time.perf_counter() - start
        print(f"Pillow, {work}: {len(files) / seconds:.0f} pictures a second and thread")


{"folder": folder, "cifar": cifar, "decode": decode, "torch-folder": torch_folder, "torch-cifar": torch_cifar}[options.mode]()
