//! Tests of this binary in a process of their own, where the environment says something else.

use std::process::Command;

use anyhow::{Result, ensure};

/// The standard output of one test under `variable`, which is not set where the value is absent. Fails unless that
/// test ran and passed.
pub fn run(test: &str, variable: &str, value: Option<&str>) -> Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--include-ignored", "--nocapture", "--exact", test])
        .env_remove(variable);
    if let Some(value) = value {
        command.env(variable, value);
    }
    let output = command.output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success() && stdout.contains("1 passed"),
        "{test} with {variable} {value:?}:\n{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}
