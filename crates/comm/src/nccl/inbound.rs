//! The receiver's end of a link: a thread that matches announced messages with the buffers to receive them.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::thread;

use super::channel::{NcclChannel, NcclRank, PollBackoff};
use super::frame::{GroupTag, LinkFrame, LinkHeader, LinkTransfer};
use super::library::{UniqueId, datatype};
use super::outbound::{deliver, first_message, refuse};
use crate::call::{Call, Operation};
use crate::data::CommBuffer;
use crate::error::Error;
use crate::stream_event::StreamEvent;

/// What the thread reacts to.
pub(super) enum InboundEvent {
    /// The sender has connected: the stream to answer it.
    Joined(TcpStream),
    /// From the sender.
    Frame(LinkFrame),
    /// From its rank: a buffer for a message.
    RecvBuffer(LinkTransfer),
}

/// Starts the thread of a link from a rank, which need not have connected yet.
pub(super) fn start(shared: &NcclRank, peer: usize, events: Receiver<InboundEvent>) -> Result<(), String> {
    shared.spawn("inbound", move |shared| {
        let (announced, recv_buffers) = Default::default();
        let (matched, in_flight) = Default::default();
        Inbound { shared, peer, stream: None, channel: None, announced, recv_buffers, matched, in_flight }
            .work(&events);
    })
}

/// Receives from a sender that has connected, until it closes the connection.
pub(super) fn listen(mut stream: TcpStream, events: Sender<InboundEvent>) -> std::io::Result<()> {
    let answers = stream.try_clone()?;
    if events.send(InboundEvent::Joined(answers)).is_err() {
        return Ok(());
    }
    let work = move || {
        while let Ok(frame) = LinkFrame::read(&mut stream) {
            if events.send(InboundEvent::Frame(frame)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("espalier-announced".into()).spawn(work).map(drop)
}

/// A message that is on its way, or has arrived.
enum AnnouncedMessage {
    OnGpu(u64, LinkHeader),
    Here(LinkHeader, Vec<u8>),
}

impl AnnouncedMessage {
    fn header(&self) -> LinkHeader {
        match self {
            AnnouncedMessage::OnGpu(_, header) | AnnouncedMessage::Here(header, _) => *header,
        }
    }
}

struct Inbound {
    channel: Option<NcclChannel>,
    /// The sender's number in the world.
    peer: usize,
    stream: Option<TcpStream>,
    announced: HashMap<GroupTag, VecDeque<AnnouncedMessage>>,
    recv_buffers: HashMap<GroupTag, VecDeque<LinkTransfer>>,
    /// Announced, with buffers that the compute stream still uses.
    matched: VecDeque<(u64, LinkTransfer)>,
    in_flight: VecDeque<(StreamEvent, LinkTransfer)>,
    shared: NcclRank,
}

impl Inbound {
    fn work(mut self, events: &Receiver<InboundEvent>) {
        let mut rest = PollBackoff::new();
        loop {
            let idle = self.matched.is_empty() && self.in_flight.is_empty();
            let event = match idle {
                true => events.recv().map_err(|_| TryRecvError::Disconnected),
                false => events.try_recv(),
            };
            let mut moved = event.is_ok();
            match event {
                Ok(InboundEvent::Joined(stream)) => self.stream = Some(stream),
                Ok(InboundEvent::Frame(LinkFrame::Id(id))) => self.connect(&id),
                Ok(InboundEvent::Frame(LinkFrame::Announced(number, header))) => {
                    self.announce(AnnouncedMessage::OnGpu(number, header))
                }
                Ok(InboundEvent::Frame(LinkFrame::Here(header, bytes))) => {
                    self.announce(AnnouncedMessage::Here(header, bytes))
                }
                Ok(InboundEvent::RecvBuffer(transfer)) => {
                    let key = transfer.key;
                    self.recv_buffers.entry(key).or_default().push_back(transfer);
                    self.bring_together(key);
                }
                Err(TryRecvError::Disconnected) if idle => break,
                Err(_) => {}
            }
            moved |= self.carry();
            if moved | deliver(&self.channel, &mut self.in_flight) {
                rest.moved();
            } else if self.shared.control.failed().is_some() {
                break;
            } else {
                rest.take();
            }
        }
        if self.shared.control.failed().is_some() {
            // The GPU may still write: the memory is leaked.
            std::mem::forget(self);
        }
    }

    fn announce(&mut self, message: AnnouncedMessage) {
        let key = message.header().key;
        self.announced.entry(key).or_default().push_back(message);
        self.bring_together(key);
    }

    /// Where a message was announced and there is a buffer of its key, the two belong together.
    fn bring_together(&mut self, key: GroupTag) {
        let (Some(announced), Some(recv_buffers)) =
            (self.announced.get_mut(&key), self.recv_buffers.get_mut(&key))
        else {
            return;
        };
        while !announced.is_empty() && !recv_buffers.is_empty() {
            let (message, mut recv_buffer) =
                (announced.pop_front().expect("not empty"), recv_buffers.pop_front().expect("not empty"));
            let header = message.header();
            if (header.element, header.elements) != (recv_buffer.data.element(), recv_buffer.data.len()) {
                mismatched(recv_buffer, self.peer, header);
                continue;
            }
            match message {
                // Nothing at all may well be for a GPU.
                AnnouncedMessage::Here(..) if header.elements == 0 => {
                    recv_buffer.ticket.deliver(Ok(recv_buffer.data))
                }
                AnnouncedMessage::Here(_, bytes) if recv_buffer.ready.is_none() => {
                    recv_buffer.data.bytes_mut().copy_from_slice(&bytes);
                    recv_buffer.ticket.deliver(Ok(recv_buffer.data));
                }
                AnnouncedMessage::OnGpu(number, _) if recv_buffer.ready.is_some() => {
                    self.matched.push_back((number, recv_buffer))
                }
                _ => refuse(recv_buffer, "one of the two tensors is on a GPU, the other on the host".into()),
            }
        }
    }

    /// Has NCCL carry what there are buffers for, and tells the sender; returns whether there was any.
    fn carry(&mut self) -> bool {
        let mut moved = false;
        while let Some((number, recv_buffer)) = self.matched.front() {
            match recv_buffer.is_ready() {
                Ok(false) => break,
                Ok(true) => {
                    let (number, recv_buffer) =
                        (*number, self.matched.pop_front().expect("it is the first").1);
                    match self.receive(number, &recv_buffer) {
                        Ok(mark) => self.in_flight.push_back((mark, recv_buffer)),
                        Err(why) => refuse(recv_buffer, why),
                    }
                }
                Err(why) => refuse(self.matched.pop_front().expect("it is the first").1, why),
            }
            moved = true;
        }
        moved
    }

    fn receive(&mut self, number: u64, recv_buffer: &LinkTransfer) -> Result<StreamEvent, String> {
        let (Some(channel), Some(stream)) = (&self.channel, &mut self.stream) else {
            return Err("the link is not connected".into());
        };
        let (CommBuffer::Tensor(tensor), Some(ready)) = (&recv_buffer.data, &recv_buffer.ready) else {
            return Err("only what is on a GPU is announced".into());
        };
        let (address, n, kind) =
            (tensor.cuda_buffer().address(), tensor.len(), datatype(recv_buffer.data.element()));
        // First the answer: NCCL's own call may take a moment.
        stream.write_all(&number.to_le_bytes()).map_err(|e| e.to_string())?;
        channel.queue(ready, |nccl, comm, cuda| {
            // SAFETY: the tensor is on this GPU, nobody else writes to it, and it is kept until the mark has
            // passed.
            nccl.check(unsafe { (nccl.receive)(address, n, kind, 0, comm, cuda.compute().raw()) })
        })
    }

    /// Connects the two ranks by NCCL, as the sender asks; waits for it, inside calls.
    fn connect(&mut self, letters: &[u8; 128]) {
        let id = UniqueId(letters.map(|letter| letter as _));
        let bound = self.shared.cuda.bind().map_err(|e| e.to_string());
        // Where it fails the sender says so, or the first message that finds no channel.
        self.channel = bound.and_then(|()| first_message(&self.shared, id, 1)).ok();
    }
}

/// The buffer does not fit what was sent.
fn mismatched(recv_buffer: LinkTransfer, peer: usize, header: LinkHeader) {
    let Call { operation, .. } = recv_buffer.call();
    let theirs = match operation {
        Operation::Receive { tag, .. } => Operation::Send { to: recv_buffer.ticket.rank, tag },
        other => other,
    };
    let theirs = Call { operation: theirs, element: Some(header.element), elements: header.elements };
    let (rank, call) = (recv_buffer.ticket.rank, recv_buffer.call());
    recv_buffer.ticket.deliver(Err(Error::Mismatch { rank, call, other: peer, theirs }));
}
