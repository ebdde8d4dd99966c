//! What is refused, before any work, with what was got and what was expected.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_gqa::training::*;

use crate::support::device::{for_each_device, gpu};

fn zeros(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    // A view, so that there may be none.
    let count = dims.iter().product::<usize>();
    let numbers = Tensor::zeros(count + 1, dtype, device)?.narrow(0, 0, count)?;
    Ok(numbers.reshape(dims)?)
}

fn refused(result: candle_core::Result<Tensor>, parts: &[&str]) -> Result<()> {
    let message = match result {
        Ok(out) => anyhow::bail!("{parts:?} gave {:?}", out.dims()),
        Err(error) => error.to_string(),
    };
    for part in parts {
        ensure!(message.contains(part), "{part} is not in: {message}");
    }
    Ok(())
}

#[test]
fn shapes_that_do_not_match() -> Result<()> {
    for_each_device(|device| {
        let f = |dims: &[usize]| zeros(dims, DType::F32, device);
        let u = |dims: &[usize]| zeros(dims, DType::U32, device);

        refused(rms_norm(&f(&[])?, &f(&[1])?, 1e-5), &["rms_norm: x", "[]"])?;
        refused(
            rms_norm(&f(&[3, 0])?, &f(&[0])?, 1e-5),
            &["rms_norm: x", "[3, 0]"],
        )?;
        refused(
            rms_norm(&f(&[3, 8])?, &f(&[4])?, 1e-5),
            &["rms_norm: weight", "[8]", "[4]"],
        )?;
        refused(
            rms_norm(&f(&[3, 8])?, &f(&[1, 8])?, 1e-5),
            &["rms_norm: weight", "[1, 8]"],
        )?;

        let x = f(&[2, 5, 3, 8])?;
        let angles = f(&[5, 4])?;
        refused(
            rope(&f(&[5, 3, 8])?, &angles, &angles),
            &["rope: x", "4 dimensions", "[5, 3, 8]"],
        )?;
        refused(
            rope(&f(&[2, 5, 3, 7])?, &angles, &angles),
            &["rope: head_dim", "even", "7"],
        )?;
        refused(
            rope(&f(&[2, 5, 3, 0])?, &angles, &angles),
            &["rope: head_dim", "at least 2", "0"],
        )?;
        for wrong in [&[4, 4][..], &[5, 8], &[3, 5, 4], &[1, 5, 4], &[5]] {
            let shape = format!("{wrong:?}");
            refused(
                rope(&x, &f(wrong)?, &angles),
                &["rope: cos", "[2, 5, 3, 8]", &shape],
            )?;
            refused(
                rope(&x, &angles, &f(wrong)?),
                &["rope: sin", "[2, 5, 3, 8]", &shape],
            )?;
        }

        refused(
            swiglu(&f(&[2, 3])?, &f(&[3, 2])?),
            &["swiglu: gate and up", "[2, 3]", "[3, 2]"],
        )?;

        refused(linear(&f(&[2, 3])?, &f(&[3])?), &["linear: weight", "[3]"])?;
        refused(
            linear(&f(&[2, 3])?, &f(&[3, 4])?),
            &["linear: x", "(4)", "[2, 3]"],
        )?;
        refused(linear(&f(&[])?, &f(&[3, 4])?), &["linear: x", "(4)", "[]"])?;

        refused(
            linear_to_heads(&f(&[2, 3])?, &f(&[8, 3])?, 5),
            &["linear_to_heads: weight", "head_dim 5", "8"],
        )?;
        refused(
            linear_to_heads(&f(&[2, 3])?, &f(&[8, 3])?, 0),
            &["linear_to_heads: weight", "head_dim 0"],
        )?;
        refused(
            linear_to_heads(&f(&[2, 3])?, &f(&[8, 4])?, 4),
            &["linear_to_heads: x", "(4)", "[2, 3]"],
        )?;
        for wrong in [&[5, 24][..], &[24], &[5, 3, 4]] {
            refused(
                linear_from_heads(&f(wrong)?, &f(&[8, 24])?),
                &["linear_from_heads: x", "(24)", &format!("{wrong:?}")],
            )?;
        }
        refused(
            swiglu_linear(&f(&[2, 3])?, &f(&[8, 3])?, &f(&[7, 3])?),
            &["gate_weight and up_weight", "[8, 3]", "[7, 3]"],
        )?;
        refused(
            swiglu_linear(&f(&[2, 3])?, &f(&[8, 4])?, &f(&[8, 4])?),
            &["swiglu_linear: x", "(4)", "[2, 3]"],
        )?;

        refused(
            embedding(&f(&[7])?, &u(&[2])?),
            &["embedding: weight", "[7]"],
        )?;
        refused(
            embedding(&f(&[7, 0])?, &u(&[2])?),
            &["embedding: weight", "[7, 0]"],
        )?;

        refused(
            cross_entropy(&f(&[])?, &u(&[])?),
            &["cross_entropy: logits", "one column", "[]"],
        )?;
        refused(
            cross_entropy(&f(&[2, 3, 4])?, &u(&[6])?),
            &["cross_entropy: targets", "[2, 3]", "[6]"],
        )?;
        refused(
            cross_entropy(&f(&[0, 4])?, &u(&[0])?),
            &["cross_entropy: logits", "one row", "[0, 4]"],
        )?;
        refused(
            cross_entropy(&f(&[3, 0])?, &u(&[3])?),
            &["cross_entropy: logits", "one column", "[3, 0]"],
        )?;
        refused(
            cross_entropy(&f(&[3, 4])?, &u(&[4])?),
            &["cross_entropy: targets", "[3]", "[4]"],
        )
    })
}

#[test]
fn dtypes_that_differ_or_have_no_kernel() -> Result<()> {
    for_each_device(|device| {
        let zeros = |dims: &[usize], dtype| zeros(dims, dtype, device);
        let (wide, narrow) = (DType::F32, DType::BF16);
        let both = ["same dtype", "F32", "BF16"];
        let x = zeros(&[2, 8], wide)?;
        refused(rms_norm(&x, &zeros(&[8], narrow)?, 1e-5), &both)?;
        refused(swiglu(&x, &zeros(&[2, 8], narrow)?), &both)?;
        refused(linear(&x, &zeros(&[3, 8], narrow)?), &both)?;
        let (gate, up) = (zeros(&[3, 8], wide)?, zeros(&[3, 8], narrow)?);
        refused(swiglu_linear(&x, &gate, &up), &both)?;
        let q = zeros(&[1, 2, 1, 8], wide)?;
        refused(
            rope(&q, &zeros(&[2, 4], narrow)?, &zeros(&[2, 4], wide)?),
            &both,
        )?;

        for ids in [DType::I64, DType::F32] {
            let got = format!("{ids:?}");
            let ids = zeros(&[2], ids)?;
            refused(embedding(&x, &ids), &["embedding: ids must be U32", &got])?;
            refused(
                cross_entropy(&x, &ids),
                &["cross_entropy: targets must be U32", &got],
            )?;
        }

        let none = match device.is_cpu() {
            true => DType::U8,
            false => DType::F64,
        };
        let ids = zeros(&[2], DType::U32)?;
        let dtype = format!("no kernel for dtype {none:?}");
        let x = zeros(&[2, 8], none)?;
        let parts = [&dtype[..], "available there", "BF16"];
        refused(rms_norm(&x, &zeros(&[8], none)?, 1e-5), &parts)?;
        refused(swiglu(&x, &x), &parts)?;
        refused(embedding(&x, &ids), &parts)?;
        refused(cross_entropy(&x, &ids), &parts)?;
        let (q, angles) = (zeros(&[1, 2, 1, 8], none)?, zeros(&[2, 4], none)?);
        refused(rope(&q, &angles, &angles), &parts)
    })
}

#[test]
fn tensors_that_cannot_be_updated_in_place() -> Result<()> {
    for_each_device(|device| {
        let f = |dims: &[usize]| zeros(dims, DType::F32, device);
        let [a, b, c, grad] = [f(&[4, 6])?, f(&[4, 6])?, f(&[4, 6])?, f(&[4, 6])?];
        let step = |tensors: [&Tensor; 3], rounded, grad: &Tensor, step| {
            let state = AdamWState {
                master: tensors[0],
                first_moment: tensors[1],
                second_moment: tensors[2],
                rounded,
            };
            let options = AdamWOptions {
                step,
                ..Default::default()
            };
            let done = adamw_step(&state, grad, &options);
            done.and_then(|()| Tensor::zeros((), DType::F32, device))
        };
        let half = zeros(&[4, 6], DType::BF16, device)?;
        let swapped = f(&[6, 4])?;
        refused(
            step([&a, &b, &swapped], None, &grad, 1),
            &["grad and second_moment", "same shape", "[6, 4]"],
        )?;
        refused(
            step([&half, &b, &c], None, &grad, 1),
            &["master must be", "F32", "BF16"],
        )?;
        refused(
            step([&a, &b, &c], Some(&swapped), &grad, 1),
            &["rounded must be", "F16", "F32"],
        )?;
        refused(
            step([&a, &b, &swapped.t()?], None, &grad, 1),
            &["second_moment must be contiguous"],
        )?;
        refused(
            step([&a, &b, &b], None, &grad, 1),
            &["first_moment and second_moment must not share"],
        )?;
        refused(
            step([&a, &b, &c], None, &c.reshape((4, 6))?, 1),
            &["second_moment and grad must not share"],
        )?;
        refused(step([&a, &b, &c], None, &grad, 0), &["from 1", "0"])?;
        step([&a, &b, &c], Some(&half), &grad, 1)?;

        let add = |sum: &Tensor, grad: &Tensor| add_grad(sum, grad).map(|()| sum.clone());
        refused(add(&a, &f(&[24])?), &["sum and grad", "[4, 6]", "[24]"])?;
        refused(add(&half, &grad), &["sum must be", "F32", "BF16"])?;
        refused(add(&a, &a), &["sum and grad must not share"])?;

        refused(grad_norm(&[]), &["at least one gradient"])?;
        refused(grad_norm(&[&a, &half]), &["same dtype", "F32", "BF16"])
    })
}

#[test]
fn settings_that_would_make_every_weight_nan() -> Result<()> {
    let good = AdamWOptions::default();
    let nan = f64::NAN;
    for_each_device(|device| {
        for (part, options) in [
            (
                "beta1 must be at least 0 and below 1, got 1",
                AdamWOptions {
                    beta1: 1.,
                    ..good.clone()
                },
            ),
            (
                "beta1",
                AdamWOptions {
                    beta1: nan,
                    ..good.clone()
                },
            ),
            (
                "beta2 must be at least 0 and below 1, got -",
                AdamWOptions {
                    beta2: -0.1,
                    ..good.clone()
                },
            ),
            (
                "eps must be finite and at least 0",
                AdamWOptions {
                    eps: -1e-8,
                    ..good.clone()
                },
            ),
            (
                "eps",
                AdamWOptions {
                    eps: nan,
                    ..good.clone()
                },
            ),
            (
                "learning_rate must be finite, got NaN",
                AdamWOptions {
                    learning_rate: nan,
                    ..good.clone()
                },
            ),
            (
                "weight_decay",
                AdamWOptions {
                    weight_decay: f64::INFINITY,
                    ..good.clone()
                },
            ),
            (
                "grad_scale",
                AdamWOptions {
                    grad_scale: nan,
                    ..good.clone()
                },
            ),
        ] {
            let master = Tensor::ones(3, DType::F32, device)?;
            let (first_moment, second_moment) = (master.zeros_like()?, master.zeros_like()?);
            let state = AdamWState {
                master: &master,
                first_moment: &first_moment,
                second_moment: &second_moment,
                rounded: None,
            };
            let done = adamw_step(&state, &Tensor::ones(3, DType::F32, device)?, &options);
            refused(done.map(|()| master.clone()), &["adamw_step: ", part])?;
            ensure!(master.to_vec1::<f32>()? == [1.; 3], "changed: {options:?}");
        }
        Ok(())
    })
}

#[test]
fn devices_that_differ() -> Result<()> {
    let Some(gpu) = gpu() else {
        return Ok(());
    };
    let here = |dims: &[usize]| zeros(dims, DType::F32, &gpu);
    let there = |dims: &[usize]| zeros(dims, DType::F32, &Device::Cpu);
    let indices = zeros(&[2], DType::U32, &Device::Cpu)?;
    let parts = ["same device"];
    refused(rms_norm(&here(&[2, 8])?, &there(&[8])?, 1e-5), &parts)?;
    refused(swiglu(&here(&[2, 8])?, &there(&[2, 8])?), &parts)?;
    refused(linear(&here(&[2, 8])?, &there(&[3, 8])?), &parts)?;
    refused(
        rope(&here(&[1, 2, 1, 8])?, &here(&[2, 4])?, &there(&[2, 4])?),
        &parts,
    )?;
    refused(embedding(&here(&[7, 8])?, &indices), &parts)?;
    refused(cross_entropy(&here(&[2, 8])?, &indices), &parts)
}
