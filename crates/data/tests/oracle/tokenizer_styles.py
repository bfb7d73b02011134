"""Makes tokenizers/: a tokenizer.json of each style that people have, trained on the spot, and what Python's `tokenizers` makes
of some texts with it, for tests/train/tokenizers.rs.

    pip install tokenizers==0.23.2 sentencepiece==0.2.2 "protobuf<7"
    python tokenizer_styles.py [FOLDER]

    gpt2      byte-level BPE behind GPT-2's split
    llama3    byte-level BPE behind a Split by regex, whole words first (ignore_merges), a token at the start
    qwen      the same with NFC before it, and without whole words first
    smollm    byte-level BPE behind single digits and GPT-2's split
    llama2    BPE with byte fallback, spaces as U+2581 by a normalizer, no split
    mistral   the same with spaces as U+2581 by a pre-tokenizer, before the first word alone, and a token that is looked for in
              what the normalizer has made
    bert      WordPiece behind BERT's normalizer and split
    t5        Unigram behind a Precompiled normalizer, WhitespaceSplit and Metaspace

FOLDER/STYLE.json is the tokenizer; FOLDER/expected.json has for each style a list of {"text", "ids", "input", "decoded"}: ids without
special tokens around them, ids with what the post-processor puts there, and their text again with special tokens in it.
"""

import json
import sys
import tempfile
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

CORPUS = [
    "To espalier: to prune a tree and train it along a lattice.",
    "The tree that is pruned and trained grows flat along the wall, and the wall keeps it warm.",
    "pruning = 0.9  # nine tenths of the weights\nfor layer in model.layers:\n    layer.prune(0.9)\n",
    "It's what we're doing: they'll train, we've pruned, she'd say \"don't\" and I'm done.",
    "Numbers: 1 22 333 4444 55555, 3.14159 and 2048 devices in 1999.",
    "Naïve café, déjà vu; Größe und Maß; ¿qué tal? árbol podado.",
    "Дерево подрезают и ведут по решётке. 木を剪定して育てる。",
] * 3

TEXTS = [
    "",
    " ",
    "The tree is trained along the wall.",
    "  two spaces, a\ttab,\n\n\nthree lines   and a trailing space ",
    "it's WE'RE they'Ll I'm don't",
    "1 12 123 1234 12345 3.14 -7 2048x1024",
    "naïve café déjà vu Größe nai\u0308ve e\u0301 \u1e9b\u0323",
    "Дерево 木を剪定 ﬁne ① ｆｕｌｌ ™ 한국어 עברית",
    "emoji 🌳✂️👩‍🌾 and \u00a0no-break\u3000wide spaces",
    "def prune(w):\r\n    return w * (abs(w) > 0.5)  # kept\r\n",
    "<|endoftext|>after<|begin_of_text|> <s>x</s> [MASK][SEP] <extra_id_0> <0x0A> plain",
    "unaffable UNAFFABLE un##affable hello,world!!! ... (a-b)_c",
    "x" * 70 + " " + "ab" * 40,
    "zero\u0000control\u0007 \u200bzero-width \ufffd replaced",
    "\n",
    "a\n",
    " leading and trailing  ",
    "x'ſy X'S he'D 'Re 're'VE 'l 'L",
    "tab\tword \t two\n\n  indented\n\t\tmore \r\n \r\n end\u2028line\u0085next",
    "a!?\n\n\nb...\r\n(c)[d]{e} <f>=\"g\";\n",
    "½Ⅷ①٣४ 12½ 1a2b 3's",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 ไทย\u0300 \u0344 \uac00\u1100\u1161",
    "▁▁ already ▁marked▁ </s></s>tail <s> <unk>",
]


def train(tokenizer, trainer):
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level(pre_tokenizer, special, size, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False))


def gpt2():
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"], 400)


def split(regex):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(regex), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def llama3():
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = byte_level(split(LLAMA3), special, 400, ignore_merges=True)
    start = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[start])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def qwen():
    return byte_level(split(QWEN), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 400, normalizers.NFC())


def smollm():
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    return byte_level(pre_tokenizers.Sequence(split), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 400)


def mistral():
    file = json.loads(llama2().to_str())
    file["normalizer"] = None
    file["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    file["added_tokens"][2]["normalized"] = True
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def llama2():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # Words are merged apart when it is trained, as sentencepiece does it; text is not cut when it is used.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    train(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=special + bytes_, show_progress=False))
    # Bytes are tokens of the model, and none that are looked for in the text.
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = file["added_tokens"][: len(special)]
    file["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(file))


def bert():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def charsmap():
    """A Precompiled normalizer of a few rules; those of T5 itself take 240 kB."""
    rules = {c: " " for c in "\u00a0\u3000\t\n\r"} | {"ﬁ": "fi", "①": "1", "™": "TM", "ｆ": "f", "ｕ": "u", "ｌ": "l", "\u200b": ""}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        hexed = lambda text: " ".join(f"{ord(c):X}" for c in text)
        (folder / "rules.tsv").write_text("".join(f"{hexed(a)}\t{hexed(b)}\n" for a, b in rules.items()))
        (folder / "corpus.txt").write_text("\n".join(CORPUS))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), model_type="char", vocab_size=200, character_coverage=1.0,
            normalization_rule_tsv=str(folder / "rules.tsv"), minloglevel=2, hard_vocab_limit=False,
        )
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString((folder / "m.model").read_bytes())
    return model.normalizer_spec.precompiled_charsmap


def t5():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Precompiled(charsmap())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    train(tokenizer, trainer)
    tokenizer.add_special_tokens([AddedToken("<extra_id_0>", lstrip=True, rstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "tokenizers")
    folder.mkdir(exist_ok=True)
    expected = {}
    for make in [gpt2, llama3, qwen, smollm, llama2, mistral, bert, t5]:
        path = folder / f"{make.__name__}.json"
        make().save(str(path), pretty=False)
        tokenizer = Tokenizer.from_file(str(path))
        ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS}
        expected[make.__name__] = [
            {
                "text": text,
                "ids": ids[text],
                "input": tokenizer.encode(text).ids,
                "decoded": tokenizer.decode(ids[text], skip_special_tokens=False),
            }
            for text in TEXTS
        ]
    lines = lambda style: ",\n".join("  " + json.dumps(one) for one in expected[style])
    styles = ",\n".join(f' "{style}": [\n{lines(style)}\n ]' for style in expected)
    (folder / "expected.json").write_text(f"{{\n{styles}\n}}\n")


main()
