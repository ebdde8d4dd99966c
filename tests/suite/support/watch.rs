//! Ends the process when a test waits for the GPU for ever: a kernel that hangs is a failure that no test may wait for.
//!
//! It asks the driver nothing: `cuCtxSynchronize` on a thread of its own waits for locks that others need to end.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Of one wait, and of what the CPU computes between two.
pub const LONGEST: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_secs(2);

/// The last sign of life of a thread that uses the GPU.
struct Sign {
    test: String,
    last: Instant,
    /// Where Linux lists the thread until it has ended: longer than it has thread-locals, since a driver was seen to be
    /// stuck in what it does after those are gone.
    task: Option<PathBuf>,
}

static SIGNS: LazyLock<Mutex<HashMap<ThreadId, Sign>>> = LazyLock::new(|| {
    thread::spawn(|| {
        loop {
            thread::sleep(PAUSE);
            let mut signs = SIGNS.lock().unwrap();
            signs.retain(|_, sign| sign.task.as_ref().is_none_or(|task| task.exists()));
            if let Some(Sign { test, .. }) =
                signs.values().find(|sign| sign.last.elapsed() > LONGEST)
            {
                // Not eprintln!, which a test captures.
                let _ = writeln!(
                    std::io::stderr(),
                    "{test} has waited for the GPU, or its thread has not ended, for {LONGEST:?}"
                );
                std::process::abort();
            }
        }
    });
    Mutex::default()
});

/// Of a thread that uses the GPU, as long as it has thread-locals.
struct Watched(ThreadId);

impl Drop for Watched {
    fn drop(&mut self) {
        let mut signs = SIGNS.lock().unwrap();
        if signs.get(&self.0).is_some_and(|sign| sign.task.is_none()) {
            signs.remove(&self.0);
        }
    }
}

thread_local!(static WATCHED: RefCell<Option<Watched>> = const { RefCell::new(None) });

/// From here on this thread has to give signs of life.
#[cfg(feature = "cuda")]
pub fn begin() {
    if WATCHED.with_borrow(Option::is_some) {
        return sign_of_life();
    }
    let thread = thread::current();
    let sign = Sign {
        test: thread.name().unwrap_or("a thread").to_string(),
        last: Instant::now(),
        task: std::fs::read_link("/proc/thread-self")
            .ok()
            .map(|link| PathBuf::from("/proc").join(link)),
    };
    SIGNS.lock().unwrap().insert(thread.id(), sign);
    WATCHED.set(Some(Watched(thread.id())));
}

/// Results have come from the GPU, or nothing was asked of it.
pub fn sign_of_life() {
    WATCHED.with_borrow(|watched| {
        let Some(Watched(thread)) = watched else {
            return;
        };
        if let Some(sign) = SIGNS.lock().unwrap().get_mut(thread) {
            sign.last = Instant::now();
        }
    });
}
