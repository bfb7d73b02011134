//! Lists that several candidates have in common: a search makes each once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::error::Error;
use crate::schedule::{Schedule, ScheduleName, ScheduleOptions};

/// Actions that are kept at most: a few hundred megabytes.
const MOST: usize = 4 << 20;

/// What a list follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ScheduleKey {
    pub name: ScheduleName,
    pub stages: usize,
    pub micro_batches: usize,
    pub chunks: Option<usize>,
}

/// Those that were made.
#[derive(Default)]
pub(super) struct ScheduleCache {
    made: RefCell<HashMap<ScheduleKey, Rc<Schedule>>>,
}

impl ScheduleCache {
    /// The lists of one batch.
    pub fn of(&self, key: ScheduleKey) -> Result<Rc<Schedule>, Error> {
        if let Some(known) = self.made.borrow().get(&key) {
            return Ok(known.clone());
        }
        let ScheduleKey { name, stages, micro_batches, chunks } = key;
        let options = ScheduleOptions { chunks, ..ScheduleOptions::new(stages, micro_batches) };
        let schedule = name.schedule(&options).map_err(|error| Error::Ranks(error.to_string()))?;
        let (schedule, mut made) = (Rc::new(schedule), self.made.borrow_mut());
        let actions = |schedule: &Schedule| schedule.ranks.iter().map(Vec::len).sum::<usize>();
        if made.values().map(|known| actions(known)).sum::<usize>() > MOST {
            made.clear();
        }
        made.insert(key, schedule.clone());
        Ok(schedule)
    }
}
