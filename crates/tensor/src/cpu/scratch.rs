//! What parallel tasks share: scratch space that is lent to one task at a time, and a slice of which each
//! task writes elements that no other touches.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Mutex;

use super::Cpu;
use crate::error::Result;

/// As many scratch spaces as tasks can run at once; how many depends on sizes alone, so that the
/// ledger's workspace peak is the same in every run.
#[derive(Debug)]
pub struct ScratchPool<S>(Mutex<Vec<S>>);

impl<S> ScratchPool<S> {
    /// One for each of `tasks`, or for each thread where these are fewer.
    pub fn new(cpu: &Cpu, tasks: usize, space: impl Fn() -> Result<S>) -> Result<ScratchPool<S>> {
        let chunks = (0..tasks.min(cpu.threads())).map(|_| space()).collect::<Result<Vec<S>>>()?;
        Ok(ScratchPool(Mutex::new(chunks)))
    }

    /// Lends one to `work`. Its content is whatever the last borrower left.
    pub fn lend<R>(&self, work: impl FnOnce(&mut S) -> R) -> R {
        let taken = self.0.lock().expect("no panic while locked").pop();
        let mut space = taken.expect("no more borrowers than threads");
        let result = work(&mut space);
        self.0.lock().expect("no panic while locked").push(space);
        result
    }
}

/// A slice that tasks on several threads write to, each its own elements.
#[derive(Debug)]
pub struct DisjointSlice<'a, T> {
    pointer: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it is a mutable slice, whose ranges may go to other threads; `range_mut` demands that they do not
// overlap.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    /// Takes the slice over for as long as it is borrowed.
    pub fn new(slice: &'a mut [T]) -> DisjointSlice<'a, T> {
        DisjointSlice { pointer: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Safety
    /// No two ranges that live at the same time may overlap.
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: in bounds by the assertion, unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}
