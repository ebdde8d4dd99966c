//! Ends the process when a test waits for the GPU for ever: a kernel that hangs is a failure that no test may wait for.
//!
//! It asks the driver nothing: `cuCtxSynchronize` on a thread of its own waits for locks that others need to end.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::Write;
use std::sync::{LazyLock, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Of one wait, and of what the CPU computes between two.
const LONGEST: Duration = Duration::from_secs(300);
const PAUSE: Duration = Duration::from_secs(2);

/// The test, and its last sign of life, of each thread that uses the GPU.
static SIGNS: LazyLock<Mutex<HashMap<ThreadId, (String, Instant)>>> = LazyLock::new(|| {
    thread::spawn(|| {
        loop {
            thread::sleep(PAUSE);
            let signs = SIGNS.lock().unwrap();
            if let Some((test, _)) = signs.values().find(|(_, last)| last.elapsed() > LONGEST) {
                // Not eprintln!, which a test captures.
                let _ = writeln!(
                    std::io::stderr(),
                    "{test} has waited for the GPU for {LONGEST:?}"
                );
                std::process::abort();
            }
        }
    });
    Mutex::default()
});

/// Of a thread that uses the GPU, until it ends.
struct Watched(ThreadId);

impl Drop for Watched {
    fn drop(&mut self) {
        SIGNS.lock().unwrap().remove(&self.0);
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
    let test = thread.name().unwrap_or("a thread").to_string();
    SIGNS
        .lock()
        .unwrap()
        .insert(thread.id(), (test, Instant::now()));
    WATCHED.set(Some(Watched(thread.id())));
}

/// Results have come from the GPU, or nothing was asked of it.
pub fn sign_of_life() {
    WATCHED.with_borrow(|watched| {
        let Some(Watched(thread)) = watched else {
            return;
        };
        if let Some((_, last)) = SIGNS.lock().unwrap().get_mut(thread) {
            *last = Instant::now();
        }
    });
}
