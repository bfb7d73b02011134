//! The loop over a rank's actions.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use espalier_comm::Communicator;
use espalier_plan::schedule::{
    Action, Chunk, ChunkWork, ControlMessage, Pass, Payload, Schedule, StageMessage,
};
use espalier_tensor::Tensor;
use tracing::{Level, debug, enabled, trace};

use super::ActionWorker;
use super::messages::Messages;
use super::trace::{Trace, TraceKind};
use crate::Result;

/// Receives that are posted before their turn: one message arrives while another is being used.
const POSTED: usize = 2;

/// How often a rank that waits for either of two messages polls.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// A rank in the course of its list.
#[derive(Debug)]
pub struct Executor {
    schedule: Schedule,
    rank: usize,
    pipeline_group: Communicator,
    /// The index of the next action in the list.
    position: usize,
    /// Receives before this index of the list are posted.
    posted: usize,
    messages: Messages,
    in_order: bool,
    /// What the rank did when, where somebody wants to know.
    pub trace: Option<Trace>,
}

impl Executor {
    /// At the beginning of a list. `pipeline_group` has the ranks of the pipeline, in their order.
    pub fn new(schedule: Schedule, pipeline_group: Communicator) -> Executor {
        let (rank, messages) = (pipeline_group.rank(), Messages::default());
        let (position, posted, in_order, trace) = (0, 0, false, None);
        Executor { schedule, rank, pipeline_group, position, posted, messages, in_order, trace }
    }

    /// Connects this rank with those that its list sends to, before it begins.
    pub fn connect(&self) -> Result<()> {
        let peer = |action: &Action| match action {
            Action::Send(message) => Some(message.peer),
            _ => None,
        };
        let mut peers: Vec<usize> = self.list().iter().filter_map(peer).collect();
        peers.sort_unstable();
        peers.dedup();
        Ok(self.pipeline_group.connect(&peers)?)
    }

    /// Keeps to the list even where the schedule lets a rank take whatever has arrived.
    pub fn in_order(mut self) -> Executor {
        self.in_order = true;
        self
    }

    /// Whether nothing is under way: the list is at its end, or has not begun.
    pub fn is_idle(&self) -> bool {
        self.position == 0 || self.position == self.list().len()
    }

    /// Goes back to the beginning of the list.
    pub fn rewind(&mut self) {
        debug_assert!(self.is_idle());
        (self.position, self.posted) = (0, 0);
    }

    /// Goes on with another list. The one before must be at its end.
    pub fn load(&mut self, schedule: Schedule) {
        debug_assert!(self.is_idle());
        self.schedule = schedule;
        (self.position, self.posted) = (0, 0);
    }

    /// Runs the list until so many more steps have been taken.
    pub fn run(&mut self, steps: usize, worker: &mut dyn ActionWorker) -> Result<()> {
        let mut taken = 0;
        while taken < steps {
            if self.position == 0 && self.schedule.message_driven && !self.in_order {
                self.run_message_driven(worker)?;
            }
            let action = self.list()[self.position];
            self.post_ahead(worker)?;
            self.act(action, worker)?;
            self.position += 1;
            taken += usize::from(action == Action::Step);
        }
        // What belongs to the step that was the last.
        while let Some(&action) = self.list().get(self.position).filter(|action| action.ends_step()) {
            self.act(action, worker)?;
            self.position += 1;
        }
        if self.is_idle() {
            self.messages.finish()?;
        }
        Ok(())
    }

    /// Runs another list that takes no step, between two of its own.
    pub(crate) fn run_between(&mut self, list: Schedule, worker: &mut dyn ActionWorker) -> Result<()> {
        debug_assert!(self.is_idle());
        let schedule = std::mem::replace(&mut self.schedule, list);
        (self.position, self.posted) = (0, 0);
        self.run_to_end(worker)?;
        self.load(schedule);
        Ok(())
    }

    /// Runs all of a list that takes no step.
    pub(crate) fn run_to_end(&mut self, worker: &mut dyn ActionWorker) -> Result<()> {
        while let Some(&action) = self.list().get(self.position) {
            self.post_ahead(worker)?;
            self.act(action, worker)?;
            self.position += 1;
        }
        self.messages.finish()
    }

    fn list(&self) -> &[Action] {
        &self.schedule.ranks[self.rank]
    }

    fn now(&self) -> f64 {
        self.trace.as_ref().map_or(0.0, Trace::now)
    }

    /// Posts the receives of the next messages.
    fn post_ahead(&mut self, worker: &mut dyn ActionWorker) -> Result<()> {
        self.posted = self.posted.max(self.position);
        while self.messages.posted() < POSTED && self.posted < self.list().len() {
            if let Action::Receive(message) = self.list()[self.posted] {
                self.post(&message, worker)?;
            }
            self.posted += 1;
        }
        Ok(())
    }

    fn post(&mut self, message: &StageMessage, worker: &mut dyn ActionWorker) -> Result<()> {
        if !self.messages.expects(message) {
            let (buffer, tag) = (worker.recv_buffer(message)?, self.tag(&Action::Receive(*message)));
            self.messages.post(message, self.pipeline_group.start_receive(buffer, message.peer, tag)?);
        }
        Ok(())
    }

    /// The tag of a message, with a tensor or with control numbers: a communicator tells messages of the same two
    /// ranks apart by them. Those within a layer have groups, and tags, of their own.
    fn tag(&self, action: &Action) -> u32 {
        let tag = self.schedule.tag(self.rank, action).expect("a message has a tag");
        u32::try_from(tag).expect("lists are short enough for their tags")
    }

    /// An action, for the log.
    fn describe(&self, action: Action) -> String {
        match action {
            Action::WaitReduce => "wait for reduce".into(),
            Action::Agree => "agree".into(),
            Action::Gather => "gather".into(),
            Action::Commit => "commit".into(),
            Action::Settle => "settle".into(),
            Action::SendControl(ControlMessage { topic, update, peer }) => {
                format!("tell {peer}: {topic:?} {update}")
            }
            Action::RecvControl(ControlMessage { topic, update, peer }) => {
                format!("hear {peer}: {topic:?} {update}")
            }
            action => self.schedule.token(self.rank, &action),
        }
    }

    fn act(&mut self, action: Action, worker: &mut dyn ActionWorker) -> Result<()> {
        // Logged before it is begun: the last line of a rank that hangs.
        let watched = enabled!(Level::DEBUG).then(|| (self.describe(action), Instant::now()));
        if let Some((name, _)) = &watched {
            debug!("{name}");
        }
        self.perform(action, worker)?;
        if let Some((name, begin)) = watched {
            trace!("done: {name}, after {:.3} ms", begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok(())
    }

    fn perform(&mut self, action: Action, worker: &mut dyn ActionWorker) -> Result<()> {
        let start = self.now();
        match action {
            Action::Receive(message) => {
                self.post(&message, worker)?;
                self.messages.wait(&message)?;
            }
            Action::Send(message) => {
                self.messages.send(&message, self.tag(&action), &self.pipeline_group)?;
            }
            Action::SendControl(message) => {
                let tag = self.tag(&action);
                // It is on its way, and nobody needs it back.
                drop(self.pipeline_group.start_send(worker.scalars_to_send(message), message.peer, tag)?);
            }
            Action::RecvControl(message) => {
                let tag = self.tag(&action);
                let buffer = vec![0.0; message.topic.numbers()];
                worker.receive_scalars(message, &self.pipeline_group.receive(buffer, message.peer, tag)?);
            }
            _ => match action.compute() {
                Some((pass, work)) => self.compute(pass, work, worker)?,
                None => worker.act(action)?,
            },
        }
        if let (Some(trace), Some(kind)) = (&mut self.trace, worker.kind(&action)) {
            trace.add(kind, start, worker.bytes(&action));
            worker.bucket_spans().into_iter().for_each(|span| trace.add_bucket_span(span));
        }
        Ok(())
    }

    fn compute(&mut self, pass: Pass, work: ChunkWork, worker: &mut dyn ActionWorker) -> Result<()> {
        let ChunkWork { micro_batch, chunk, .. } = work;
        let current = self.schedule.placement.chunks(self.rank)[chunk];
        let (payload, made, next) = match pass {
            Pass::Forward => {
                let input = self.messages.take((Payload::Activation, micro_batch, chunk));
                let output = worker.forward(work, input)?;
                (Payload::Activation, output, self.schedule.placement.after(current))
            }
            Pass::Backward | Pass::BackwardInput => {
                let gradient = self.messages.take((Payload::Gradient, micro_batch, chunk));
                let made = worker.backward(work, gradient, pass == Pass::Backward)?;
                (Payload::Gradient, made, self.schedule.placement.before(current))
            }
            Pass::BackwardWeight => return worker.act(pass.on(work)),
        };
        if let (Some(tensor), Some(next)) = (made, next) {
            self.hand_over(payload, micro_batch, chunk, next, tensor);
        }
        Ok(())
    }

    /// Leaves what a pass made: for the next chunk, if that is here too, or for the send that follows.
    fn hand_over(&mut self, payload: Payload, micro_batch: usize, chunk: usize, next: Chunk, tensor: Tensor) {
        match self.schedule.placement.chunk_of(self.rank, next) {
            Some(here) => self.messages.store((payload, micro_batch, here), tensor),
            None => self.messages.queue_send((payload, micro_batch, chunk), tensor),
        }
    }

    /// AxoNN's rule: runs whatever message has arrived, up to the end of the batch. Forwards and backwards
    /// each keep their order, so that sums of gradients do not depend on who was faster.
    fn run_message_driven(&mut self, worker: &mut dyn ActionWorker) -> Result<()> {
        let end = self.list().iter().position(|action| matches!(action, Action::AllReduce { .. }));
        let end = end.expect("a batch ends with an all-reduce");
        let (mut forwards, mut backwards) = units(&self.list()[..end]);
        let stages = self.schedule.stages();
        let (mut entered, mut left) = (0, 0);
        while !forwards.is_empty() || !backwards.is_empty() {
            for unit in [forwards.front(), backwards.front()].into_iter().flatten() {
                if let Some(message) = unit.receive {
                    self.post(&message, worker)?;
                }
            }
            let in_flight = entered - left;
            // The first rank lets as many in as there are stages.
            let may_enter = self.rank > 0 || in_flight < stages;
            let forward = may_enter && self.is_ready(forwards.front())?;
            let backward = in_flight > 0 && self.is_ready(backwards.front())?;
            // Where both are ready, what 1F1B would do.
            let due = in_flight < stages - self.rank;
            match (forward, backward) {
                (true, false) => self.run_unit(forwards.pop_front(), &mut entered, worker)?,
                (true, true) if due => self.run_unit(forwards.pop_front(), &mut entered, worker)?,
                (_, true) => self.run_unit(backwards.pop_front(), &mut left, worker)?,
                (false, false) => {
                    let wanted = [forwards.front().filter(|_| may_enter), backwards.front()];
                    self.wait_for_either(wanted.map(|unit| unit.and_then(|unit| unit.receive)))?;
                }
            }
        }
        self.position = end;
        Ok(())
    }

    fn is_ready(&mut self, unit: Option<&ScheduledPass>) -> Result<bool> {
        match unit {
            None => Ok(false),
            Some(ScheduledPass { receive: None, .. }) => Ok(true),
            Some(ScheduledPass { receive: Some(message), .. }) => self.messages.has_arrived(message),
        }
    }

    fn run_unit(
        &mut self,
        unit: Option<ScheduledPass>,
        count: &mut usize,
        worker: &mut dyn ActionWorker,
    ) -> Result<()> {
        let unit = unit.expect("it was ready");
        if let Some(message) = unit.receive {
            self.messages.wait(&message)?;
        }
        self.act(unit.compute, worker)?;
        *count += 1;
        unit.send.map_or(Ok(()), |message| self.act(Action::Send(message), worker))
    }

    fn wait_for_either(&mut self, wanted: [Option<StageMessage>; 2]) -> Result<()> {
        let (start, begin) = (self.now(), Instant::now());
        let limit = self.pipeline_group.limit();
        if enabled!(Level::DEBUG) {
            let names = wanted.iter().flatten().map(|message| self.describe(Action::Receive(*message)));
            debug!("waits for {}, whichever is first", names.collect::<Vec<_>>().join(" or "));
        }
        loop {
            for message in wanted.iter().flatten() {
                if self.messages.has_arrived(message)? {
                    if let Some(trace) = &mut self.trace {
                        trace.add(TraceKind::Wait, start, 0);
                    }
                    return Ok(());
                }
            }
            if begin.elapsed() > limit {
                let message = wanted.iter().flatten().next().expect("it waits for something");
                return self.messages.wait(message);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// A pass with the message before it and the one behind it.
struct ScheduledPass {
    receive: Option<StageMessage>,
    compute: Action,
    send: Option<StageMessage>,
}

/// The forwards and the backwards of a list.
fn units(list: &[Action]) -> (VecDeque<ScheduledPass>, VecDeque<ScheduledPass>) {
    let (mut forwards, mut backwards) = (VecDeque::new(), VecDeque::new());
    let mut receive = None;
    for (position, action) in list.iter().enumerate() {
        match *action {
            Action::Receive(message) => receive = Some(message),
            Action::Forward(_) | Action::Backward(_) => {
                let send = match list.get(position + 1) {
                    Some(&Action::Send(message)) => Some(message),
                    _ => None,
                };
                let unit = ScheduledPass { receive: receive.take(), compute: *action, send };
                if matches!(action, Action::Forward(_)) { &mut forwards } else { &mut backwards }
                    .push_back(unit);
            }
            _ => {}
        }
    }
    (forwards, backwards)
}
