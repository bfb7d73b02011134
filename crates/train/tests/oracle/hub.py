"""Makes hub/: a tiny GPT-2, and tiny models of the Llama family, as transformers saves them, and what transformers says of them; and says
what it makes of folders of ours. For tests/train/hub.rs, which runs it where Python has these packages.

    pip install torch==2.15.0 transformers==5.22.2 safetensors==0.8.0 numpy==2.4.6
    python hub.py [FOLDER]
    python hub.py --read FOLDER EXPORTED...
    python hub.py --read FOLDER/FAMILY.safetensors EXPORTED...

The first makes

    hub/gpt2/             save_pretrained of a GPT2LMHeadModel of random weights
    hub/expected.safetensors
        ids               17 tokens: 16 to read, each followed by what to predict
        logits            of the 16, by the model in f32; the mean loss in the metadata
        logits_bf16       the same by the model in bf16
        greedy/N          16 tokens, of which the first N are a prompt and the others what the model in f32 says is likeliest
        after/NAME        the weights after one step of AdamW on that loss, in f32

    hub/FAMILY/           llama (llama3 scaling, grouped keys), qwen2 (biases), qwen3 (norms of queries and keys), mistral; and gpt2-other,
                          a GPT-2 of another inner width, epsilon and activation
    hub/FAMILY.safetensors  the same of these: 33 tokens, prompts that are followed up to 200 tokens further

and the second reads folders that we exported with from_pretrained, in the precision that they have, and writes of each EXPORTED.safetensors
with `logits` of FOLDER's `ids` and, in f32, `greedy/N` behind the prompts of FOLDER. A tensor that is missing, unexpected or of another shape is an error.

`check_export.py` holds a folder with its tokenizer against `espalier eval` on a text.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config,
)

ADAMW = dict(lr=0.01, betas=(0.9, 0.999), eps=1e-6)
DECAY = 0.1
VOCAB, CONTEXT, PROMPTS = 40, 16, [1, 2, 5, 11]

# What the Llama family's models have in common, and how they differ. A wavelength of the second pair is between those that are scaled and not.
SIZES = dict(
    vocab_size=VOCAB, max_position_embeddings=256, hidden_size=16, num_hidden_layers=2, intermediate_size=24, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1, attn_implementation="eager", bos_token_id=39, eos_token_id=39,
)
SCALING = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64,
)
THETA = dict(rope_type="default", rope_theta=1e6)
FAMILIES = {
    "llama": LlamaConfig(**SIZES, head_dim=8, tie_word_embeddings=False, rope_parameters=SCALING, rms_norm_eps=1e-5),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=THETA, rms_norm_eps=1e-6),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False, rope_parameters=THETA, rms_norm_eps=1e-6),
    "mistral": MistralConfig(**SIZES, head_dim=8, tie_word_embeddings=False, rope_parameters=THETA, rms_norm_eps=1e-5, sliding_window=None),
    # A GPT-2 that is not as published in any of these.
    "gpt2-other": GPT2Config(
        vocab_size=VOCAB, n_positions=256, n_embd=16, n_layer=2, n_head=4, n_inner=24, activation_function="gelu", layer_norm_epsilon=1e-3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1, attn_implementation="eager", bos_token_id=39, eos_token_id=39,
    ),
}

array = lambda tensor: np.ascontiguousarray(tensor.detach().float().numpy())
tokens = lambda tensor: tensor.numpy().astype(np.uint8)


def logits(model, ids):
    with torch.no_grad():
        return array(model(ids[None]).logits[0])


def greedy(model, prompt):
    # Neither a token that ends the text nor a mask of padding: all that the weights say, up to the end of the context or 200 tokens further.
    how = dict(attention_mask=torch.ones_like(prompt[None]), do_sample=False, eos_token_id=None, pad_token_id=0)
    return tokens(model.generate(prompt[None], max_length=min(model.config.max_position_embeddings, len(prompt) + 200), **how)[0])


def after_a_step(model, ids, **more):
    # Biases and norms are not decayed, as the run file's `exclude_from_decay` has it.
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, **ADAMW | more)
    loss = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:])
    loss.backward()
    optimizer.step()
    named = {name.removeprefix("transformer.").removeprefix("model."): array(p) for name, p in model.named_parameters()}
    return {f"after/{name}": weight for name, weight in named.items()}, loss.item()


def make_family(folder, name, config):
    torch.manual_seed(13)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder / name)
    ids = torch.randint(0, VOCAB, (33,))
    out = {"ids": tokens(ids), "logits": logits(model, ids[:-1])}
    out["logits_bf16"] = logits(AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16), ids[:-1])
    out |= {f"greedy/{length}": greedy(model, ids[:length]) for length in PROMPTS}
    # Some of its gradients are as small as 1e-6: an epsilon of that size would make large steps of their roundings.
    after, loss = after_a_step(model, ids, eps=1e-4)
    save_file(out | after, folder / f"{name}.safetensors", metadata={"loss": repr(loss)})


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in FAMILIES.items():
        make_family(folder, name, config)
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

    after, loss = after_a_step(model, ids)
    save_file(out | after, folder / "expected.safetensors", metadata={"loss": repr(loss)})


def read(made, exported):
    expected = made if made.suffix == ".safetensors" else made / "expected.safetensors"
    ids = torch.tensor(load_file(expected)["ids"].astype(np.int64))
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
