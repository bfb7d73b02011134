"""Makes hub/strided.json: the strided perplexity of the tiny GPT-2 in hub/, by transformers. For tests/train/hub/strided.rs.

    pip install torch==2.15.0 transformers==5.22.2
    python strided.py

Windows are those of Hugging Face's guide "Perplexity of fixed-length models". The guide weights the mean of a window by one token less than it
predicts in every window but the first; `loss` is the mean over all predicted tokens instead, and `guide` what the guide's own loop gives.
"""

import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
torch.manual_seed(5)
model = AutoModelForCausalLM.from_pretrained(HERE / "hub/gpt2", dtype=torch.float32)
length, context = 75, model.config.n_positions
ids = torch.randint(0, model.config.vocab_size, (1, length))

found = {}
for stride in (1, 5, 8, context):
    guide_sum, guide_tokens, total, tokens, previous = 0.0, 0, 0.0, 0, 0
    for begin in range(0, length, stride):
        end = min(begin + context, length)
        window = ids[:, begin:end]
        targets = window.clone()
        targets[:, : -(end - previous)] = -100
        with torch.no_grad():
            output = model(window, labels=targets)
        predicted = int((targets[:, 1:] != -100).sum())
        if predicted:
            total += output.loss.item() * predicted
            tokens += predicted
        valid = int((targets != -100).sum()) - 1
        if valid:
            guide_sum += output.loss.item() * valid
            guide_tokens += valid
        previous = end
        if end == length:
            break
    found[stride] = dict(loss=total / tokens, tokens=tokens, guide=math.exp(guide_sum / guide_tokens))
(HERE / "hub/strided.json").write_text(json.dumps(dict(ids=ids[0].tolist(), strided=found), indent=1) + "\n")
