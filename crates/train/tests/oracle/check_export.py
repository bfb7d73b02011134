"""Reads a folder that `espalier export` wrote, or a checkpoint, with transformers, and says how well it does on a text: what
`espalier eval FOLDER --data TEXT --json` says.

    pip install torch==2.15.0 transformers==5.22.2
    python check_export.py FOLDER TEXT
"""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, text = sys.argv[1], Path(sys.argv[2]).read_text()
model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
problems = {kind: sorted(names) for kind, names in report.items() if names}
assert not problems, problems
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
assert tokenizer.decode(ids) == text, "text, ids and text again"
seq = model.config.n_positions
starts = range(0, len(ids) - seq, seq)
loss = 0.0
with torch.no_grad():
    for start in starts:
        logits = model(ids[None, start : start + seq]).logits[0].float()
        loss += torch.nn.functional.cross_entropy(logits, ids[start + 1 : start + seq + 1], reduction="sum").item()
tokens = len(starts) * seq
loss /= tokens
print(json.dumps({"loss": loss, "perplexity": math.exp(loss), "samples": len(starts), "tokens": tokens}))
