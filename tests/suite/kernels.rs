//! On Hopper two families of kernels take the same problems, its own and those for all GPUs: what one family's forward
//! leaves behind, either family's backward can follow.

use anyhow::{Context, Result, ensure};
use candle_core::DType;

use crate::support::child;
use crate::support::device::{devices, gpu};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, host};

const VARIABLE: &str = "CANDLE_FLASH_GQA_KERNELS";

/// Tiles of every kernel, on and off their edges, with scores that move the maxima.
fn problems() -> Vec<(Problem, f64)> {
    let mut problems = vec![];
    for head_dim in [40, 64, 96, 128, 192, 256] {
        for scale in [1., 6.] {
            problems.push((Problem::new(1, [200, 390], [2, 1], head_dim), scale));
            problems.push((
                Problem::new(2, [129, 257], [2, 2], head_dim).causal(),
                scale,
            ));
        }
    }
    problems
}

#[test]
#[ignore = "run twice by the test below, under its environment"]
fn print_lse() -> Result<()> {
    let device = devices().pop().context("no device")?;
    println!();
    for (problem, scale) in problems() {
        let inputs = Inputs::scaled(&problem, [scale, 1., 1.], DType::BF16, &device, 1)?;
        let (_, lse) = run::forward(&problem, &inputs)?;
        for value in host(&lse)? {
            println!("lse {value:e}");
        }
    }
    Ok(())
}

#[test]
fn both_families_leave_the_same_lse() -> Result<()> {
    let lse = |value| -> Result<Vec<f64>> {
        let printed = child::run("kernels::print_lse", VARIABLE, value)?;
        let values = printed.lines().filter_map(|line| line.strip_prefix("lse "));
        Ok(values.map(str::parse).collect::<Result<_, _>>()?)
    };
    let (chosen, for_all) = (lse(Some("sm90"))?, lse(Some("sm80"))?);
    let expected: usize = problems()
        .iter()
        .map(|(p, _)| p.batch * p.num_heads * p.seqlen_q)
        .sum();
    ensure!(
        chosen.len() == expected && for_all.len() == expected,
        "{} and {} numbers, expected {expected}",
        chosen.len(),
        for_all.len()
    );
    // Both sum products of 16 bits in f32, in another order.
    for (row, (a, b)) in chosen.iter().zip(&for_all).enumerate() {
        ensure!(
            (a - b).abs() <= 4e-6 * a.abs().max(1.),
            "row {row} of all: {a} and {b}"
        );
    }
    Ok(())
}

/// Those of small problems, which the other family would take: most of a grid.
#[test]
fn the_grids_hold_with_hoppers_forward_wherever_it_runs() -> Result<()> {
    if gpu().is_none() {
        return Ok(());
    }
    for test in [
        "forward::fwd_grid_of_plain_scores_in_f16",
        "forward::fwd_grid_of_plain_scores_in_bf16",
        "forward::fwd_on_split_keys_of_which_most_are_outside_the_window",
        "sanitizer::small_grid",
    ] {
        child::run(test, VARIABLE, Some("sm90"))?;
    }
    Ok(())
}
