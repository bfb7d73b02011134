"""Makes hub/: a tiny GPT-2 as transformers saves it, and what transformers says of it; and says what it makes of folders of ours. For
tests/train/hub.rs, which runs it where Python has these packages.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python hub.py [FOLDER]
    python hub.py --read FOLDER EXPORTED...

The first makes

    hub/gpt2/             save_pretrained of a GPT2LMHeadModel of random weights
    hub/expected.safetensors
        ids               17 tokens: 16 to read, each followed by what to predict
        logits            of the 16, by the model in f32; the mean loss in the metadata
        logits_bf16       the same by the model in bf16
        greedy/N          16 tokens, of which the first N are a prompt and the others what the model in f32 says is likeliest
        after/NAME        the weights after one step of AdamW on that loss, in f32

and the second reads folders that we exported with from_pretrained, in the precision that they have, and writes of each EXPORTED.safetensors
with `logits` of FOLDER's `ids` and, in f32, `greedy/N` behind the prompts of FOLDER. A tensor that is missing, unexpected or of another shape is an error.

`check_export.py` holds a folder with its tokenizer against `espalier eval` on a text.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

ADAMW = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6)
DECAY = 0.1
VOCAB, CONTEXT, PROMPTS = 40, 16, [1, 2, 5, 11]

array = lambda tensor: np.ascontiguousarray(tensor.detach().float().numpy())
tokens = lambda tensor: tensor.numpy().astype(np.uint8)


def logits(model, ids):
    with torch.no_grad():
        return array(model(ids[None]).logits[0])


def greedy(model, prompt):
    # Neither a token that ends the text nor a mask of padding: all that the weights say, up to the end of the context.
    how = dict(attention_mask=torch.ones_like(prompt[None]), do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens(model.generate(prompt[None], max_length=CONTEXT, **how)[0])


def make(folder):
    torch.manual_seed(11)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", bos_token_id=39, eos_token_id=39,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "gpt2")

    ids = torch.randint(0, VOCAB, (CONTEXT + 1,))
    out = {"ids": tokens(ids), "logits": logits(model, ids[:-1])}
    out["logits_bf16"] = logits(GPT2LMHeadModel.from_pretrained(folder / "gpt2", dtype=torch.bfloat16), ids[:-1])
    out |= {f"greedy/{length}": greedy(model, ids[:length]) for length in PROMPTS}

    # Biases and norms are not decayed, as the run file's `exclude_from_decay` has it.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    loss = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:])
    loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        out[f"after/{name.removeprefix('transformer.')}"] = array(parameter)
    save_file(out, folder / "expected.safetensors", metadata={"loss": repr(loss.item())})


def read(folder, exported):
    ids = torch.tensor(load_file(folder / "expected.safetensors")["ids"].astype(np.int64))
    model, report = AutoModelForCausalLM.from_pretrained(exported, dtype="auto", output_loading_info=True)
    problems = {kind: sorted(names) for kind, names in report.items() if names}
    assert not problems, problems
    out = {"logits": logits(model, ids[:-1])}
    if model.dtype == torch.float32:
        out |= {f"greedy/{length}": greedy(model, ids[:length]) for length in PROMPTS}
    save_file(out, f"{exported}.safetensors", metadata={"dtype": str(model.dtype)})


if sys.argv[1:2] == ["--read"]:
    for exported in sys.argv[3:]:
        read(Path(sys.argv[2]), exported)
else:
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "hub")
