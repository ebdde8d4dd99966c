//! The kernels of the lesser instruction sets, which this machine would not choose.
//!
//! The choice is made once in a process, so a small grid runs again in a child process of this test
//! binary under `CANDLE_FLASH_GQA_SIMD`.

use std::process::Command;

use anyhow::{Result, ensure};
use candle_core::Device;

use crate::support::device::dtypes;
use crate::support::problem::Problem;
use crate::support::tensors::Inputs;
use crate::support::verify;

const VARIABLE: &str = "CANDLE_FLASH_GQA_SIMD";

#[test]
#[ignore = "run by the two tests below, under their environment"]
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

fn run_small_grid(instruction_set: &str) -> Result<()> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--ignored", "--exact", "simd::small_grid"])
        .env(VARIABLE, instruction_set)
        .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && stdout.contains("1 passed"),
        "with {VARIABLE}={instruction_set}:\n{stdout}"
    );
    Ok(())
}

#[test]
fn the_small_grid_holds_with_avx2() -> Result<()> {
    run_small_grid("avx2")
}

#[test]
fn the_small_grid_holds_without_vectors() -> Result<()> {
    run_small_grid("scalar")
}
