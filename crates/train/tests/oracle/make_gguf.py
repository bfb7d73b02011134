"""Makes gguf/: what the gguf package of llama.cpp writes of weights and of the tiny models in hub/. For tests/train/hub/gguf.rs.

    pip install gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0
    python make_gguf.py

    gguf/quantized.safetensors   weights, and their bytes as q8_0, q4_0, f16 and bf16
    gguf/NAME.gguf               the model of hub/NAME in f16, with a small tokenizer, key by key as ours has it
"""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import quants
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent


def quantized():
    random = np.random.default_rng(7)
    rows = [random.standard_normal(96) * 10.0**power for power in (-6, -3, -2, -1, 0, 1, 2)]
    rows.append(np.zeros(96))
    # Ties of magnitude in both orders, halves that are rounded away from zero, and a block of one value.
    rows.append(np.tile([1.0, -1.0, 0.5, -0.5], 24))
    rows.append(np.tile([-1.0, 1.0, 0.25, 0.75], 24))
    rows.append(np.concatenate([np.arange(-16, 16) * 7.9375, np.full(32, 127.0), np.arange(32) - 0.5]))
    # Pruned: zeros between the weights, and blocks of which one is left.
    rows.append(random.standard_normal(96) * (random.random(96) < 0.3))
    rows.append(np.where(np.arange(96) == 40, -0.37, 0.0))
    weights = np.stack(rows).astype(np.float32)
    # gguf gives f16 as numpy's own type.
    types = dict(q8_0=T.Q8_0, q4_0=T.Q4_0, bf16=T.BF16, f16=T.F16)
    out = {name: np.ascontiguousarray(quants.quantize(weights, kind)).view(np.uint8) for name, kind in types.items()}
    save_file({"weights": weights, **out}, HERE / "gguf/quantized.safetensors", metadata={"gguf": "0.19.0"})


LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
TOKENS = [*LETTERS, "Ġ", "th", "the", "Ġthe", "<|endoftext|>"]
MERGES = ["t h", "th e", "Ġ the"]


def write(name, architecture, sizes, tensors, vocab):
    writer = gguf.GGUFWriter(HERE / f"gguf/{name}.gguf", architecture)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    sizes(writer)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    end = TOKENS.index("<|endoftext|>")
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_token_merges(MERGES)
    unused = [f"[PAD{i}]" for i in range(len(TOKENS), vocab)]
    writer.add_token_types([1] * end + [3] + [5] * len(unused))
    writer.add_token_list(TOKENS + unused)
    writer.add_chat_template("{{ messages[0].content }}")
    for key, value in tensors:
        exact = value.ndim == 1 or key == "position_embd.weight"
        writer.add_tensor(key, np.ascontiguousarray(value if exact else value.astype(np.float16)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gpt2():
    config = json.loads((HERE / "hub/gpt2/config.json").read_text())
    weights = load_file(HERE / "hub/gpt2/model.safetensors")

    def sizes(writer):
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])

    # As gguf's own table of names has them; linear layers of GPT-2 lie input by output.
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config["n_layer"])
    blocks = [f"h.{i}." for i in range(config["n_layer"])]
    inside = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    order = ["wte", "wpe", *[block + name for block in blocks for name in inside], "ln_f"]
    tensors = []
    for module in order:
        for kind in ("weight", "bias"):
            if (value := weights.get(f"transformer.{module}.{kind}")) is not None:
                value = value.T if ".c_" in module and kind == "weight" else value
                tensors.append((f"{table.get_name(f'transformer.{module}')}.{kind}", value))
    write("gpt2", "gpt2", sizes, tensors, config["vocab_size"])


def permuted(weights, heads):
    """As `LlamaModel.permute` of llama.cpp's converter."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def divisors(rope, size):
    """As `generate_extra_tensors` of llama.cpp's converter."""
    found = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / size)
        context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context / low:
            found.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def family(name, architecture):
    config = json.loads((HERE / f"hub/{name}/config.json").read_text())
    weights = load_file(HERE / f"hub/{name}/model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, rope = config.get("head_dim") or config["hidden_size"] // heads, config["rope_parameters"]

    def sizes(writer):
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(size)
        writer.add_rope_freq_base(rope["rope_theta"])

    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    tensors = [("rope_freqs.weight", divisors(rope, size))] if rope["rope_type"] == "llama3" else []
    for key, value in weights.items():
        module, kind = key.rsplit(".", 1)
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            value = permuted(value, heads if module.endswith("q_proj") else kv_heads)
        tensors.append((f"{table.get_name(module)}.{kind}", value))
    write(name, architecture, sizes, tensors, config["vocab_size"])


(HERE / "gguf").mkdir(exist_ok=True)
quantized()
gpt2()
for name, architecture in dict(llama="llama", mistral="llama", qwen2="qwen2", qwen3="qwen3").items():
    family(name, architecture)
