//! Messages between two ranks: a link for each direction.
//!
//! A link is a TCP connection and, once a tensor of a GPU went over it, a communicator of NCCL of its two
//! ranks. The sender announces over the connection what it has, the receiver when it has a buffer for it, and only
//! then does NCCL carry it. So nothing waits on a GPU for a message that may not come soon, ranks send and
//! receive in whatever order they like, messages are told apart by their tags, and one to or from a third
//! rank holds up no other. Numbers and tensors of the host go over the connection itself.
//!
//! Without it, messages of one communicator are carried out in the order of calls, each waiting for its
//! peer's: two ranks that each post a receive before they send would wait for each other for ever.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use super::channel::NcclRank;
use super::frame::LinkTransfer;
use super::{inbound, outbound};
use crate::data::CommBuffer;
use crate::ticket::Ticket;

/// The first bytes on every connection: nobody else begins like this.
const MAGIC: [u8; 8] = *b"espalr\x00\x02";
/// How often the listener is polled.
const GLANCE: Duration = Duration::from_millis(5);
/// How long a new connection may send nothing.
const GREETING: Duration = Duration::from_secs(2);

/// The links of a rank with all others, each made when it is first asked for.
#[derive(Debug)]
pub(super) struct PeerLinks {
    shared: NcclRank,
    addresses: Vec<SocketAddr>,
    /// How long it may take to reach one.
    limit: Duration,
    outbound: Mutex<HashMap<usize, Sender<outbound::OutboundEvent>>>,
    inbound: Mutex<HashMap<usize, Sender<inbound::InboundEvent>>>,
}

impl PeerLinks {
    /// Starts to listen: connections are accepted whatever this rank is doing.
    pub(super) fn open(
        shared: NcclRank,
        door: TcpListener,
        addresses: Vec<SocketAddr>,
        limit: Duration,
    ) -> Result<Arc<PeerLinks>, String> {
        door.set_nonblocking(true).map_err(|e| e.to_string())?;
        let (outbound, inbound) = Default::default();
        let links = Arc::new(PeerLinks { shared, addresses, limit, outbound, inbound });
        let weak = Arc::downgrade(&links);
        let thread = thread::Builder::new().name("espalier-door".into());
        thread.spawn(move || attend(&door, &weak)).map_err(|e| e.to_string())?;
        Ok(links)
    }

    /// Sends to a rank of the world.
    pub(super) fn send(&self, to: usize, transfer: LinkTransfer) -> Result<(), String> {
        self.to(to)?.send(outbound::OutboundEvent::Send(transfer)).map_err(broken)
    }

    /// Gives a buffer for what a rank of the world sends.
    pub(super) fn receive(&self, from: usize, transfer: LinkTransfer) -> Result<(), String> {
        self.from(from)?.send(inbound::InboundEvent::RecvBuffer(transfer)).map_err(broken)
    }

    /// Connects the GPUs of this rank and another, so that messages to it need not wait for that.
    pub(super) fn connect(&self, to: usize, ticket: Arc<Ticket<CommBuffer>>) -> Result<(), String> {
        self.to(to)?.send(outbound::OutboundEvent::Connect(ticket)).map_err(broken)
    }

    fn to(&self, rank: usize) -> Result<Sender<outbound::OutboundEvent>, String> {
        let mut links = self.outbound.lock().expect("no panic while locked");
        if let Some(link) = links.get(&rank) {
            return Ok(link.clone());
        }
        let (events, inbox) = mpsc::channel();
        let mut stream = TcpStream::connect_timeout(&self.addresses[rank], self.limit)
            .map_err(|e| format!("rank {rank} cannot be reached at {}: {e}", self.addresses[rank]))?;
        let hello = [&MAGIC[..], &(self.shared.control.rank() as u32).to_le_bytes()].concat();
        let sent = stream.set_nodelay(true).and_then(|()| stream.write_all(&hello));
        sent.map_err(|e| format!("rank {rank} cannot be told: {e}"))?;
        outbound::start(&self.shared, stream, events.clone(), inbox)?;
        links.insert(rank, events.clone());
        Ok(events)
    }

    fn from(&self, rank: usize) -> Result<Sender<inbound::InboundEvent>, String> {
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

impl Drop for PeerLinks {
    fn drop(&mut self) {
        let outbound = self.outbound.get_mut().expect("no panic while locked");
        // A link ends by its sender: that closes the connection.
        outbound.values().for_each(|link| drop(link.send(outbound::OutboundEvent::End)));
    }
}

/// Accepts connections, for as long as the links exist.
fn attend(door: &TcpListener, links: &Weak<PeerLinks>) {
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

/// The rank that has connected; `None` for a stranger.
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

/// Why nothing can be handed to a link's thread any more.
fn broken<T>(_: mpsc::SendError<T>) -> String {
    "the link is broken".to_owned()
}
