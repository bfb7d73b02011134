//! The sender's end of a link: a thread that announces messages and has them carried once the receiver is ready.

use std::collections::{HashMap, VecDeque};
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::thread;

use espalier_tensor::{Category, DType, Device, Tensor};

use super::channel::{NcclChannel, NcclRank, PollBackoff};
use super::frame::{LinkFrame, LinkHeader, LinkTransfer};
use super::library::{UniqueId, datatype};
use crate::data::{CommBuffer, ElementType};
use crate::error::Error;
use crate::stream_event::StreamEvent;
use crate::ticket::Ticket;

/// What the thread reacts to.
pub(super) enum OutboundEvent {
    /// From its rank: carry this.
    Send(LinkTransfer),
    /// From its rank: be connected.
    Connect(Arc<Ticket<CommBuffer>>),
    /// From the other side: there is a buffer for the message of this number.
    RecvReady(u64),
    /// From its rank: that was all.
    End,
    Lost,
}

/// Starts the threads of a link over a connection; `events` is the channel to the one that works.
pub(super) fn start(
    shared: &NcclRank,
    stream: TcpStream,
    events: Sender<OutboundEvent>,
    inbox: Receiver<OutboundEvent>,
) -> Result<(), String> {
    let answers = stream.try_clone().map_err(|e| e.to_string())?;
    let listener = thread::Builder::new().name("espalier-room".into());
    listener.spawn(move || listen(answers, &events)).map_err(|e| format!("no thread for it: {e}"))?;
    shared.spawn("outbound", move |shared| {
        let (channel, waiting, announced) = (None, VecDeque::new(), HashMap::new());
        Outbound { shared, stream, channel, waiting, announced, next: 0, in_flight: VecDeque::new() }
            .work(&inbox);
    })
}

/// Receives which messages there are buffers for, until the connection is closed.
fn listen(mut stream: TcpStream, events: &Sender<OutboundEvent>) {
    let mut number = [0; 8];
    while stream.read_exact(&mut number).is_ok() {
        if events.send(OutboundEvent::RecvReady(u64::from_le_bytes(number))).is_err() {
            return;
        }
    }
    let _ = events.send(OutboundEvent::Lost);
}

struct Outbound {
    channel: Option<NcclChannel>,
    stream: TcpStream,
    /// What the compute stream is still making.
    waiting: VecDeque<LinkTransfer>,
    /// What the other side knows of, by number.
    announced: HashMap<u64, LinkTransfer>,
    next: u64,
    in_flight: VecDeque<(StreamEvent, LinkTransfer)>,
    shared: NcclRank,
}

impl Outbound {
    fn work(mut self, events: &Receiver<OutboundEvent>) {
        let (mut rest, mut ending) = (PollBackoff::new(), false);
        loop {
            let idle = self.waiting.is_empty() && self.in_flight.is_empty();
            if ending && idle && self.announced.is_empty() {
                break;
            }
            let event = match idle {
                true => events.recv().map_err(|_| TryRecvError::Disconnected),
                false => events.try_recv(),
            };
            let moved = event.is_ok();
            match event {
                // Those of one key keep their order.
                Ok(OutboundEvent::Send(transfer))
                    if transfer.ready.is_none()
                        && self.waiting.iter().all(|other| other.key != transfer.key) =>
                {
                    self.hand_over(transfer);
                }
                Ok(OutboundEvent::Send(transfer)) => self.waiting.push_back(transfer),
                Ok(OutboundEvent::Connect(ticket)) => {
                    let failed = |why| Error::Carrier { rank: ticket.rank, call: ticket.call, why };
                    ticket.deliver(self.connect().map(|()| CommBuffer::U64(Vec::new())).map_err(failed));
                }
                Ok(OutboundEvent::RecvReady(number)) => self.carry(number),
                Ok(OutboundEvent::End) => ending = true,
                // The control connection reports who is gone, and why.
                Ok(OutboundEvent::Lost) | Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {}
            }
            if moved | self.announce() | deliver(&self.channel, &mut self.in_flight) {
                rest.moved();
            } else if self.shared.control.failed().is_some() {
                break;
            } else {
                rest.take();
            }
        }
        let _ = self.stream.shutdown(Shutdown::Both);
        if !self.in_flight.is_empty() || self.shared.control.failed().is_some() {
            // The GPU may still read: the memory is leaked.
            std::mem::forget(self);
        }
    }

    /// Sends a message of the host.
    fn hand_over(&mut self, transfer: LinkTransfer) {
        // Nothing at all may well be on a GPU.
        let bytes = if transfer.data.is_empty() { Vec::new() } else { transfer.data.bytes().to_vec() };
        let frame = LinkFrame::Here(header(&transfer), bytes);
        match frame.write(&mut self.stream) {
            Ok(()) => transfer.ticket.deliver(Ok(transfer.data)),
            Err(error) => refuse(transfer, error.to_string()),
        }
    }

    /// Announces what has been made; returns whether anything was.
    fn announce(&mut self) -> bool {
        let mut moved = false;
        while let Some(transfer) = self.waiting.front() {
            match transfer.is_ready() {
                Ok(false) => break,
                Ok(true) => {
                    let transfer = self.waiting.pop_front().expect("it is the first");
                    moved = true;
                    if transfer.ready.is_none() {
                        self.hand_over(transfer);
                        continue;
                    }
                    let sent = self.connect().and_then(|()| {
                        let frame = LinkFrame::Announced(self.next, header(&transfer));
                        frame.write(&mut self.stream).map_err(|e| e.to_string())
                    });
                    match sent {
                        Ok(()) => drop(self.announced.insert(self.next, transfer)),
                        Err(why) => refuse(transfer, why),
                    }
                    self.next += 1;
                }
                Err(why) => refuse(self.waiting.pop_front().expect("it is the first"), why),
            }
            moved = true;
        }
        moved
    }

    /// The receiver has a buffer for a message: NCCL carries it.
    fn carry(&mut self, number: u64) {
        let (Some(transfer), Some(channel)) = (self.announced.remove(&number), &self.channel) else { return };
        let (CommBuffer::Tensor(tensor), Some(ready)) = (&transfer.data, &transfer.ready) else {
            return refuse(transfer, "only what is on a GPU is announced".into());
        };
        let (address, n, kind) =
            (tensor.cuda_buffer().address(), tensor.len(), datatype(transfer.data.element()));
        let queued = channel.queue(ready, |nccl, comm, cuda| {
            // SAFETY: the tensor is on this GPU and is kept until the mark has passed.
            nccl.check(unsafe { (nccl.send)(address, n, kind, 1, comm, cuda.compute().raw()) })
        });
        match queued {
            Ok(mark) => self.in_flight.push_back((mark, transfer)),
            Err(why) => refuse(transfer, why),
        }
    }

    /// Connects the two ranks by NCCL, unless they are; waits for the other side, inside calls.
    fn connect(&mut self) -> Result<(), String> {
        if self.channel.is_some() {
            return Ok(());
        }
        self.shared.cuda.bind().map_err(|e| e.to_string())?;
        let id = self.shared.unique_id()?;
        let letters = Box::new(id.0.map(|letter| letter as u8));
        LinkFrame::Id(letters).write(&mut self.stream).map_err(|e| e.to_string())?;
        self.channel = Some(first_message(&self.shared, id, 0)?);
        Ok(())
    }
}

/// The communicator of a link, with its first message behind it: only that connects its two ranks. Of these 0
/// sends and 1 receives.
pub(super) fn first_message(shared: &NcclRank, id: UniqueId, rank: usize) -> Result<NcclChannel, String> {
    let channel = NcclChannel::connect(shared, id, rank, 2)?;
    let device = Device::Cuda(channel.cuda().clone());
    let word =
        Tensor::zeros(&device, &[1], DType::U32, Category::Communication).map_err(|e| e.to_string())?;
    let address = word.cuda_buffer().address();
    let ready = StreamEvent::new(channel.cuda().compute().raw())?;
    let mark = channel.queue(&ready, |nccl, comm, cuda| {
        let (kind, stream) = (datatype(ElementType::U32), cuda.compute().raw());
        // SAFETY: the word is on this GPU, and is kept until the mark has passed.
        nccl.check(unsafe {
            match rank {
                0 => (nccl.send)(address, 1, kind, 1, comm, stream),
                _ => (nccl.receive)(address, 1, kind, 0, comm, stream),
            }
        })
    })?;
    let rest = PollBackoff::new();
    while !channel.has_passed(&mark)? {
        if shared.control.failed().is_some() {
            std::mem::forget(word);
            return Err("another rank has failed".into());
        }
        rest.take();
    }
    drop(word);
    Ok(channel)
}

/// Hands over the first message that NCCL has carried, if it has; returns whether anything moved.
pub(super) fn deliver(
    channel: &Option<NcclChannel>,
    in_flight: &mut VecDeque<(StreamEvent, LinkTransfer)>,
) -> bool {
    let (Some(channel), Some((mark, _))) = (channel, in_flight.front()) else { return false };
    match channel.has_passed(mark) {
        Ok(false) => return false,
        Ok(true) => {
            let (_, transfer) = in_flight.pop_front().expect("it is the first");
            transfer.ticket.deliver(Ok(transfer.data));
        }
        Err(why) => in_flight.drain(..).for_each(|(_, transfer)| refuse(transfer, why.clone())),
    }
    true
}

fn header(transfer: &LinkTransfer) -> LinkHeader {
    LinkHeader { key: transfer.key, element: transfer.data.element(), elements: transfer.data.len() }
}

/// Ends a message that cannot be carried. The GPU may still read its memory, which is leaked.
pub(super) fn refuse(transfer: LinkTransfer, why: String) {
    let ticket = transfer.ticket.clone();
    std::mem::forget(transfer);
    ticket.deliver(Err(Error::Carrier { rank: ticket.rank, call: ticket.call, why }));
}
