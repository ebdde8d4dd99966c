//! The kernels of the lesser instruction sets, which this machine would not choose.
//!
//! The choice is made once in a process, so a small grid runs again in a child process of this test
//! binary under `CANDLE_FLASH_GQA_SIMD`. That the variable took effect shows in the bits of a result.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device};

use crate::support::child;
use crate::support::device::dtypes;
use crate::support::grid::small_problems;
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, host};
use crate::support::verify;

const VARIABLE: &str = "CANDLE_FLASH_GQA_SIMD";

#[test]
#[ignore = "run by two tests below, under their environment"]
fn small_grid() -> Result<()> {
    for problem in small_problems() {
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
#[ignore = "run by a test below, under its environment"]
fn print_bits() -> Result<()> {
    let problem = Problem::new(1, [1, 200], [1, 1], 128);
    let inputs = Inputs::normal(&problem, DType::F32, &Device::Cpu, 2)?;
    let (out, _) = run::forward(&problem, &inputs)?;
    let bits: Vec<u64> = host(&out)?.into_iter().map(f64::to_bits).collect();
    println!("\n{BITS}{bits:x?}");
    Ok(())
}

#[test]
#[ignore = "run by the last test below, under its environment"]
fn refused() -> Result<()> {
    let problem = Problem::new(1, [1, 1], [1, 1], 8);
    let inputs = Inputs::normal(&problem, DType::F32, &Device::Cpu, 2)?;
    let message = run::forward(&problem, &inputs).err();
    let message = message.context("it should have been refused")?.to_string();
    let expected = "CANDLE_FLASH_GQA_SIMD must be avx2, scalar or not set, got \"avx3\"";
    ensure!(message.contains(expected), "{message}");
    Ok(())
}

/// Before the bits in the output of [`print_bits`].
const BITS: &str = "bits of out: ";

fn bits(instruction_set: Option<&str>) -> Result<String> {
    let stdout = child::run("simd::print_bits", VARIABLE, instruction_set)?;
    let line = stdout.lines().find_map(|line| line.strip_prefix(BITS));
    Ok(line.context("no bits in the output")?.to_string())
}

#[test]
fn the_small_grid_holds_with_avx2() -> Result<()> {
    child::run("simd::small_grid", VARIABLE, Some("avx2"))?;
    Ok(())
}

#[test]
fn the_small_grid_holds_without_vectors() -> Result<()> {
    child::run("simd::small_grid", VARIABLE, Some("scalar"))?;
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

#[test]
fn an_instruction_set_that_is_not_known_is_refused() -> Result<()> {
    child::run("simd::refused", VARIABLE, Some("avx3"))?;
    Ok(())
}
