"""Writes resized.json, what Pillow's antialiased bilinear resampling makes of a few pictures (each row: height,
width, new height, new width, bytes), and pictures/, small files of every kind with what Pillow reads from them.

    python pictures.py          (Pillow 13)
"""

import json
import pathlib

from PIL import Image

SIZES = [
    (7, 9, 3, 4), (3, 4, 7, 9), (16, 16, 5, 5), (5, 11, 5, 3), (40, 30, 8, 6),
    (1, 1, 3, 3), (13, 2, 4, 4), (64, 48, 9, 7), (6, 6, 6, 13), (33, 21, 12, 12),
]
HERE = pathlib.Path(__file__).parent

rows = []
for height, width, to_height, to_width in SIZES:
    pixels = bytes(
        (y * y * 7 + x * 13 + (x * y) % 31 * 5 + c * 50) % 256
        for y in range(height) for x in range(width) for c in range(3)
    )
    picture = Image.frombytes("RGB", (width, height), pixels)
    resized = picture.resize((to_width, to_height), Image.Resampling.BILINEAR)
    rows.append([height, width, to_height, to_width, resized.tobytes().hex()])
(HERE / "resized.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")

# A smooth picture, whose lossy forms are near to it, of an odd size.
width, height = 21, 13
colours = Image.frombytes("RGB", (width, height), bytes(
    v for y in range(height) for x in range(width) for v in (x * 12, y * 19, (x + y) * 7)
))
alpha = Image.frombytes("L", (width, height), bytes((x * y) % 256 for y in range(height) for x in range(width)))
clear = colours.copy()
clear.putalpha(alpha)
grey = colours.convert("L")
grey_clear = Image.merge("LA", [grey, alpha])
palette = colours.quantize(16)
FILES = {
    "colours.png": (colours, {}), "clear.png": (clear, {}), "grey.png": (grey, {}),
    "grey-clear.png": (grey_clear, {}), "palette.png": (palette, {"transparency": 3}),
    "bits.png": (grey.point(lambda v: 255 * (v > 100)).convert("1"), {}),
    "colours.jpg": (colours, {"quality": 95}), "full.jpg": (colours, {"quality": 95, "subsampling": 0}),
    "progressive.jpg": (colours, {"quality": 95, "progressive": True}), "grey.jpg": (grey, {"quality": 95}),
    "cmyk.jpg": (colours.convert("CMYK"), {"quality": 95}),
    "exact.webp": (colours, {"lossless": True}), "clear.webp": (clear, {"lossless": True, "exact": True}),
    "lossy.webp": (colours, {"quality": 90}),
}
(HERE / "pictures").mkdir(exist_ok=True)
read = {}
for name, (picture, how) in FILES.items():
    picture.save(HERE / "pictures" / name, **how)
    found = Image.open(HERE / "pictures" / name).convert("RGB")
    read[name] = [found.height, found.width, found.tobytes().hex()]
(HERE / "pictures" / "read.json").write_text(json.dumps(read, indent=0) + "\n")
