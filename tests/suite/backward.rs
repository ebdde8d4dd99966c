//! dq, dk and dv against f64 on the host, and finite differences of the op itself.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_flash_gqa::{flash_attn_with, is_supported};

use crate::support::compare::{close, close_to};
use crate::support::device::{for_each_device, for_each_dtype};
use crate::support::grid::{Scores, for_each_problem};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::{Inputs, from_host, host};
use crate::support::verify;

/// It also holds out and lse of the tracked forward.
fn grid(dtype: DType, seed: u64, scores: Scores) -> Result<()> {
    for_each_problem(dtype, seed, scores, |problem, inputs| {
        verify::passes(problem, inputs).map(drop)
    })
}

#[test]
fn bwd_grid_in_f64() -> Result<()> {
    grid(DType::F64, 5, Scores::Any)
}

#[test]
fn bwd_grid_in_f32() -> Result<()> {
    grid(DType::F32, 6, Scores::Any)
}

#[test]
fn bwd_grid_in_f16() -> Result<()> {
    grid(DType::F16, 7, Scores::Any)
}

#[test]
fn bwd_grid_in_bf16() -> Result<()> {
    grid(DType::BF16, 8, Scores::Any)
}

#[test]
fn bwd_grid_of_plain_scores_in_f16() -> Result<()> {
    grid(DType::F16, 11, Scores::Plain)
}

#[test]
fn bwd_grid_of_plain_scores_in_bf16() -> Result<()> {
    grid(DType::BF16, 12, Scores::Plain)
}

#[test]
fn bwd_with_every_option_at_once() -> Result<()> {
    let problem = Problem::new(2, [150, 230], [6, 2], 40)
        .window(Some(70), Some(11))
        .softcap(2.)
        .alibi_of_batch()
        .scale(0.4);
    for_each_dtype(problem.head_dim, |device, dtype| {
        for problem in [problem.clone(), problem.clone().causal()] {
            let inputs = Inputs::normal(&problem, dtype, device, 7)?;
            verify::passes(&problem, &inputs)?;
        }
        Ok(())
    })
}

/// The loss is `sum(out * dout)`; its central differences must be the gradients.
#[test]
fn bwd_equals_finite_differences_for_every_option() -> Result<()> {
    const STEP: f64 = 1e-5;
    let plain = Problem::new(2, [4, 5], [4, 2], 3);
    let problems = [
        plain.clone(),
        plain.clone().causal(),
        plain.clone().window(Some(1), Some(0)),
        plain.clone().window(None, Some(1)),
        plain.clone().scale(1.7),
        plain.clone().softcap(0.8),
        plain.clone().alibi(),
        plain.clone().alibi_of_batch(),
        plain.causal().window(Some(2), None).softcap(1.1).alibi(),
        // Rows that see nothing.
        Problem::new(1, [6, 3], [2, 1], 3).causal(),
    ];
    for_each_device(|device| {
        if !is_supported(device, DType::F64, 3) {
            return Ok(());
        }
        for problem in &problems {
            let inputs = Inputs::normal(problem, DType::F64, device, 11)?;
            let grads = run::forward_backward(problem, &inputs)?.grads;
            let options = problem.options(device)?;
            let loss = |q: &Tensor, k: &Tensor, v: &Tensor| -> Result<f64> {
                let out = flash_attn_with(q, k, v, &options)?;
                Ok((out * &inputs.dout)?.sum_all()?.to_scalar()?)
            };
            let tensors = [inputs.q.clone(), inputs.k.clone(), inputs.v.clone()];
            for (which, (name, grad)) in grads.named().into_iter().enumerate() {
                let values = host(&tensors[which])?;
                let mut differences = Vec::new();
                for i in 0..values.len() {
                    let loss_at = |x: f64| -> Result<f64> {
                        let (mut tensors, mut values) = (tensors.clone(), values.clone());
                        values[i] = x;
                        let dims = tensors[which].dims().to_vec();
                        tensors[which] = from_host(&values, &dims, DType::F64, device)?;
                        let [q, k, v] = &tensors;
                        loss(q, k, v)
                    };
                    let difference = loss_at(values[i] + STEP)? - loss_at(values[i] - STEP)?;
                    differences.push(difference / (2. * STEP));
                }
                close(&format!("{name} of {problem:?}"), grad, &differences, 1e-8)?;
            }
        }
        Ok(())
    })
}

/// Where nothing is large, candle's gradients of the plain formula are the same as ours in f64.
#[test]
fn bwd_equals_the_autograd_of_the_plain_formula() -> Result<()> {
    let problem = Problem::new(2, [33, 47], [6, 3], 24)
        .causal()
        .softcap(3.)
        .alibi();
    for_each_device(|device| {
        if !is_supported(device, DType::F64, problem.head_dim) {
            return Ok(());
        }
        let inputs = Inputs::normal(&problem, DType::F64, device, 12)?;
        let ours = run::forward_backward(&problem, &inputs)?;
        let (plain_out, plain) = run::plain(&problem, &inputs)?;
        close_to("out", &ours.out, &plain_out, 1e-13)?;
        for ((name, ours), (_, plain)) in ours.grads.named().into_iter().zip(plain.named()) {
            close_to(name, ours, plain, 1e-12)?;
        }
        Ok(())
    })
}

/// The gradients are linear in dout, so its size must not matter.
#[test]
fn bwd_of_large_and_small_output_gradients() -> Result<()> {
    let problem = Problem::new(1, [100, 130], [4, 2], 64).causal();
    for_each_dtype(problem.head_dim, |device, dtype| {
        let inputs = Inputs::normal(&problem, dtype, device, 13)?;
        let ours = run::forward_backward(&problem, &inputs)?.grads;
        for factor in [1. / 64., 64.] {
            // A power of two: exact in every dtype, but for the smallest numbers of f16.
            let dout = (&inputs.dout * factor)?;
            let scaled = Inputs {
                dout,
                ..inputs.clone()
            };
            let scaled = run::forward_backward(&problem, &scaled)?.grads;
            for ((name, ours), (_, scaled)) in ours.named().into_iter().zip(scaled.named()) {
                let expected: Vec<f64> = host(ours)?.iter().map(|x| x * factor).collect();
                let largest = expected.iter().fold(0f64, |max, x| max.max(x.abs()));
                let limit = 4. * verify::unit_roundoff(dtype) * largest;
                close(name, scaled, &expected, limit)?;
            }
        }
        Ok(())
    })
}
