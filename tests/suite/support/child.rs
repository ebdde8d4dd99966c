//! Tests of this binary in a process of their own, where the environment says something else.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::device::watch;

const PAUSE: Duration = Duration::from_millis(20);

/// The standard output of one test under `variable`, which is not set where the value is absent. Fails unless that
/// test ran and passed, in no more than [`watch::LONGEST`].
pub fn run(test: &str, variable: &str, value: Option<&str>) -> Result<String> {
    run_all(&[test], variable, value)
}

/// The same of several tests, in one process.
pub fn run_all(tests: &[&str], variable: &str, value: Option<&str>) -> Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--include-ignored", "--nocapture", "--exact"])
        .args(tests)
        .env_remove(variable)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(value) = value {
        command.env(variable, value);
    }
    let mut child = command.spawn()?;
    let stdout = read(child.stdout.take().context("no standard output")?);
    let stderr = read(child.stderr.take().context("no standard error")?);
    let status = status_in(watch::LONGEST, &mut child)?;
    if status.is_none() {
        child.kill()?;
        child.wait()?;
    }
    let [stdout, stderr] = [stdout, stderr].map(|reader| reader.join().expect("a thread panicked"));
    let (stdout, stderr) = (stdout?, stderr?);
    let how = match status {
        Some(status) => status.to_string(),
        None => format!("stopped after {:?}", watch::LONGEST),
    };
    ensure!(
        status.is_some_and(|status| status.success())
            && stdout.contains(&format!(" {} passed", tests.len())),
        "{tests:?} with {variable} {value:?}, {how}:\n{stdout}{stderr}"
    );
    Ok(stdout)
}

/// Reads all that comes, so that the child never waits for room.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<Result<String>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    })
}

/// What the child ends with, if it does in so long.
fn status_in(longest: Duration, child: &mut Child) -> Result<Option<ExitStatus>> {
    let begin = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || begin.elapsed() > longest {
            return Ok(status);
        }
        // It is the child that the test waits for, not the GPU.
        watch::sign_of_life();
        thread::sleep(PAUSE);
    }
}
