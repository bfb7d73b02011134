//! Event files, as TensorBoard reads them: records of a length, its checksum, an `Event` in the encoding of
//! protocol buffers, and a checksum of that. The few fields that scalars need are written by hand.

use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::Result;
use espalier_train::Error;

use super::series::{self, Series, SeriesPoint};
use crate::records::RunRecord;

/// The file of a run in a folder of its name; one that is there is replaced, so that a reader sees each step
/// once.
pub fn write(run: &RunRecord, folder: &Path) -> Result<()> {
    // A name may be a path, where two runs are called the same.
    let name: String = run.name.chars().map(|c| if c == '/' { '-' } else { c }).collect();
    let folder = folder.join(name.trim_start_matches('.'));
    let path = folder.join("events.out.tfevents.0.espalier");
    let file = events(&series::of(run), began(run));
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, file));
    written.map_err(|why| Error::of_io(path, &why, format!("the event file cannot be written: {why}")))?;
    Ok(())
}

/// When the process began that wrote the last line: a line has the seconds since then.
fn began(run: &RunRecord) -> f64 {
    let modified = fs::metadata(run.folder.join("metrics.jsonl")).and_then(|found| found.modified()).ok();
    let modified = modified
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map_or(0.0, |since| since.as_secs_f64());
    modified - run.steps.last().map_or(0.0, |step| step.time)
}

/// The bytes of an event file; `began` is when the run did, in seconds since 1970.
fn events(series: &[Series], began: f64) -> Vec<u8> {
    let mut file = Vec::new();
    let mut first = Vec::new();
    fixed64(&mut first, 1, began);
    bytes(&mut first, 3, b"brain.Event:2");
    record(&mut file, &first);
    let mut points: Vec<(&str, &SeriesPoint)> = Vec::new();
    series.iter().for_each(|series| points.extend(series.points.iter().map(|point| (series.name, point))));
    points.sort_by_key(|(_, point)| point.step);
    let mut now = 0.0;
    for (name, SeriesPoint { step, time, value }) in points {
        now = time.unwrap_or(now);
        let mut scalar = Vec::new();
        bytes(&mut scalar, 1, name.as_bytes());
        fixed32(&mut scalar, 2, *value as f32);
        let mut summary = Vec::new();
        bytes(&mut summary, 1, &scalar);
        let mut event = Vec::new();
        fixed64(&mut event, 1, began + now);
        varint(&mut event, 2 << 3);
        varint(&mut event, *step);
        bytes(&mut event, 5, &summary);
        record(&mut file, &event);
    }
    file
}

fn record(file: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    file.extend_from_slice(&length);
    file.extend_from_slice(&masked(crc32c(&length)).to_le_bytes());
    file.extend_from_slice(data);
    file.extend_from_slice(&masked(crc32c(data)).to_le_bytes());
}

/// A checksum of data that hold checksums would be weak: so they are stored turned, with a constant added.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: event files are small.
fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
    !data.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn bytes(out: &mut Vec<u8>, field: u64, value: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

fn fixed64(out: &mut Vec<u8>, field: u64, value: f64) {
    varint(out, field << 3 | 1);
    out.extend_from_slice(&value.to_le_bytes());
}

fn fixed32(out: &mut Vec<u8>, field: u64, value: f32) {
    varint(out, field << 3 | 5);
    out.extend_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis() {
        // The check value of the catalogue of CRCs, and RFC 3720's for 32 zeros.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    /// Bytes that the reader of the Python package `tensorboard` takes for step 300 of a loss of 0.5.
    #[test]
    fn an_event_is_the_bytes_that_a_reader_expects() {
        let series =
            [Series { name: "loss", points: vec![SeriesPoint { step: 300, time: Some(1.0), value: 0.5 }] }];
        let file = events(&series, 1.0);
        let (first, second) = file.split_at(8 + 4 + 24 + 4);
        assert_eq!(first[..8], 24u64.to_le_bytes());
        assert_eq!(&first[12 + 9 + 2..36], b"brain.Event:2");
        let event = &second[12..second.len() - 4];
        let mut expected = vec![0x09];
        expected.extend(2f64.to_le_bytes());
        expected.extend([0x10, 0xac, 0x02, 0x2a, 13, 0x0a, 11, 0x0a, 4, b'l', b'o', b's', b's', 0x15]);
        expected.extend(0.5f32.to_le_bytes());
        assert_eq!(event, expected);
        assert_eq!(second[second.len() - 4..], masked(crc32c(event)).to_le_bytes());
    }
}
