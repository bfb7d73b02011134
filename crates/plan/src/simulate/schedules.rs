//! Lists that several candidates have in common: a search makes each once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::error::Error;
use crate::schedule::{Name, Options, Schedule};

/// Actions that are kept at most: a few hundred megabytes.
const MOST: usize = 4 << 20;

/// What a list follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub name: Name,
    pub stages: usize,
    pub micro_batches: usize,
    pub chunks: Option<usize>,
}

/// Those that were made.
#[derive(Default)]
pub(super) struct Schedules {
    made: RefCell<HashMap<Key, Rc<Schedule>>>,
}

impl Schedules {
    /// The lists of one batch.
    pub fn of(&self, key: Key) -> Result<Rc<Schedule>, Error> {
        if let Some(known) = self.made.borrow().get(&key) {
            return Ok(known.clone());
        }
        let Key { name, stages, micro_batches, chunks } = key;
        let options = Options { chunks, ..Options::new(stages, micro_batches) };
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
