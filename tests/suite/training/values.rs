//! Large and small numbers, infinities, long sums, indices out of range.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor, Var};
use candle_flash_gqa::training::{cross_entropy, embedding, linear, rms_norm, swiglu};

use super::case::for_each_dtype;
use super::ops::{self, EPS};
use crate::support::compare::{close, finite};
use crate::support::tensors::{from_host, full, host};

#[test]
fn rms_norm_of_zeros_is_zero_and_of_large_numbers_does_not_overflow() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let weight = full(&[16], 1., dtype, device)?;
        let zeros = full(&[2, 16], 0., dtype, device)?;
        close("zeros", &rms_norm(&zeros, &weight, EPS)?, &[0.; 32], 0.)?;
        // Its square is beyond f16.
        let large = Var::from_tensor(&full(&[2, 16], 30000., dtype, device)?)?;
        let out = rms_norm(&large, &weight, EPS)?;
        close("large", &out, &[1.; 32], 0.01)?;
        finite("dx", out.sum_all()?.backward()?.get(&large).context("dx")?)
    })
}

/// Where the two terms of the gradient cancel.
#[test]
fn rms_norm_of_one_column_is_the_sign() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let weight = full(&[1], 3., dtype, device)?;
        let x = Var::from_tensor(&from_host(&[2., -5., 0.25], &[3, 1], dtype, device)?)?;
        let out = rms_norm(&x, &weight, 0.)?;
        close("out", &out, &[3., -3., 3.], 1e-6)?;
        let grads = out.sum_all()?.backward()?;
        close("dx", grads.get(&x).context("dx")?, &[0.; 3], 1e-5)
    })
}

#[test]
fn swiglu_of_large_gates_does_not_overflow() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let gate = Var::from_tensor(&from_host(&[-3e4, -100., 100., 3e4], &[4], dtype, device)?)?;
        let up = full(&[4], 0.5, dtype, device)?;
        let out = swiglu(&gate, &up)?;
        close("out", &out, &[0., 0., 50., 1.5e4], 60.)?;
        let grads = out.sum_all()?.backward()?;
        close(
            "dgate",
            grads.get(&gate).context("dgate")?,
            &[0., 0., 0.5, 0.5],
            1e-6,
        )
    })
}

#[test]
fn cross_entropy_of_large_logits_does_not_overflow() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let targets = Tensor::new(&[0u32, 1], device)?;
        let logits = [3e4, -3e4, 0., 3e4, 0., 0.];
        let logits = Var::from_tensor(&from_host(&logits, &[2, 3], dtype, device)?)?;
        let loss = cross_entropy(&logits, &targets)?;
        // The first row is right, the second off by 3e4.
        close("loss", &loss, &[1.5e4], 60.)?;
        let dlogits = loss.backward()?;
        let dlogits = dlogits.get(&logits).context("dlogits")?;
        close("dlogits", dlogits, &[0., 0., 0., 0.5, -0.5, 0.], 0.)
    })
}

/// A vocabulary of which a part is masked away.
#[test]
fn cross_entropy_of_logits_that_are_minus_infinity() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let cols = 3000;
        let mut logits = vec![f64::NEG_INFINITY; cols];
        logits[cols - 1] = 1.;
        logits[cols - 2] = 1.;
        let logits = Var::from_tensor(&from_host(&logits, &[1, cols], dtype, device)?)?;
        let target = Tensor::new(&[cols as u32 - 1], device)?;
        let loss = cross_entropy(&logits, &target)?;
        close("loss", &loss, &[2f64.ln()], 1e-6)?;
        let dlogits = loss.backward()?;
        let mut expected = vec![0.; cols];
        expected[cols - 1] = -0.5;
        expected[cols - 2] = 0.5;
        close(
            "dlogits",
            dlogits.get(&logits).context("dlogits")?,
            &expected,
            1e-6,
        )
    })
}

#[test]
fn a_nan_makes_the_loss_nan() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let case = ops::cross_entropy(&[3, 40], dtype, device)?;
        let mut logits = host(&case.operands[0])?;
        logits[50] = f64::NAN;
        let logits = from_host(&logits, &[3, 40], dtype, device)?;
        let loss = host(&cross_entropy(&logits, &case.constants[0])?)?;
        ensure!(loss[0].is_nan(), "{loss:?}");
        Ok(())
    })
}

#[test]
fn a_target_out_of_range_is_an_error_or_nan() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let logits = Var::from_tensor(&ops::cross_entropy(&[3, 9], dtype, device)?.operands[0])?;
        for target in [9, u32::MAX] {
            let targets = Tensor::new(&[0u32, target, 8], device)?;
            let loss = cross_entropy(&logits, &targets);
            if device.is_cpu() {
                let message = loss.map(|_| ()).unwrap_err().to_string();
                let expected = format!("target {target} of row 1 is not below vocab_size 9");
                ensure!(message.contains(&expected), "{message}");
                continue;
            }
            let loss = loss?;
            ensure!(host(&loss)?[0].is_nan());
            let dlogits = loss.backward()?;
            let dlogits = host(dlogits.get(&logits).context("dlogits")?)?;
            for (i, x) in dlogits.into_iter().enumerate() {
                ensure!(x.is_nan() == (i / 9 == 1), "{x} at {i}");
            }
        }
        Ok(())
    })
}

#[test]
fn an_id_out_of_range_is_an_error_or_nan() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let table = Var::from_tensor(&ops::embedding([7, 8], &[2], dtype, device)?.operands[0])?;
        for id in [7, u32::MAX] {
            let ids = Tensor::new(&[6u32, id], device)?;
            let rows = embedding(&table, &ids);
            if device.is_cpu() {
                let message = rows.map(|_| ()).unwrap_err().to_string();
                ensure!(
                    message.contains(&format!("id {id} is not below vocab_size 7")),
                    "{message}"
                );
                continue;
            }
            let rows = rows?;
            for (i, x) in host(&rows)?.into_iter().enumerate() {
                ensure!(x.is_nan() == (i / 8 == 1), "{x} at {i}");
            }
            let grads = rows.backward()?;
            let mut expected = vec![0.; 48];
            expected.extend([1.; 8]);
            close(
                "dweight",
                grads.get(&table).context("dweight")?,
                &expected,
                0.,
            )?;
        }
        Ok(())
    })
}

/// In bf16 a sum of ones would stop at 256.
#[test]
fn long_sums_are_wider_than_the_operands() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let rows = 4096;
        let table = Var::from_tensor(&full(&[3, 8], 1., dtype, device)?)?;
        let ids = Tensor::full(1u32, rows, device)?;
        let grads = embedding(&table, &ids)?.backward()?;
        let mut expected = vec![0.; 24];
        expected[8..16].fill(rows as f64);
        close(
            "embedding",
            grads.get(&table).context("dweight")?,
            &expected,
            0.,
        )?;

        let weight = Var::from_tensor(&full(&[8], 1., dtype, device)?)?;
        let x = full(&[rows, 8], 1., dtype, device)?;
        let grads = rms_norm(&x, &weight, 0.)?.backward()?;
        close(
            "rms_norm",
            grads.get(&weight).context("dweight")?,
            &[rows as f64; 8],
            0.,
        )
    })
}

/// A weight that is used twice, as tied embeddings are.
#[test]
fn a_table_that_is_also_the_output_gets_both_gradients() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let case = ops::embedding([7, 8], &[5], dtype, device)?;
        let (ids, table) = (&case.constants[0], Var::from_tensor(&case.operands[0])?);
        let apart = [
            Var::from_tensor(&table.copy()?.detach())?,
            Var::from_tensor(&table.copy()?.detach())?,
        ];
        let loss = |table: &Tensor, output: &Tensor| {
            cross_entropy(&linear(&embedding(table, ids)?, output)?, ids)
        };
        let tied = loss(&table, &table)?.backward()?;
        let grads = loss(&apart[0], &apart[1])?.backward()?;
        let grad = |var| grads.get(var).context("no gradient");
        let sum = (grad(&apart[0])? + grad(&apart[1])?)?;
        let limit = if dtype == DType::F64 { 1e-15 } else { 0.01 };
        close(
            "tied",
            tied.get(&table).context("no gradient")?,
            &host(&sum)?,
            limit,
        )
    })
}
