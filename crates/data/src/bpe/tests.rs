//! Ids are those of Hugging Face; words of any length; bytes without a token.

use super::*;
use serde_json::json;
use std::{collections::HashMap, fs};

/// The merges of a tokenizer that Hugging Face's trainer learnt from a novel.
const MERGES: &str = "Ġ t|h e|Ġ a|i n|Ġ s|Ġt he|Ġ w|Ġ o|r e|h a|n d|Ġ b|e r|in g|Ġ m|h i|e d|Ġ f|o u|Ġ c|i t|l e|\
    Ġa nd|Ġo f|a r|s t|l l|o n|e n|Ġt o|o r|Ġ in|Ġ d|Ġ p|a n|Ġ l|Ġ n|a t|Ġ hi|e s|o w|ha t|Ġ he|o m|Ġ ha|u t|a s|Ġ I|\
    Ġ g|Ġb e|l y|Ġt h|Ġt hat|i s|Ġ e|l d|Ġo n|g h|o t|Ġhi s|Ġ it|s e|Ġ u|e e|â Ģ|âĢ Ķ|Ġs t|c k|i d|' s|v e|v er";

/// Odd texts, and their ids by Hugging Face's tokenizers 0.23.3.
const ODD: [(&str, &[u32]); 6] = [
    (
        "The whale's in there, and they're the others'",
        &[52, 258, 263, 266, 278, 326, 288, 262, 265, 12, 279, 262, 89, 7, 265, 262, 264, 84, 258, 82, 83, 7],
    ),
    (
        "  two  spaces\n\n\tand tabs \n",
        &[221, 257, 87, 79, 221, 261, 80, 65, 67, 296, 199, 199, 198, 65, 267, 257, 65, 66, 83, 221, 199],
    ),
    ("<|endoftext|>the<|endoftext|><|endoftext", &[0, 84, 258, 0, 28, 92, 69, 267, 79, 70, 84, 69, 88, 84]),
    (
        "na\u{ef}ve caf\u{e9} \u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} \u{4e2d}\u{6587} \u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{bd}\u{2167}",
        &[
            78, 65, 128, 108, 327, 276, 65, 70, 128, 103, 221, 157, 98, 118, 157, 98, 124, 157, 98, 102, 157,
            99, 236, 157, 98, 100, 157, 99, 223, 221, 161, 117, 256, 163, 245, 230, 221, 173, 254, 240, 103,
            321, 236, 173, 254, 240, 103, 321, 236, 173, 254, 240, 101, 221, 127, 122, 159, 228, 101,
        ],
    ),
    (
        "thethethethereallyeeeeeee=====",
        &[84, 258, 84, 258, 84, 258, 84, 258, 265, 65, 283, 89, 320, 320, 320, 69, 29, 29, 29, 29, 29],
    ),
    (
        "\x00\x7f\u{a0}\u{2028}'S 'tis I'LL we'll",
        &[189, 222, 127, 255, 321, 102, 7, 51, 221, 7, 84, 310, 304, 7, 44, 44, 263, 69, 7, 283],
    ),
];

/// The trainer's file: first the special token, then the bytes in the order of their characters, then the
/// merges.
fn trained(prefix_space: bool) -> Bpe {
    let mut bytes = crate::tokenizer_json::alphabet().map(String::from).to_vec();
    bytes.sort_unstable();
    let merges: Vec<_> = MERGES.split('|').collect();
    let merged = merges.iter().map(|merge| merge.replace(' ', ""));
    let vocab: HashMap<String, u32> = bytes.into_iter().chain(merged).zip(1..).collect();
    let file = json!({
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", "normalized": false}],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": prefix_space, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "vocab": vocab, "merges": merges},
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    fs::write(&path, file.to_string()).unwrap();
    Bpe::open(&path).unwrap()
}

#[test]
fn ids_are_hugging_faces() {
    let bpe = trained(false);
    assert_eq!((bpe.vocab(), bpe.added("<|endoftext|>"), bpe.added("the")), (329, Some(0), None));
    for (text, ids) in ODD {
        assert_eq!(bpe.encode(text).unwrap(), ids, "{text}");
        let back: Vec<u8> = ids.iter().flat_map(|&id| bpe.token_bytes(id)).copied().collect();
        assert_eq!(back, text.as_bytes());
    }
    let ids = [0, 262, 0, 221, 28, 92, 69, 267, 79, 70, 84, 69, 88, 84];
    assert_eq!(trained(true).encode(ODD[2].0).unwrap(), ids);
}

/// A word without end takes n log n steps: at n squared this test would not come back.
#[test]
fn long_words_are_merged_in_time() {
    let ids = trained(false).encode(&"e".repeat(400_001)).unwrap();
    assert_eq!((ids.len(), ids[0], ids[200_000]), (200_001, 320, 69));
}

/// Both ways to merge give the same.
#[test]
fn words_of_any_length_are_merged_alike() {
    let bpe = trained(false);
    let text = "the thing that he hated, and others' heads: eeeeee";
    for start in 0..text.len() {
        for end in start..text.len().min(start + SHORT) {
            let (mut ids, mut symbols) = (Vec::new(), Vec::new());
            bpe.merge(&text[start..end], &mut ids).unwrap();
            bpe.spell(&text[start..end], &mut symbols).unwrap();
            assert!(bpe.merge_long(symbols).eq(ids), "{}", &text[start..end]);
        }
    }
}

#[test]
fn words_begin_at_spaces() {
    let words = |words| marked_words("a▁▁b▁c▁", words).collect::<Vec<_>>();
    assert_eq!(words(MarkedWords::Runs), ["a", "▁▁b", "▁c", "▁"]);
    assert_eq!(words(MarkedWords::Each), ["a", "▁", "▁b", "▁c", "▁"]);
}

#[test]
fn a_byte_without_a_token_is_refused() {
    let mut bpe = trained(false);
    let Alphabet::Bytes(bytes) = &mut bpe.alphabet else { panic!() };
    bytes[usize::from(b'q')] = None;
    let message = bpe.encode("a queue").unwrap_err().to_string();
    assert!(message.ends_with("has no token for \"byte 0x71 of  queue\""), "{message}");
}
