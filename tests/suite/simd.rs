//! The kernels of the lesser instruction sets, which this machine would not choose.
//!
//! The choice is made once in a process, so a small grid runs again in a child process of this test
//! binary under `CANDLE_FLASH_GQA_SIMD`. That the variable took effect shows in the bits of a result.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};

use crate::support::device::dtypes;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, host};
use crate::support::verify;

const VARIABLE: &str = "CANDLE_FLASH_GQA_SIMD";

#[test]
#[ignore = "run by two tests below, under their environment"]
fn small_grid() -> Result<()> {
    let problems = [
        Problem::new(1, [1, 1], [1, 1], 1),
        Problem::new(2, [33, 70], [4, 2], 40).causal(),
        Problem::new(1, [100, 50], [3, 1], 63).causal().softcap(2.),
        Problem::new(1, [97, 129], [2, 2], 64).window(Some(20), Some(5)),
        Problem::new(1, [65, 65], [2, 1], 128).alibi(),
        Problem::new(1, [3, 1100], [2, 1], 24).causal().alibi(),
        Problem::new(1, [1, 200], [7, 1], 80).softcap(2.),
        Problem::new(1, [20, 30], [2, 1], 256).causal(),
    ];
    for problem in problems {
        for dtype in dtypes(&Device::Cpu, problem.head_dim) {
            let inputs = Inputs::normal(&problem, dtype, &Device::Cpu, 1)?;
            verify::both(&problem, &inputs)?;
        }
    }
    Ok(())
}

/// One row of one head: its scores are sums along head_dim, in an order that depends on the number of
/// lanes, so the bits of the result tell the instruction set.
#[test]
#[ignore = "run by the last test below, under its environment"]
fn print_bits() -> Result<()> {
    let problem = Problem::new(1, [1, 200], [1, 1], 128);
    let inputs = Inputs::normal(&problem, DType::F32, &Device::Cpu, 2)?;
    let (out, _) = run::forward(&problem, &inputs)?;
    let bits: Vec<u64> = host(&out)?.into_iter().map(f64::to_bits).collect();
    println!("\n{BITS}{bits:x?}");
    Ok(())
}

/// Before the bits in the output of [`print_bits`].
const BITS: &str = "bits of out: ";

/// The standard output of one ignored test of this file; without an instruction set the best one is
/// chosen.
fn run_child(test: &str, instruction_set: Option<&str>) -> Result<String> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--ignored", "--nocapture", "--exact", test])
        .env_remove(VARIABLE);
    if let Some(instruction_set) = instruction_set {
        command.env(VARIABLE, instruction_set);
    }
    let output = command.output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success() && stdout.contains("1 passed"),
        "{test} with {VARIABLE} {instruction_set:?}:\n{stdout}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}

fn bits(instruction_set: Option<&str>) -> Result<String> {
    let stdout = run_child("simd::print_bits", instruction_set)?;
    let line = stdout.lines().find_map(|line| line.strip_prefix(BITS));
    Ok(line.context("no bits in the output")?.to_string())
}

#[test]
fn the_small_grid_holds_with_avx2() -> Result<()> {
    run_child("simd::small_grid", Some("avx2"))?;
    Ok(())
}

#[test]
fn the_small_grid_holds_without_vectors() -> Result<()> {
    run_child("simd::small_grid", Some("scalar"))?;
    Ok(())
}

/// Else the two tests above would run the native kernels again.
#[test]
fn the_variable_chooses_the_instruction_set() -> Result<()> {
    let native = bits(None)?;
    ensure!(bits(None)? == native, "the native bits differ between runs");
    if matches!(pulp::Arch::new(), pulp::Arch::Scalar) {
        println!("skipped: this machine has no vectors that the kernels know");
        return Ok(());
    }
    let scalar = bits(Some("scalar"))?;
    ensure!(scalar != native, "scalar gives the native bits");
    #[cfg(target_arch = "x86_64")]
    if pulp::x86::V4::try_new().is_some() {
        let avx2 = bits(Some("avx2"))?;
        ensure!(avx2 != native, "avx2 gives the bits of AVX-512");
        ensure!(avx2 != scalar, "avx2 gives the scalar bits");
    } else {
        println!("avx2 not told from native: this machine has no AVX-512");
    }
    Ok(())
}
