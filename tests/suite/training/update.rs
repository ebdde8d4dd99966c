//! What follows a backward: sums of gradients, their norm, and AdamW, against the formulas in f64.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_gqa::training::{AdamWOptions, AdamWState, adamw_step, add_grad, grad_norm};

use super::case::for_each_dtype;
use crate::support::compare::{close, close_to, identical};
use crate::support::tensors::{from_host, full, host, normal};
use crate::support::verify::unit_roundoff;

/// Lengths on and off the vectors, the blocks, and the pieces of a norm.
const LENGTHS: [usize; 7] = [1, 7, 8, 1000, 2049, 16384, 40_000];

fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Master, moments and, for a half type, the rounded weight.
struct Weight {
    master: Tensor,
    moments: [Tensor; 2],
    rounded: Option<Tensor>,
}

impl Weight {
    fn new(dims: &[usize], dtype: DType, rounded: Option<DType>, device: &Device) -> Result<Self> {
        let zeros = || full(dims, 0., dtype, device);
        Ok(Self {
            master: normal(dims, 1., dtype, device, 1)?,
            moments: [zeros()?, zeros()?],
            rounded: rounded
                .map(|dtype| full(dims, 0., dtype, device))
                .transpose()?,
        })
    }

    fn step(&self, grad: &Tensor, options: &AdamWOptions) -> candle_core::Result<()> {
        let state = AdamWState {
            master: &self.master,
            first_moment: &self.moments[0],
            second_moment: &self.moments[1],
            rounded: self.rounded.as_ref(),
        };
        adamw_step(&state, grad, options)
    }
}

fn options(step: usize) -> AdamWOptions {
    AdamWOptions {
        learning_rate: 0.01,
        weight_decay: 0.1,
        step,
        grad_scale: 0.5,
        ..Default::default()
    }
}

/// The formula of the documentation on `[master, first_moment, second_moment]`.
fn formula(state: &mut [Vec<f64>; 3], grad: &[f64], options: &AdamWOptions) {
    let [master, first, second] = state;
    let correction = |beta: f64| 1. - beta.powi(options.step as i32);
    for (i, grad) in grad.iter().enumerate() {
        let g = options.grad_scale * grad;
        first[i] = options.beta1 * first[i] + (1. - options.beta1) * g;
        second[i] = options.beta2 * second[i] + (1. - options.beta2) * g * g;
        let m = first[i] / correction(options.beta1);
        let v = second[i] / correction(options.beta2);
        let decayed = (1. - options.learning_rate * options.weight_decay) * master[i];
        master[i] = decayed - options.learning_rate * m / (v.sqrt() + options.eps);
    }
}

#[test]
fn adamw_equals_the_formula() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let copies = match dtype {
            DType::F64 => vec![None],
            _ => vec![None, Some(DType::F16), Some(DType::BF16)],
        };
        for (len, rounded) in LENGTHS
            .iter()
            .flat_map(|len| copies.iter().map(move |copy| (len, copy)))
        {
            let weight = Weight::new(&[*len], wide(dtype), *rounded, device)?;
            let mut state = [host(&weight.master)?, vec![0.; *len], vec![0.; *len]];
            for step in 1..=4 {
                let grad = normal(&[*len], 1., dtype, device, 10 + step as u64)?;
                weight.step(&grad, &options(step))?;
                formula(&mut state, &host(&grad)?, &options(step));
            }
            let [first, second] = &weight.moments;
            let all = [
                ("master", &weight.master),
                ("first", first),
                ("second", second),
            ];
            for ((name, ours), truth) in all.into_iter().zip(&state) {
                close(name, ours, truth, 100. * unit_roundoff(wide(dtype)))?;
            }
            if let Some(ours) = &weight.rounded {
                identical("rounded", ours, &weight.master.to_dtype(ours.dtype())?)?;
            }
        }
        Ok(())
    })
}

/// The second numbers of longer storages, which are left alone around them.
#[test]
fn adamw_updates_views_and_nothing_beside_them() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let view = |storage: &Tensor| storage.narrow(0, 1, 30);
        let expected = Weight::new(&[32], wide(dtype), None, device)?;
        let storages = Weight::new(&[32], wide(dtype), None, device)?;
        let grad = normal(&[32], 1., dtype, device, 3)?;
        expected.step(&grad, &options(1))?;
        let [first, second] = &storages.moments;
        let views = Weight {
            master: view(&storages.master)?,
            moments: [view(first)?, view(second)?],
            rounded: None,
        };
        views.step(&view(&grad)?, &options(1))?;
        identical("inside", &views.master, &view(&expected.master)?)?;
        let before = normal(&[32], 1., wide(dtype), device, 1)?;
        for outside in [0, 31] {
            let at = |tensor: &Tensor| tensor.narrow(0, outside, 1);
            identical("outside", &at(&storages.master)?, &at(&before)?)?;
        }
        Ok(())
    })
}

/// As in a model: matrices, gradients of any layout.
#[test]
fn adamw_reads_gradients_of_any_layout() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let [expected, ours] = [0; 2].map(|_| Weight::new(&[24, 16], wide(dtype), None, device));
        let (expected, ours) = (expected?, ours?);
        let grad = normal(&[16, 24], 1., dtype, device, 3)?.t()?;
        expected.step(&grad.contiguous()?, &options(1))?;
        ours.step(&grad, &options(1))?;
        identical("master", &ours.master, &expected.master)
    })
}

#[test]
fn a_nan_in_a_gradient_reaches_its_own_weight_alone() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let weight = Weight::new(&[16], wide(dtype), None, device)?;
        let mut grad = vec![1.; 16];
        grad[5] = f64::NAN;
        weight.step(&from_host(&grad, &[16], dtype, device)?, &options(1))?;
        for (i, x) in host(&weight.master)?.into_iter().enumerate() {
            ensure!(x.is_nan() == (i == 5), "{x} at {i}");
        }
        Ok(())
    })
}

#[test]
fn gradients_add_up_in_a_wider_type() -> Result<()> {
    for_each_dtype(|device, dtype| {
        for len in LENGTHS {
            let sum = full(&[len], 1024., wide(dtype), device)?;
            let grad = normal(&[len], 1., dtype, device, 5)?;
            for _ in 0..3 {
                add_grad(&sum, &grad)?;
            }
            let truth: Vec<f64> = host(&grad)?.iter().map(|x| 1024. + 3. * x).collect();
            close("sum", &sum, &truth, 4096. * unit_roundoff(wide(dtype)))?;
        }
        Ok(())
    })
}

#[test]
fn the_norm_is_that_of_all_gradients_as_one_vector() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let mut grads = vec![normal(&[], 1., dtype, device, 1)?];
        for (i, len) in LENGTHS.iter().enumerate() {
            grads.push(normal(&[*len], 1. + i as f64, dtype, device, 2 + i as u64)?);
        }
        grads.push(normal(&[30, 70], 2., dtype, device, 20)?.t()?);
        for count in 1..=grads.len() {
            let some: Vec<&Tensor> = grads[..count].iter().collect();
            let norm = grad_norm(&some)?;
            let mut square = 0.;
            for grad in &some {
                square += host(grad)?.iter().map(|x| x * x).sum::<f64>();
            }
            let truth = square.sqrt();
            ensure!(norm.dtype() == wide(dtype) && norm.dims().is_empty());
            close(
                "norm",
                &norm,
                &[truth],
                64. * truth * unit_roundoff(wide(dtype)),
            )?;
            identical("norm again", &norm, &grad_norm(&some)?)?;
        }
        Ok(())
    })
}

#[test]
fn numbers_that_a_person_can_check() -> Result<()> {
    for_each_dtype(|device, dtype| {
        let tensor = |numbers: &[f64]| from_host(numbers, &[numbers.len()], dtype, device);
        close(
            "norm",
            &grad_norm(&[&tensor(&[2., 3.])?, &tensor(&[6.])?])?,
            &[7.],
            1e-6,
        )?;
        for broken in [f64::NAN, f64::INFINITY] {
            let norm = host(&grad_norm(&[&tensor(&[1.; 99])?, &tensor(&[broken])?])?)?[0];
            ensure!(!norm.is_finite(), "{broken} gave {norm}");
        }
        let sum = full(&[2], 1., wide(dtype), device)?;
        add_grad(&sum, &tensor(&[2., -4.])?)?;
        close("sum", &sum, &[3., -3.], 0.)?;
        // The first step goes as far as the learning rate, against the gradient.
        let weight = full(&[2], 1., wide(dtype), device)?;
        let state = AdamWState {
            master: &weight,
            first_moment: &weight.zeros_like()?,
            second_moment: &weight.zeros_like()?,
            rounded: None,
        };
        let options = AdamWOptions {
            learning_rate: 0.25,
            weight_decay: 0.,
            ..Default::default()
        };
        adamw_step(&state, &tensor(&[2., -4.])?, &options)?;
        close("master", &weight, &[0.75, 1.25], 1e-6)
    })
}

#[test]
fn any_number_of_threads_gives_the_same_bits() -> Result<()> {
    let device = &Device::Cpu;
    let grad = normal(&[100_000], 1., DType::BF16, device, 1)?;
    let mut expected: Option<[Tensor; 2]> = None;
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()?;
        let ours = pool.install(|| -> Result<_> {
            let weight = Weight::new(&[100_000], DType::F32, None, device)?;
            weight.step(&grad, &options(1))?;
            Ok([weight.master, grad_norm(&[&grad])?])
        })?;
        if let Some(expected) = &expected {
            identical("master", &ours[0], &expected[0])?;
            close_to("norm", &ours[1], &expected[1], 0.)?;
        }
        expected = Some(ours);
    }
    Ok(())
}
