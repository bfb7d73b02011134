//! The end of a run, at its last step or before: the trace, the summary, and what cannot be called a result.

use espalier_comm::TrafficKind;
use espalier_data::DataSplit;
use espalier_nn::weights::hash_of;
use espalier_tensor::{Category, Device};

use super::Run;
use crate::checkpoint::first_not_finite;
use crate::parallel::all_gather_results;
use crate::run::trace::{TraceEvent, TraceFile};
use crate::run::{Observer, RunOutcome, SUMMARY_FILE, write};
use crate::summary::{RunSummary, Throughput, TrainedData, Validation};
use crate::{Error, Result, durable};

impl Run {
    /// The end of a run, at its last step or before.
    pub(super) fn end(mut self, interrupted: bool, observer: &mut dyn Observer) -> Result<RunOutcome> {
        self.write_trace()?;
        // A rank other than 0 has no file, and a run of which nothing was left to do has none either.
        let writes = self.metrics.is_open();
        self.check_folder()?;
        self.metrics.sync(observer);
        self.metrics.close(observer);
        if let Some(error) = self.unsaved.take() {
            return Err(error);
        }
        let summary = self.summary()?;
        if writes {
            let text = serde_json::to_string_pretty(&summary).expect("a summary is plain data");
            if let Err(error) = write(&self.folder, SUMMARY_FILE, &text) {
                observer.warning(&error.to_string());
            }
        }
        Ok(RunOutcome { summary, interrupted })
    }

    /// An error where a weight is not finite: what is saved was checked when it was.
    pub(super) fn refuse_not_finite(&self) -> Result<()> {
        let find = || first_not_finite(self.trainer.params()).map_err(|why| why.to_string());
        let found = all_gather_results(self.trainer.ranks(), find)?;
        let found = found.map_err(|why| Error::RankEnded { rank: 0, how: "failed", why })?;
        match found.into_iter().flatten().next() {
            Some(what) => Err(Error::NotFinite { step: self.trainer.progress().step, what }),
            None => Ok(()),
        }
    }

    /// Writes what all ranks did when, where that is wanted.
    fn write_trace(&self) -> Result<()> {
        let (Some(path), Some(trace)) = (&self.trace, self.trainer.trace()) else { return Ok(()) };
        let ranks = self.trainer.ranks();
        let events = |(number, span)| TraceEvent::of(ranks.rank(), number, span);
        let local = || Ok(trace.spans.iter().enumerate().flat_map(events).collect());
        let file = TraceFile::new(all_gather_results(ranks, local)?.expect("no rank can fail at it"));
        if self.is_rank0() {
            let text = serde_json::to_string(&file).expect("a trace is plain data");
            durable::replace(path, text.as_bytes()).map_err(|why| Error::unwritten(path, why))?;
        }
        Ok(())
    }

    pub(super) fn validation(&self) -> Validation {
        if let Some(past) = self.past_validation.as_ref().filter(|_| self.validation.is_none()) {
            return past.clone();
        }
        Validation::new(
            self.validation,
            self.trainer.progress().best_validation,
            self.tokens_per_sample.is_some(),
        )
    }

    /// What the run came to; bytes are the largest over ranks.
    fn summary(&self) -> Result<RunSummary> {
        let device = self.trainer.device();
        let ledger = device.ledger();
        let sent = TrafficKind::ALL.map(|traffic| self.trainer.sent().of(traffic));
        let peaks = Category::ALL.map(|category| ledger.peak(category) as u64);
        let totals = [ledger, device.host_ledger()].map(|ledger| ledger.total_peak() as u64);
        let bytes = [&totals[..], &sent[..], &peaks[..], &self.trainer.state_peak()].concat();
        let (ranks, model_parallel) = (self.trainer.ranks(), self.trainer.model_parallel());
        let digests =
            self.trainer.params().digests(|param| model_parallel.digest(param.id(), &param.dense()?))?;
        ranks.check_replicas_agree("weights at the end", &hash_of(&digests))?;
        let bytes = ranks.all_reduce_max(bytes)?;
        let hash = hash_of(&ranks.gather_over_replica(digests)?);
        let (sent, peaks) = bytes[totals.len()..].split_at(sent.len());
        let (peaks, state) = peaks.split_at(Category::ALL.len());
        let rates = Throughput::from_steps(
            self.step_timer.last(usize::MAX),
            self.plan.batch.samples,
            self.tokens_per_sample,
        );
        let mut summary = RunSummary::planned(&self.plan, device.name());
        summary.scored(self.trainer.scoring());
        summary.steps = self.trainer.progress().step;
        summary.loss = self.last_loss;
        summary.validation = self.validation();
        summary.rate(rates);
        summary.predicted = self.predicted.clone();
        summary.pruned(&self.trainer, self.trainer.state_bytes()?);
        let (kept, all) = self.trainer.kept();
        summary.trained_on = Some(TrainedData::new(
            summary.steps * self.plan.batch.samples as u64,
            self.trainer.dataset().len(DataSplit::Train) as u64,
            self.tokens_per_sample.map(|tokens| tokens as u64),
            [summary.parameters, summary.parameters - all + kept],
        ));
        for (category, peak) in Category::ALL.into_iter().zip(peaks) {
            summary.measured(category, *peak as usize);
        }
        summary.state_peak.before.measured = Some(state[0] as usize);
        summary.state_peak.after.measured = Some(state[1] as usize);
        summary.state_peak.pruned_after = self.plan.pruned_after(self.trainer.steps());
        summary.peak_bytes = Some(bytes[0] as usize);
        summary.host_peak_bytes = matches!(device, Device::Cuda(_)).then_some(bytes[1] as usize);
        let names = TrafficKind::ALL.map(|traffic| traffic.name().to_owned());
        summary.bytes_sent = names.into_iter().zip(sent.iter().copied()).collect();
        summary.setup_seconds =
            self.first_step_end.zip(summary.step_ms).map(|(end, step_ms)| (end - step_ms / 1e3).max(0.0));
        summary.seconds = Some(self.begin.elapsed().as_secs_f64());
        summary.weights_hash = Some(hash);
        summary.run = Some(self.folder.display().to_string());
        Ok(summary)
    }
}
