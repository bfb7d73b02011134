//! SentencePiece's map of characters, which a `tokenizer.json` carries as the normalizer `Precompiled`:
//! checked before the crate that follows it gets it, since that trusts every offset in it and panics where
//! one leads nowhere.
//!
//! The map is base64 of: the bytes of a trie (u32), the trie, and texts that each end with a zero. The trie
//! is a double array (Aoe 1989, as Darts has it) of u32 units. From a node `p` the child by a byte `c` is the
//! unit at `p ^ c`, if its label is `c`; that unit's offset leads on to the next node, where a value stands
//! if it has a leaf: the offset of a text.

use serde_json::Value;

/// An error of every map in a normalizer that leads nowhere.
pub(crate) fn check(normalizer: &Value) -> Result<(), String> {
    match normalizer {
        Value::Object(fields) => {
            if let Some(map) = fields.get("precompiled_charsmap").and_then(Value::as_str) {
                check_map(&decode(map).ok_or("a character map that is not base64")?)?;
            }
            fields.values().try_for_each(check)
        }
        Value::Array(normalizers) => normalizers.iter().try_for_each(check),
        _ => Ok(()),
    }
}

fn check_map(map: &[u8]) -> Result<(), String> {
    let too_short = || "a character map that ends within its trie".to_owned();
    let (size, rest) = map.split_first_chunk().ok_or_else(too_short)?;
    let size = u32::from_le_bytes(*size) as usize;
    if size > rest.len() {
        return Err(too_short());
    }
    // What is left of the last unit belongs to the texts, as that crate has it.
    let (trie, texts) = rest.split_at(size / 4 * 4);
    let units: Vec<u32> = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let texts = str::from_utf8(texts).map_err(|_| "a character map whose texts are not UTF-8".to_owned())?;
    let astray = || "a character map whose trie leads out of it".to_owned();
    let first = *units.first().ok_or_else(astray)?;
    let (mut visited, mut nodes) = (vec![false; units.len()], vec![offset(first)]);
    while let Some(node) = nodes.pop() {
        match visited.get_mut(node) {
            Some(visited) if *visited => continue,
            Some(visited) => *visited = true,
            None => return Err(astray()),
        }
        for byte in 1..=255 {
            let at = node ^ byte;
            let unit = *units.get(at).ok_or_else(astray)?;
            if unit & (1 << 31 | 0xff) != byte as u32 {
                continue;
            }
            let next = at ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let text = *units.get(next).ok_or_else(astray)? & !(1 << 31);
                if !texts.is_char_boundary(text as usize) {
                    return Err("a character map with a text that begins nowhere".into());
                }
            }
            nodes.push(next);
        }
    }
    Ok(())
}

/// How far from a unit the node lies that it leads to; by exclusive or.
fn offset(unit: u32) -> usize {
    (unit as usize >> 10) << ((unit & 1 << 9) >> 6)
}

/// Base64 of the usual alphabet, with or without its padding.
fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four.iter().try_fold(0u32, |bits, byte| Some(bits << 6 | u32::from(digit(*byte)?)))?;
        let bits = bits << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A trie that makes `A` into the text at some offset: node 256, whose child by `A` leads to node 512,
    /// where the value is.
    fn map(value: u32, texts: &[u8]) -> Vec<u8> {
        let mut units = vec![0u32; 768];
        units[0] = 256 << 10;
        let child = 256 ^ usize::from(b'A');
        units[child] = ((512 ^ child as u32) << 10) | 1 << 8 | u32::from(b'A');
        units[512] = 1 << 31 | value;
        let trie = units.iter().flat_map(|unit| unit.to_le_bytes());
        (4 * 768u32).to_le_bytes().into_iter().chain(trie).chain(texts.iter().copied()).collect()
    }

    fn encode(bytes: &[u8]) -> String {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let four = |three: &[u8]| {
            let bits = three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
            let bits = bits << (8 * (3 - three.len()));
            let digit = move |i: usize| match i <= three.len() {
                true => char::from(DIGITS[(bits >> (18 - 6 * i)) as usize & 63]),
                false => '=',
            };
            (0..4).map(digit).collect::<String>()
        };
        bytes.chunks(3).map(four).collect()
    }

    #[test]
    fn base64_is_read_back() {
        for text in ["", "a", "ab", "abc", "abcd\u{ff}\0"] {
            assert_eq!(decode(&encode(text.as_bytes())).unwrap(), text.as_bytes());
        }
        assert_eq!(encode(b"ab"), "YWI=");
        assert_eq!(decode("a-b"), None);
    }

    #[test]
    fn a_map_that_leads_nowhere_is_refused() {
        let error = |map: &[u8]| check_map(map).unwrap_err();
        assert_eq!(check_map(&map(1, "xé\0".as_bytes())), Ok(()));
        assert_eq!(error(&map(2, "xé\0".as_bytes())), "a character map with a text that begins nowhere");
        assert_eq!(error(&map(9, b"a\0")), "a character map with a text that begins nowhere");
        assert_eq!(error(&map(0, &[0xff])), "a character map whose texts are not UTF-8");
        assert_eq!(error(&map(0, b"")[..80]), "a character map that ends within its trie");
        assert_eq!(error(&[1]), "a character map that ends within its trie");
        assert_eq!(error(&[0; 4]), "a character map whose trie leads out of it");
        // As long as it says, and shorter than its offsets lead.
        let mut short = map(0, b"");
        short.truncate(4 + 4 * 400);
        short[..4].copy_from_slice(&(4 * 400u32).to_le_bytes());
        assert_eq!(error(&short), "a character map whose trie leads out of it");
        // Wherever it stands in a normalizer.
        let nested = json!({ "type": "Sequence", "normalizers": [{ "type": "Precompiled", "precompiled_charsmap": "AAAA" }] });
        assert_eq!(check(&nested).unwrap_err(), "a character map that ends within its trie");
        assert_eq!(check(&json!({ "type": "NFC" })), Ok(()));
    }
}
