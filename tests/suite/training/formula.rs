//! Values and gradients against the plain formula in f64, and finite differences of the ops themselves.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};

use super::case::{Case, dout, for_each_dtype};
use super::ops;
use crate::support::compare::{close, close_to, identical};
use crate::support::tensors::{from_host, host};

fn check(case: Case) -> Result<()> {
    case.check(&case.passes()?)
}

#[test]
fn rms_norm_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        // Odd columns, one row, more rows than a block sums, more columns than threads.
        for dims in [
            &[8][..],
            &[1, 3],
            &[3, 7],
            &[5, 64],
            &[2, 3, 4, 40],
            &[129, 17],
            &[300, 264],
            &[7, 2048],
            &[3, 4099],
        ] {
            check(ops::rms_norm(dims, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn rope_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for dims in [
            [1, 1, 1, 2],
            [2, 5, 3, 6],
            [2, 9, 4, 16],
            [1, 33, 2, 80],
            [3, 4, 17, 128],
        ] {
            for per_batch in [false, true] {
                check(ops::rope(dims, per_batch, dtype, device)?)?;
            }
        }
        Ok(())
    })
}

#[test]
fn swiglu_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for dims in [&[][..], &[1], &[3, 5], &[2, 3, 64], &[17, 1000], &[4, 4096]] {
            check(ops::swiglu(dims, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn linear_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for (dims, size_out) in [
            (&[8][..], 3),
            (&[1, 1], 1),
            (&[5, 16], 8),
            (&[2, 7, 9], 13),
            (&[2, 3, 2, 32], 64),
            (&[1, 1, 24], 16),
        ] {
            check(ops::linear(dims, size_out, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn linear_to_and_from_heads_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for (dims, heads) in [(&[8][..], 1), (&[1, 1], 3), (&[5, 16], 2), (&[2, 7, 9], 4)] {
            check(ops::linear_to_heads(dims, heads, dtype, device)?)?;
        }
        for (dims, size_out) in [
            (&[1, 1][..], 1),
            (&[2, 8], 3),
            (&[5, 3, 4], 8),
            (&[2, 7, 3, 16], 24),
        ] {
            check(ops::linear_from_heads(dims, size_out, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn swiglu_linear_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for (dims, size_out) in [
            (&[8][..], 3),
            (&[1, 1], 1),
            (&[5, 16], 8),
            (&[2, 70, 9], 130),
        ] {
            check(ops::swiglu_linear(dims, size_out, dtype, device)?)?;
        }
        Ok(())
    })
}

/// One node of the graph in place of three.
#[test]
fn swiglu_linear_is_swiglu_of_linears_to_the_bit() -> Result<()> {
    use candle_flash_gqa::training::*;
    for_each_dtype(|device, dtype| {
        let case = ops::swiglu_linear(&[2, 33, 24], 40, dtype, device)?;
        let mut apart = case.clone();
        apart.op.fused = |x, _| swiglu(&linear(&x[0], &x[1])?, &linear(&x[0], &x[2])?);
        let (ours, expected) = (case.passes()?, apart.passes()?);
        for ((name, ours), (_, expected)) in ours.named().zip(expected.named()) {
            identical(&name, ours, expected)?;
        }
        Ok(())
    })
}

#[test]
fn embedding_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for (table, ids) in [
            ([1, 1], &[1][..]),
            ([5, 3], &[]),
            ([7, 8], &[2, 6]),
            // More ids than a block compares at once, more columns than it has threads for.
            ([40, 9], &[3, 700]),
            ([300, 16], &[50]),
            ([6, 2100], &[2, 9]),
        ] {
            check(ops::embedding(table, ids, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn cross_entropy_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for dims in [
            &[5][..],
            &[1, 1],
            &[1, 8],
            &[3, 7],
            &[2, 3, 9],
            &[130, 40],
            &[2, 5000],
            &[1100, 64],
            &[9, 4097],
        ] {
            check(ops::cross_entropy(dims, dtype, device)?)?;
        }
        Ok(())
    })
}

#[test]
fn gradients_equal_finite_differences() -> Result<()> {
    const STEP: f64 = 1e-5;
    for case in ops::all(DType::F64, &Device::Cpu)? {
        let passes = case.passes()?;
        for (which, grad) in passes.grads.iter().enumerate() {
            let values = host(&case.operands[which])?;
            let mut differences = vec![];
            for i in 0..values.len() {
                let loss_at = |x: f64| -> Result<f64> {
                    let mut values = values.clone();
                    values[i] = x;
                    let mut operands = case.operands.clone();
                    let dims = operands[which].dims().to_vec();
                    operands[which] = from_host(&values, &dims, DType::F64, &Device::Cpu)?;
                    let out = (case.op.fused)(&operands, &case.constants)?;
                    Ok((&out * dout(&out)?)?.sum_all()?.to_scalar()?)
                };
                let difference = loss_at(values[i] + STEP)? - loss_at(values[i] - STEP)?;
                differences.push(difference / (2. * STEP));
            }
            let name = format!("gradient {which} of {}", case.op.name);
            close(&name, grad, &differences, 1e-8)?;
        }
    }
    Ok(())
}

/// candle's own op for inference turns the same pairs the same way.
#[test]
fn rope_equals_candles() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let case = ops::rope([2, 5, 3, 16], false, dtype, device)?;
        let [cos, sin] = [0, 1].map(|i| case.constants[i].narrow(0, 0, 5));
        let candles = candle_nn::rotary_emb::rope_thd(&case.operands[0], &cos?, &sin?)?;
        let limit = 8. * crate::support::verify::unit_roundoff(dtype);
        close_to("rope", &case.passes()?.out, &candles, limit)
    })
}

#[test]
fn numbers_that_a_person_can_check() -> Result<()> {
    use candle_flash_gqa::training::*;
    for_each_dtype(|device, dtype| {
        let tensor = |values: &[f64], dims: &[usize]| from_host(values, dims, dtype, device);
        let indices = |ids: &[u32]| Tensor::new(ids, device);

        // The root mean square of (1, 7) is 5.
        let normed = rms_norm(&tensor(&[1., 7.], &[1, 2])?, &tensor(&[5., 10.], &[2])?, 0.)?;
        close("rms_norm", &normed, &[1., 14.], 0.1)?;
        // A quarter turn takes (3, 4) to (-4, 3).
        let (cos, sin) = (tensor(&[0.], &[1, 1])?, tensor(&[1.], &[1, 1])?);
        let turned = rope(&tensor(&[3., 4.], &[1, 1, 1, 2])?, &cos, &sin)?;
        close("rope", &turned, &[-4., 3.], 0.)?;
        // silu(0) is 0, and that of a large number itself.
        let gated = swiglu(&tensor(&[0., 40.], &[2])?, &tensor(&[9., 0.5], &[2])?)?;
        close("swiglu", &gated, &[0., 20.], 0.)?;
        let product = linear(
            &tensor(&[1., 2.], &[2])?,
            &tensor(&[3., 4., 5., 6.], &[2, 2])?,
        )?;
        close("linear", &product, &[11., 17.], 0.)?;
        let table = tensor(&[1., 2., 3., 4., 5., 6.], &[3, 2])?;
        close(
            "embedding",
            &embedding(&table, &indices(&[2, 0])?)?,
            &[5., 6., 1., 2.],
            0.,
        )?;
        // Four equal logits: log 4.
        let loss = cross_entropy(&tensor(&[1.; 8], &[2, 4])?, &indices(&[3, 0])?)?;
        close("cross_entropy", &loss, &[4f64.ln()], 1e-6)
    })
}
