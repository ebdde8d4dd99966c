//! The kernels of training: addresses, outputs, launches.
//!
//! One file an op, as in [`cpu::training`](crate::cpu::training). Inputs are contiguous unless said otherwise,
//! and checked; everything is launched on their own stream.

pub(crate) mod adamw;
pub(crate) mod cross_entropy;
pub(crate) mod embedding;
mod ffi;
pub(crate) mod grads;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu;

use std::ffi::c_int;
use std::ops::Deref;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::{CudaDevice, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};

use super::ffi::{ELEMENT_BF16, ELEMENT_F16, Launch};
use super::{Input, cuda_storage, error_text, strides_of};

/// The element types of the kernels.
pub(crate) const DTYPES: [DType; 3] = [DType::F16, DType::BF16, DType::F32];

/// `ELEMENT_F32` of kernels/params.h.
const ELEMENT_F32: i32 = 2;

/// `ElementType` of kernels/params.h.
fn element(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F16 => Ok(ELEMENT_F16),
        DType::BF16 => Ok(ELEMENT_BF16),
        DType::F32 => Ok(ELEMENT_F32),
        dtype => bail!("no CUDA kernel for dtype {dtype:?}"),
    }
}

/// The operands of one launch: their addresses, and the guards that keep its place among the work on them.
struct Operands<'a> {
    stream: &'a CudaStream,
    guards: Vec<SyncOnDrop<'a>>,
}

/// Runs `$call` on the slice of a storage, of whichever element type.
macro_rules! on_slice {
    ($slice:expr, $name:ident => $call:expr) => {
        match $slice {
            CudaStorageSlice::F16($name) => $call,
            CudaStorageSlice::BF16($name) => $call,
            CudaStorageSlice::F32($name) => $call,
            CudaStorageSlice::U32($name) => $call,
            _ => bail!("no CUDA kernel for this dtype"),
        }
    };
}

impl<'a> Operands<'a> {
    fn new(stream: &'a CudaStream) -> Self {
        Self {
            stream,
            guards: vec![],
        }
    }

    /// The address of the first number of an input.
    fn read<T>(&mut self, (storage, layout): Input<'a>) -> Result<*const T> {
        let (base, guard) = on_slice!(&storage.slice, slice => slice.device_ptr(self.stream));
        self.guards.push(guard);
        let offset = layout.start_offset() * storage.dtype().size_in_bytes();
        Ok((base + offset as u64) as *const T)
    }

    /// The same of a tensor, by what [`Tensor::storage_and_layout`] gave for it.
    fn read_tensor<T>(
        &mut self,
        (storage, layout): &'a (impl Deref<Target = Storage>, &Layout),
    ) -> Result<*const T> {
        self.read((cuda_storage(storage)?, layout))
    }

    /// The address of an output.
    fn write<T>(&mut self, storage: &'a mut CudaStorage) -> Result<*mut T> {
        let (base, guard) =
            on_slice!(&mut storage.slice, slice => slice.device_ptr_mut(self.stream));
        self.guards.push(guard);
        Ok(base as *mut T)
    }

    /// The address of the first number of a tensor that is updated in place.
    fn update<T>(&mut self, (storage, layout): &'a mut Updated<'_>) -> Result<*mut T> {
        let offset = layout.start_offset() * storage.dtype().size_in_bytes();
        let base: *mut u8 = self.write(storage)?;
        Ok(base.wrapping_add(offset).cast())
    }

    /// Launches a kernel on the stream of its operands.
    ///
    /// # Safety
    ///
    /// The pointers of `params` come from `self`, and all that the kernel reads or writes at its sizes and strides
    /// lies within them.
    unsafe fn launch<P: std::fmt::Debug>(
        self,
        name: &str,
        launch: Launch<P>,
        params: P,
    ) -> Result<()> {
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: the context is current, its allocations live as long as the guards, and the rest is the
        // caller's.
        let status = unsafe { launch(&params, self.stream.cu_stream()) };
        check(status, name, &params)
    }
}

/// A storage that is written to, with the layout of the tensor that is seen in it.
type Updated<'a> = (&'a mut CudaStorage, &'a Layout);

/// Makes the status of a launcher an error that names the kernel and its problem.
fn check(status: c_int, kernel: &str, params: &impl std::fmt::Debug) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => bail!("{kernel} failed for {params:?}: {}", error_text(status)),
    }
}

/// An output that a kernel will write.
///
/// # Safety
///
/// The caller has every number written before it is read.
unsafe fn uninit(device: &CudaDevice, len: usize, dtype: DType) -> Result<CudaStorage> {
    // CUDA has no allocation of nothing.
    let shape = Shape::from(len.max(1));
    // SAFETY: the caller's.
    unsafe { device.alloc_uninit(&shape, dtype) }
}

/// A contiguous tensor of what a kernel has written.
pub(crate) fn tensor(storage: CudaStorage, shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// The rows of a tensor along its last dimension, and their length.
fn rows_and_cols(layout: &Layout) -> (usize, usize) {
    let cols = layout.dims().last().copied().unwrap_or(1);
    (layout.shape().elem_count() / cols.max(1), cols)
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::ffi::*;

    /// The twins of kernels/training/params.h have not drifted.
    #[test]
    fn structs_have_the_layout_of_the_kernels() {
        let ours = [
            size_of::<RmsNormParams>(),
            offset_of!(RmsNormParams, partial),
            offset_of!(RmsNormParams, element),
            size_of::<RopeParams>(),
            offset_of!(RopeParams, x_strides),
            offset_of!(RopeParams, element),
            size_of::<SwigluParams>(),
            offset_of!(SwigluParams, element),
            size_of::<CrossEntropyParams>(),
            offset_of!(CrossEntropyParams, dlogits),
            offset_of!(CrossEntropyParams, element),
            size_of::<EmbeddingParams>(),
            offset_of!(EmbeddingParams, element),
            size_of::<AdamWParams>(),
            offset_of!(AdamWParams, len),
            offset_of!(AdamWParams, rounded_element),
            size_of::<AddGradParams>(),
            offset_of!(AddGradParams, element),
            size_of::<GradNormParams>(),
            offset_of!(GradNormParams, element),
            ROWS_TOGETHER,
            NUMBERS_TOGETHER,
            super::ELEMENT_F32 as usize,
        ];
        let mut theirs = [0; 23];
        // SAFETY: it writes exactly as many numbers as kernels/training/layout.cu lists, 23.
        unsafe { flash_training_layout(theirs.as_mut_ptr()) };
        assert_eq!(ours, theirs);
    }
}
