//! The order in which work items add to a sum that they share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Whose turn it is to add to each query tile's dq.
pub(crate) struct Turns {
    /// For each query tile the key tile that adds next.
    next: Vec<AtomicUsize>,
    abandoned: AtomicBool,
}

impl Turns {
    pub(crate) fn new(count: usize, first: impl Fn(usize) -> usize) -> Self {
        Self {
            next: (0..count).map(|i| AtomicUsize::new(first(i))).collect(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Waits until all earlier key tiles have added to a query tile; false if one never will.
    pub(crate) fn wait(&self, m_tile: usize, n_tile: usize) -> bool {
        /// Rounds of spinning, a few microseconds, before the core is offered to others.
        const SPINS: usize = 256;
        let mut rounds = 0;
        // Acquire: what the previous key tile added is seen once its `finish` is.
        while self.next[m_tile].load(Ordering::Acquire) != n_tile {
            if self.abandoned.load(Ordering::Relaxed) {
                return false;
            }
            rounds += 1;
            if rounds < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        true
    }

    pub(crate) fn finish(&self, m_tile: usize, n_tile: usize) {
        // Release: publishes what was added, to the Acquire in `wait`.
        self.next[m_tile].store(n_tile + 1, Ordering::Release);
    }

    pub(crate) fn release_on_unwind(&self) -> impl Drop + '_ {
        struct Guard<'a>(&'a Turns);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.abandoned.store(true, Ordering::Relaxed);
                }
            }
        }
        Guard(self)
    }
}
