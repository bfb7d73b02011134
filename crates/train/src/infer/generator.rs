//! A model that generates text, as one of its ranks: it reads positions and says what follows.
//!
//! A pass is the list [`Schedule::next_token`] of the executor that trains: positions enter where the model
//! begins, go from stage to stage, and the token that is chosen where it ends is sent to all. A prompt goes
//! through in one pass, and then each token by itself, with the keys and values of those before it in the
//! cache. Tensor ranks have the same logits and choose the same.

use std::time::{Duration, Instant};

use espalier_nn::layers::{BatchSlice, ForwardContext, KvCache, Mode};
use espalier_nn::weights::WeightStore;
use espalier_plan::schedule::{ChunkWork, ControlMessage, Schedule, StageMessage};
use espalier_plan::{Error as PlanError, Plan};
use espalier_tensor::ops::argmax::{self, argmax};
use espalier_tensor::{Category, DType, Device, Tensor};

use super::Sampler;
use super::graphed_decode::GraphedDecode;
use crate::Result;
use crate::parallel::{Ranks, all_gather_bytes};
use crate::stage::Stage;
use crate::step::{ActionWorker, Executor};

/// A rank's stage of a model that generates text, and what it has read.
pub struct Generator<'a> {
    inference: InferenceModel<'a>,
    ranks: &'a Ranks,
    executor: Executor,
    cache: KvCache,
    /// Where one rank has all of the model, on a GPU.
    graphed_decode: Option<GraphedDecode>,
}

/// What the rank holds of the model.
#[derive(Clone, Copy)]
struct InferenceModel<'a> {
    stage: &'a Stage,
    weights: &'a dyn WeightStore,
    device: &'a Device,
    dtype: DType,
}

/// How the token behind some positions is chosen, where the model ends.
enum TokenChoice<'b> {
    /// By whoever is shown the logits.
    FromLogits(&'b mut dyn FnMut(&[f32]) -> u32),
    /// Where they are: a GPU's logits stay there.
    Greedy,
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// It has as many tokens as were asked for.
    MaxTokens,
    /// The model can read no further.
    ContextFull,
    /// `should_continue` said no.
    Stopped,
}

/// A text, and how long it took.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The tokens behind the prompt.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub end: FinishReason,
    /// Until the first of them: the prompt was read.
    pub prompt_time: Duration,
    /// From the first to the last.
    pub time: Duration,
}

impl Generation {
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
            let (field, split) = match plan.layout.has_sequence() {
                true => ("parallel.sequence", "the positions of a sequence"),
                false => ("parallel.integrated", "samples"),
            };
            let problem = format!("splits {split}, and generation has one at a time");
            return Err(PlanError::Conflict { field: field.into(), problem }.into());
        }
        let schedule = Schedule::next_token(stage.placement());
        let executor = Executor::new(schedule, ranks.stages().clone());
        executor.connect()?;
        let inference =
            InferenceModel { stage, weights, device, dtype: espalier_nn::dtype(plan.storage.precision) };
        let graphed_decode = if plan.mesh.size() == 1 { GraphedDecode::new(device)? } else { None };
        Ok(Generator { inference, ranks, executor, cache: KvCache::new(context, device)?, graphed_decode })
    }

    pub fn ranks(&self) -> &Ranks {
        self.ranks
    }

    /// The device that holds its weights and its cache.
    pub fn device(&self) -> &Device {
        self.inference.device
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
    pub fn reset_cache(&mut self) {
        self.cache.clear();
    }

    /// Reads tokens behind those that it has read, and says which follows: what `choose` makes of the logits,
    /// where the model ends. All ranks must; there must be one to read, and no more than the context has room
    /// for.
    pub fn read(&mut self, ids: &[u32], choose: &mut dyn FnMut(&[f32]) -> u32) -> Result<u32> {
        self.next_token(ids, &mut TokenChoice::FromLogits(choose))
    }

    fn next_token(&mut self, ids: &[u32], choice: &mut TokenChoice<'_>) -> Result<u32> {
        self.cache.begin_pass()?;
        let graphed_decode =
            self.graphed_decode.as_mut().filter(|_| ids.len() == 1 && self.cache.length() > 0);
        let mut worker = DecodeWorker {
            inference: self.inference,
            cache: &mut self.cache,
            graphed_decode,
            ids,
            choice,
            token: None,
        };
        self.executor.rewind();
        self.executor.run_to_end(&mut worker)?;
        let token = worker.token.expect("the last rank has sent it");
        self.cache.advance(ids.len());
        Ok(token)
    }

    /// Rank 0's ids, on every rank.
    pub fn broadcast_from_rank0(&self, local: &[u32]) -> Result<Vec<u32>> {
        let bytes: Vec<u8> = local.iter().flat_map(|id| id.to_le_bytes()).collect();
        let gathered = all_gather_bytes(self.ranks.world(), &bytes)?;
        Ok(gathered[0].as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// Reads a prompt and generates up to `max_tokens` tokens behind it. `should_continue` hears each and
    /// says whether there should be more: where one rank says no, all stop.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        sampler: &mut Sampler,
        should_continue: &mut dyn FnMut(u32) -> bool,
    ) -> Result<Generation> {
        let begin = Instant::now();
        sampler.read(prompt);
        let greedy = sampler.is_argmax();
        let mut choose = |logits: &[f32]| sampler.choose(logits);
        let mut choice = if greedy { TokenChoice::Greedy } else { TokenChoice::FromLogits(&mut choose) };
        let mut tokens = vec![self.next_token(prompt, &mut choice)?];
        let prompt_time = begin.elapsed();
        let begin = Instant::now();
        let end = self
            .inference
            .device
            .awake(|| self.decode(&mut tokens, max_tokens, &mut choice, should_continue))?;
        Ok(Generation { tokens, end, prompt_time, time: begin.elapsed() })
    }

    /// Generates token after token behind the last of those that there are.
    fn decode(
        &mut self,
        tokens: &mut Vec<u32>,
        max_tokens: usize,
        choice: &mut TokenChoice<'_>,
        should_continue: &mut dyn FnMut(u32) -> bool,
    ) -> Result<FinishReason> {
        loop {
            let last = *tokens.last().expect("the first one is there");
            if self.ranks.any_rank(!should_continue(last))? {
                return Ok(FinishReason::Stopped);
            }
            if tokens.len() >= max_tokens {
                return Ok(FinishReason::MaxTokens);
            }
            if self.length() == self.context() {
                return Ok(FinishReason::ContextFull);
            }
            tokens.push(self.next_token(&[last], choice)?);
        }
    }
}

/// A pass over some positions.
struct DecodeWorker<'a, 'b, 'c> {
    inference: InferenceModel<'a>,
    cache: &'b mut KvCache,
    graphed_decode: Option<&'b mut GraphedDecode>,
    ids: &'b [u32],
    choice: &'b mut TokenChoice<'c>,
    token: Option<u32>,
}

impl InferenceModel<'_> {
    /// Through a chunk of the model: what comes out of it, which at its end are logits.
    fn forward(&self, chunk: usize, x: Tensor, cache: &mut KvCache) -> Result<Tensor> {
        let (model, weights) = (self.stage.model(chunk), self.weights);
        let batch_slice = BatchSlice { samples: 1, ..BatchSlice::default() };
        let mut pass = ForwardContext {
            cache: Some(cache),
            ..ForwardContext::new(weights, Mode::Evaluate, 0, batch_slice)
        };
        let x = model.forward(x, &mut pass)?;
        Ok(if model.is_last() { model.last_logits(&x, weights)? } else { x })
    }
}

impl ActionWorker for DecodeWorker<'_, '_, '_> {
    fn forward(&mut self, work: ChunkWork, input: Option<Tensor>) -> Result<Option<Tensor>> {
        let inference = self.inference;
        let model = inference.stage.model(work.chunk);
        let greedy = matches!(self.choice, TokenChoice::Greedy) && model.is_last() && model.has_all_classes();
        let cache = &mut *self.cache;
        let mut pass = |x: Tensor| -> Result<Tensor> {
            let y = inference.forward(work.chunk, x, cache)?;
            Ok(if greedy { argmax(&y)? } else { y })
        };
        let y = match (input, &mut self.graphed_decode) {
            (Some(x), _) => pass(x)?,
            (None, Some(graphed_decode)) => graphed_decode.run(self.ids[0], greedy, &mut pass)?,
            (None, None) => {
                let ids = Tensor::from_slice(
                    inference.device,
                    &[1, self.ids.len()],
                    self.ids,
                    Category::Transient,
                )?;
                pass(ids)?
            }
        };
        if !model.is_last() {
            return Ok(Some(y));
        }
        self.token = Some(match &mut self.choice {
            TokenChoice::Greedy if greedy => y.read_u32()?[0],
            TokenChoice::Greedy => argmax::of_slice(&model.read_logits(&y)?),
            TokenChoice::FromLogits(choose) => choose(&model.read_logits(&y)?),
        });
        Ok(None)
    }

    fn recv_buffer(&mut self, message: &StageMessage) -> Result<Tensor> {
        let InferenceModel { stage, device, dtype, .. } = self.inference;
        let shape = [1, self.ids.len(), stage.border(message).last()];
        Ok(Tensor::empty(device, &shape, dtype, Category::Transient)?)
    }

    fn scalars_to_send(&mut self, _: ControlMessage) -> Vec<f64> {
        vec![f64::from(self.token.expect("it was chosen in the pass before"))]
    }

    fn receive_scalars(&mut self, _: ControlMessage, scalars: &[f64]) {
        self.token = Some(scalars[0] as u32);
    }
}
