//! Files for llama.cpp: to the byte what its own Python package writes (`../oracle/make_gguf.py`), and every key
//! and tensor read back by a small reader, in every type.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use espalier_tensor::{bf16, f16};
use espalier_testing::largest;
use espalier_train::Error;
use espalier_train::hub::{ExportOptions, ExportPrecision, GgufType};
use serde_json::json;

use super::tokens::add_tokenizer;
use super::{AS_IT_IS, copy, floats, folder_with, gpt2, open, oracle, tensors};
use crate::fixture::Fixture;
use crate::support::{assert_says, names, tiny_gpt};

/// The fixture with a tokenizer and a chat template.
fn with_tokenizer(at: PathBuf) -> PathBuf {
    let folder = folder_with(at, |_| {});
    add_text_files(&folder);
    folder
}

fn add_text_files(folder: &Path) {
    add_tokenizer(folder);
    fs::write(folder.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let tokenizer_config = json!({"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"});
    fs::write(folder.join("tokenizer_config.json"), tokenizer_config.to_string()).unwrap();
}

/// Header, keys in order, table of tensors, padding and numbers.
#[test]
fn a_file_is_that_of_ggufs_own_writer() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out/gpt2.gguf");
    let model = open(&with_tokenizer(folder.path().join("from")));
    let report = model.export_gguf(&file, Some(GgufType::F16)).unwrap();
    let (ours, theirs) = (fs::read(&file).unwrap(), fs::read(oracle().join("gguf/gpt2.gguf")).unwrap());
    assert_eq!(GgufFile::parse(&ours), GgufFile::parse(&theirs));
    assert!(ours == theirs, "the same keys and tensors in other bytes");
    assert_eq!((report.bytes, report.tensors, report.has_tokenizer), (theirs.len() as u64, 28, true));
    let error = model.export_gguf(&file, None).unwrap_err().to_string();
    assert!(error.ends_with("gpt2.gguf: it is there already: choose another name"), "{error}");
    let left = fs::read_dir(folder.path().join("out")).unwrap().count();
    assert_eq!(left, 1, "nothing is left of what was being written");
}

/// Keys and tensors of the Llama family, in whichever order: names, permuted rows, divisors of angles.
#[test]
fn every_family_is_written_as_llama_cpp_names_it() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["llama", "mistral", "qwen2", "qwen3"] {
        let from = folder.path().join(name);
        copy(&oracle().join("hub").join(name), &from);
        add_text_files(&from);
        let file = folder.path().join(format!("{name}.gguf"));
        open(&from).export_gguf(&file, Some(GgufType::F16)).unwrap();
        let ours = GgufFile::parse(&fs::read(&file).unwrap());
        let theirs = GgufFile::parse(&fs::read(oracle().join(format!("gguf/{name}.gguf"))).unwrap());
        assert_eq!(ours.pairs, theirs.pairs, "{name}");
        let names = |file: &GgufFile| file.tensors.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&ours), names(&theirs), "{name}");
        for (key, tensor) in &ours.tensors {
            assert!(*tensor == theirs.tensors[key], "{name}: {key} differs");
        }
    }
}

/// Weights of a linear layer with those of the fixture as its rows.
#[test]
fn weights_are_quantised_by_the_published_rule() {
    let folder = tempfile::tempdir().unwrap();
    let expected = Fixture::read(include_bytes!("../../oracle/gguf/quantized.safetensors"));
    let weights = &expected.f32["weights"];
    let rows = weights.len() / 96;
    // A GPT-2 whose tokens are the rows: its table is a matrix that is written as it lies.
    tiny_gpt("train.steps=0 model.width=96 model.heads=2 model.layers=1").run_in(&folder.path().join("run"));
    let hf = folder.path().join("hf");
    open(&folder.path().join("run")).export(&hf, &AS_IT_IS).unwrap();
    let mut all = tensors(&hf.join("model.safetensors"));
    let table = all.get_mut("transformer.wte.weight").unwrap();
    assert!(table.1[0] >= rows, "{:?}", table.1);
    for (place, weight) in table.2.as_chunks_mut::<4>().0.iter_mut().zip(weights) {
        *place = weight.to_le_bytes();
    }
    super::write(&hf.join("model.safetensors"), &all);
    let types = [
        (GgufType::Q8_0, "q8_0"),
        (GgufType::Q4_0, "q4_0"),
        (GgufType::F16, "f16"),
        (GgufType::Bf16, "bf16"),
    ];
    for (dtype, name) in types {
        let file = folder.path().join(format!("{name}.gguf"));
        open(&hf).export_gguf(&file, Some(dtype)).unwrap();
        let read = GgufFile::parse(&fs::read(&file).unwrap());
        let expected = &expected.bytes[name].1;
        let table = &read.tensors["token_embd.weight"];
        let differs = table.bytes.iter().zip(expected).position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs, None, "{name}: the first byte that differs");
    }
}

/// From any layout, of any precision, each number once rounded from the masters.
#[test]
fn every_tensor_of_any_checkpoint_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let small = tiny_gpt("train.steps=2 model.width=32 model.heads=2 model.layers=2");
    for (name, more) in [
        ("one", ""),
        ("cut", "parallel.tensor=2 parallel.pipeline=2 train.micro_batches=2"),
        ("narrow", "train.precision=bf16 model.tied=false"),
        ("pruned", "prune.method=magnitude prune.sparsity=0.5"),
    ] {
        small.set(more).run_in(&at(name));
        let (trained, hf) = (open(&at(name)), at(&format!("{name}-hf")));
        trained.export(&hf, &ExportOptions { dtype: Some(ExportPrecision::F32), ..AS_IT_IS }).unwrap();
        let theirs = tensors(&hf.join("model.safetensors"));
        for (dtype, code, most) in [
            (GgufType::F32, 0, 0.0),
            (GgufType::F16, 1, 1e-3),
            (GgufType::Bf16, 30, 4e-3),
            (GgufType::Q8_0, 8, 4.5e-3),
            (GgufType::Q4_0, 2, 0.13),
        ] {
            let file = at(&format!("{name}-{}.gguf", dtype.name()));
            trained.export_gguf(&file, Some(dtype)).unwrap();
            let read = GgufFile::parse(&fs::read(&file).unwrap());
            assert_eq!(read.tensors.len(), theirs.len(), "{name}");
            for (key, (_, shape, bytes)) in &theirs {
                let gguf = renamed(key);
                let Tensor { code: written, shape: sizes, bytes: numbers } = &read.tensors[&gguf];
                let is_linear = key.contains(".c_") && key.ends_with("weight");
                let is_exact = shape.len() == 1 || key.ends_with("wpe.weight");
                assert_eq!(*written, if is_exact { 0 } else { code }, "{gguf}");
                let mut expected = floats(bytes);
                let mut shape = shape.clone();
                if is_linear {
                    expected = (0..shape[1])
                        .flat_map(|j| expected[j..].iter().step_by(shape[1]).copied().collect::<Vec<f32>>())
                        .collect();
                    shape.reverse();
                }
                // Innermost first.
                shape.reverse();
                assert_eq!(*sizes, shape, "{gguf}");
                let got = numbers_of(*written, numbers);
                assert_eq!(got.len(), expected.len(), "{gguf}");
                let most = if is_exact { 0.0 } else { most };
                for (expected, got) in expected.chunks(32).zip(got.chunks(32)) {
                    let largest = largest(expected);
                    for (expected, got) in expected.iter().zip(got) {
                        assert!((expected - got).abs() <= most * largest, "{gguf}: {expected} and {got}");
                        // What is pruned stays so.
                        assert!(*expected != 0.0 || *got == 0.0, "{gguf}: 0 and {got}");
                    }
                }
            }
        }
        // As stored.
        let stored = trained.export_gguf(&at(&format!("{name}.gguf")), None).unwrap().dtype;
        assert_eq!(stored, if name == "narrow" { GgufType::Bf16 } else { GgufType::F32 });
    }
}

/// Each in one sentence, and no file is left.
#[test]
fn what_llama_cpp_cannot_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |model: &Path, dtype| open(model).export_gguf(&at("out.gguf"), Some(dtype)).unwrap_err();
    for dtype in [GgufType::Q8_0, GgufType::Q4_0] {
        let error = refused(&gpt2(), dtype).to_string();
        let why = format!(
            "token_embd.weight has rows of 16 weights, and {} takes 32 at a time: use --type f16, bf16 or f32",
            dtype.name()
        );
        assert!(error.ends_with(&why), "{error}");
    }
    let large = folder_with(at("large"), |all| {
        let bytes = &mut all.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap().2;
        bytes[40..44].copy_from_slice(&70_000_f32.to_le_bytes());
    });
    let error = refused(&large, GgufType::F16).to_string();
    assert!(
        error.ends_with("blk.1.ffn_up.weight has values beyond the range of f16: use --type bf16 or f32"),
        "{error}"
    );
    open(&large).export_gguf(&at("large.gguf"), Some(GgufType::Bf16)).unwrap();
    let broken = folder_with(at("broken"), |all| {
        let bytes = &mut all.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap().2;
        bytes[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert!(matches!(refused(&broken, GgufType::F32), Error::BrokenWeights { .. }));
    tiny_gpt("train.steps=1 model.norm=rms").run_in(&at("rms"));
    assert_says(refused(&at("rms"), GgufType::F32), &["llama.cpp has no architecture for this model"]);
    tiny_gpt("train.steps=1 model.activation=relu").run_in(&at("relu"));
    let error = refused(&at("relu"), GgufType::F32).to_string();
    assert!(error.ends_with("its activation is relu, and llama.cpp's has gelu_new alone"), "{error}");
    let tokenizer = with_tokenizer(at("tokenizer"));
    copy(&tokenizer, &at("split"));
    let joined = json!({
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    });
    fs::write(at("split").join("tokenizer.json"), joined.to_string()).unwrap();
    let error = refused(&at("split"), GgufType::F32).to_string();
    assert!(
        error.ends_with("merges a text without splitting it into words, which llama.cpp's does not"),
        "{error}"
    );
    let left = names(folder.path());
    assert!(left.iter().all(|name| !name.contains("out.gguf")), "{left:?}");
}

/// llama.cpp's name of a tensor of a GPT-2, by the table of its documentation.
fn renamed(theirs: &str) -> String {
    let table = [
        ("lm_head", "output"),
        ("transformer.wte", "token_embd"),
        ("transformer.wpe", "position_embd"),
        ("transformer.ln_f", "output_norm"),
        ("transformer.h.", "blk."),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ];
    table.iter().fold(theirs.to_owned(), |name, (theirs, ours)| name.replace(theirs, ours))
}

/// A file as its specification has it, read for tests alone.
#[derive(Debug, PartialEq)]
struct GgufFile {
    /// Each value as text, in the order of the file.
    pairs: Vec<(String, String)>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug, PartialEq)]
struct Tensor {
    code: u32,
    /// Innermost first.
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Bytes that are left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(count);
        self.0 = left;
        taken
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> usize {
        u64::from_le_bytes(self.take(8).try_into().unwrap()) as usize
    }

    fn string(&mut self) -> String {
        let length = self.u64();
        String::from_utf8(self.take(length).to_vec()).unwrap()
    }

    fn value(&mut self, kind: u32) -> String {
        match kind {
            4 => self.u32().to_string(),
            5 => (self.u32() as i32).to_string(),
            6 => f32::from_bits(self.u32()).to_string(),
            7 => (self.take(1) == [1]).to_string(),
            8 => self.string(),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).map(|_| self.value(kind)).collect::<Vec<_>>().join("|")
            }
            other => panic!("a value of type {other}"),
        }
    }
}

impl GgufFile {
    fn parse(file: &[u8]) -> GgufFile {
        let mut reader = Reader(file);
        assert_eq!((reader.take(4), reader.u32()), (&b"GGUF"[..], 3));
        let (tensors, pairs) = (reader.u64(), reader.u64());
        let pairs = (0..pairs).map(|_| {
            let key = reader.string();
            let kind = reader.u32();
            (key, reader.value(kind))
        });
        let pairs = pairs.collect();
        let table: Vec<(String, Vec<usize>, u32, usize)> = (0..tensors)
            .map(|_| {
                let name = reader.string();
                let dimensions = reader.u32();
                let shape = (0..dimensions).map(|_| reader.u64()).collect();
                (name, shape, reader.u32(), reader.u64())
            })
            .collect();
        let start = (file.len() - reader.0.len()).next_multiple_of(32);
        let mut read = BTreeMap::new();
        for (name, shape, code, offset) in table {
            assert_eq!(offset % 32, 0, "{name}");
            let elements: usize = shape.iter().product();
            let length = match code {
                0 => 4 * elements,
                1 | 30 => 2 * elements,
                2 => elements / 32 * 18,
                8 => elements / 32 * 34,
                other => panic!("{name} is of type {other}"),
            };
            let bytes = file[start + offset..][..length].to_vec();
            assert!(
                read.insert(name.clone(), Tensor { code, shape, bytes }).is_none(),
                "{name} stands twice"
            );
        }
        GgufFile { pairs, tensors: read }
    }
}

/// What the bytes of a type stand for.
fn numbers_of(code: u32, bytes: &[u8]) -> Vec<f32> {
    let two = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    match code {
        0 => floats(bytes),
        1 => bytes.chunks(2).map(two).collect(),
        30 => bytes.as_chunks().0.iter().map(|two| bf16::from_le_bytes(*two).to_f32()).collect(),
        8 => bytes
            .chunks(34)
            .flat_map(|block| block[2..].iter().map(move |number| f32::from(*number as i8) * two(block)))
            .collect(),
        _ => bytes
            .chunks(18)
            .flat_map(|block| {
                let low = block[2..].iter().map(|number| number & 15);
                let high = block[2..].iter().map(|number| number >> 4);
                low.chain(high).map(move |number| (f32::from(number) - 8.0) * two(block))
            })
            .collect(),
    }
}
