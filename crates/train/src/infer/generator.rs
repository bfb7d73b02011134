//! A model that writes, as one of its ranks: it reads positions and says what follows.
//!
//! A pass is the list [`Schedule::next_token`] of the executor that trains: positions enter where the model begins, go from stage
//! to stage, and the token that is chosen where it ends is told to all. A prompt goes through in one pass, and then each token
//! by itself, with the keys and values of those before it in the cache. Tensor ranks have the same logits and choose the same.

use std::time::{Duration, Instant};

use espalier_nn::layers::{BatchSlice, Cache, Forward, Mode};
use espalier_nn::weights::WeightStore;
use espalier_plan::schedule::{Message, Notice, Schedule, Work};
use espalier_plan::{Error as PlanError, Plan};
use espalier_tensor::ops::argmax::{self, argmax};
use espalier_tensor::{Category, DType, Device, Tensor};

use super::Sampler;
use super::recorded::OneToken;
use crate::Result;
use crate::parallel::{Ranks, exchange};
use crate::stage::Stage;
use crate::step::{Executor, Worker};

/// A rank's part of a model that writes, and what it has read.
pub struct Generator<'a> {
    held: Held<'a>,
    ranks: &'a Ranks,
    executor: Executor,
    cache: Cache,
    /// Where one rank has all of the model, on a card.
    one_token: Option<OneToken>,
}

/// What the rank holds of the model.
#[derive(Clone, Copy)]
struct Held<'a> {
    stage: &'a Stage,
    weights: &'a dyn WeightStore,
    device: &'a Device,
    dtype: DType,
}

/// How the token behind some positions is chosen, where the model ends.
enum Choice<'b> {
    /// By whoever is shown the logits.
    FromLogits(&'b mut dyn FnMut(&[f32]) -> u32),
    /// Where they are: a card's logits stay there.
    Likeliest,
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has as many tokens as were asked for.
    Long,
    /// The model can read no further.
    Context,
    /// Whoever listens has heard enough.
    Stopped,
}

/// A text, and how long it took.
#[derive(Debug, Clone)]
pub struct Written {
    /// The tokens behind the prompt.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub end: End,
    /// Until the first of them: the prompt was read.
    pub prompt_time: Duration,
    /// From the first to the last.
    pub time: Duration,
}

impl Written {
    /// Tokens for each second, those after the first; none where there is no second one.
    pub fn rate(&self) -> Option<f64> {
        let count = self.tokens.len().checked_sub(1).filter(|count| *count > 0)?;
        Some(count as f64 / self.time.as_secs_f64())
    }
}

impl<'a> Generator<'a> {
    /// A rank of a plan whose weights are these. All ranks must.
    pub fn new(
        plan: &Plan,
        stage: &'a Stage,
        weights: &'a dyn WeightStore,
        ranks: &'a Ranks,
        device: &'a Device,
    ) -> Result<Generator<'a>> {
        let Some(context) = plan.model.input.context() else {
            let problem = format!("is \"{}\", an image model, which generates no text", plan.model.name);
            return Err(PlanError::Conflict { field: "model.name".into(), problem }.into());
        };
        if plan.layout.has_sequence() || plan.layout.mixture().is_some() {
            let (field, cut) = match plan.layout.has_sequence() {
                true => ("parallel.sequence", "the positions of a sequence"),
                false => ("parallel.integrated", "samples"),
            };
            let problem = format!("splits {cut}, and generation has one at a time");
            return Err(PlanError::Conflict { field: field.into(), problem }.into());
        }
        let schedule = Schedule::next_token(stage.placement());
        let executor = Executor::new(schedule, ranks.stages().clone());
        executor.connect()?;
        let held = Held { stage, weights, device, dtype: espalier_nn::dtype(plan.storage.precision) };
        let one_token = if plan.mesh.size() == 1 { OneToken::new(device)? } else { None };
        Ok(Generator { held, ranks, executor, cache: Cache::new(context, device)?, one_token })
    }

    /// Its place among the ranks.
    pub fn ranks(&self) -> &Ranks {
        self.ranks
    }

    /// The device that holds its weights and its cache.
    pub fn device(&self) -> &Device {
        self.held.device
    }

    /// The most positions that it can read.
    pub fn context(&self) -> usize {
        self.cache.context()
    }

    /// Positions that it has read.
    pub fn length(&self) -> usize {
        self.cache.length()
    }

    /// Forgets what it has read.
    pub fn forget(&mut self) {
        self.cache.clear();
    }

    /// Reads tokens behind those that it has read, and says which follows: what `choose` makes of the logits, where the model
    /// ends. All ranks must; there must be one to read, and no more than the context has room for.
    pub fn read(&mut self, ids: &[u32], choose: &mut dyn FnMut(&[f32]) -> u32) -> Result<u32> {
        self.next_token(ids, &mut Choice::FromLogits(choose))
    }

    fn next_token(&mut self, ids: &[u32], choice: &mut Choice<'_>) -> Result<u32> {
        self.cache.begin_pass()?;
        let one_token = self.one_token.as_mut().filter(|_| ids.len() == 1 && self.cache.length() > 0);
        let mut worker =
            Reading { held: self.held, cache: &mut self.cache, one_token, ids, choice, token: None };
        self.executor.rewind();
        self.executor.run_to_end(&mut worker)?;
        let token = worker.token.expect("the last rank has told it");
        self.cache.advance(ids.len());
        Ok(token)
    }

    /// What rank 0 has to say, on every rank.
    pub fn from_first(&self, own: &[u32]) -> Result<Vec<u32>> {
        let bytes: Vec<u8> = own.iter().flat_map(|id| id.to_le_bytes()).collect();
        let said = exchange(self.ranks.world(), &bytes)?;
        Ok(said[0].as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// Reads a prompt and writes up to `most` tokens behind it. `go_on` hears each and says whether there should be more: where one
    /// rank says no, all stop.
    pub fn write(
        &mut self,
        prompt: &[u32],
        most: usize,
        sampler: &mut Sampler,
        go_on: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Written> {
        let begin = Instant::now();
        sampler.read(prompt);
        let likeliest = sampler.takes_the_likeliest();
        let mut choose = |logits: &[f32]| sampler.choose(logits);
        let mut choice = if likeliest { Choice::Likeliest } else { Choice::FromLogits(&mut choose) };
        let mut tokens = vec![self.next_token(prompt, &mut choice)?];
        let prompt_time = begin.elapsed();
        let begin = Instant::now();
        let end = self.held.device.awake(|| self.go_on(&mut tokens, most, &mut choice, go_on))?;
        Ok(Written { tokens, end, prompt_time, time: begin.elapsed() })
    }

    /// Writes token after token behind the last of those that there are.
    fn go_on(
        &mut self,
        tokens: &mut Vec<u32>,
        most: usize,
        choice: &mut Choice<'_>,
        go_on: &mut dyn FnMut(u32) -> bool,
    ) -> Result<End> {
        loop {
            let last = *tokens.last().expect("the first one is there");
            if self.ranks.any(!go_on(last))? {
                return Ok(End::Stopped);
            }
            if tokens.len() >= most {
                return Ok(End::Long);
            }
            if self.length() == self.context() {
                return Ok(End::Context);
            }
            tokens.push(self.next_token(&[last], choice)?);
        }
    }
}

/// A pass over some positions.
struct Reading<'a, 'b, 'c> {
    held: Held<'a>,
    cache: &'b mut Cache,
    one_token: Option<&'b mut OneToken>,
    ids: &'b [u32],
    choice: &'b mut Choice<'c>,
    token: Option<u32>,
}

impl Held<'_> {
    /// Through a part of the model: what comes out of it, which at its end are logits.
    fn pass(&self, chunk: usize, x: Tensor, cache: &mut Cache) -> Result<Tensor> {
        let (model, weights) = (self.stage.model(chunk), self.weights);
        let share = BatchSlice { samples: 1, ..BatchSlice::default() };
        let mut pass = Forward { cache: Some(cache), ..Forward::new(weights, Mode::Evaluate, 0, share) };
        let x = model.forward(x, &mut pass)?;
        Ok(if model.is_last() { model.last_logits(&x, weights)? } else { x })
    }
}

impl Worker for Reading<'_, '_, '_> {
    fn forward(&mut self, work: Work, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let held = self.held;
        let model = held.stage.model(work.chunk);
        let likeliest =
            matches!(self.choice, Choice::Likeliest) && model.is_last() && model.has_all_classes();
        let cache = &mut *self.cache;
        let mut pass = |x: Tensor| -> Result<Tensor> {
            let y = held.pass(work.chunk, x, cache)?;
            Ok(if likeliest { argmax(&y)? } else { y })
        };
        let y = match (input, &mut self.one_token) {
            (Some(x), _) => pass(x)?,
            (None, Some(one_token)) => one_token.run(self.ids[0], likeliest, &mut pass)?,
            (None, None) => {
                let ids =
                    Tensor::from_slice(held.device, &[1, self.ids.len()], self.ids, Category::Transient)?;
                pass(ids)?
            }
        };
        if !model.is_last() {
            return Ok(Some(y));
        }
        self.token = Some(match &mut self.choice {
            Choice::Likeliest if likeliest => y.read_u32()?[0],
            Choice::Likeliest => argmax::of_slice(&model.read_logits(&y)?),
            Choice::FromLogits(choose) => choose(&model.read_logits(&y)?),
        });
        Ok(None)
    }

    fn room(&mut self, message: &Message) -> Result<Tensor> {
        let Held { stage, device, dtype, .. } = self.held;
        stage.room_for_positions(message.chunk, self.ids.len(), device, dtype)
    }

    fn tell(&mut self, _: Notice) -> Vec<f64> {
        vec![f64::from(self.token.expect("it was chosen in the pass before"))]
    }

    fn hear(&mut self, _: Notice, told: &[f64]) {
        self.token = Some(told[0] as u32);
    }
}
