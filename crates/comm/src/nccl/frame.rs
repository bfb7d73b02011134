//! What goes over a link's connection: which message, what it is made of, and, of the host, the message itself.

use std::io::{Read, Write};
use std::sync::Arc;

use crate::call::Call;
use crate::data::{CommBuffer, ElementType};
use crate::stream_event::StreamEvent;
use crate::ticket::Ticket;

/// What a message is told apart by: the name of the group, and the tag.
pub(super) type GroupTag = (u64, u32);

/// A message to send, or a buffer for one.
pub(super) struct LinkTransfer {
    pub(super) key: GroupTag,
    pub(super) data: CommBuffer,
    /// Behind the work of the compute stream that made the data, or last used its memory; nothing for
    /// what is on the host.
    pub(super) ready: Option<StreamEvent>,
    pub(super) ticket: Arc<Ticket<CommBuffer>>,
}

impl LinkTransfer {
    pub(super) fn call(&self) -> Call {
        self.ticket.call
    }

    /// Whether the compute stream is done with its memory.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        self.ready.as_ref().map_or(Ok(true), StreamEvent::has_passed)
    }
}

/// What a sender writes.
#[derive(Debug)]
pub(super) enum LinkFrame {
    /// Connect to me by this id of NCCL's.
    Id(Box<[u8; 128]>),
    /// I have a message of the GPU; the number is what to answer with when there is a buffer.
    Announced(u64, LinkHeader),
    /// A message of the host.
    Here(LinkHeader, Vec<u8>),
}

/// Which message, and what it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinkHeader {
    pub(super) key: GroupTag,
    pub(super) element: ElementType,
    pub(super) elements: usize,
}

const ELEMENTS: [ElementType; 5] =
    [ElementType::F32, ElementType::Bf16, ElementType::U32, ElementType::U64, ElementType::F64];

impl LinkFrame {
    pub(super) fn write(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let header_with = |stream: &mut dyn Write, kind: u8, number: u64, header: &LinkHeader| {
            let element = ELEMENTS.iter().position(|element| *element == header.element);
            let mut bytes = vec![kind, element.expect("all types are listed") as u8];
            bytes.extend(number.to_le_bytes());
            bytes.extend(header.key.0.to_le_bytes());
            bytes.extend(header.key.1.to_le_bytes());
            bytes.extend((header.elements as u64).to_le_bytes());
            stream.write_all(&bytes)
        };
        match self {
            LinkFrame::Id(id) => {
                stream.write_all(&[1])?;
                stream.write_all(&id[..])
            }
            LinkFrame::Announced(number, header) => header_with(stream, 2, *number, header),
            LinkFrame::Here(header, bytes) => {
                header_with(stream, 3, 0, header)?;
                stream.write_all(bytes)
            }
        }
    }

    pub(super) fn read(stream: &mut impl Read) -> std::io::Result<LinkFrame> {
        let strange = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        if kind == [1] {
            let mut id = Box::new([0; 128]);
            stream.read_exact(&mut id[..])?;
            return Ok(LinkFrame::Id(id));
        }
        let mut bytes = [0; 29];
        stream.read_exact(&mut bytes)?;
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let tag = u32::from_le_bytes(bytes[17..21].try_into().expect("four bytes"));
        let element = *ELEMENTS.get(usize::from(bytes[0])).ok_or_else(strange)?;
        let elements = usize::try_from(long(21)).map_err(|_| strange())?;
        let header = LinkHeader { key: (long(9), tag), element, elements };
        match kind {
            [2] => Ok(LinkFrame::Announced(long(1), header)),
            [3] => {
                let length = elements.checked_mul(element.bytes()).ok_or_else(strange)?;
                let mut payload = Vec::new();
                let read = stream.take(length as u64).read_to_end(&mut payload)?;
                if read < length { Err(strange()) } else { Ok(LinkFrame::Here(header, payload)) }
            }
            _ => Err(strange()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_as_they_went() {
        let header = LinkHeader { key: (u64::MAX - 1, 77), element: ElementType::Bf16, elements: 3 };
        let frames = [
            LinkFrame::Id(Box::new(std::array::from_fn(|i| i as u8))),
            LinkFrame::Announced(1 << 40, header),
            LinkFrame::Here(header, vec![1, 2, 3, 4, 5, 6]),
            LinkFrame::Here(LinkHeader { elements: 0, ..header }, Vec::new()),
        ];
        let mut wire = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut wire).unwrap());
        let mut left = &wire[..];
        for frame in &frames {
            assert_eq!(format!("{:?}", LinkFrame::read(&mut left).unwrap()), format!("{frame:?}"));
        }
        assert!(left.is_empty());
        // Cut short, or of a kind that there is not: refused, and nothing as long as it claims is taken.
        let mut short = Vec::new();
        LinkFrame::Here(LinkHeader { elements: 1 << 50, ..header }, vec![0; 9]).write(&mut short).unwrap();
        assert!(LinkFrame::read(&mut &short[..]).is_err());
        assert!(LinkFrame::read(&mut &[9u8; 64][..]).is_err());
    }
}
