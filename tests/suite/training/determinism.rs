//! The same bits whatever the number of threads, and on every run.

use anyhow::Result;
use candle_core::{DType, Device};

use super::case::{Case, Passes, for_each_dtype};
use super::ops;
use crate::support::compare::identical;

/// Large enough, all of them, to be worth several threads and blocks.
fn cases(dtype: DType, device: &Device) -> Result<[Case; 9]> {
    Ok([
        ops::rms_norm(&[700, 328], dtype, device)?,
        ops::rope([2, 200, 6, 64], false, dtype, device)?,
        ops::swiglu(&[300, 129], dtype, device)?,
        ops::linear(&[3, 50, 96], 72, dtype, device)?,
        ops::linear_to_heads(&[3, 50, 96], 12, dtype, device)?,
        ops::linear_from_heads(&[3, 50, 6, 16], 72, dtype, device)?,
        ops::swiglu_linear(&[3, 50, 96], 72, dtype, device)?,
        ops::embedding([90, 136], &[3000], dtype, device)?,
        ops::cross_entropy(&[1500, 200], dtype, device)?,
    ])
}

fn check_identical(how: &str, case: &Case, ours: &Passes, first: &Passes) -> Result<()> {
    for ((name, ours), (_, first)) in ours.named().zip(first.named()) {
        identical(&format!("{name} of {} {how}", case.op.name), ours, first)?;
    }
    Ok(())
}

#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in cases(dtype, device)? {
            let mut first = None;
            for threads in [1, 2, 3, 7] {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()?;
                // On a GPU each thread has a stream of its own, and none waits for another.
                device.synchronize()?;
                let passes = pool.install(|| {
                    let passes = case.passes()?;
                    device.synchronize()?;
                    anyhow::Ok(passes)
                })?;
                match &first {
                    None => first = Some(passes),
                    Some(first) => {
                        check_identical(&format!("on {threads} threads"), &case, &passes, first)?
                    }
                }
            }
        }
        Ok(())
    })
}

#[test]
fn every_run_gives_the_same_bits() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for case in cases(dtype, device)? {
            let first = case.passes()?;
            for repetition in 1..10 {
                let how = format!("in repetition {repetition}");
                check_identical(&how, &case, &case.passes()?, &first)?;
            }
        }
        Ok(())
    })
}
