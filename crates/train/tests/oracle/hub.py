"""Makes hub/: a tiny GPT-2 as transformers saves it, and what transformers says of it, for tests/train/hub.rs.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python hub.py [FOLDER]

    hub/gpt2/             save_pretrained of a GPT2LMHeadModel of random weights
    hub/expected.safetensors
        ids               17 tokens: 16 to read, each followed by what to predict
        logits            of the 16, by the model in f32; the mean loss in the metadata
        logits_bf16       the same by the model in bf16
        after/NAME        the weights after one step of AdamW on that loss, in f32

With the program built, `python check_export.py` holds what it exports against transformers the other way round.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import GPT2Config, GPT2LMHeadModel

ADAMW = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6)
DECAY = 0.1

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "hub")
torch.manual_seed(11)
config = GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", bos_token_id=39, eos_token_id=39,
)
model = GPT2LMHeadModel(config)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.randn(parameter.shape)
model.save_pretrained(folder / "gpt2")

ids = torch.randint(0, 40, (17,))
array = lambda tensor: np.ascontiguousarray(tensor.detach().float().numpy())
out = {"ids": ids.numpy().astype(np.uint8)}
out["logits"] = array(model(ids[None, :-1]).logits[0])
with torch.no_grad():
    out["logits_bf16"] = array(GPT2LMHeadModel.from_pretrained(folder / "gpt2", dtype=torch.bfloat16)(ids[None, :-1]).logits[0])

# Biases and norms are not decayed, as the run file's `exclude_from_decay` has it.
matrices = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)], **ADAMW)
loss = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:])
loss.backward()
optimizer.step()
for name, parameter in model.named_parameters():
    out[f"after/{name.removeprefix('transformer.')}"] = array(parameter)
save_file(out, folder / "expected.safetensors", metadata={"loss": repr(loss.item())})
