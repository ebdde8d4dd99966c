//! The ops around the attention that a transformer's training spends its time in, each as one kernel per pass
//! where candle's differentiable operations are chains of them.
//!
//! ```text
//! rms_norm           x / sqrt(mean(x^2) + eps) * weight
//! rope               rotary positions on (batch, seqlen, num_heads, head_dim)
//! linear             x · weightᵀ
//! linear_to_heads    the same, to (batch, seqlen, num_heads, head_dim)
//! linear_from_heads  the same, from there
//! swiglu             silu(gate) * up
//! swiglu_linear      silu(x · gate_weightᵀ) * (x · up_weightᵀ)
//! embedding          rows of a table
//! cross_entropy      mean of lse - logits[target]
//! ```
//!
//! After the backward come the gradients of a whole model and the weights, in place and one pass over memory each:
//!
//! ```text
//! add_grad           sum += grad, over micro-batches
//! grad_norm          of all gradients as one vector, to clip by
//! adamw_step         moments, F32 master and its rounded copy at once
//! ```
//!
//! Where memory is short, [`Recompute`] runs a part of a model without keeping its activations.
//!
//! # Conventions
//!
//! * They are differentiable in every operand that is not said to be a constant, on the CPU and on CUDA
//!   (compute capability 8.0 or more), in F16, BF16 and F32, on the CPU in F64 too. Operands of one call have
//!   one dtype and one device.
//! * Arithmetic is in f32 and each result is rounded once; in f64 for F64, as are sums on the CPU. Not so the matrix
//!   products of [`linear`] and its like, which are candle's: in F16 on the CPU those round within long sums.
//! * Every result is the same bits on every run, and on the CPU with any number of threads: sums are taken in a
//!   fixed order, without atomic additions.
//! * Any strides are taken. [`rope`] reads rows in place; the others copy what is not contiguous.
//! * Misuse is an error before any work. What only the values can tell (a target or an id that is too large) is
//!   an error on the CPU and NaN on CUDA, where to ask would wait for the device.
//!
//! # Example
//!
//! ```
//! use candle_core::{DType, Device, Tensor, Var};
//! use candle_flash_gqa::training::{cross_entropy, embedding, linear, rms_norm};
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! let table = Var::randn(0f32, 1., (100, 16), &device)?;
//! let norm = Var::ones(16, DType::F32, &device)?;
//! let ids = Tensor::new(&[[3u32, 14, 15]], &device)?;
//! let targets = Tensor::new(&[14u32, 15, 92], &device)?;
//!
//! let hidden = rms_norm(&embedding(&table, &ids)?, &norm, 1e-5)?;
//! let logits = linear(&hidden, &table)?.flatten_to(1)?;
//! let grads = cross_entropy(&logits, &targets)?.backward()?;
//! assert_eq!(grads.get(&table).unwrap().dims(), [100, 16]);
//! # Ok(())
//! # }
//! ```

/// Calls a function of `cpu::training` or `cuda::training` on tensors.
macro_rules! on_device {
    ($device:expr, $module:ident::$function:ident($($args:expr),*)) => {
        match $device {
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(_) => crate::cuda::training::$module::$function($($args),*),
            _ => crate::cpu::training::$module::$function($($args),*),
        }
    };
}

pub(crate) mod adamw;
mod check;
mod cross_entropy;
mod embedding;
mod grads;
mod in_place;
mod linear;
mod recompute;
mod rms_norm;
pub(crate) mod rope;
mod swiglu;
mod swiglu_linear;

use std::sync::OnceLock;

use candle_core::{Result, Tensor, bail};

pub use adamw::{AdamWOptions, AdamWState, adamw_step};
pub use cross_entropy::cross_entropy;
pub use embedding::embedding;
pub use grads::{add_grad, grad_norm};
pub use linear::{linear, linear_from_heads, linear_to_heads};
pub use recompute::Recompute;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use swiglu::swiglu;
pub use swiglu_linear::swiglu_linear;

/// What the forward of an op leaves for its backward. Each call makes an op of its own, so it is filled once.
#[derive(Default)]
struct Kept(OnceLock<Tensor>);

impl Kept {
    fn fill(&self, tensor: Tensor) {
        // The op is applied once, so it was empty.
        let _ = self.0.set(tensor);
    }

    fn get(&self) -> Result<&Tensor> {
        match self.0.get() {
            Some(tensor) => Ok(tensor),
            None => bail!("a backward before its forward"),
        }
    }
}

/// Computes the gradient of an operand, if somebody will ask: candle adds up whatever a backward returns.
fn if_tracked(operand: &Tensor, grad: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
    operand.track_op().then(grad).transpose()
}
