//! One step of AdamW.

use candle_core::{DType, Result, Tensor, bail};

use super::check::{self, Named};
use super::in_place;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// The settings of an [`adamw_step`].
#[derive(Debug, Clone, PartialEq)]
pub struct AdamWOptions {
    pub learning_rate: f64,
    /// How much of the first moment is kept, at least 0 and below 1.
    pub beta1: f64,
    /// How much of the second moment is kept, at least 0 and below 1.
    pub beta2: f64,
    /// Added to the root of the second moment, at least 0. With 0, a number whose gradients were all 0 becomes
    /// `0 / 0`, NaN.
    pub eps: f64,
    /// The share of the weight that a step at learning rate 1 takes away.
    pub weight_decay: f64,
    /// The number of this step, counted from 1.
    pub step: usize,
    /// Factor on the gradient before anything else: that of clipping, of a mean over micro-batches, or both.
    pub grad_scale: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            step: 1,
            grad_scale: 1.,
        }
    }
}

impl AdamWOptions {
    fn check(&self) -> Result<()> {
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0. ..1.).contains(&beta) {
                bail!("adamw_step: {name} must be at least 0 and below 1, got {beta:e}");
            }
        }
        if !(self.eps >= 0. && self.eps.is_finite()) {
            bail!(
                "adamw_step: eps must be finite and at least 0, got {:e}",
                self.eps
            );
        }
        for (name, factor) in [
            ("learning_rate", self.learning_rate),
            ("weight_decay", self.weight_decay),
            ("grad_scale", self.grad_scale),
        ] {
            if !factor.is_finite() {
                bail!("adamw_step: {name} must be finite, got {factor}");
            }
        }
        if self.step == 0 {
            bail!("adamw_step: step is counted from 1, got 0");
        }
        Ok(())
    }
}

/// A weight with all that an [`adamw_step`] updates of it.
#[derive(Debug, Clone, Copy)]
pub struct AdamWState<'a> {
    /// The weight, F32 (F64 for F64 gradients).
    pub master: &'a Tensor,
    /// Zeros before the first step; shape and dtype of `master`.
    pub first_moment: &'a Tensor,
    /// The same.
    pub second_moment: &'a Tensor,
    /// The variable of F16 or BF16 that the model computes with, which becomes the rounded `master`. Absent where
    /// `master` is that variable.
    pub rounded: Option<&'a Tensor>,
}

/// Takes one step of AdamW with one weight, in place, in one pass over memory.
///
/// ```text
/// g             = grad_scale * grad
/// first_moment  = beta1 * first_moment  + (1 - beta1) * g
/// second_moment = beta2 * second_moment + (1 - beta2) * g^2
/// master        = (1 - learning_rate * weight_decay) * master - learning_rate * m / (sqrt(v) + eps)
/// ```
///
/// where `m = first_moment / (1 - beta1^step)` and `v = second_moment / (1 - beta2^step)`.
///
/// A half type has 8 or 11 bits, and an update is often less than half of the last one: so it adds up in an F32
/// master, and the variable that the model computes with is rounded from it each time.
///
/// # Arguments
///
/// * `state`: contiguous tensors of one shape, each of a storage of its own. [`Var`](candle_core::Var)s, or any
///   tensors: whatever shares their storage sees the new values.
/// * `grad`: of the same shape; F16, BF16 or F32, on the CPU F64 too, whatever the dtype of `rounded`.
///
/// # Errors
///
/// Shapes or devices that differ, dtypes other than those above, tensors that are not contiguous or share their
/// storage, a device without kernels, settings out of their range or not finite, `step` 0. Nothing is changed then.
///
/// # Example
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_flash_gqa::training::{AdamWOptions, AdamWState, adamw_step};
/// # fn main() -> candle_core::Result<()> {
/// let weight = Var::new(&[1f32, -2.], &Device::Cpu)?;
/// let grad = Tensor::new(&[0.5f32, -0.5], &Device::Cpu)?;
/// let state = AdamWState {
///     master: &weight,
///     first_moment: &weight.zeros_like()?,
///     second_moment: &weight.zeros_like()?,
///     rounded: None,
/// };
/// let options = AdamWOptions { learning_rate: 0.1, weight_decay: 0., ..Default::default() };
/// adamw_step(&state, &grad, &options)?;
/// // The first step is as long as the learning rate, whatever the gradient's size.
/// assert!((weight.to_vec1::<f32>()?[0] - 0.9).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", 2017, arXiv 1711.05101, algorithm 2; the
/// F32 master is that of P. Micikevicius et al., "Mixed Precision Training", 2017, arXiv 1710.03740, section 3.1.
pub fn adamw_step(state: &AdamWState<'_>, grad: &Tensor, options: &AdamWOptions) -> Result<()> {
    let written = check_operands(state, grad)?;
    options.check()?;
    let coefficients = Coefficients::new(options);
    let grad = grad.contiguous()?;
    let tensors: Vec<&Tensor> = written.into_iter().map(|(_, tensor)| tensor).collect();
    in_place::lock("adamw_step", &tensors, |locked| match grad.device() {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => {
            cuda::training::adamw::step(locked.cuda, &grad, &coefficients)
        }
        _ => cpu::training::adamw::step(locked.cpu, &grad, &coefficients),
    })
}

/// The tensors that are written to, master and moments first.
fn check_operands<'a>(state: &AdamWState<'a>, grad: &Tensor) -> Result<Vec<Named<'a>>> {
    let mut written = vec![
        ("master", state.master),
        ("first_moment", state.first_moment),
        ("second_moment", state.second_moment),
    ];
    check::has_kernel("adamw_step", grad)?;
    let wide = match grad.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    for (name, tensor) in &written {
        check::dtype("adamw_step", (name, tensor), &[wide])?;
    }
    if let Some(rounded) = state.rounded {
        check::dtype(
            "adamw_step",
            ("rounded", rounded),
            &[DType::F16, DType::BF16],
        )?;
        check::dtype("adamw_step", ("master", state.master), &[DType::F32])?;
        written.push(("rounded", rounded));
    }
    for &named in &written {
        check::same_shape("adamw_step", ("grad", grad), named)?;
        check::same_device("adamw_step", ("grad", grad), named)?;
    }
    in_place::check("adamw_step", &written, ("grad", grad))?;
    Ok(written)
}

/// What is the same for every number of a step.
pub(crate) struct Coefficients {
    pub(crate) grad_scale: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    /// What weight decay leaves.
    pub(crate) kept: f64,
    /// The learning rate over the first moment's correction.
    pub(crate) step_size: f64,
    /// One over the second moment's correction.
    pub(crate) second_scale: f64,
}

impl Coefficients {
    fn new(options: &AdamWOptions) -> Self {
        let correction = |beta: f64| 1. - beta.powf(options.step as f64);
        Self {
            grad_scale: options.grad_scale,
            beta1: options.beta1,
            beta2: options.beta2,
            eps: options.eps,
            kept: 1. - options.learning_rate * options.weight_decay,
            step_size: options.learning_rate / correction(options.beta1),
            second_scale: 1. / correction(options.beta2),
        }
    }
}
