//! Whether lists can be run, and do what training needs: no deadlock, every message sent once and received
//! once in order, every micro-batch forward and backward once through every virtual stage, no pass before
//! what it takes, and the right version of the weights for each.

use std::collections::{BTreeMap, VecDeque};

use super::walk::{AllReduces, walk};
use super::{
    Action, Chunk, ChunkWork, Pass, Payload, Schedule, ScheduleError, StageMessage, Updates, agreement,
};

impl Schedule {
    /// Checks all lists, or says what is wrong with the first action that cannot be.
    pub fn validate(&self) -> Result<(), ScheduleError> {
        if self.message_driven {
            self.check_message_driven()?;
        }
        self.check_implied()?;
        let mut ranks: Vec<RankState> = (0..self.stages()).map(|rank| RankState::new(self, rank)).collect();
        let mut inboxes = vec![Inbox::default(); self.stages()];
        let mut all_reduces = AllReduces::default();
        walk(self, |rank, position, action| {
            let tag = || self.tag(rank, action).expect("a message has a tag");
            let outcome = match *action {
                Action::Send(message) => ranks[rank].send(message).map(|()| {
                    inboxes[message.peer].from(rank, Some(message.payload)).push_back(tag());
                    true
                }),
                Action::Receive(message) => ranks[rank].receive(message, || {
                    take(inboxes[rank].from(message.peer, Some(message.payload)), tag())
                }),
                Action::SendControl(notice) => {
                    inboxes[notice.peer].from(rank, None).push_back(tag());
                    Ok(true)
                }
                Action::RecvControl(notice) => take(inboxes[rank].from(notice.peer, None), tag()),
                Action::AllReduce { chunk } => {
                    ranks[rank].all_reduce(chunk, || all_reduces.rendezvous(self, rank, chunk, 0.0).is_some())
                }
                Action::Step => ranks[rank].step().map(|()| true),
                action if action.is_implied() => Ok(true),
                Action::Average => Ok(true),
                Action::Stash { version } => ranks[rank].stash(version).map(|()| true),
                Action::Drop { version } => ranks[rank].drop(version).map(|()| true),
                _ => {
                    let (pass, work) = action.compute().expect("all others compute");
                    ranks[rank].compute(pass, work).map(|()| true)
                }
            };
            outcome.map_err(|problem| {
                // As a person counts them who reads or writes the line.
                let position =
                    self.ranks[rank][..position].iter().filter(|action| !action.is_implied()).count();
                let action = self.token(rank, action);
                ScheduleError::Invalid { rank, position, action, problem }
            })
        })?;
        for (index, rank) in ranks.iter().enumerate() {
            rank.finish().map_err(|problem| ScheduleError::Unfinished { rank: index, problem })?;
        }
        Ok(())
    }
}

impl Schedule {
    /// What steps imply must be there, all of it and nothing more.
    fn check_implied(&self) -> Result<(), ScheduleError> {
        let written = |list: &Vec<Action>| list.iter().copied().filter(|a| !a.is_implied()).collect();
        let bare = self.ranks.iter().map(written).collect();
        let expected = agreement::fill_in(&self.placement, self.updates, self.micro_batches, bare);
        for (rank, (list, expected)) in self.ranks.iter().zip(expected).enumerate() {
            // Whether state is sharded is not the schedule's to know.
            let list = || list.iter().filter(|action| **action != Action::Gather);
            if !list().eq(&expected) {
                let same = list().zip(&expected).take_while(|(is, should)| is == should);
                let position = same.filter(|(action, _)| !action.is_implied()).count();
                let problem = "before it or after it is not what steps imply".into();
                return Err(ScheduleError::Invalid { rank, position, action: "step".into(), problem });
            }
        }
        Ok(())
    }

    /// What AxoNN's rule takes for granted: an arrived message says what to run, and what the pass makes goes
    /// on at once.
    fn check_message_driven(&self) -> Result<(), ScheduleError> {
        let refuse = |expected, got| Err(ScheduleError::MessageDriven { expected, got });
        let ranks = self.placement.pipeline(0);
        if self.placement.copies() > 1 || !ranks.iter().copied().eq(0..self.stages()) {
            let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
            let got = match self.placement.copies() {
                1 => format!("the pipeline is {}", list.join(" ")),
                copies => format!("there are {copies} pipelines"),
            };
            return refuse("one pipeline with a stage on each rank, in order", got);
        }
        let halves =
            |action: &&Action| matches!(action, Action::BackwardInput(_) | Action::BackwardWeight(_));
        for (rank, list) in self.ranks.iter().enumerate() {
            if let Some(half) = list.iter().find(halves) {
                let got = format!("of rank {rank} `{}` is half of one", self.token(rank, half));
                return refuse("full backward passes", got);
            }
        }
        Ok(())
    }
}

/// The tags in flight to a rank from each of the few that send it something, those of control messages apart.
/// What is left there at the end needs no check of its own: the pass that it was for cannot have run.
#[derive(Clone, Default)]
struct Inbox(Vec<(usize, Option<Payload>, VecDeque<u64>)>);

impl Inbox {
    fn from(&mut self, sender: usize, payload: Option<Payload>) -> &mut VecDeque<u64> {
        let known = self.0.iter().position(|(from, of, _)| (*from, *of) == (sender, payload));
        let index = known.unwrap_or_else(|| {
            self.0.push((sender, payload, VecDeque::new()));
            self.0.len() - 1
        });
        &mut self.0[index].2
    }
}

/// Takes a message that has arrived: whether there was any.
fn take(queue: &mut VecDeque<u64>, tag: u64) -> Result<bool, String> {
    match queue.pop_front() {
        None => Ok(false),
        Some(first) if first == tag => Ok(true),
        Some(_) => Err("the peer sends another message first".into()),
    }
}

/// What a rank has of a micro-batch in a chunk.
#[derive(Clone, Default)]
struct ChunkProgress {
    activation: TransferState,
    gradient: TransferState,
    /// The version that the forward used.
    forward: Option<usize>,
    input_gradient: bool,
    weight_gradient: bool,
}

#[derive(Clone, Copy, Default)]
struct TransferState {
    received: bool,
    sent: bool,
}

struct RankState<'a> {
    schedule: &'a Schedule,
    rank: usize,
    /// `[micro-batch][chunk]`
    progress: Vec<Vec<ChunkProgress>>,
    newest: usize,
    stashed: Vec<usize>,
    /// Of each version, the passes of micro-batches through chunks that have begun with it and not ended.
    users: BTreeMap<usize, usize>,
    /// Of each chunk, the micro-batches whose gradients await the next step.
    waiting: Vec<Vec<usize>>,
    /// Of each chunk, whether the gradients were reduced since the last step.
    reduced: Vec<bool>,
}

type Validity<T = ()> = Result<T, String>;

fn ensure(condition: bool, problem: impl FnOnce() -> String) -> Validity {
    match condition {
        true => Ok(()),
        false => Err(problem()),
    }
}

impl<'a> RankState<'a> {
    fn new(schedule: &'a Schedule, rank: usize) -> RankState<'a> {
        let chunks = schedule.placement.chunks(rank).len();
        RankState {
            schedule,
            rank,
            progress: vec![vec![ChunkProgress::default(); chunks]; schedule.all_micro_batches()],
            newest: 0,
            stashed: Vec::new(),
            users: BTreeMap::new(),
            waiting: vec![Vec::new(); chunks],
            reduced: vec![false; chunks],
        }
    }

    /// The chunk, where the micro-batch goes through it.
    fn chunk(&self, micro_batch: usize, chunk: usize) -> Validity<Chunk> {
        let placement = &self.schedule.placement;
        ensure(micro_batch < self.progress.len(), || {
            format!("the last micro-batch is {}", self.progress.len() - 1)
        })?;
        let at = *placement.chunks(self.rank).get(chunk).ok_or("the rank has no such chunk")?;
        ensure(placement.route(micro_batch) == at.pipeline, || {
            format!("the micro-batch goes through pipeline {}", placement.route(micro_batch))
        })?;
        Ok(at)
    }

    /// What this rank has of a neighbouring virtual stage, where it holds that itself.
    fn local(&self, micro_batch: usize, neighbour: Chunk) -> Option<&ChunkProgress> {
        let chunk = self.schedule.placement.chunk_of(self.rank, neighbour)?;
        Some(&self.progress[micro_batch][chunk])
    }

    fn compute(&mut self, pass: Pass, work: ChunkWork) -> Validity {
        let ChunkWork { micro_batch, chunk, version } = work;
        let at = self.chunk(micro_batch, chunk)?;
        let progress = &self.progress[micro_batch][chunk];
        match pass {
            Pass::Forward => {
                ensure(progress.forward.is_none(), || "it has run already".into())?;
                let ready = self.schedule.placement.before(at).is_none_or(|before| {
                    self.local(micro_batch, before)
                        .map_or(progress.activation.received, |before| before.forward.is_some())
                });
                ensure(ready, || "its input has not arrived".into())?;
                self.right_version(work)?;
            }
            Pass::Backward | Pass::BackwardInput => {
                ensure(progress.forward.is_some(), || "its forward has not run".into())?;
                ensure(!progress.input_gradient, || "it has run already".into())?;
                let ready = self.schedule.placement.after(at).is_none_or(|after| {
                    self.local(micro_batch, after)
                        .map_or(progress.gradient.received, |after| after.input_gradient)
                });
                ensure(ready, || "the gradient of its output has not arrived".into())?;
            }
            Pass::BackwardWeight => {
                ensure(progress.input_gradient, || "its input half has not run".into())?;
                ensure(!progress.weight_gradient, || "it has run already".into())?;
            }
        }
        let forward = progress.forward.unwrap_or(version);
        ensure(version == forward, || format!("its forward used version {forward}, this uses {version}"))?;
        ensure(version == self.newest || self.stashed.contains(&version), || {
            format!("version {version} of the weights is not there")
        })?;

        let progress = &mut self.progress[micro_batch][chunk];
        match pass {
            Pass::Forward => {
                progress.forward = Some(version);
                *self.users.entry(version).or_default() += 1;
            }
            Pass::Backward | Pass::BackwardInput => progress.input_gradient = true,
            Pass::BackwardWeight => {}
        }
        if matches!(pass, Pass::Backward | Pass::BackwardWeight) {
            progress.weight_gradient = true;
            *self.users.get_mut(&version).expect("the forward came before") -= 1;
            ensure(!self.reduced[chunk], || "its gradients come after their all-reduce".into())?;
            self.waiting[chunk].push(micro_batch);
        }
        Ok(())
    }

    fn right_version(&self, work: ChunkWork) -> Validity {
        let batch = work.micro_batch / self.schedule.micro_batches;
        let expected = match self.schedule.updates {
            Updates::Flush => batch,
            Updates::EveryMicroBatch => self.newest,
            Updates::DoubleBuffered => batch.saturating_sub(1),
            Updates::Free => work.version,
        };
        ensure(work.version == expected, || {
            format!("it must use version {expected} of the weights, not {}", work.version)
        })
    }

    fn send(&mut self, message: StageMessage) -> Validity {
        let StageMessage { payload, micro_batch, chunk, peer } = message;
        let at = self.chunk(micro_batch, chunk)?;
        let placement = &self.schedule.placement;
        let progress = &mut self.progress[micro_batch][chunk];
        let (to, made, edge) = match payload {
            Payload::Activation => {
                (placement.after(at), progress.forward.is_some(), &mut progress.activation)
            }
            Payload::Gradient => (placement.before(at), progress.input_gradient, &mut progress.gradient),
        };
        self.schedule.is_peer(self.rank, peer, to)?;
        ensure(made, || "what it sends has not been made".into())?;
        ensure(!edge.sent, || "it was sent already".into())?;
        edge.sent = true;
        Ok(())
    }

    fn receive(&mut self, message: StageMessage, arrived: impl FnOnce() -> Validity<bool>) -> Validity<bool> {
        let StageMessage { payload, micro_batch, chunk, peer } = message;
        let at = self.chunk(micro_batch, chunk)?;
        let placement = &self.schedule.placement;
        let progress = &mut self.progress[micro_batch][chunk];
        let (from, edge) = match payload {
            Payload::Activation => (placement.before(at), &mut progress.activation),
            Payload::Gradient => (placement.after(at), &mut progress.gradient),
        };
        self.schedule.is_peer(self.rank, peer, from)?;
        ensure(!edge.received, || "it was received already".into())?;
        edge.received = arrived()?;
        Ok(edge.received)
    }

    fn all_reduce(&mut self, chunk: usize, all_there: impl FnOnce() -> bool) -> Validity<bool> {
        let reduced = self.reduced.get_mut(chunk).ok_or("the rank has no such chunk")?;
        ensure(!*reduced, || "it was reduced already".into())?;
        *reduced = all_there();
        Ok(*reduced)
    }

    /// Every chunk's gradients must be those of what one step is for.
    fn step(&mut self) -> Validity {
        let missing = self.reduced.iter().position(|reduced| !reduced);
        ensure(missing.is_none(), || {
            format!("the gradients of chunk {} were not reduced", missing.expect("there is one"))
        })?;
        let per_batch = self.schedule.micro_batches;
        for (chunk, waiting) in self.waiting.iter_mut().enumerate() {
            waiting.sort_unstable();
            match self.schedule.updates {
                Updates::Flush | Updates::DoubleBuffered => {
                    let pipeline = self.schedule.placement.chunks(self.rank)[chunk].pipeline;
                    let routed = self.schedule.placement.routed(pipeline);
                    let batch: Vec<usize> = routed.map(|k| k + self.newest * per_batch).collect();
                    ensure(*waiting == batch, || {
                        format!(
                            "it is for micro-batches {batch:?}, but chunk {chunk} has the gradients of {waiting:?}"
                        )
                    })?;
                }
                Updates::EveryMicroBatch => ensure(waiting.len() == 1, || {
                    format!("it is for one micro-batch, but chunk {chunk} has the gradients of {waiting:?}")
                })?,
                Updates::Free => {}
            }
            waiting.clear();
        }
        self.reduced.fill(false);
        self.newest += 1;
        Ok(())
    }

    fn stash(&mut self, version: usize) -> Validity {
        ensure(version == self.newest, || format!("only the newest version, {}, can be kept", self.newest))?;
        ensure(!self.stashed.contains(&version), || "it is kept already".into())?;
        self.stashed.push(version);
        Ok(())
    }

    fn drop(&mut self, version: usize) -> Validity {
        let kept = self.stashed.iter().position(|&kept| kept == version);
        let kept = kept.ok_or("it is not kept")?;
        let users = self.users.get(&version).copied().unwrap_or(0);
        ensure(users == 0, || "a micro-batch in flight still needs it".into())?;
        self.stashed.remove(kept);
        Ok(())
    }

    fn finish(&self) -> Validity {
        for micro_batch in 0..self.progress.len() {
            for chunk in self.schedule.placement.chunks_for(self.rank, micro_batch) {
                let ChunkProgress { forward, input_gradient, weight_gradient, .. } =
                    self.progress[micro_batch][chunk];
                let missing = match (forward, input_gradient, weight_gradient) {
                    (None, ..) => "forward",
                    (_, false, _) => "backward",
                    (_, _, false) => "weight gradients",
                    _ => continue,
                };
                return Err(format!("micro-batch {micro_batch} has had no {missing} in chunk {chunk}"));
            }
        }
        let unused = self.waiting.iter().flatten().min();
        ensure(unused.is_none(), || {
            format!("the gradients of micro-batch {} were used in no step", unused.expect("there is one"))
        })?;
        let expected: &[usize] = match self.schedule.updates {
            // The next batch would use it.
            Updates::DoubleBuffered => &[self.schedule.batches - 1],
            Updates::Free => &self.stashed,
            _ => &[],
        };
        ensure(self.stashed == expected, || {
            format!("kept versions should be {expected:?}, but are {:?}", self.stashed)
        })
    }
}

impl Schedule {
    /// A message must go between this rank and the other holder of the neighbouring virtual stage.
    fn is_peer(&self, rank: usize, peer: usize, neighbour: Option<Chunk>) -> Validity {
        let neighbour = neighbour.ok_or("there is no stage on that side")?;
        let holder = self.placement.rank_of(neighbour);
        ensure(holder != rank, || "both stages are on this rank: there is no message between them".into())?;
        ensure(peer == holder, || format!("stage {} is on rank {holder}", neighbour.virtual_stage))
    }
}
