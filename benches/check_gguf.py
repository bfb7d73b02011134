#!/usr/bin/env python3
"""llama.cpp beside Espalier: whether it reads what `espalier export --format gguf` writes, and says the same.

    python benches/check_gguf.py MODEL [--prompt TEXT] [--tokens 120] [--types f32,f16,bf16,q8_0,q4_0] [--binary target/release/espalier]

MODEL is a run folder, a checkpoint or a Hugging Face folder. The interpreter needs llama-cpp-python (and llama.cpp's libraries, in the folder
that LLAMA_CPP_LIB_PATH names where the package has none of its own) and gguf. For each type it prints a line of JSON:

    read        tensors that gguf's own reader finds, and the type of most of them
    prompt      whether llama.cpp makes as many ids of the prompt as we do
    equal       greedy tokens that are ours before the first that is not, those that are ours behind our own tokens, and how many there are
    distinct    how many different tokens there are among them
    margin      by how much llama.cpp prefers its token over ours at most, in logits: rounding, where it is small

f32 is expected to agree to the last token but where two logits are as good as equal. With f16 llama.cpp also rounds activations to f16, which
a trained model does not notice and random weights do; q8_0 and q4_0 are other weights.
"""
import argparse, collections, json, os, subprocess, sys, tempfile

here = os.path.dirname(os.path.abspath(__file__))
arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("model")
arguments.add_argument("--prompt", default="The model")
arguments.add_argument("--tokens", type=int, default=120)
arguments.add_argument("--types", default="f32,f16,bf16,q8_0,q4_0")
arguments.add_argument("--binary", default=os.path.join(os.path.dirname(here), "target/release/espalier"))
options = arguments.parse_args()

import gguf
import llama_cpp


def ours():
    how = ["--temperature", "0", "--max-new-tokens", str(options.tokens), "--dtype", "f32", "--set", "device.kind=cpu", "--json"]
    done = subprocess.run([options.binary, "generate", options.model, options.prompt, *how], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def theirs(path, generated):
    """Whether their token is ours behind the prompt and each of our tokens, and by how much they prefer another where it is not."""
    # Its cache of keys and values is f16 otherwise, and its attention rounds to it too.
    exact = dict(type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False)
    model = llama_cpp.Llama(path, n_ctx=0, n_batch=512, logits_all=True, verbose=False, n_threads=os.cpu_count(), **exact)
    ids = model.tokenize(options.prompt.encode(), add_bos=False, special=True)
    same_prompt = len(ids) == generated["prompt_tokens"]
    model.eval(ids)
    margins = []
    for token in generated["tokens"]:
        logits = model.scores[model.n_tokens - 1]
        margins.append(float(logits.max() - logits[token]))
        model.eval([token])
    return same_prompt, margins


generated = ours()
with tempfile.TemporaryDirectory() as folder:
    for kind in options.types.split(","):
        path = os.path.join(folder, f"{kind}.gguf")
        subprocess.run([options.binary, "export", options.model, "-o", path, "--format", "gguf", "--type", kind], check=True, stdout=subprocess.DEVNULL)
        tensors = gguf.GGUFReader(path).tensors
        most = collections.Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]
        same_prompt, margins = theirs(path, generated)
        first = next((step for step, margin in enumerate(margins) if margin > 0), len(margins))
        equal = [first, sum(margin == 0 for margin in margins), len(margins)]
        distinct = len(set(generated["tokens"]))
        line = dict(type=kind, read=[len(tensors), most], prompt=same_prompt, equal=equal, distinct=distinct, margin=max(margins), bytes=os.path.getsize(path))
        print(json.dumps(line), flush=True)
