//! out and lse against f64 on the host.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_flash_gqa::{flash_attn, flash_attn_with, flash_attn_with_lse};

use crate::support::compare::{close, identical};
use crate::support::device::{for_each_dtype, for_each_usual_dtype};
use crate::support::grid::{Scores, for_each_problem};
use crate::support::problem::Problem;
use crate::support::tensors::{Inputs, fill, from_host, padded_rows};
use crate::support::verify;

fn grid(dtype: DType, seed: u64, scores: Scores) -> Result<()> {
    for_each_problem(dtype, seed, scores, verify::forward)
}

#[test]
fn fwd_grid_in_f64() -> Result<()> {
    grid(DType::F64, 1, Scores::Any)
}

#[test]
fn fwd_grid_in_f32() -> Result<()> {
    grid(DType::F32, 2, Scores::Any)
}

#[test]
fn fwd_grid_in_f16() -> Result<()> {
    grid(DType::F16, 3, Scores::Any)
}

#[test]
fn fwd_grid_in_bf16() -> Result<()> {
    grid(DType::BF16, 4, Scores::Any)
}

#[test]
fn fwd_grid_of_plain_scores_in_f16() -> Result<()> {
    grid(DType::F16, 9, Scores::Plain)
}

#[test]
fn fwd_grid_of_plain_scores_in_bf16() -> Result<()> {
    grid(DType::BF16, 10, Scores::Plain)
}

/// q = [1, 0], k = [[0, 0], [ln 3, 7]], v = [[1, 2], [5, 10]], scale 1: weights 1/4 and 3/4.
#[test]
fn fwd_of_numbers_that_a_pencil_verifies() -> Result<()> {
    for head_dim in [2, 8] {
        for_each_dtype(head_dim, |device, dtype| {
            let tensor = |rows: &[[f64; 2]]| padded_rows(rows, head_dim, dtype, device);
            let q = tensor(&[[1., 0.]])?;
            let k = tensor(&[[0., 0.], [3f64.ln(), 7.]])?;
            let v = tensor(&[[1., 2.], [5., 10.]])?;
            let problem = Problem::new(1, [1, 2], [1, 1], head_dim).scale(1.);
            let (out, lse) = flash_attn_with_lse(&q, &k, &v, &problem.options(device)?)?;
            let roundoff = 4. * verify::unit_roundoff(dtype);
            close("out", &out.narrow(3, 0, 2)?, &[4., 8.], 8. * roundoff)?;
            close("lse", &lse, &[4f64.ln()], 2. * roundoff.max(1e-7))
        })?;
    }
    Ok(())
}

#[test]
fn fwd_with_every_option_at_once() -> Result<()> {
    let problem = Problem::new(2, [150, 230], [6, 2], 40)
        .window(Some(70), Some(11))
        .softcap(2.)
        .alibi_of_batch()
        .scale(0.4);
    for_each_dtype(problem.head_dim, |device, dtype| {
        for problem in [problem.clone(), problem.clone().causal()] {
            verify::forward(&problem, &Inputs::normal(&problem, dtype, device, 7)?)?;
        }
        Ok(())
    })
}

#[test]
fn fwd_of_few_rows_with_every_option_at_once() -> Result<()> {
    let problem = Problem::new(1, [3, 2100], [4, 2], 64)
        .window(Some(1500), Some(1))
        .softcap(2.)
        .alibi()
        .scale(0.4);
    for_each_dtype(problem.head_dim, |device, dtype| {
        for problem in [problem.clone(), problem.clone().causal()] {
            verify::forward(&problem, &Inputs::normal(&problem, dtype, device, 8)?)?;
        }
        Ok(())
    })
}

/// Keys are split from 1024 on; some of the parts see nothing.
#[test]
fn fwd_on_split_keys_of_which_most_are_outside_the_window() -> Result<()> {
    for_each_dtype(16, |device, dtype| {
        for seqlen_q in [1, 2, 9, 40] {
            for left in [0, 3, 700] {
                let problem = Problem::new(1, [seqlen_q, 4500], [2, 1], 16)
                    .causal()
                    .window(Some(left), None);
                let inputs = Inputs::normal(&problem, dtype, device, 9)?;
                verify::forward(&problem, &inputs)?;
            }
        }
        Ok(())
    })
}

#[test]
fn fwd_is_the_same_whichever_function_is_called() -> Result<()> {
    let problem = Problem::new(2, [70, 130], [4, 2], 32).causal();
    for_each_dtype(problem.head_dim, |device, dtype| {
        let Inputs { q, k, v, .. } = Inputs::normal(&problem, dtype, device, 10)?;
        let options = problem.options(device)?;
        let out = flash_attn_with(&q, &k, &v, &options)?;
        let (with_lse, _) = flash_attn_with_lse(&q, &k, &v, &options)?;
        identical("with lse", &with_lse, &out)?;
        // A scale that is exact in f32, so that both calls have the same.
        let scale = 0.25;
        let options = problem.clone().scale(scale).options(device)?;
        let out = flash_attn_with(&q, &k, &v, &options)?;
        identical("short", &flash_attn(&q, &k, &v, scale, true)?, &out)
    })
}

/// A head's values must not leak into its neighbours in the padding of a tile.
#[test]
fn fwd_of_one_head_does_not_depend_on_the_others() -> Result<()> {
    for head_dim in [9, 24] {
        for_each_dtype(head_dim, |device, dtype| {
            let problem = Problem::new(2, [50, 75], [3, 3], head_dim);
            let inputs = Inputs::normal(&problem, dtype, device, 11)?;
            let (out, _) = crate::support::run::forward(&problem, &inputs)?;
            let alone = Problem::new(1, [50, 75], [1, 1], head_dim);
            for batch in 0..2 {
                for head in 0..3 {
                    let part = |x: &Tensor| x.narrow(0, batch, 1)?.narrow(2, head, 1);
                    let options = alone.options(device)?;
                    let (q, k, v) = (part(&inputs.q)?, part(&inputs.k)?, part(&inputs.v)?);
                    let expected = flash_attn_with(&q, &k, &v, &options)?;
                    identical("one head", &part(&out)?, &expected)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// From the last key, where the kernels begin, to the first by so many powers of two with every hundred keys: rows whose
/// maximum moves in every tile, in some by more than an exponential can hold.
#[test]
fn scores_that_rise_from_tile_to_tile() -> Result<()> {
    for head_dim in [64, 128, 256] {
        for (rise, causal) in [(9., false), (9., true), (20., false), (200., true)] {
            let problem = Problem::new(1, [130, 520], [2, 1], head_dim).with_causal(causal);
            for_each_usual_dtype(head_dim, |device, dtype| {
                let mut inputs = Inputs::normal(&problem, dtype, device, 1)?;
                let steps = f64::ln(2.) * (head_dim as f64).sqrt() * rise / 100.;
                let first: Vec<f64> = (0..520).rev().map(|key| steps * f64::from(key)).collect();
                let first = from_host(&first, &[1, 520, 1, 1], dtype, device)?;
                inputs.k = Tensor::cat(&[&first, &inputs.k.narrow(3, 1, head_dim - 1)?], 3)?;
                // Else plain attention in f32 is itself off by more than what it is to judge.
                inputs.q = fill(&fill(&inputs.q, 3, 1..head_dim, 0.)?, 3, 0..1, 1.)?;
                verify::both_of_large(&problem, &inputs)?;
                Ok(())
            })
            .with_context(|| format!("head_dim {head_dim}, rise {rise}, causal {causal}"))?;
        }
    }
    Ok(())
}
