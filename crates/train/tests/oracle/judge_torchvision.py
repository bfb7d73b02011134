"""Holds `espalier eval` of state dicts of torchvision's against torchvision: log-probabilities of classes, image by image.

    pip install torch torchvision safetensors
    python judge_torchvision.py ESPALIER [NETWORK[:SIZE]...]

Weights are torchvision's own random ones, with batch norms that have seen something; images are random, SIZE x SIZE (224, as published, unless
told otherwise), and read by `eval` as IDX in colour. One image under each of several labels gives the log-probability of each of these classes.
Networks of 224 are also asked to `classify` a PNG, which torchvision's own transforms resize, crop and standardise (needs Pillow).
"""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from safetensors.numpy import save_file
from torchvision import transforms

LABELS = [0, 3, 9]
espalier, names = sys.argv[1], sys.argv[2:] or ["resnet18", "resnet18:32", "resnet50", "resnet152", "wide_resnet50_2", "vgg11", "vgg11_bn", "vgg13_bn", "vgg16", "vgg16_bn",
                                              "vgg19", "alexnet", "alexnet:96"]
torch.manual_seed(5)
print(f"torch {torch.__version__}, torchvision {torchvision.__version__}")
for name in names:
    name, _, size = name.partition(":")
    size = int(size or 224)
    model = torchvision.models.get_model(name) if hasattr(torchvision.models, "get_model") else getattr(torchvision.models, name)()
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 3, size, size))
    model.eval()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        save_file({key: np.ascontiguousarray(value.numpy()) for key, value in model.state_dict().items()}, folder / "m.safetensors")
        for image in range(2):
            planes = np.random.default_rng(image).integers(0, 256, (3, size, size), dtype=np.uint8)
            # An image by itself is standardised by its own channels.
            x = planes.astype(np.float64)
            x = (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True)
            with torch.no_grad():
                theirs = torch.log_softmax(model(torch.tensor(x, dtype=torch.float32)[None]), 1)[0]
            for label in LABELS:
                file = folder / "t10k-images-idx4-ubyte"
                file.write_bytes(struct.pack(">5I", 0x0804, 1, size, size, 3) + planes.transpose(1, 2, 0).tobytes())
                (folder / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x0801, 1) + bytes([label]))
                said = subprocess.run([espalier, "eval", folder / "m.safetensors", "--data", file, "--json"], capture_output=True, text=True)
                assert said.returncode == 0, said.stderr
                ours = -json.loads(said.stdout)["loss"]
                worst = max(worst, abs(ours - theirs[label].item()))
        if size == 224:
            picture = Image.fromarray(np.random.default_rng(7).integers(0, 256, (40, 30, 3), dtype=np.uint8)).resize((300, 400), Image.Resampling.BICUBIC)
            picture.save(folder / "picture.png")
            transform = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(),
                                            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
            with torch.no_grad():
                theirs = torch.softmax(model(transform(picture)[None]), 1)[0]
            said = subprocess.run([espalier, "classify", folder / "m.safetensors", folder / "picture.png", "--json"], capture_output=True, text=True)
            assert said.returncode == 0, said.stderr
            for one in json.loads(said.stdout)["images"][0]["classes"]:
                apart = abs(one["probability"] / theirs[one["label"]].item() - 1)
                assert apart < 1e-2, (one, theirs[one["label"]].item())
                print(f"{name}: class {one['label']} of a picture has probability {one['probability']:.6f}, {apart:.1e} from torchvision's")
    print(f"{name}, {size} x {size}: log-probabilities of {2 * len(LABELS)} classes and images differ by at most {worst:.2e}", flush=True)
    assert worst < 1e-4
