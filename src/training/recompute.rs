//! Activations that are computed again in the backward in place of being kept.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, Var, bail};

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;

/// Runs parts of a model without keeping their activations: of each part its input alone stays in memory, and the
/// backward runs it forward once more.
///
/// A model whose blocks run like this needs the memory of all blocks' inputs and of one block's activations, for one
/// more forward, a third of the time of a step. The gradients are the same bits, where the ops themselves give the same
/// bits on every run and no weight is used both in a part and outside of all parts (its contributions would be added
/// in another order).
///
/// candle hands the backward of an op the gradients of its inputs only, and a part's weights are none: so they are
/// collected here, and **gradients come from [`Recompute::backward`]** in place of `loss.backward()`, which has none
/// of those weights.
///
/// # Example
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_flash_gqa::training::{Recompute, linear};
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let weight = Var::randn(0f32, 1., (16, 16), &device)?;
/// let x = Tensor::randn(0f32, 1., (4, 16), &device)?;
///
/// let recompute = Recompute::default();
/// let of_block = weight.as_tensor().clone();
/// let out = recompute.run(&x, move |x| linear(x, &of_block)?.silu())?;
/// let grads = recompute.backward(&out.sqr()?.mean_all()?)?;
/// assert!(grads.get(&weight).is_some());
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
#[derive(Debug, Clone, Default)]
pub struct Recompute {
    /// Of the variables that parts used, while a backward runs.
    grads: Arc<Mutex<GradStore>>,
}

impl Recompute {
    /// Runs a part of a model.
    ///
    /// # Arguments
    ///
    /// * `x`: the input, which is kept.
    /// * `part`: called now, and again by the backward; it must compute the same both times. Whatever it holds
    ///   (weights, positions, a mask) stays in memory until the graph is dropped.
    ///
    /// # Returns
    ///
    /// What `part` returns, contiguous; differentiable in `x` and in every variable that `part` uses.
    ///
    /// # Errors
    ///
    /// Those of `part`.
    pub fn run(
        &self,
        x: &Tensor,
        part: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let out = part(&x.detach())?;
        if !x.track_op() && !out.track_op() {
            return Ok(out);
        }
        let op = Rerun {
            part,
            grads: self.grads.clone(),
            out: Mutex::new(Some(out.detach())),
        };
        // The graph of the part, and with it every activation.
        drop(out);
        match x.track_op() {
            true => x.apply_op1(op),
            // Only an op on a tracked tensor is part of a graph.
            false => Var::from_tensor(x)?.apply_op1(op),
        }
    }

    /// Runs the backward of a loss; the gradients of variables inside of parts are among those returned.
    ///
    /// # Errors
    ///
    /// Those of `loss.backward()`, and of parts that are run again.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        // What a `loss.backward()` of the caller's, or one that failed, has left.
        mem::take(&mut *lock(&self.grads));
        let grads = loss.backward();
        let of_parts = mem::take(&mut *lock(&self.grads));
        let mut grads = grads?;
        grads.extend(of_parts)?;
        Ok(grads)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part that has run.
struct Rerun<Part> {
    part: Part,
    grads: Arc<Mutex<GradStore>>,
    /// What it returned, until the op's forward takes it.
    out: Mutex<Option<Tensor>>,
}

impl<Part> Rerun<Part> {
    fn take_out(&self) -> Result<Tensor> {
        match lock(&self.out).take() {
            Some(out) => Ok(out),
            None => bail!("recompute was applied twice"),
        }
    }
}

impl<Part: Fn(&Tensor) -> Result<Tensor>> CustomOp1 for Rerun<Part> {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn cpu_fwd(&self, _x: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = self.take_out()?;
        let (storage, layout) = out.storage_and_layout();
        copy(cpu::cpu_storage(&storage)?, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _x: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let out = self.take_out()?;
        let (storage, layout) = out.storage_and_layout();
        copy(cuda::cuda_storage(&storage)?, layout)
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, dout: &Tensor) -> Result<Option<Tensor>> {
        let input = Var::from_tensor(&x.detach())?;
        let out = (self.part)(&input)?.apply_op1(Seed(dout.clone()))?;
        let mut grads = out.backward()?;
        let dx = grads.remove(&input);
        // Of variables alone, and without the graphs that candle's gradients may have: with those each part's activations
        // would stay until the end of the backward, and so would the gradients of its constants.
        let mut of_variables = GradStore::default();
        for node in out.sorted_nodes() {
            if node.is_variable()
                && let Some(grad) = grads.remove(node)
            {
                of_variables.insert(node, grad.detach());
            }
        }
        lock(&self.grads).extend(of_variables)?;
        match dx {
            Some(dx) => Ok(Some(dx.detach())),
            // candle wants a gradient of every tracked input.
            None => Ok(Some(x.zeros_like()?.detach())),
        }
    }
}

/// A contiguous copy: an op returns a storage of its own.
fn copy<S: BackendStorage<Device: BackendDevice<Storage = S>>>(
    storage: &S,
    layout: &Layout,
) -> Result<(S, Shape)> {
    let shape = layout.shape().clone();
    // CUDA has no allocation of nothing.
    let len = Shape::from(shape.elem_count().max(1));
    // SAFETY: the copy writes every number of the shape.
    let mut copy = unsafe { storage.device().alloc_uninit(&len, storage.dtype())? };
    storage.copy_strided_src(&mut copy, 0, layout)?;
    Ok((copy, shape))
}

/// Something to run a backward from that begins with a given gradient.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, out: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        nothing(out)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, out: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        nothing(out)
    }

    fn bwd(&self, _out: &Tensor, _seed: &Tensor, _ones: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// The value of a seed, which nobody asks for.
fn nothing<S: BackendStorage<Device: BackendDevice<Storage = S>>>(out: &S) -> Result<(S, Shape)> {
    let shape = Shape::from(());
    Ok((out.device().zeros_impl(&shape, out.dtype())?, shape))
}
