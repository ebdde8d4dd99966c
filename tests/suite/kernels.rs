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
    if gpu().is_none() {
        return Ok(());
    }
    let lse = |family| -> Result<Vec<f64>> {
        let printed = child::run("kernels::print_lse", VARIABLE, Some(family))?;
        let values = printed.lines().filter_map(|line| line.strip_prefix("lse "));
        Ok(values.map(str::parse).collect::<Result<_, _>>()?)
    };
    let (hoppers, for_all) = (lse("sm90")?, lse("sm80")?);
    let expected: usize = problems()
        .iter()
        .map(|(p, _)| p.batch * p.num_heads * p.seqlen_q)
        .sum();
    ensure!(
        hoppers.len() == expected && for_all.len() == expected,
        "{} and {} numbers, expected {expected}",
        hoppers.len(),
        for_all.len()
    );
    ensure!(
        hoppers != for_all || !is_hopper()?,
        "the variable has no effect: all bits are the same"
    );
    // Both sum products of 16 bits in f32, in another order.
    for (row, (a, b)) in hoppers.iter().zip(&for_all).enumerate() {
        ensure!(
            (a - b).abs() <= 4e-6 * a.abs().max(1.),
            "row {row} of all: {a} and {b}"
        );
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn is_hopper() -> Result<bool> {
    let device = gpu().context("no GPU")?;
    let stream = device.as_cuda_device()?.cuda_stream();
    Ok(stream.context().compute_capability()? == (9, 0))
}

#[cfg(not(feature = "cuda"))]
fn is_hopper() -> Result<bool> {
    Ok(false)
}

/// Those of small problems, which the other family would take: most of a grid, and of what has to do with strides, NaN and
/// masks.
#[test]
fn small_problems_hold_with_hoppers_forward_too() -> Result<()> {
    if gpu().is_none() {
        return Ok(());
    }
    let tests = [
        "forward::fwd_grid_of_plain_scores_in_f16",
        "forward::fwd_grid_of_plain_scores_in_bf16",
        "sanitizer::small_grid",
        "strides::case_37_heads_outside_the_sequence_at_every_head_dim",
        "strides::case_38_all_storage_orders_give_the_same_bits",
        "strides::views_with_gaps_on_every_side",
        "strides::case_40_parts_of_a_fused_projection",
        "strides::case_41_rows_that_lie_far_apart",
        "strides::expanded_batches_heads_and_sequences",
        "strides::case_39_strides_of_size_1_dimensions_do_not_matter",
        "nan::nan_reaches_every_row_when_all_are_visible",
        "nan::nan_reaches_exactly_the_rows_that_see_it",
        "nan::infinity_goes_where_the_definition_sends_it",
        "nan::case_18_keys_of_the_future_are_nan",
        "nan::rows_of_finite_scores_beside_rows_of_minus_infinity_are_finite",
        "gqa::case_42_head_h_reads_key_value_head_h_over_group",
        "gqa::case_45_groups_of_3_5_6_7_10_and_12_heads",
        "gqa::a_key_value_head_is_read_by_its_group_alone",
        "mask::mask_shows_exactly_the_keys_of_its_definition",
        "mask::mask_shows_exactly_the_keys_of_its_definition_across_tiles",
        "mask::case_11_rows_whose_window_lies_before_the_keys_are_0",
        "mask::blind_rows_of_any_content_leave_the_gradients_alone",
    ];
    child::run_all(&tests, VARIABLE, Some("sm90"))?;
    Ok(())
}
