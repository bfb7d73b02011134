//! Schedules as text: one line a rank, which a person can read, write and bring. `docs/schedules.md` explains
//! the format.
//!
//! `F0` is the forward of micro-batch 0, `B0` its backward; where a `W0` stands in the same line, `B0` is the
//! input half and `W0` the weight half. `F0.1` says which of the rank's chunks, where the micro-batch goes
//! through several; `F0@2` which version of the weights, where it is not the newest. `a0>1` sends the
//! activation of micro-batch 0 to rank 1, `g0<1` receives its gradient from there. `reduce`, `step`, `keep2`
//! and `drop2` are what they say.

use std::fmt;

use super::{Action, ChunkWork, Pass, Payload, Schedule, StageMessage};

impl Schedule {
    /// The order in which a rank computes, without messages, steps and versions.
    pub fn order(&self, rank: usize) -> String {
        let passes = self.ranks[rank].iter().filter_map(Action::compute);
        let tokens = passes.map(|(pass, work)| {
            format!("{}{}{}", letter(pass), work.micro_batch, self.suffix(rank, work.micro_batch, work.chunk))
        });
        tokens.collect::<Vec<_>>().join(" ")
    }

    /// An action as it is written in a line, but for its version.
    pub fn token(&self, rank: usize, action: &Action) -> String {
        match *action {
            Action::Send(message) => self.message(rank, message, '>'),
            Action::Receive(message) => self.message(rank, message, '<'),
            Action::AllReduce { chunk } if self.placement.chunks(rank).len() > 1 => format!("reduce.{chunk}"),
            Action::AllReduce { .. } => "reduce".into(),
            // What follows from a step bears its name.
            Action::Step => "step".into(),
            action if action.is_implied() => "step".into(),
            Action::Average => "average".into(),
            Action::Stash { version } => format!("keep{version}"),
            Action::Drop { version } => format!("drop{version}"),
            _ => {
                let (pass, ChunkWork { micro_batch, chunk, .. }) =
                    action.compute().expect("all others compute");
                format!("{}{micro_batch}{}", letter(pass), self.suffix(rank, micro_batch, chunk))
            }
        }
    }

    fn message(&self, rank: usize, message: StageMessage, arrow: char) -> String {
        let StageMessage { payload, micro_batch, chunk, peer } = message;
        let letter = match payload {
            Payload::Activation => 'a',
            Payload::Gradient => 'g',
        };
        format!("{letter}{micro_batch}{}{arrow}{peer}", self.suffix(rank, micro_batch, chunk))
    }

    /// `.1`, unless there is only one chunk that it can be.
    fn suffix(&self, rank: usize, micro_batch: usize, chunk: usize) -> String {
        let mut possible = self.placement.chunks_for(rank, micro_batch);
        match (possible.next(), possible.next()) {
            (Some(only), None) if only == chunk => String::new(),
            _ => format!(".{chunk}"),
        }
    }

    fn line(&self, rank: usize) -> String {
        let mut newest = 0;
        let tokens = self.ranks[rank].iter().filter(|action| !action.is_implied()).map(|action| {
            newest += usize::from(*action == Action::Step);
            let version = action.compute().map(|(_, work)| work.version).filter(|&version| version != newest);
            self.token(rank, action) + &version.map_or(String::new(), |version| format!("@{version}"))
        });
        tokens.collect::<Vec<_>>().join(" ")
    }
}

fn letter(pass: Pass) -> char {
    match pass {
        Pass::Forward => 'F',
        Pass::Backward | Pass::BackwardInput => 'B',
        Pass::BackwardWeight => 'W',
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "name {}", self.name)?;
        writeln!(f, "micro-batches {}", self.micro_batches)?;
        writeln!(f, "batches {}", self.batches)?;
        writeln!(f, "updates {}", self.updates.as_str())?;
        if self.message_driven {
            writeln!(f, "message-driven")?;
        }
        for pipeline in 0..self.placement.copies() {
            let ranks = numbers(self.placement.pipeline(pipeline).iter().copied());
            match self.placement.copies() {
                1 => writeln!(f, "pipeline {ranks}")?,
                _ => writeln!(f, "pipeline {ranks} runs {}", numbers(self.placement.routed(pipeline)))?,
            }
        }
        for rank in 0..self.ranks.len() {
            writeln!(f, "{}", self.line(rank))?;
        }
        Ok(())
    }
}

fn numbers(numbers: impl Iterator<Item = usize>) -> String {
    numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(" ")
}
