"""Writes torchvision_shapes.json: what the state dicts of torchvision's networks are made of. For each the number of
parameters, of tensors (without `num_batches_tracked`), and a hash of all names and shapes (FNV-1a, 64 bits, of the
sorted lines `NAME D1 D2 ...`).

    python torchvision_shapes.py          (torchvision 0.29; run where torch and torchvision are installed)
"""

import json
import pathlib

import torch
import torchvision

NETWORKS = {
    "resnet-18": "resnet18", "resnet-34": "resnet34", "resnet-50": "resnet50", "resnet-101": "resnet101",
    "resnet-152": "resnet152", "wide-resnet-50-2": "wide_resnet50_2", "wide-resnet-101-2": "wide_resnet101_2",
    "alexnet": "alexnet",
    **{f"vgg-{n}": f"vgg{n}" for n in (11, 13, 16, 19)}, **{f"vgg-{n}-bn": f"vgg{n}_bn" for n in (11, 13, 16, 19)},
}


def fnv(text):
    hash = 0xCBF29CE484222325
    for byte in text.encode():
        hash = (hash ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{hash:016x}"


rows = {}
for ours, theirs in NETWORKS.items():
    with torch.device("meta"):
        model = getattr(torchvision.models, theirs)(init_weights=False) if "vgg" in theirs else getattr(torchvision.models, theirs)()
    lines = sorted(
        " ".join([name, *map(str, tensor.shape)]) + "\n"
        for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")
    )
    parameters = sum(p.numel() for p in model.parameters())
    rows[ours] = [parameters, len(lines), fnv("".join(lines))]
pathlib.Path(__file__).with_name("torchvision_shapes.json").write_text(json.dumps(rows, indent=1) + "\n")
