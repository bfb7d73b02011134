"""Makes generated.json: what Hugging Face's GPT-2 writes with the weights of gpt.safetensors, for tests/train/generate.rs.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python generate.py

Greedy, from prompts of several lengths to the end of the context of 16, with the dense weights and with those that its masks keep.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
CONTEXT, VOCAB = 16, 24
PROMPTS = [[3], [0, 1], [5, 17, 2], [23, 4, 4, 9], [1, 2, 3, 4, 5, 6, 7], [11, 20, 8, 0, 13, 13, 2, 22, 6, 19]]


def model(tensors, masked):
    config = GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2)
    gpt = GPT2LMHeadModel(config).eval()
    weights = dict(gpt.transformer.named_parameters())
    for name, weight in weights.items():
        values = tensors[f"init/{name}"].reshape(weight.shape).copy()
        if masked and f"mask/{name}" in tensors:
            bits = np.unpackbits(tensors[f"mask/{name}"].view(np.uint8), bitorder="little")
            values *= bits[: values.size].reshape(values.shape)
        weight.data = torch.from_numpy(values)
    gpt.tie_weights()
    return gpt


def tokens(gpt, prompt):
    ids = torch.tensor([prompt])
    # Without a mask, tokens of the prompt that are the padding's would be left out of it.
    how = dict(attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return gpt.generate(ids, max_length=CONTEXT, **how)[0, len(prompt) :].tolist()


def main():
    tensors = load_file(HERE / "gpt.safetensors")
    texts = {}
    for case in ["dense", "masked"]:
        gpt = model(tensors, case == "masked")
        texts[case] = [{"prompt": prompt, "tokens": tokens(gpt, prompt)} for prompt in PROMPTS]
    lines = lambda case: ",\n".join("  " + json.dumps(text) for text in texts[case])
    cases = ",\n".join(f' "{case}": [\n{lines(case)}\n ]' for case in texts)
    (HERE / "generated.json").write_text(f'{{"torch": "{torch.__version__}", "texts": {{\n{cases}\n}}}}\n')


main()
