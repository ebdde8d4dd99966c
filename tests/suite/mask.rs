//! What a row sees: windows, their counts, the alignment at the bottom right, and equal masks.

use anyhow::{Result, ensure};
use candle_core::{DType, Device};

use crate::support::compare::{close, identical, identical_passes};
use crate::support::device::{for_each_device, for_each_dtype, for_each_usual_dtype};
use crate::support::problem::Problem;
use crate::support::run::{self, Passes};
use crate::support::tensors::{Inputs, from_host, full, host};
use crate::support::verify::{self, unit_roundoff};

/// With q = 0 a row's weights are equal, with v the unit vectors its output *is* its weights: at least as
/// many numbers as there are keys.
fn check_weights(problem: &Problem, device: &Device, dtype: DType) -> Result<()> {
    let (rows, keys, columns) = (problem.seqlen_q, problem.seqlen_k, problem.head_dim);
    let unit: Vec<f64> = (0..keys * columns)
        .map(|i| f64::from(i / columns == i % columns))
        .collect();
    let inputs = Inputs {
        v: from_host(&unit, &problem.kv_dims(), dtype, device)?,
        ..Inputs::constant(problem, [0., 1., 0., 1.], dtype, device)?
    };
    let mut weights = vec![0.; rows * columns];
    let mut lse = vec![f64::NEG_INFINITY; rows];
    for i in 0..rows {
        let visible = problem.visible(i);
        for &j in &visible {
            weights[i * columns + j] = 1. / visible.len() as f64;
        }
        lse[i] = (visible.len() as f64).ln();
    }
    let column_sums: Vec<f64> = (0..keys)
        .flat_map(|j| {
            let sum: f64 = (0..rows).map(|i| weights[i * columns + j]).sum();
            vec![sum; columns]
        })
        .collect();
    // 1 and 1/2 are exact, 1/3 is off by at most a third of the roundoff. In a sum each weight is rounded.
    let roundoff = unit_roundoff(dtype);
    let limit = 1e-6f64.max(roundoff / 2.);
    let largest_sum = column_sums.iter().copied().fold(0., f64::max);
    let limit_of_sums = 1e-4f64.max(4. * roundoff * largest_sum);

    let (out, row_lse) = run::forward(problem, &inputs)?;
    let name = |of: &str| format!("{of} of {problem:?}");
    close(&name("out"), &out, &weights, limit)?;
    close(&name("lse"), &row_lse, &lse, 1e-6)?;
    let passes = run::forward_backward(problem, &inputs)?;
    close(&name("tracked out"), &passes.out, &weights, limit)?;
    close(&name("tracked lse"), &passes.lse, &lse, 1e-6)?;
    close(&name("dv"), &passes.grads.dv, &column_sums, limit_of_sums)
}

/// Every mask of every small problem.
fn check_small_masks(head_dim: usize, device: &Device, dtype: DType) -> Result<()> {
    const LIMITS: [Option<usize>; 6] = [None, Some(0), Some(1), Some(2), Some(4), Some(usize::MAX)];
    for seqlen_q in 1..=5 {
        for seqlen_k in 1..=5 {
            for left in LIMITS {
                for right in LIMITS {
                    for causal in [false, true] {
                        let problem = Problem::new(1, [seqlen_q, seqlen_k], [1, 1], head_dim)
                            .with_causal(causal)
                            .window(left, right);
                        check_weights(&problem, device, dtype)?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn mask_shows_exactly_the_keys_of_its_definition() -> Result<()> {
    for_each_usual_dtype(5, |device, dtype| check_small_masks(5, device, dtype))?;
    for_each_dtype(8, |device, dtype| check_small_masks(8, device, dtype))
}

/// Masks whose edges cross the tiles of rows and of keys at other angles than the diagonal.
#[test]
fn mask_shows_exactly_the_keys_of_its_definition_across_tiles() -> Result<()> {
    for [seqlen_q, seqlen_k] in [[260, 100], [100, 260], [200, 200], [100, 250usize]] {
        // Those of the CPU, and what a GPU has up to 256.
        for head_dim in [seqlen_k, seqlen_k.next_multiple_of(8)] {
            for_each_usual_dtype(head_dim, |device, dtype| {
                for [left, right] in [[None, Some(0)], [Some(96), Some(96)], [Some(50), None]] {
                    let problem = Problem::new(1, [seqlen_q, seqlen_k], [1, 1], head_dim);
                    check_weights(&problem.window(left, right), device, dtype)?;
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn case_01_a_single_causal_query_sees_every_key() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        for seqlen_k in [1, 2, 16, 63, 64, 65, 129, 1500] {
            let problem = Problem::new(1, [1, seqlen_k], [4, 4], 64);
            let inputs = Inputs::normal(&problem, dtype, device, 1)?;
            check_same(&problem, &problem.clone().causal(), &inputs)?;
        }
        Ok(())
    })
}

#[test]
fn case_02_keep_mask_of_2_queries_and_5_keys() {
    let problem = Problem::new(1, [2, 5], [1, 1], 1).causal();
    assert_eq!(problem.visible(0), [0, 1, 2, 3]);
    assert_eq!(problem.visible(1), [0, 1, 2, 3, 4]);
}

#[test]
fn case_08_causal_is_a_window_of_nothing_to_the_right() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        equal_causal_masks(400, 2, 64, device, dtype)
    })
}

#[test]
#[ignore = "the full size: a minute without optimisation"]
fn case_08_causal_is_a_window_of_nothing_to_the_right_at_16384() -> Result<()> {
    const SEQLEN: usize = 16384;
    for_each_device(|device| {
        let plain = Problem::new(1, [SEQLEN; 2], [8, 8], 128);
        let inputs = Inputs::normal(&plain, DType::F16, device, 8)?;
        let (causal, _) = run::forward(&plain.clone().causal(), &inputs)?;
        for left in [None, Some(SEQLEN), Some(SEQLEN - 1)] {
            let window = plain.clone().window(left, Some(0));
            identical("out", &run::forward(&window, &inputs)?.0, &causal)?;
        }
        Ok(())
    })
}

fn equal_causal_masks(
    seqlen: usize,
    heads: usize,
    head_dim: usize,
    device: &Device,
    dtype: DType,
) -> Result<()> {
    let plain = Problem::new(1, [seqlen; 2], [heads; 2], head_dim);
    let inputs = Inputs::normal(&plain, dtype, device, 8)?;
    let causal = plain.clone().causal();
    for window in [
        (None, Some(0)),
        (Some(seqlen), Some(0)),
        (Some(seqlen - 1), Some(0)),
        (Some(usize::MAX), Some(0)),
    ] {
        check_same(&causal, &plain.clone().window(window.0, window.1), &inputs)?;
        check_same(&causal, &causal.clone().window(window.0, Some(7)), &inputs)?;
    }
    Ok(())
}

#[test]
fn case_09_a_window_that_hides_nothing_is_no_window() -> Result<()> {
    for_each_dtype(40, |device, dtype| {
        for seqlens in [[130, 130], [40, 200], [200, 40]] {
            let plain = Problem::new(2, seqlens, [4, 2], 40);
            let inputs = Inputs::normal(&plain, dtype, device, 9)?;
            for causal in [false, true] {
                let plain = plain.clone().with_causal(causal);
                for limit in [200, 1 << 40, usize::MAX] {
                    let wide = plain.clone().window(Some(limit), Some(limit));
                    check_same(&plain, &wide, &inputs)?;
                }
            }
        }
        Ok(())
    })
}

/// Out, lse and gradients of both problems have the same bits.
fn check_same(a: &Problem, b: &Problem, inputs: &Inputs) -> Result<()> {
    let (a_out, a_lse) = run::forward(a, inputs)?;
    let (b_out, b_lse) = run::forward(b, inputs)?;
    let name = |of: &str| format!("{of} of {a:?} and {b:?}");
    identical(&name("out"), &a_out, &b_out)?;
    identical(&name("lse"), &a_lse, &b_lse)?;
    let [a, b] = [a, b].map(|problem| problem.clone().deterministic());
    let how = format!("against {b:?}");
    let (a_passes, b_passes) = (
        run::forward_backward(&a, inputs)?,
        run::forward_backward(&b, inputs)?,
    );
    identical_passes(&how, &a, &a_passes, &b_passes)
}

#[test]
fn case_10_a_window_of_w_keys_is_w_minus_1_to_the_left() -> Result<()> {
    for head_dim in [4, 8] {
        for_each_usual_dtype(head_dim, |device, dtype| {
            for [seqlen, window] in [[8, 4], [4096, 2048]] {
                let problem = Problem::new(1, [seqlen; 2], [1, 1], head_dim)
                    .causal()
                    .window(Some(window - 1), None);
                let inputs = Inputs::constant(&problem, [0., 1., 2., 1.], dtype, device)?;
                let (out, lse) = run::forward(&problem, &inputs)?;
                let counts = (1..=seqlen).map(|keys| keys.min(window) as f64);
                let expected: Vec<f64> = counts.map(f64::ln).collect();
                close("lse", &lse, &expected, 2e-6)?;
                close("out", &out, &vec![2.; seqlen * head_dim], 1e-6)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn case_11_rows_whose_window_lies_before_the_keys_are_0() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let problem = Problem::new(1, [129, 32], [2, 1], 64).window(Some(32), Some(64));
        let blind = (0..129).filter(|&i| problem.visible(i).is_empty());
        assert_eq!(blind.collect::<Vec<_>>(), (0..=32).collect::<Vec<_>>());
        verify::forward(&problem, &Inputs::normal(&problem, dtype, device, 11)?)?;
        verify::passes(&problem, &Inputs::normal(&problem, dtype, device, 11)?)?;
        Ok(())
    })
}

#[test]
fn case_12_of_4_causal_rows_on_2_keys_the_first_2_are_0() -> Result<()> {
    for_each_dtype(8, |device, dtype| {
        let problem = Problem::new(1, [4, 2], [1, 1], 8).causal();
        let passes = verify::passes(&problem, &Inputs::normal(&problem, dtype, device, 12)?)?;
        check_blind_rows(&problem, &passes, 2)
    })
}

#[test]
fn case_23_of_8_causal_rows_on_3_keys_the_sixth_is_the_first_value() -> Result<()> {
    for_each_dtype(64, |device, dtype| {
        let problem = Problem::new(1, [8, 3], [2, 2], 64).causal();
        let inputs = Inputs::normal(&problem, dtype, device, 23)?;
        let passes = verify::passes(&problem, &inputs)?;
        check_blind_rows(&problem, &passes, 5)?;
        let (out, _) = run::forward(&problem, &inputs)?;
        for out in [&out, &passes.out] {
            let row = out.narrow(1, 5, 1)?.contiguous()?;
            identical("row 5", &row, &inputs.v.narrow(1, 0, 1)?.contiguous()?)?;
        }
        Ok(())
    })
}

/// The first rows of out and dq are 0 and their lse is -inf; no later lse is.
fn check_blind_rows(problem: &Problem, passes: &Passes, blind: usize) -> Result<()> {
    for (name, tensor) in [("out", &passes.out), ("dq", &passes.grads.dq)] {
        let rows = host(&tensor.narrow(1, 0, blind)?)?;
        ensure!(rows.iter().all(|&x| x == 0.), "{name}: {rows:?}");
    }
    for (i, lse) in host(&passes.lse)?.into_iter().enumerate() {
        let expected = i % problem.seqlen_q < blind;
        ensure!((lse == f64::NEG_INFINITY) == expected, "lse {lse} at {i}");
    }
    Ok(())
}

/// A row that sees nothing takes no part, whatever its q and dout hold.
#[test]
fn blind_rows_of_any_content_leave_the_gradients_alone() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        let problem = Problem::new(1, [90, 50], [2, 1], 16)
            .causal()
            .deterministic();
        let inputs = Inputs::normal(&problem, dtype, device, 13)?;
        let passes = run::forward_backward(&problem, &inputs)?;
        let other = |tensor: &candle_core::Tensor| -> Result<candle_core::Tensor> {
            let blind = full(&[1, 40, 2, 16], 1e4, dtype, device)?;
            let rest = tensor.narrow(1, 40, 50)?;
            Ok(candle_core::Tensor::cat(&[&blind, &rest], 1)?)
        };
        let changed = Inputs {
            q: other(&inputs.q)?,
            dout: other(&inputs.dout)?,
            ..inputs.clone()
        };
        let changed = run::forward_backward(&problem, &changed)?;
        identical_passes("with other blind rows", &problem, &changed, &passes)
    })
}
