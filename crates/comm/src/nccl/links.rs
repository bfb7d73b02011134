//! Messages between two ranks: a link for each direction.
//!
//! A link is a TCP connection and, once a tensor of a card went over it, a communicator of NCCL of its two ranks. The sender says over the
//! connection what it has, the receiver when it has room for it, and only then does NCCL carry it. So nothing waits on a card for a
//! message that may not come soon, ranks send and receive in whatever order they like, messages are told apart by their tags, and
//! one to or from a third rank holds up no other. Numbers and tensors of the host go over the connection itself.
//!
//! Without it, messages of one communicator are carried out in the order of calls, each waiting for its peer's: two ranks that
//! each post a receive before they send would wait for each other for ever.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use super::channel::Shared;
use super::{inbound, outbound};
use crate::call::Call;
use crate::data::{Data, Element};
use crate::mark::Mark;
use crate::ticket::Ticket;

/// The first bytes on every connection: nobody else begins like this.
const MAGIC: [u8; 8] = *b"espalr\x00\x02";
/// How often the door is looked at.
const GLANCE: Duration = Duration::from_millis(5);
/// How long somebody may stand in the door without a word.
const GREETING: Duration = Duration::from_secs(2);

/// What a message is told apart by: the name of the group, and the tag.
pub(super) type Key = (u64, u32);

/// A message to send, or room for one.
pub(super) struct Parcel {
    pub(super) key: Key,
    pub(super) data: Data,
    /// Behind the work of the compute stream that made the data, or last used the room for it; nothing for what is on the host.
    pub(super) ready: Option<Mark>,
    pub(super) ticket: Arc<Ticket<Data>>,
}

impl Parcel {
    pub(super) fn call(&self) -> Call {
        self.ticket.call
    }

    /// Whether the compute stream is done with its memory.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        self.ready.as_ref().map_or(Ok(true), Mark::has_passed)
    }
}

/// What a sender says.
#[derive(Debug)]
pub(super) enum Frame {
    /// Connect to me by this id of NCCL's.
    Id(Box<[u8; 128]>),
    /// I have a message of the card; the number is what to answer with when there is room.
    Announced(u64, Header),
    /// A message of the host.
    Here(Header, Vec<u8>),
}

/// Which message, and what it is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) key: Key,
    pub(super) element: Element,
    pub(super) elements: usize,
}

const ELEMENTS: [Element; 5] = [Element::F32, Element::Bf16, Element::U32, Element::U64, Element::F64];

impl Frame {
    pub(super) fn write(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let words = |stream: &mut dyn Write, kind: u8, number: u64, header: &Header| {
            let element = ELEMENTS.iter().position(|element| *element == header.element);
            let mut bytes = vec![kind, element.expect("all types are listed") as u8];
            bytes.extend(number.to_le_bytes());
            bytes.extend(header.key.0.to_le_bytes());
            bytes.extend(header.key.1.to_le_bytes());
            bytes.extend((header.elements as u64).to_le_bytes());
            stream.write_all(&bytes)
        };
        match self {
            Frame::Id(id) => {
                stream.write_all(&[1])?;
                stream.write_all(&id[..])
            }
            Frame::Announced(number, header) => words(stream, 2, *number, header),
            Frame::Here(header, bytes) => {
                words(stream, 3, 0, header)?;
                stream.write_all(bytes)
            }
        }
    }

    pub(super) fn read(stream: &mut impl Read) -> std::io::Result<Frame> {
        let strange = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        if kind == [1] {
            let mut id = Box::new([0; 128]);
            stream.read_exact(&mut id[..])?;
            return Ok(Frame::Id(id));
        }
        let mut bytes = [0; 29];
        stream.read_exact(&mut bytes)?;
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let tag = u32::from_le_bytes(bytes[17..21].try_into().expect("four bytes"));
        let element = *ELEMENTS.get(usize::from(bytes[0])).ok_or_else(strange)?;
        let elements = usize::try_from(long(21)).map_err(|_| strange())?;
        let header = Header { key: (long(9), tag), element, elements };
        match kind {
            [2] => Ok(Frame::Announced(long(1), header)),
            [3] => {
                let length = elements.checked_mul(element.bytes()).ok_or_else(strange)?;
                let mut payload = Vec::new();
                let read = stream.take(length as u64).read_to_end(&mut payload)?;
                if read < length { Err(strange()) } else { Ok(Frame::Here(header, payload)) }
            }
            _ => Err(strange()),
        }
    }
}

/// The links of a rank with all others, each made when it is first asked for.
#[derive(Debug)]
pub(super) struct Links {
    shared: Shared,
    /// Where each rank's door is.
    addresses: Vec<SocketAddr>,
    /// How long it may take to reach one.
    limit: Duration,
    outbound: Mutex<HashMap<usize, Sender<outbound::Event>>>,
    inbound: Mutex<HashMap<usize, Sender<inbound::Event>>>,
}

impl Links {
    /// Opens the door: who knocks is heard, whatever this rank is at.
    pub(super) fn open(
        shared: Shared,
        door: TcpListener,
        addresses: Vec<SocketAddr>,
        limit: Duration,
    ) -> Result<Arc<Links>, String> {
        door.set_nonblocking(true).map_err(|e| e.to_string())?;
        let (outbound, inbound) = Default::default();
        let links = Arc::new(Links { shared, addresses, limit, outbound, inbound });
        let weak = Arc::downgrade(&links);
        let thread = thread::Builder::new().name("espalier-door".into());
        thread.spawn(move || attend(&door, &weak)).map_err(|e| e.to_string())?;
        Ok(links)
    }

    /// Sends to a rank of the world.
    pub(super) fn send(&self, to: usize, parcel: Parcel) -> Result<(), String> {
        self.to(to)?.send(outbound::Event::Send(parcel)).map_err(|_| "the link is broken".to_owned())
    }

    /// Makes room for what a rank of the world sends.
    pub(super) fn receive(&self, from: usize, parcel: Parcel) -> Result<(), String> {
        self.from(from)?.send(inbound::Event::Room(parcel)).map_err(|_| "the link is broken".to_owned())
    }

    /// Connects the cards of this rank and another, so that messages to it need not wait for that.
    pub(super) fn connect(&self, to: usize, ticket: Arc<Ticket<Data>>) -> Result<(), String> {
        self.to(to)?.send(outbound::Event::Connect(ticket)).map_err(|_| "the link is broken".to_owned())
    }

    fn to(&self, rank: usize) -> Result<Sender<outbound::Event>, String> {
        let mut links = self.outbound.lock().expect("no panic while locked");
        if let Some(link) = links.get(&rank) {
            return Ok(link.clone());
        }
        let (events, inbox) = mpsc::channel();
        let mut stream = TcpStream::connect_timeout(&self.addresses[rank], self.limit)
            .map_err(|e| format!("rank {rank} cannot be reached at {}: {e}", self.addresses[rank]))?;
        let hello = [&MAGIC[..], &(self.shared.control.rank() as u32).to_le_bytes()].concat();
        let said = stream.set_nodelay(true).and_then(|()| stream.write_all(&hello));
        said.map_err(|e| format!("rank {rank} cannot be told: {e}"))?;
        outbound::start(&self.shared, stream, events.clone(), inbox)?;
        links.insert(rank, events.clone());
        Ok(events)
    }

    fn from(&self, rank: usize) -> Result<Sender<inbound::Event>, String> {
        let mut links = self.inbound.lock().expect("no panic while locked");
        if let Some(link) = links.get(&rank) {
            return Ok(link.clone());
        }
        let (events, inbox) = mpsc::channel();
        inbound::start(&self.shared, rank, inbox)?;
        links.insert(rank, events.clone());
        Ok(events)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let outbound = self.outbound.get_mut().expect("no panic while locked");
        // A link ends by its sender: that closes the connection.
        outbound.values().for_each(|link| drop(link.send(outbound::Event::End)));
    }
}

/// Lets in who knocks, for as long as there is anybody to come to.
fn attend(door: &TcpListener, links: &Weak<Links>) {
    loop {
        let accepted = door.accept();
        let Some(links) = links.upgrade() else { return };
        let Ok((mut stream, _)) = accepted else {
            drop(links);
            thread::sleep(GLANCE);
            continue;
        };
        let Ok(Some(rank)) = greeted(&mut stream) else { continue };
        if rank < links.addresses.len()
            && let Ok(events) = links.from(rank)
        {
            let _ = inbound::listen(stream, events);
        }
    }
}

/// Who has come; `None` for a stranger.
fn greeted(stream: &mut TcpStream) -> std::io::Result<Option<usize>> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING))?;
    let mut hello = [0; 12];
    stream.read_exact(&mut hello)?;
    stream.set_read_timeout(None)?;
    let rank = u32::from_le_bytes(hello[8..].try_into().expect("four bytes"));
    Ok((hello[..8] == MAGIC).then_some(rank as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_as_they_went() {
        let header = Header { key: (u64::MAX - 1, 77), element: Element::Bf16, elements: 3 };
        let frames = [
            Frame::Id(Box::new(std::array::from_fn(|i| i as u8))),
            Frame::Announced(1 << 40, header),
            Frame::Here(header, vec![1, 2, 3, 4, 5, 6]),
            Frame::Here(Header { elements: 0, ..header }, Vec::new()),
        ];
        let mut wire = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut wire).unwrap());
        let mut left = &wire[..];
        for frame in &frames {
            assert_eq!(format!("{:?}", Frame::read(&mut left).unwrap()), format!("{frame:?}"));
        }
        assert!(left.is_empty());
        // Cut short, or of a kind that there is not: refused, and nothing as long as it claims is taken.
        let mut short = Vec::new();
        Frame::Here(Header { elements: 1 << 50, ..header }, vec![0; 9]).write(&mut short).unwrap();
        assert!(Frame::read(&mut &short[..]).is_err());
        assert!(Frame::read(&mut &[9u8; 64][..]).is_err());
    }
}
