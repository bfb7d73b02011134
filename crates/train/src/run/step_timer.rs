//! How long steps take.

/// So many steps are remembered: enough for a median, whatever the length of the run.
const REMEMBERED: usize = 4096;

/// The times of the last few thousand steps, in seconds.
#[derive(Default)]
pub(super) struct StepTimer {
    /// Up to twice as many as are remembered, so that dropping the older half is seldom.
    seconds: Vec<f64>,
}

impl StepTimer {
    pub fn add(&mut self, seconds: f64) {
        if self.seconds.len() == 2 * REMEMBERED {
            self.seconds.drain(..REMEMBERED);
        }
        self.seconds.push(seconds);
    }

    /// The last so many, or all that are remembered.
    pub fn last(&self, steps: usize) -> &[f64] {
        let steps = steps.min(REMEMBERED).min(self.seconds.len());
        &self.seconds[self.seconds.len() - steps..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of a million steps used to hold a million times.
    #[test]
    fn memory_does_not_grow_with_the_steps() {
        let mut step_timer = StepTimer::default();
        assert!(step_timer.last(20).is_empty());
        for step in 0..100_000 {
            step_timer.add(step as f64);
        }
        assert!(step_timer.seconds.capacity() <= 4 * REMEMBERED, "{}", step_timer.seconds.capacity());
        assert_eq!(step_timer.last(2), [99_998.0, 99_999.0]);
        assert_eq!(step_timer.last(usize::MAX).len(), REMEMBERED);
    }
}
