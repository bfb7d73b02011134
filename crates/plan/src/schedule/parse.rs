//! Reading a schedule that a person brings, in the format of [`text`](super::text).
//!
//! Lines without messages get those that follow from their order, and lines without steps get a flush and a
//! step at the end of each batch: so the order of computing alone is a schedule already.

use std::collections::HashSet;

use super::assemble::reduce_and_step;
use super::{
    Action, ChunkWork, Pass, Payload, Placement, Schedule, ScheduleError, StageMessage, Updates, agreement,
    messages,
};
use crate::edit_distance::{did_you_mean, nearest};

impl Schedule {
    /// Reads what [`Display`](std::fmt::Display) writes, or what a person wrote. What was read can be run if it is
    /// [valid](Schedule::validate).
    pub fn parse(text: &str) -> Result<Schedule, ScheduleError> {
        ScheduleDraft::read(text)?.finish()
    }
}

/// What a file says, before it is known what it leaves out.
#[derive(Default)]
struct ScheduleDraft<'a> {
    name: Option<&'a str>,
    micro_batches: Option<usize>,
    batches: Option<usize>,
    updates: Option<Updates>,
    message_driven: bool,
    /// The ranks of each, and the micro-batches that it runs.
    pipelines: Vec<(Vec<usize>, Option<Vec<usize>>)>,
    /// For every rank, the number of its line and its tokens.
    lines: Vec<(usize, Vec<(&'a str, Token)>)>,
}

/// An action with what was written, and without what was not.
#[derive(Clone, Copy)]
enum Token {
    Compute { letter: char, micro_batch: usize, chunk: Option<usize>, version: Option<usize> },
    Message { payload: Payload, out: bool, micro_batch: usize, chunk: Option<usize>, peer: usize },
    Reduce { chunk: Option<usize> },
    Step,
    Keep(usize),
    Drop(usize),
}

const SETTINGS: [&str; 6] = ["name", "micro-batches", "batches", "updates", "message-driven", "pipeline"];

impl<'a> ScheduleDraft<'a> {
    fn read(text: &'a str) -> Result<ScheduleDraft<'a>, ScheduleError> {
        let mut draft = ScheduleDraft::default();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            let words: Vec<&str> = line.split_whitespace().collect();
            let syntax = |problem| ScheduleError::Syntax { line: index + 1, problem };
            match words.first() {
                None => {}
                Some(setting) if SETTINGS.contains(setting) => {
                    draft.set(setting, &words[1..]).map_err(syntax)?;
                }
                Some(_) => {
                    let tokens = words.iter().map(|&word| Ok((word, Token::read(word)?)));
                    let tokens = tokens.collect::<Result<_, String>>().map_err(syntax)?;
                    draft.lines.push((index + 1, tokens));
                }
            }
        }
        Ok(draft)
    }

    fn set(&mut self, setting: &str, values: &[&'a str]) -> Result<(), String> {
        let one = || match values {
            &[value] => Ok(value),
            _ => Err(format!("`{setting}` takes one value")),
        };
        let once = |is_new: bool| match is_new {
            true => Ok(()),
            false => Err(format!("`{setting}` is given twice")),
        };
        match setting {
            "name" => once(self.name.replace(one()?).is_none()),
            "micro-batches" => once(self.micro_batches.replace(positive(one()?)?).is_none()),
            "batches" => once(self.batches.replace(positive(one()?)?).is_none()),
            "updates" => once(self.updates.replace(updates(one()?)?).is_none()),
            "message-driven" if values.is_empty() => once(!std::mem::replace(&mut self.message_driven, true)),
            "message-driven" => Err("`message-driven` takes no value".into()),
            _ => {
                let mut halves = values.split(|&word| word == "runs");
                let mut list = || halves.next().map(|half| half.iter().map(|word| number(word)).collect());
                let ranks: Vec<usize> = list().transpose()?.unwrap_or_default();
                let runs: Option<Vec<usize>> = list().transpose()?;
                if ranks.is_empty() || list().is_some() {
                    return Err(
                        "a pipeline is written `pipeline 0 1 2 runs 0 1`: the rank of every stage, and \
                                with several pipelines, the micro-batches of a batch that it runs"
                            .into(),
                    );
                }
                self.pipelines.push((ranks, runs));
                Ok(())
            }
        }
    }

    fn finish(self) -> Result<Schedule, ScheduleError> {
        let nowhere = |problem: &str| ScheduleError::Syntax { line: 1, problem: problem.into() };
        if self.lines.is_empty() {
            return Err(nowhere("there is no line of actions, such as `F0 F1 B0 B1`"));
        }
        let tokens = || self.lines.iter().flat_map(|(_, tokens)| tokens.iter().map(|(_, token)| token));
        let batches = self.batches.unwrap_or(1);
        let micro_batches = match self.micro_batches {
            Some(micro_batches) => micro_batches,
            None => {
                let all =
                    tokens().filter_map(Token::micro_batch).max().map_or(0, |last| last.saturating_add(1));
                if all == 0 || all % batches > 0 {
                    return Err(nowhere(&format!(
                        "the lines have {all} micro-batches, which {batches} batches cannot split evenly"
                    )));
                }
                all / batches
            }
        };
        let chunks = match self.pipelines.is_empty() {
            true => (self.rounds() as u128).saturating_mul(self.lines.len() as u128),
            false => self.pipelines.iter().map(|(ranks, _)| ranks.len() as u128).sum(),
        };
        let forwards =
            [micro_batches, batches].iter().fold(chunks, |n, &more| n.saturating_mul(more as u128));
        if forwards > super::FORWARDS_MOST {
            return Err(ScheduleError::TooLong { forwards });
        }
        let placement = self.placement(micro_batches)?;
        let has_steps = tokens().any(|token| matches!(token, Token::Step));
        let has_messages = tokens().any(|token| matches!(token, Token::Message { .. }));
        let mut ranks = Vec::with_capacity(self.lines.len());
        for (rank, (line, tokens)) in self.lines.iter().enumerate() {
            let batch = (!has_steps).then_some(micro_batches);
            let list = actions(&placement, rank, tokens, batch);
            let list = list.map_err(|problem| ScheduleError::Syntax { line: *line, problem })?;
            ranks.push(match has_steps {
                true => list,
                false => with_flushes(&placement, rank, list, micro_batches),
            });
        }
        let updates = self.updates.unwrap_or(Updates::Flush);
        let ranks = if has_messages { ranks } else { messages::fill_in(&placement, ranks) };
        Ok(Schedule {
            name: self.name.unwrap_or("file").into(),
            micro_batches,
            batches,
            updates,
            message_driven: self.message_driven,
            ranks: agreement::fill_in(&placement, updates, micro_batches, ranks),
            placement,
        })
    }

    /// How often a pipeline that is not written goes round the ranks: as the highest chunk needs.
    fn rounds(&self) -> usize {
        let tokens = self.lines.iter().flat_map(|(_, tokens)| tokens);
        tokens.filter_map(|(_, token)| token.chunk()).max().unwrap_or(0).saturating_add(1)
    }

    fn placement(&self, micro_batches: usize) -> Result<Placement, ScheduleError> {
        let ranks = self.lines.len();
        if self.pipelines.is_empty() {
            return Ok(Placement::round_robin(ranks, self.rounds(), micro_batches));
        }
        let refuse = |problem: String| Err(ScheduleError::Placement { problem });
        let mut routes = vec![None; micro_batches];
        for (pipeline, (_, runs)) in self.pipelines.iter().enumerate() {
            let runs = match runs {
                Some(runs) => runs.clone(),
                None if self.pipelines.len() == 1 => (0..micro_batches).collect(),
                None => {
                    return refuse(format!(
                        "pipeline {pipeline} does not list the micro-batches that it runs"
                    ));
                }
            };
            for micro_batch in runs {
                match routes.get_mut(micro_batch) {
                    None => {
                        return refuse(format!(
                            "pipeline {pipeline} runs micro-batch {micro_batch}, but a batch has {micro_batches}"
                        ));
                    }
                    Some(Some(_)) => {
                        return refuse(format!("micro-batch {micro_batch} is run by two pipelines"));
                    }
                    Some(route) => *route = Some(pipeline),
                }
            }
        }
        if let Some(micro_batch) = routes.iter().position(Option::is_none) {
            return refuse(format!("no pipeline runs micro-batch {micro_batch}"));
        }
        let pipelines = self.pipelines.iter().map(|(ranks, _)| ranks.clone()).collect();
        Placement::new(ranks, pipelines, routes.into_iter().flatten().collect())
    }
}

fn number(word: &str) -> Result<usize, String> {
    word.parse().map_err(|_| format!("`{word}` is not a number"))
}

fn positive(word: &str) -> Result<usize, String> {
    number(word).ok().filter(|&number| number > 0).ok_or_else(|| format!("`{word}` is not a number above 0"))
}

fn updates(word: &str) -> Result<Updates, String> {
    Updates::ALL.into_iter().find(|updates| updates.as_str() == word).ok_or_else(|| {
        let known = Updates::ALL.map(Updates::as_str);
        let hint = nearest(word, known).map(String::from);
        format!("`updates` is one of {}, not `{word}`{}", known.join(", "), did_you_mean(&hint))
    })
}

impl Token {
    fn read(word: &str) -> Result<Token, String> {
        let unknown = || match nearest(word, SETTINGS) {
            Some(setting) => format!("`{word}` is no action and no setting; did you mean `{setting}`?"),
            None => format!(
                "`{word}` is no action and no setting; actions are F0, B0, W0, a0>1, a0<1, g0>1, g0<1, reduce, step, \
                 keep0 and drop0"
            ),
        };
        let read = |digits: &str| {
            digits.parse::<usize>().ok().filter(|_| digits.starts_with(|c: char| c.is_ascii_digit()))
        };
        // `3.1` is micro-batch 3 in chunk 1.
        let indices = |text: &str| match text.split_once('.') {
            Some((micro_batch, chunk)) => Some((read(micro_batch)?, Some(read(chunk)?))),
            None => Some((read(text)?, None)),
        };
        let compute = |letter: char, rest: &str| {
            let (rest, version) = match rest.split_once('@') {
                Some((rest, version)) => (rest, Some(read(version)?)),
                None => (rest, None),
            };
            let (micro_batch, chunk) = indices(rest)?;
            Some(Token::Compute { letter, micro_batch, chunk, version })
        };
        let message = |payload: Payload, rest: &str| {
            let (rest, peer) = rest.split_once(['<', '>'])?;
            let (micro_batch, chunk) = indices(rest)?;
            Some(Token::Message { payload, out: word.contains('>'), micro_batch, chunk, peer: read(peer)? })
        };
        let first = word.chars().next().ok_or_else(unknown)?;
        let rest = &word[first.len_utf8()..];
        let token = match (first, word) {
            (_, "step") => Some(Token::Step),
            (_, "reduce") => Some(Token::Reduce { chunk: None }),
            ('F' | 'B' | 'W', _) => compute(first, rest),
            ('a', _) => message(Payload::Activation, rest),
            ('g', _) => message(Payload::Gradient, rest),
            _ => match (word.strip_prefix("reduce."), word.strip_prefix("keep"), word.strip_prefix("drop")) {
                (Some(chunk), ..) => read(chunk).map(|chunk| Token::Reduce { chunk: Some(chunk) }),
                (_, Some(version), _) => read(version).map(Token::Keep),
                (.., Some(version)) => read(version).map(Token::Drop),
                _ => None,
            },
        };
        token.ok_or_else(unknown)
    }

    fn micro_batch(&self) -> Option<usize> {
        match *self {
            Token::Compute { micro_batch, .. } | Token::Message { micro_batch, .. } => Some(micro_batch),
            _ => None,
        }
    }

    fn chunk(&self) -> Option<usize> {
        match *self {
            Token::Compute { chunk, .. } | Token::Message { chunk, .. } | Token::Reduce { chunk } => chunk,
            _ => None,
        }
    }
}

/// The actions of a line, with the chunks and versions that it leaves out: the newest version, or where steps
/// are left out too, that of its batch.
fn actions(
    placement: &Placement,
    rank: usize,
    tokens: &[(&str, Token)],
    batch: Option<usize>,
) -> Result<Vec<Action>, String> {
    let chunks = placement.chunks(rank).len();
    let choose =
        |word: &str, written: Option<usize>, mut possible: Vec<usize>| match (written, possible.pop()) {
            (Some(chunk), _) if chunk < chunks => Ok(chunk),
            (Some(_), _) => Err(format!("`{word}`: rank {rank} has no such chunk")),
            (None, Some(only)) if possible.is_empty() => Ok(only),
            (None, _) => Err(format!("`{word}` must say in which chunk, as in `{word}.0`")),
        };
    let mut resolved = Vec::with_capacity(tokens.len());
    for &(word, token) in tokens {
        let possible = match token.micro_batch() {
            Some(micro_batch) => placement.chunks_for(rank, micro_batch).collect(),
            None => (0..chunks).collect(),
        };
        let chunk = match token {
            Token::Compute { chunk, .. } | Token::Message { chunk, .. } | Token::Reduce { chunk } => {
                choose(word, chunk, possible)?
            }
            _ => 0,
        };
        resolved.push((token, chunk));
    }
    let halves: HashSet<(usize, usize)> = resolved
        .iter()
        .filter(|(token, _)| matches!(token, Token::Compute { letter: 'W', .. }))
        .filter_map(|(token, chunk)| Some((token.micro_batch()?, *chunk)))
        .collect();
    let mut newest = 0;
    let actions = |(token, chunk): (Token, usize)| match token {
        Token::Compute { letter, micro_batch, version, .. } => {
            let pass = match letter {
                'F' => Pass::Forward,
                'W' => Pass::BackwardWeight,
                _ if halves.contains(&(micro_batch, chunk)) => Pass::BackwardInput,
                _ => Pass::Backward,
            };
            let unwritten = batch.map_or(newest, |batch| micro_batch / batch);
            pass.on(ChunkWork { micro_batch, chunk, version: version.unwrap_or(unwritten) })
        }
        Token::Message { payload, out, micro_batch, peer, .. } => {
            let message = StageMessage { payload, micro_batch, chunk, peer };
            if out { Action::Send(message) } else { Action::Receive(message) }
        }
        Token::Reduce { .. } => Action::AllReduce { chunk },
        Token::Keep(version) => Action::Stash { version },
        Token::Drop(version) => Action::Drop { version },
        Token::Step => {
            newest += 1;
            Action::Step
        }
    };
    Ok(resolved.into_iter().map(actions).collect())
}

/// A flush and a step where the passes of one batch end and those of the next begin.
fn with_flushes(placement: &Placement, rank: usize, list: Vec<Action>, micro_batches: usize) -> Vec<Action> {
    let step = reduce_and_step(placement, rank);
    let mut flushed = Vec::with_capacity(list.len() + step.len());
    let mut batch = 0;
    for action in list {
        let at = action.compute().map_or(batch, |(_, work)| work.micro_batch / micro_batches);
        if at > batch {
            flushed.extend(step.iter().copied());
            batch = at;
        }
        flushed.push(action);
    }
    flushed.extend(step);
    flushed
}
