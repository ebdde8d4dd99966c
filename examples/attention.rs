//! The smallest complete call: grouped-query attention, forward and backward.

use candle_core::{Device, Result, Tensor, Var};
use candle_flash_gqa::{AttnOptions, flash_attn_with, reference};

fn main() -> Result<()> {
    // 1. 8 query heads share 2 key/value heads. Layout: (batch, seqlen, num_heads, head_dim).
    let device = Device::Cpu;
    let q = Var::randn(0f32, 1., (1, 128, 8, 64), &device)?;
    let k = Var::randn(0f32, 1., (1, 128, 2, 64), &device)?;
    let v = Var::randn(0f32, 1., (1, 128, 2, 64), &device)?;

    // 2. Causal attention; softmax_scale is 1 / sqrt(head_dim) unless given.
    let options = AttnOptions {
        causal: true,
        ..Default::default()
    };
    let out = flash_attn_with(&q, &k, &v, &options)?;

    // 3. Gradients of any scalar made from it.
    let grads = out.sqr()?.sum_all()?.backward()?;

    // 4. The same in plain tensor operations.
    let expected = reference(&q, &k, &v, &options)?;
    let expected_grads = expected.sqr()?.sum_all()?.backward()?;
    check("out", &out, &expected)?;
    for (name, input) in [("dq", &q), ("dk", &k), ("dv", &v)] {
        let (grad, expected) = (grads.get(input), expected_grads.get(input));
        match (grad, expected) {
            (Some(grad), Some(expected)) => check(name, grad, expected)?,
            _ => candle_core::bail!("{name} is missing"),
        }
    }
    Ok(())
}

/// Prints the shape and the largest difference, which only rounding may cause.
fn check(name: &str, got: &Tensor, expected: &Tensor) -> Result<()> {
    let difference: f32 = (got - expected)?.abs()?.max_all()?.to_scalar()?;
    let largest: f32 = expected.abs()?.max_all()?.to_scalar()?;
    println!("{name:3} {:?}, off by at most {difference:.1e}", got.dims());
    let close = difference <= 1e-5 * largest; // not so for NaN
    if !close {
        candle_core::bail!("{name} is off by {difference}, its largest element is {largest}");
    }
    Ok(())
}
