//! Checksums of texts that people and programs read as they are: a changed digit in one of them would be believed.
//!
//! A resolved run file has one in its first line, a line of JSON as its last field. Texts of older programs
//! have none, and are read as before: where a flipped bit hides the checksum, what it is of is as it was.

use std::borrow::Cow;

/// How the first line of a resolved run file begins.
const FIRST_LINE: &str = "# blake3 of all that follows: ";
/// How the last field of a line of JSON begins.
const LAST_FIELD: &str = ",\"blake3\":\"";
/// So many hexadecimal digits are enough to find what a disk has changed.
const DIGITS: usize = 16;

/// A run file with its checksum ahead of it.
pub(crate) fn add_to_toml(text: &str) -> String {
    format!("{FIRST_LINE}{}\n{text}", blake3::hash(text.as_bytes()).to_hex())
}

/// A run file without its checksum, if that is right or it has none; an error is the end of a sentence about
/// the file.
pub(crate) fn check_toml(text: &str) -> Result<&str, &'static str> {
    // One that was cut off within the line, down to nothing.
    if FIRST_LINE.starts_with(text) {
        return Err("is cut off: it is not the file that the run wrote");
    }
    let Some(rest) = text.strip_prefix(FIRST_LINE) else { return Ok(text) };
    match rest.split_once('\n') {
        Some((sum, rest)) if blake3::hash(rest.as_bytes()).to_hex().as_str() == sum => Ok(rest),
        _ => Err(
            "is not the file that the run wrote: its checksum, in the first line, is that of another text; where you have \
                  changed it yourself, remove that line",
        ),
    }
}

/// An object of JSON, on one line, with its checksum as its last field.
pub fn add_to_json(object: &str) -> String {
    let sum = digits(object);
    let open = object.strip_suffix('}').unwrap_or(object);
    format!("{open}{LAST_FIELD}{sum}\"}}")
}

/// Such an object without its checksum, if that is right or it has none.
pub fn check_json(line: &str) -> Result<Cow<'_, str>, &'static str> {
    let Some(at) = line.rfind(LAST_FIELD) else { return Ok(Cow::Borrowed(line)) };
    let object = format!("{}}}", &line[..at]);
    match line[at + LAST_FIELD.len()..].trim_end_matches('\n').strip_suffix("\"}") {
        Some(sum) if sum == digits(&object) => Ok(Cow::Owned(object)),
        _ => Err("its checksum is that of another line"),
    }
}

/// The checksum of a text, as `study.json` has it.
pub fn digits(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..DIGITS].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any bit of the text that flips is noticed; one of the checksum's own line hides it or is noticed, and
    /// changes nothing.
    #[test]
    fn no_flipped_bit_changes_what_is_read() {
        let (run, object) = ("seed = 4\n[train]\nbatch = 16\n", "{\"step\":16,\"loss\":0.25}");
        let (file, line) = (add_to_toml(run), add_to_json(object) + "\n");
        assert_eq!(check_toml(&file), Ok(run));
        assert_eq!(check_json(&line).unwrap(), object);
        let flipped = |text: &str, bit: usize| {
            let mut bytes = text.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            String::from_utf8(bytes).ok()
        };
        for text in (0..8 * file.len()).filter_map(|bit| flipped(&file, bit)) {
            assert!(check_toml(&text).is_err() || text.ends_with(run), "{text}");
        }
        for text in (0..8 * line.len()).filter_map(|bit| flipped(&line, bit)) {
            let read = check_json(&text).map(Cow::into_owned);
            assert!(
                read.is_err() || read.is_ok_and(|read| read.starts_with(&object[..object.len() - 1])),
                "{text}"
            );
        }
        // Cut off anywhere.
        for end in 0..file.len() {
            assert!(check_toml(&file[..end]).is_err(), "{}", &file[..end]);
        }
    }

    #[test]
    fn texts_of_older_programs_have_none() {
        assert_eq!(check_toml("seed = 4\n"), Ok("seed = 4\n"));
        assert_eq!(check_json("{\"step\":16}\n").unwrap(), "{\"step\":16}\n");
    }
}
