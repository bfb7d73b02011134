//! Threads that stay awake between operations.
//!
//! A token that a model writes is some hundred operations of a few milliseconds and less, one after the
//! other. A pool's threads fall asleep between them, and on a virtual machine one that is woken comes so late
//! that the caller has done much of the work alone. [`Cpu::awake`] gives them company for a while: members
//! that look for work without sleeping, and doze between two looks only when there has been none for a while.
//!
//! Nobody waits for a member that has not begun: whoever comes late finds the round closed. So a core that
//! another program takes costs its own work and no more.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Cpu;

/// How long a member without work stays awake,
const AWAKE: Duration = Duration::from_millis(2);
/// and how long it then sleeps before it looks again.
const NAP: Duration = Duration::from_micros(50);
/// Set in [`Team::gate`] while members may begin.
const OPEN: usize = 1 << (usize::BITS - 1);

/// What all members do in a round: `task(0) .. task(tasks - 1)`, each once.
#[derive(Clone, Copy)]
struct Round {
    task: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

/// The members' common state.
pub(super) struct Team {
    /// The processor whose work they share, by the address of what its handles share.
    owner: *const (),
    round: UnsafeCell<Round>,
    /// How many rounds there were: a member takes part in each once.
    number: AtomicUsize,
    /// The next task of the round.
    next: AtomicUsize,
    /// How many members are at work, and [`OPEN`].
    gate: AtomicUsize,
    /// Whether there will be no more.
    over: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `round` is written by the caller alone, while the gate is closed and nobody is at work; members
// read it after they have passed the open gate. What it points to is `Sync`. `owner` is only compared.
unsafe impl Sync for Team {}

thread_local! {
    /// The team that this thread has called together.
    static TEAM: Cell<*const Team> = const { Cell::new(ptr::null()) };
}

/// Gives the thread its team back.
struct RestoreTeam(*const Team);

impl Drop for RestoreTeam {
    fn drop(&mut self) {
        TEAM.set(self.0);
    }
}

impl Cpu {
    /// Does some work that consists of many short operations, with threads that stay awake between them.
    pub fn awake<R>(&self, work: impl FnOnce() -> R) -> R {
        if self.threads() == 1 || !TEAM.get().is_null() {
            return work();
        }
        let team = Team::new(self);
        thread::scope(|scope| {
            for i in 1..self.threads() {
                let name = format!("espalier-awake-{i}");
                // Where the system has no thread left there is one member fewer.
                let _ = thread::Builder::new().name(name).spawn_scoped(scope, || team.serve());
            }
            let _end = CloseTeam(&team);
            TEAM.set(&team);
            work()
        })
    }

    /// Runs tasks with the team of this thread, if it has one of this processor.
    pub(super) fn with_team(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) -> bool {
        let team = TEAM.get();
        // SAFETY: the team lives until `awake` returns, and that clears the pointer.
        let Some(team) = (unsafe { team.as_ref() }).filter(|team| team.owner == self.address()) else {
            return false;
        };
        // A task that has tasks itself gives them to the pool.
        let _back = RestoreTeam(TEAM.replace(ptr::null()));
        team.run(tasks, task);
        true
    }
}

/// Sends the members home, also where the work panics.
struct CloseTeam<'a>(&'a Team);

impl Drop for CloseTeam<'_> {
    fn drop(&mut self) {
        TEAM.set(ptr::null());
        self.0.over.store(true, Ordering::Release);
    }
}

impl Team {
    fn new(cpu: &Cpu) -> Team {
        fn nothing(_: usize) {}
        let nothing: *const (dyn Fn(usize) + Sync) = &(nothing as fn(usize));
        Team {
            owner: cpu.address(),
            round: UnsafeCell::new(Round { task: nothing, tasks: 0 }),
            number: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            gate: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// A round: returns when all tasks are done.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime is forgotten: this returns when nobody uses the reference any more, and
        // `work` never unwinds.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        // SAFETY: the gate is closed and nobody is at work.
        unsafe { *self.round.get() = Round { task, tasks } };
        self.next.store(0, Ordering::Relaxed);
        self.number.fetch_add(1, Ordering::Relaxed);
        self.gate.store(OPEN, Ordering::Release);
        self.work();
        self.gate.fetch_and(!OPEN, Ordering::Relaxed);
        while self.gate.load(Ordering::Acquire) > 0 {
            spin_loop();
        }
        let panic = self.panic.lock().expect("no panic while locked").take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Does tasks until none is left. Whoever called the round or has passed the gate may.
    fn work(&self) {
        // SAFETY: the round stays as it is while the gate is open or somebody is at work, and its task lives
        // as long.
        let (task, tasks) = unsafe { ((*self.round.get()).task, (*self.round.get()).tasks) };
        let all = || {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                // SAFETY: as above.
                unsafe { (*task)(i) };
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(all)) {
            // The others need not go on.
            self.next.store(tasks, Ordering::Relaxed);
            self.panic.lock().expect("no panic while locked").get_or_insert(panic);
        }
    }

    /// A member's life.
    fn serve(&self) {
        let (mut last_round, mut idle) = (0, Instant::now());
        while !self.over.load(Ordering::Acquire) {
            if self.number.load(Ordering::Relaxed) != last_round && self.begin() {
                last_round = self.number.load(Ordering::Relaxed);
                self.work();
                self.gate.fetch_sub(1, Ordering::Release);
                idle = Instant::now();
            } else if idle.elapsed() < AWAKE {
                (0..32).for_each(|_| spin_loop());
            } else {
                thread::sleep(NAP);
            }
        }
    }

    /// Whether the gate was open for one more.
    fn begin(&self) -> bool {
        let enter = |gate: usize| (gate & OPEN > 0).then_some(gate + 1);
        self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many short rounds, of more tasks than threads and of fewer, and two processors at once.
    #[test]
    fn every_task_is_done_once_in_every_round() {
        let (cpu, other) = (Cpu::new(3).unwrap(), Cpu::new(2).unwrap());
        cpu.awake(|| {
            for round in 0..2000 {
                let counts: Vec<AtomicUsize> = (0..round % 9).map(|_| AtomicUsize::new(0)).collect();
                let owner = if round % 5 == 4 { &other } else { &cpu };
                owner.for_each(counts.len(), |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "round {round}");
            }
        });
        assert!(TEAM.get().is_null());
    }

    /// Members really take part: two tasks that wait for each other end.
    #[test]
    fn tasks_run_beside_each_other_and_may_have_tasks_themselves() {
        let cpu = Cpu::new(2).unwrap();
        let (arrived, inner) = (AtomicUsize::new(0), AtomicUsize::new(0));
        cpu.awake(|| {
            // Longer than a member stays awake: one that naps comes too.
            thread::sleep(2 * AWAKE);
            cpu.for_each(2, |_| {
                arrived.fetch_add(1, Ordering::SeqCst);
                while arrived.load(Ordering::SeqCst) < 2 {
                    spin_loop();
                }
                cpu.for_each(3, |_| {
                    inner.fetch_add(1, Ordering::SeqCst);
                });
            });
        });
        assert_eq!(inner.into_inner(), 6);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let cpu = Cpu::new(2).unwrap();
        cpu.awake(|| {
            let fails = || cpu.for_each(8, |i| assert!(i != 5, "the sixth"));
            assert!(catch_unwind(AssertUnwindSafe(fails)).is_err());
            let done = AtomicUsize::new(0);
            cpu.for_each(8, |_| {
                done.fetch_add(1, Ordering::SeqCst);
            });
            assert_eq!(done.into_inner(), 8);
        });
    }
}
