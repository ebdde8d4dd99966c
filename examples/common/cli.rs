//! What the command lines of the examples share: devices, progress bars and errors.

use std::fmt;
use std::io;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, ensure};
use candle_core::Device;
use indicatif::{ProgressBar, ProgressStyle};

/// `cpu` or `cuda[:N]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    Cpu,
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let expected = || format!("got {name:?}, expected cpu, cuda or cuda:N");
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", ordinal)) => ordinal.parse().map(Self::Cuda).map_err(|_| expected()),
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.pad("cpu"),
            Self::Cuda(ordinal) => f.pad(&format!("cuda:{ordinal}")),
        }
    }
}

impl DeviceName {
    pub fn open(self) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(ordinal) => {
                ensure!(
                    candle_core::utils::cuda_is_available(),
                    "--device {self}: this build has no CUDA kernels; build with --features cuda or use --device cpu"
                );
                let device = Device::new_cuda(ordinal)?;
                #[cfg(feature = "cuda")]
                if let Device::Cuda(cuda) = &device {
                    // So that an allocation makes and destroys no events, two of each: they keep streams in
                    // order with each other, and here there is one. A step allocates some thousands of times.
                    // SAFETY: candle works on the default stream of the calling thread, and only the main thread
                    // of the examples has tensors on a GPU.
                    unsafe { cuda.disable_event_tracking() };
                }
                Ok(device)
            }
        }
    }
}

/// A bar on standard error that shows `what`, the time, and steps done; hidden when standard error is
/// not a terminal.
pub fn progress_bar(what: String, steps: u64) -> ProgressBar {
    let template = "{prefix} [{elapsed}] {wide_bar} {pos}/{len} {msg}";
    let style = ProgressStyle::with_template(template).expect("the template above is well-formed");
    let bar = ProgressBar::new(steps).with_style(style).with_prefix(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Runs an example: an error becomes one line on standard error and exit status 1.
pub fn main(run: impl FnOnce() -> Result<()>) -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads the output has stopped, as in `llama | head`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes on one line, without the backtraces that candle appends to its own: their
/// lines are indented.
pub fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        let lines: Vec<&str> = cause
            .trim()
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with(char::is_whitespace))
            .collect();
        let cause = lines.join(" ");
        if line.is_empty() {
            line = cause;
        } else if !line.ends_with(&cause) {
            line.push_str(": ");
            line.push_str(&cause);
        }
    }
    line
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
