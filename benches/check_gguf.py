#!/usr/bin/env python3
"""llama.cpp beside Espalier: whether it reads what `espalier export --format gguf` writes, and says the same.

    python benches/check_gguf.py MODEL [--prompt TEXT] [--tokens 120] [--types f32,f16,bf16,q8_0,q4_0] [--binary target/release/espalier]

MODEL is a run folder, a checkpoint or a Hugging Face folder. The interpreter needs llama-cpp-python (and llama.cpp's libraries, in the folder
that LLAMA_CPP_LIB_PATH names where the package has none of its own) and gguf. For each type it prints a line of JSON:

    read        tensors that gguf's own reader finds, and the type of most of them
    prompt      whether llama.cpp makes as many ids of the prompt as we do
    equal       greedy tokens that are ours before the first that is not, and how many there are
    margin      by how much llama.cpp prefers its token over ours there, in logits: rounding, where it is small

f32 and f16 are expected to agree to the last token but where two logits are as good as equal; q8_0 and q4_0 are other weights.
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
    """Their token behind the prompt and each of our tokens, as long as it is ours."""
    model = llama_cpp.Llama(path, n_ctx=0, n_batch=512, logits_all=True, verbose=False, n_threads=os.cpu_count())
    ids = model.tokenize(options.prompt.encode(), add_bos=False, special=True)
    same_prompt = len(ids) == generated["prompt_tokens"]
    model.eval(ids)
    for step, token in enumerate(generated["tokens"]):
        logits = model.scores[model.n_tokens - 1]
        best = int(logits.argmax())
        if best != token:
            return same_prompt, step, float(logits[best] - logits[token])
        model.eval([token])
    return same_prompt, len(generated["tokens"]), None


generated = ours()
with tempfile.TemporaryDirectory() as folder:
    for kind in options.types.split(","):
        path = os.path.join(folder, f"{kind}.gguf")
        subprocess.run([options.binary, "export", options.model, "-o", path, "--format", "gguf", "--type", kind], check=True, stdout=subprocess.DEVNULL)
        tensors = gguf.GGUFReader(path).tensors
        most = collections.Counter(tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1).most_common(1)[0][0]
        same_prompt, equal, margin = theirs(path, generated)
        line = dict(type=kind, read=[len(tensors), most], prompt=same_prompt, equal=[equal, len(generated["tokens"])], margin=margin, bytes=os.path.getsize(path))
        print(json.dumps(line), flush=True)
