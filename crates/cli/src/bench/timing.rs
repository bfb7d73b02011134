//! How things are timed beside each other: in turns, so that a machine that slows down slows all of them
//! down; and, where ranks share a machine, by all of them at once, since each is slower then.

use std::time::{Duration, Instant};

use espalier_comm::{Reduce, threads};
use espalier_plan::cluster::measured::median;
use espalier_tensor::{Device, Error, Result};

/// One of the things to be timed: does its work once, or queues it on a GPU.
pub type TimedWork<'a> = Box<dyn FnMut() -> Result<()> + Send + 'a>;

/// A sample lasts at least this long, by doing the work several times: clocks and launches then do not count.
const SAMPLE: Duration = Duration::from_millis(2);
/// The most times that a sample repeats the work.
const MOST_REPEATS: f64 = 500.0;
/// The fewest and the most rounds.
const ROUNDS: (usize, usize) = (3, 41);
/// How long a device waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The median milliseconds of each, over as many rounds as fit into about `budget`. In a round each has one
/// turn; one run of each comes before and does not count.
pub fn round_robin(device: &Device, budget: Duration, cases: &mut [TimedWork<'_>]) -> Result<Vec<f64>> {
    rounds(device, budget, cases, Ok)
}

/// The same on several devices that all do the same at the same time, each with cases of its own: means
/// over devices.
pub fn at_once(
    devices: &[Device],
    budget: Duration,
    prepare: impl Fn(&Device) -> Result<Vec<TimedWork<'static>>> + Sync,
) -> Result<Vec<f64>, espalier_train::Error> {
    let each = threads::run(devices.len(), TIMEOUT, |comm| -> Result<_, espalier_train::Error> {
        let device = &devices[comm.rank()];
        let mean = |ms: f64| Ok(comm.all_reduce(vec![ms], Reduce::Sum)?[0] / devices.len() as f64);
        rounds(device, budget, &mut prepare(device)?, mean)
    });
    // All have the same means.
    Ok(each?.swap_remove(0))
}

/// `mean` waits for the others, where there are any: so all begin each sample together.
fn rounds<E: From<Error> + Send>(
    device: &Device,
    budget: Duration,
    cases: &mut [TimedWork<'_>],
    mean: impl Fn(f64) -> Result<f64, E> + Sync,
) -> Result<Vec<f64>, E> {
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
fn sample(device: &Device, case: &mut TimedWork<'_>, repeats: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..repeats {
        case()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / repeats as f64)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn turns_alternate_and_an_error_ends_them() {
        let device = Device::cpu(1).unwrap();
        let order = Mutex::new(Vec::new());
        let turn = |name: char| {
            let order = &order;
            move || {
                // So long that a sample is one run.
                std::thread::sleep(SAMPLE);
                order.lock().unwrap().push(name);
                Ok(())
            }
        };
        let mut two: [TimedWork<'_>; 2] = [Box::new(turn('a')), Box::new(turn('b'))];
        let times = round_robin(&device, Duration::ZERO, &mut two).unwrap();
        assert_eq!(times.len(), 2);
        assert_eq!(
            order.lock().unwrap().iter().collect::<String>(),
            "aabbababab",
            "two to warm up, three rounds"
        );
        let refused = || espalier_tensor::Error::Unsupported { what: "no".into() };
        let mut bad: [TimedWork<'_>; 1] = [Box::new(|| Err(refused()))];
        assert_eq!(round_robin(&device, Duration::ZERO, &mut bad).unwrap_err().to_string(), "no");
    }

    #[test]
    fn devices_work_at_once_and_one_that_cannot_ends_it() {
        let devices = [Device::cpu(1).unwrap(), Device::cpu(1).unwrap()];
        let begun = Mutex::new(0);
        let prepare = |_: &Device| -> Result<Vec<TimedWork<'static>>> {
            *begun.lock().unwrap() += 1;
            Ok(vec![Box::new(|| {
                std::thread::sleep(SAMPLE);
                Ok(())
            })])
        };
        let times = at_once(&devices, Duration::ZERO, prepare).unwrap();
        assert!(times.len() == 1 && times[0] >= 2.0, "{times:?}");
        assert_eq!(*begun.lock().unwrap(), 2);
        let refused = |_: &Device| Err(Error::Unsupported { what: "no".into() });
        assert!(at_once(&devices, Duration::ZERO, refused).unwrap_err().to_string().ends_with("no"));
    }
}
