//! A grid that is small enough to run under a checker such as `compute-sanitizer`, and, in child processes, with
//! the kernels of GPUs that have less shared memory than this one.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_flash_gqa::{flash_attn, is_supported};

use crate::support::child;
use crate::support::device::{check_still_works, dtypes, for_each_device, gpu};
use crate::support::grid::small_problems;
use crate::support::tensors::Inputs;
use crate::support::verify;

const VARIABLE: &str = "CANDLE_FLASH_GQA_SHARED_KIB";

#[test]
fn small_grid() -> Result<()> {
    for_each_device(|device| {
        for problem in small_problems() {
            for dtype in dtypes(device, problem.head_dim) {
                let inputs = Inputs::normal(&problem, dtype, device, 1)?;
                verify::both(&problem, &inputs)?;
            }
        }
        check_still_works(device)
    })
}

/// What blocks of an A100 may have, and those of most other GPUs from Ampere on.
#[test]
fn the_small_grid_holds_with_the_shared_memory_of_other_gpus() -> Result<()> {
    if gpu().is_none() {
        return Ok(());
    }
    for kib in ["163", "99"] {
        child::run("sanitizer::small_grid", VARIABLE, Some(kib))?;
    }
    Ok(())
}

#[test]
#[ignore = "run by the test below, under its environment"]
fn no_kernel_fits() -> Result<()> {
    let device = gpu().context("no GPU")?;
    let tensor = Tensor::zeros((1, 2, 1, 64), DType::F16, &device)?;
    ensure!(!is_supported(&device, DType::F16, 64));
    let called = flash_attn(&tensor, &tensor, &tensor, 1., true);
    let message = called.err().context("the call did not fail")?.to_string();
    ensure!(
        message.contains("no kernel for dtype F16 and head_dim 64"),
        "{message}"
    );
    Ok(())
}

/// It also shows that the variable takes effect.
#[test]
fn a_gpu_whose_shared_memory_holds_no_kernel_is_refused() -> Result<()> {
    if gpu().is_none() {
        return Ok(());
    }
    child::run("sanitizer::no_kernel_fits", VARIABLE, Some("10"))?;
    Ok(())
}
