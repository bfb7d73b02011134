"""Makes rows.json: the loss of the answers of some rows, and the norm of its gradient, by transformers, for tests/train/rows.rs.

    pip install torch==2.15.0 transformers==5.22.2
    python rows.py

Each row goes through the model by itself; the loss is the sum over all answers of a batch, divided by their number
(`num_items_in_batch`), whatever micro-batches there are. Models are those of hub/, in f64.

    {"rows": [{"prompt", "completion"}], "ids": [[...]], "answers": [n of the last ids of each row], MODEL: {"loss", "grad_norm"}}
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
END = 39
ROWS = [("a tree", " grows"), ("to prune", " cuts"), ("x", " y"), ("asked a lot", " no"), ("it", " is so"), ("b c", " d")]


def encode(text):
    return [26 if c == " " else ord(c) - ord("a") for c in text]


def main():
    ids = [encode(prompt + completion) + [END] for prompt, completion in ROWS]
    answers = [len(encode(completion)) + 1 for _, completion in ROWS]
    out = {"rows": [{"prompt": a, "completion": b} for a, b in ROWS], "ids": ids, "answers": answers}
    for name in ["gpt2", "llama", "qwen3"]:
        model = AutoModelForCausalLM.from_pretrained(HERE / "hub" / name, dtype=torch.float64, attn_implementation="eager").eval()
        for row, count in zip(ids, answers):
            labels = torch.tensor([[-100] * (len(row) - count) + row[-count:]])
            items = torch.tensor(sum(answers))
            # Summed over rows, as a trainer sums it over micro-batches.
            loss = model(input_ids=torch.tensor([row]), labels=labels, num_items_in_batch=items).loss
            out.setdefault(name, {"loss": 0.0})["loss"] += loss.item()
            loss.backward()
        squares = sum(p.grad.double().pow(2).sum().item() for p in model.parameters())
        out[name]["grad_norm"] = squares**0.5
    (HERE / "rows.json").write_text(json.dumps(out) + "\n")
    print({name: out[name] for name in ["gpt2", "llama", "qwen3"]})


main()
