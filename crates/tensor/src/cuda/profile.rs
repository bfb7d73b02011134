//! Where a GPU's time goes: an event before and after each piece of work, summed by the family that it belongs to.
//!
//! Off, it costs a load of a flag for each launch. On, the events lie in the work's own stream and wait for
//! nothing; they are read when many have come, or when the result is asked for.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::Cuda;
use super::stream::{Event, Stream};
use crate::error::Result;

/// Marks that wait to be read, at most.
const MOST: usize = 20_000;

/// What a family of kernels took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct KernelTime {
    /// How often it was launched.
    pub launches: u64,
    pub seconds: f64,
    /// Flops, for products.
    pub flops: f64,
}

/// The times of a GPU.
#[derive(Debug, Default)]
pub(super) struct Profile {
    on: AtomicBool,
    marks: Mutex<ProfileEvents>,
}

#[derive(Debug, Default)]
struct ProfileEvents {
    waiting: Vec<(&'static str, f64, Event, Event)>,
    times: BTreeMap<&'static str, KernelTime>,
    /// What the host took to have batches of samples ready.
    data_wait: f64,
}

impl ProfileEvents {
    fn read(&mut self) -> Result<()> {
        for (family, flops, begin, end) in self.waiting.drain(..) {
            let times = self.times.entry(family).or_default();
            end.synchronize()?;
            times.launches += 1;
            times.seconds += end.seconds_since(&begin)?;
            times.flops += flops;
        }
        Ok(())
    }
}

/// Work whose time is taken: from its making to its end.
#[derive(Debug)]
pub(super) struct KernelTimer<'a> {
    cuda: &'a Cuda,
    stream: &'a Stream,
    family: &'static str,
    flops: f64,
    begin: Option<Event>,
}

impl KernelTimer<'_> {
    /// Marks the end of the work, which was queued.
    pub(super) fn end(mut self) -> Result<()> {
        let Some(begin) = self.begin.take() else { return Ok(()) };
        let end = Event::timed()?;
        end.record(self.stream)?;
        let mut marks = self.cuda.profile().marks.lock().expect("no panic while locked");
        marks.waiting.push((self.family, self.flops, begin, end));
        if marks.waiting.len() >= MOST { marks.read() } else { Ok(()) }
    }
}

impl Cuda {
    /// From here on the time of each piece of work is taken.
    pub fn start_profile(&self) {
        self.profile().on.store(true, Relaxed);
    }

    /// Whether it is taken now.
    pub(crate) fn is_profiled(&self) -> bool {
        self.profile().on.load(Relaxed)
    }

    /// What each family of kernels took since the start.
    pub fn take_profile(&self) -> Result<BTreeMap<&'static str, KernelTime>> {
        self.bind()?;
        self.profile().on.store(false, Relaxed);
        let mut marks = self.profile().marks.lock().expect("no panic while locked");
        marks.read()?;
        Ok(std::mem::take(&mut marks.times))
    }

    /// Counts seconds that the host took to have a batch of samples.
    pub(crate) fn waited_for_data(&self, seconds: f64) {
        if self.profile().on.load(Relaxed) {
            self.profile().marks.lock().expect("no panic while locked").data_wait += seconds;
        }
    }

    /// The sum of those since the start.
    pub fn take_data_wait(&self) -> f64 {
        std::mem::take(&mut self.profile().marks.lock().expect("no panic while locked").data_wait)
    }

    /// Marks the beginning of work of a family that is about to be queued on the compute stream.
    pub(super) fn time(&self, family: &'static str, flops: f64) -> Result<KernelTimer<'_>> {
        self.time_on(self.compute(), family, flops)
    }

    /// The same on another stream. What runs there beside the compute stream's work is counted as what it
    /// takes, hidden or not.
    pub(super) fn time_on<'a>(
        &'a self,
        stream: &'a Stream,
        family: &'static str,
        flops: f64,
    ) -> Result<KernelTimer<'a>> {
        let begin = match self.profile().on.load(Relaxed) {
            false => None,
            true => {
                let begin = Event::timed()?;
                begin.record(stream)?;
                Some(begin)
            }
        };
        Ok(KernelTimer { cuda: self, stream, family, flops, begin })
    }
}
