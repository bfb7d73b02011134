//! How things are timed beside each other: in turns, so that a machine that slows down slows all of them down.

use std::time::{Duration, Instant};

use espalier_tensor::{Device, Result};

/// One of the things to be timed: does its work once, or queues it on a card.
pub type Contestant<'a> = Box<dyn FnMut() -> Result<()> + Send + 'a>;

/// A sample lasts at least this long, by doing the work several times: clocks and launches then do not count.
const SAMPLE: Duration = Duration::from_millis(2);
/// The most times that a sample repeats the work.
const MOST_REPEATS: f64 = 500.0;
/// The fewest and the most rounds.
const ROUNDS: (usize, usize) = (3, 41);

/// The median milliseconds of each, over as many rounds as fit into about `budget`. In a round each has one turn;
/// one run of each comes before and does not count.
pub fn in_turns(device: &Device, budget: Duration, contestants: &mut [Contestant<'_>]) -> Result<Vec<f64>> {
    device.enter(|| {
        let mut plans = Vec::new();
        for contestant in &mut *contestants {
            sample(device, contestant, 1)?;
            let once = sample(device, contestant, 1)?.max(1e-6);
            let repeats = (SAMPLE.as_secs_f64() / once).ceil().clamp(1.0, MOST_REPEATS);
            plans.push((repeats as usize, once * repeats));
        }
        let round: f64 = plans.iter().map(|(_, seconds)| seconds).sum();
        let rounds = ((budget.as_secs_f64() / round) as usize).clamp(ROUNDS.0, ROUNDS.1);
        let mut times = vec![Vec::new(); contestants.len()];
        for _ in 0..rounds {
            for ((contestant, (repeats, _)), times) in contestants.iter_mut().zip(&plans).zip(&mut times) {
                times.push(sample(device, contestant, *repeats)? * 1e3);
            }
        }
        Ok(times.iter_mut().map(|times| median(times)).collect())
    })
}

/// Seconds of one run, averaged over some that follow each other.
fn sample(device: &Device, contestant: &mut Contestant<'_>, repeats: usize) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..repeats {
        contestant()?;
    }
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / repeats as f64)
}

/// The middle one, or the mean of the two in the middle.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    let half = times.len() / 2;
    if times.len().is_multiple_of(2) { (times[half - 1] + times[half]) / 2.0 } else { times[half] }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }

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
        let mut two: [Contestant<'_>; 2] = [Box::new(turn('a')), Box::new(turn('b'))];
        let times = in_turns(&device, Duration::ZERO, &mut two).unwrap();
        assert_eq!(times.len(), 2);
        assert_eq!(
            order.lock().unwrap().iter().collect::<String>(),
            "aabbababab",
            "two to warm up, three rounds"
        );
        let refused = || espalier_tensor::Error::Unsupported { what: "no".into() };
        let mut bad: [Contestant<'_>; 1] = [Box::new(|| Err(refused()))];
        assert_eq!(in_turns(&device, Duration::ZERO, &mut bad).unwrap_err().to_string(), "no");
    }
}
