//! The receiver's end of a link: a thread that brings together what was announced and the room for it.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::thread;

use super::channel::{Channel, Rest, Shared};
use super::frame::{Frame, Header, Key, Parcel};
use super::library::{UniqueId, datatype};
use super::outbound::{deliver, first_message, refuse};
use crate::call::{Call, Operation};
use crate::data::Data;
use crate::error::Error;
use crate::mark::Mark;

/// What the thread hears.
pub(super) enum Event {
    /// The sender has come: the way to answer it.
    Joined(TcpStream),
    /// From the sender.
    Heard(Frame),
    /// From its rank: room for a message.
    Room(Parcel),
}

/// Starts the thread of a link from a rank, which need not have come yet.
pub(super) fn start(shared: &Shared, peer: usize, events: Receiver<Event>) -> Result<(), String> {
    shared.spawn("inbound", move |shared| {
        let (announced, rooms) = Default::default();
        let (matched, under_way) = Default::default();
        Inbound { shared, peer, stream: None, channel: None, announced, rooms, matched, under_way }
            .work(&events);
    })
}

/// Hears a sender that has come, until it closes the connection.
pub(super) fn listen(mut stream: TcpStream, events: Sender<Event>) -> std::io::Result<()> {
    let answers = stream.try_clone()?;
    if events.send(Event::Joined(answers)).is_err() {
        return Ok(());
    }
    let work = move || {
        while let Ok(frame) = Frame::read(&mut stream) {
            if events.send(Event::Heard(frame)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("espalier-announced".into()).spawn(work).map(drop)
}

/// A message that is on its way, or has come.
enum Announced {
    OnCard(u64, Header),
    Here(Header, Vec<u8>),
}

impl Announced {
    fn header(&self) -> Header {
        match self {
            Announced::OnCard(_, header) | Announced::Here(header, _) => *header,
        }
    }
}

struct Inbound {
    channel: Option<Channel>,
    /// The sender's number in the world.
    peer: usize,
    stream: Option<TcpStream>,
    announced: HashMap<Key, VecDeque<Announced>>,
    rooms: HashMap<Key, VecDeque<Parcel>>,
    /// Announced, with room, which the compute stream still uses.
    matched: VecDeque<(u64, Parcel)>,
    under_way: VecDeque<(Mark, Parcel)>,
    shared: Shared,
}

impl Inbound {
    fn work(mut self, events: &Receiver<Event>) {
        let mut rest = Rest::new();
        loop {
            let idle = self.matched.is_empty() && self.under_way.is_empty();
            let event = match idle {
                true => events.recv().map_err(|_| TryRecvError::Disconnected),
                false => events.try_recv(),
            };
            let mut moved = event.is_ok();
            match event {
                Ok(Event::Joined(stream)) => self.stream = Some(stream),
                Ok(Event::Heard(Frame::Id(id))) => self.connect(&id),
                Ok(Event::Heard(Frame::Announced(number, header))) => {
                    self.announced
                        .entry(header.key)
                        .or_default()
                        .push_back(Announced::OnCard(number, header));
                    self.bring_together(header.key);
                }
                Ok(Event::Heard(Frame::Here(header, bytes))) => {
                    self.announced.entry(header.key).or_default().push_back(Announced::Here(header, bytes));
                    self.bring_together(header.key);
                }
                Ok(Event::Room(parcel)) => {
                    let key = parcel.key;
                    self.rooms.entry(key).or_default().push_back(parcel);
                    self.bring_together(key);
                }
                Err(TryRecvError::Disconnected) if idle => break,
                Err(_) => {}
            }
            moved |= self.carry();
            if moved | deliver(&self.channel, &mut self.under_way) {
                rest.moved();
            } else if self.shared.control.failed().is_some() {
                break;
            } else {
                rest.take();
            }
        }
        if self.shared.control.failed().is_some() {
            // The card may still write: memory is given up.
            std::mem::forget(self);
        }
    }

    /// Where a message was announced and there is room for one of its key, the two are of one message.
    fn bring_together(&mut self, key: Key) {
        let (Some(announced), Some(rooms)) = (self.announced.get_mut(&key), self.rooms.get_mut(&key)) else {
            return;
        };
        while !announced.is_empty() && !rooms.is_empty() {
            let (message, mut room) =
                (announced.pop_front().expect("not empty"), rooms.pop_front().expect("not empty"));
            let header = message.header();
            if (header.element, header.elements) != (room.data.element(), room.data.len()) {
                mismatched(room, self.peer, header);
                continue;
            }
            match message {
                // Nothing at all may well be for a card.
                Announced::Here(..) if header.elements == 0 => room.ticket.deliver(Ok(room.data)),
                Announced::Here(_, bytes) if room.ready.is_none() => {
                    room.data.bytes_mut().copy_from_slice(&bytes);
                    room.ticket.deliver(Ok(room.data));
                }
                Announced::OnCard(number, _) if room.ready.is_some() => {
                    self.matched.push_back((number, room))
                }
                _ => refuse(room, "one of the two tensors is on a GPU, the other on the host".into()),
            }
        }
    }

    /// Has NCCL carry what there is room for, and says so; returns whether there was any.
    fn carry(&mut self) -> bool {
        let mut moved = false;
        while let Some((number, room)) = self.matched.front() {
            match room.is_ready() {
                Ok(false) => break,
                Ok(true) => {
                    let (number, room) = (*number, self.matched.pop_front().expect("it is the first").1);
                    match self.receive(number, &room) {
                        Ok(mark) => self.under_way.push_back((mark, room)),
                        Err(why) => refuse(room, why),
                    }
                }
                Err(why) => refuse(self.matched.pop_front().expect("it is the first").1, why),
            }
            moved = true;
        }
        moved
    }

    fn receive(&mut self, number: u64, room: &Parcel) -> Result<Mark, String> {
        let (Some(channel), Some(stream)) = (&self.channel, &mut self.stream) else {
            return Err("the link is not connected".into());
        };
        let (Data::Tensor(tensor), Some(ready)) = (&room.data, &room.ready) else {
            return Err("only what is on a GPU is announced".into());
        };
        let (address, n, kind) =
            (tensor.cuda_buffer().address(), tensor.len(), datatype(room.data.element()));
        // First the answer: NCCL's own call may take a moment.
        stream.write_all(&number.to_le_bytes()).map_err(|e| e.to_string())?;
        channel.queue(ready, |nccl, comm, beside| {
            // SAFETY: the tensor is on this card, nobody else writes to it, and it is kept until the mark has passed.
            nccl.check(unsafe { (nccl.receive)(address, n, kind, 0, comm, beside.compute().raw()) })
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

/// The room is not for what was sent.
fn mismatched(room: Parcel, peer: usize, header: Header) {
    let Call { operation, .. } = room.call();
    let theirs = match operation {
        Operation::Receive { tag, .. } => Operation::Send { to: room.ticket.rank, tag },
        other => other,
    };
    let theirs = Call { operation: theirs, element: Some(header.element), elements: header.elements };
    let (rank, call) = (room.ticket.rank, room.call());
    room.ticket.deliver(Err(Error::Mismatch { rank, call, other: peer, theirs }));
}
