//! How things are timed beside each other: in turns, so that a machine that slows down slows all of them
//! down; and, where ranks share a machine, by all of them at once, since each is slower then.

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

/// The median milliseconds of each, over as many rounds as fit into about `budget`, on devices that all do the same at
/// the same time, each with cases of its own: means over devices. In a round each case has one turn; one run of each
/// comes before and does not count.
pub fn at_once(
    devices: &[Device],
    budget: Duration,
    prepare: impl Fn(&Device) -> Result<Vec<TimedWork>> + Sync,
) -> Result<Vec<f64>, Error> {
    let each = threads::run(devices.len(), TIMEOUT, |comm| {
        let device = &devices[comm.rank()];
        // Waits for the others: so all begin each sample together.
        let mean = |ms: f64| Ok(comm.all_reduce(vec![ms], Reduce::Sum)?[0] / devices.len() as f64);
        rounds(device, budget, &mut prepare(device)?, mean)
    });
    // All have the same means.
    Ok(each?.swap_remove(0))
}

fn rounds(
    device: &Device,
    budget: Duration,
    cases: &mut [TimedWork],
    mean: impl Fn(f64) -> Result<f64, Error> + Sync,
) -> Result<Vec<f64>, Error> {
    device.enter(|| {
        let mut plans = Vec::new();
        for case in &mut *cases {
            sample(device, case, 1)?;
            let once = mean(sample(device, case, 1)?)?.max(1e-6);
            let repeats = (SAMPLE.as_secs_f64() / once).ceil().clamp(1.0, MOST_REPEATS);
            plans.push((repeats as usize, once * repeats));
        }
        let round: f64 = plans.iter().map(|(_, seconds)| seconds).sum();
        let rounds = ((budget.as_secs_f64() / round) as usize).clamp(ROUNDS.0, ROUNDS.1);
        let mut times = vec![Vec::new(); cases.len()];
        for _ in 0..rounds {
            for ((case, (repeats, _)), times) in cases.iter_mut().zip(&plans).zip(&mut times) {
                times.push(mean(sample(device, case, *repeats)?)? * 1e3);
            }
        }
        Ok(times.into_iter().map(median).collect())
    })
}

/// Seconds of one run, averaged over some that follow each other.
fn sample(device: &Device, case: &mut TimedWork, repeats: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..repeats {
        case()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / repeats as f64)
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
        let times = at_once(&[Device::cpu(1).unwrap()], Duration::ZERO, prepare).unwrap();
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
        let error = at_once(&[Device::cpu(1).unwrap()], Duration::ZERO, prepare).unwrap_err();
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
        let times = at_once(&devices, Duration::ZERO, prepare).unwrap();
        assert!(times.len() == 1 && times[0] >= 2.0, "{times:?}");
        assert_eq!(*begun.lock().unwrap(), 2);
        let refused = |_: &Device| Err(espalier_tensor::Error::Unsupported { what: "no".into() });
        assert!(at_once(&devices, Duration::ZERO, refused).unwrap_err().to_string().ends_with("no"));
    }
}
