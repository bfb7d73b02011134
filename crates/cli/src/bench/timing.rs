//! How things are timed beside each other: in turns, so that a machine that slows down slows all of them
//! down; and, where ranks share a machine, by all of them at once, since each is slower then. On a GPU several
//! runs of small work are captured as a CUDA graph, so that it is timed and not the host's launches.

use std::time::{Duration, Instant};

use espalier_comm::{Reduce, threads};
use espalier_plan::cluster::measured::median;
use espalier_tensor::{Device, Result};
use espalier_train::Error;

/// One of the things to be timed: does its work once, or queues it on a GPU.
pub type TimedWork = Box<dyn FnMut() -> Result<()> + Send>;

/// A sample lasts at least this long, by doing the work several times: clocks and launches then do not count.
const SAMPLE: Duration = Duration::from_millis(2);
/// The most times that a sample repeats the work.
const MOST_REPEATS: f64 = 500.0;
/// The fewest and the most rounds.
const ROUNDS: (usize, usize) = (3, 41);
/// How long a device waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Whether the host starts a GPU's kernels one by one, or many at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Launches {
    Eager,
    Captured,
}

/// The median milliseconds of each, over as many rounds as fit into about `budget`, on devices that all do the same at
/// the same time, each with cases of its own: means over devices. In a round each case has one turn; one run of each
/// comes before and does not count.
pub fn at_once(
    devices: &[Device],
    budget: Duration,
    launches: Launches,
    prepare: impl Fn(&Device) -> Result<Vec<TimedWork>> + Sync,
) -> Result<Vec<f64>, Error> {
    let each = threads::run(devices.len(), TIMEOUT, |comm| {
        let device = &devices[comm.rank()];
        // Waits for the others: so all begin each sample together.
        let mean = |ms: f64| Ok(comm.all_reduce(vec![ms], Reduce::Sum)?[0] / devices.len() as f64);
        rounds(device, budget, launches, prepare(device)?, mean)
    });
    // All have the same means.
    Ok(each?.swap_remove(0))
}

fn rounds(
    device: &Device,
    budget: Duration,
    launches: Launches,
    cases: Vec<TimedWork>,
    mean: impl Fn(f64) -> Result<f64, Error> + Sync,
) -> Result<Vec<f64>, Error> {
    device.enter(|| {
        let mut samples = Vec::new();
        let mut round = 0.0;
        for mut work in cases {
            seconds(device, &mut work)?;
            let once = mean(seconds(device, &mut work)?)?.max(1e-6);
            let repeats = (SAMPLE.as_secs_f64() / once).ceil().clamp(1.0, MOST_REPEATS);
            round += once * repeats;
            samples.push(Sample::new(device, launches, work, repeats as usize)?);
        }
        let rounds = ((budget.as_secs_f64() / round) as usize).clamp(ROUNDS.0, ROUNDS.1);
        let mut times = vec![Vec::new(); samples.len()];
        for _ in 0..rounds {
            for (sample, times) in samples.iter_mut().zip(&mut times) {
                times.push(mean(sample.take(device)?)? * 1e3);
            }
        }
        Ok(times.into_iter().map(median).collect())
    })
}

/// Some runs of a work that follow each other.
struct Sample {
    all: TimedWork,
    repeats: usize,
}

impl Sample {
    fn new(device: &Device, launches: Launches, mut work: TimedWork, repeats: usize) -> Result<Sample> {
        let all: TimedWork = match device {
            Device::Cuda(cuda) if launches == Launches::Captured => {
                let graph = cuda.record(|| (0..repeats).try_for_each(|_| work()))?;
                graph.replay()?;
                Box::new(move || {
                    // It has the tensors that the graph reads.
                    let _ = &work;
                    graph.replay().map(drop)
                })
            }
            _ => Box::new(move || (0..repeats).try_for_each(|_| work())),
        };
        Ok(Sample { all, repeats })
    }

    /// Seconds of one of them, on the mean.
    fn take(&mut self, device: &Device) -> Result<f64> {
        Ok(seconds(device, &mut self.all)? / self.repeats as f64)
    }
}

/// Seconds of some work, until a GPU is done with it.
fn seconds(device: &Device, work: &mut TimedWork) -> Result<f64> {
    let start = Instant::now();
    work()?;
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn turns_alternate() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let turn = |name: char| -> TimedWork {
            let order = order.clone();
            Box::new(move || {
                // So long that a sample is one run.
                std::thread::sleep(SAMPLE);
                order.lock().unwrap().push(name);
                Ok(())
            })
        };
        let prepare = |_: &Device| Ok(vec![turn('a'), turn('b')]);
        let times = at_once(&[Device::cpu(1).unwrap()], Duration::ZERO, Launches::Eager, prepare).unwrap();
        assert_eq!(times.len(), 2);
        assert_eq!(
            order.lock().unwrap().iter().collect::<String>(),
            "aabbababab",
            "two to warm up, three rounds"
        );
    }

    #[test]
    fn an_error_ends_them() {
        let refused = || espalier_tensor::Error::Unsupported { what: "no".into() };
        let prepare = |_: &Device| -> Result<Vec<TimedWork>> { Ok(vec![Box::new(move || Err(refused()))]) };
        let error =
            at_once(&[Device::cpu(1).unwrap()], Duration::ZERO, Launches::Eager, prepare).unwrap_err();
        assert!(error.to_string().ends_with("no"), "{error}");
    }

    #[test]
    fn devices_work_at_once_and_one_that_cannot_ends_it() {
        let devices = [Device::cpu(1).unwrap(), Device::cpu(1).unwrap()];
        let begun = Mutex::new(0);
        let prepare = |_: &Device| -> Result<Vec<TimedWork>> {
            *begun.lock().unwrap() += 1;
            Ok(vec![Box::new(|| {
                std::thread::sleep(SAMPLE);
                Ok(())
            })])
        };
        let times = at_once(&devices, Duration::ZERO, Launches::Eager, prepare).unwrap();
        assert!(times.len() == 1 && times[0] >= 2.0, "{times:?}");
        assert_eq!(*begun.lock().unwrap(), 2);
        let refused = |_: &Device| Err(espalier_tensor::Error::Unsupported { what: "no".into() });
        assert!(
            at_once(&devices, Duration::ZERO, Launches::Eager, refused)
                .unwrap_err()
                .to_string()
                .ends_with("no")
        );
    }
}
