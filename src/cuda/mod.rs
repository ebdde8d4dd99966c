//! The CUDA kernels: storage to device pointers, workspace, stream, and status to [`candle_core::Error`].
//!
//! * [`instances`]: the list of compiled kernels, which build.rs reads too; [`dispatch`]: the choice.
//! * [`forward`] fills `FwdParams` and calls one launcher; [`backward`] fills `BwdParams` and calls delta,
//!   main and convert in order.
//! * [`ffi`]: the structs and symbols of the border.
//! * [`training`]: the ops beside the attention, with a border of their own.
//!
//! Everything is launched on the tensor's own device and stream; nothing synchronises.

#[macro_use]
mod instances;
mod backward;
pub(crate) mod dispatch;
mod ffi;
mod forward;
pub(crate) mod training;

use std::ffi::{CStr, c_int, c_void};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};

use crate::params::AttnParams;

pub(crate) use backward::backward;
pub(crate) use forward::{ForwardOutput, forward, lse, lse_tensor};

/// A storage with the layout of the tensor that is seen in it.
pub(crate) type Input<'a> = (&'a CudaStorage, &'a Layout);

/// Runs `$call::<E>($args)` for the element type of a storage that `AttnParams` has admitted.
macro_rules! for_dtype {
    ($dtype:expr, $call:path, ($($args:expr),*)) => {{
        use $call as call;
        match $dtype {
            DType::F16 => call::<f16>($($args),*),
            DType::BF16 => call::<bf16>($($args),*),
            dtype => bail!("flash_attn: no CUDA kernel for dtype {dtype:?}"),
        }
    }};
}
use for_dtype;

/// An element type of the kernels.
trait Element: CudaDType + DeviceRepr {
    /// `ElementType` of kernels/params.h.
    const TYPE: i32;
}

impl Element for f16 {
    const TYPE: i32 = ffi::ELEMENT_F16;
}

impl Element for bf16 {
    const TYPE: i32 = ffi::ELEMENT_BF16;
}

/// A tensor as the kernels read it: rows of `head_dim` numbers at aligned addresses.
struct Rows<'a, E> {
    storage: Borrowed<'a>,
    offset: usize,
    strides: ffi::Strides,
    element: std::marker::PhantomData<E>,
}

enum Borrowed<'a> {
    InPlace(&'a CudaStorage),
    Copied(CudaStorage),
}

impl<'a, E: Element> Rows<'a, E> {
    /// In place if rows are contiguous and 16-byte aligned, else a contiguous copy; so too of one row that is
    /// repeated by a stride of 0, where the kernel's copy engine would have to read it.
    fn new((storage, layout): Input<'a>, by_copy_engine: bool) -> Result<Self> {
        let repeats_a_row = layout.dims()[1] > 1 && layout.stride()[1] == 0;
        let strides = aligned_strides::<E>(storage, layout)?;
        if let Some(strides) = strides.filter(|_| !(by_copy_engine && repeats_a_row)) {
            return Ok(Self {
                storage: Borrowed::InPlace(storage),
                offset: layout.start_offset(),
                strides,
                element: std::marker::PhantomData,
            });
        }
        let device = storage.device();
        // CUDA has no allocation of nothing.
        if layout.shape().elem_count() == 0 {
            return Ok(Self {
                storage: Borrowed::InPlace(storage),
                offset: 0,
                strides: strides_of(&Layout::contiguous(layout.shape())),
                element: std::marker::PhantomData,
            });
        }
        // SAFETY: the copy below writes every element.
        let mut copy = unsafe { device.alloc_uninit(layout.shape(), storage.dtype())? };
        storage.copy_strided_src(&mut copy, 0, layout)?;
        let contiguous = Layout::contiguous(layout.shape());
        Ok(Self {
            storage: Borrowed::Copied(copy),
            offset: 0,
            strides: strides_of(&contiguous),
            element: std::marker::PhantomData,
        })
    }

    fn slice(&self) -> Result<&CudaSlice<E>> {
        match &self.storage {
            Borrowed::InPlace(storage) => storage.as_cuda_slice::<E>(),
            Borrowed::Copied(storage) => storage.as_cuda_slice::<E>(),
        }
    }

    /// The address of the first row; the read ends when the guard is dropped.
    fn pointer<'s>(&'s self, stream: &'s CudaStream) -> Result<(*const c_void, SyncOnDrop<'s>)> {
        let (base, guard) = self.slice()?.device_ptr(stream);
        let address = base + (self.offset * size_of::<E>()) as u64;
        Ok((address as *const c_void, guard))
    }
}

/// The strides of a layout whose rows the kernels can read in place.
fn aligned_strides<E: Element>(
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<Option<ffi::Strides>> {
    let per_copy = 16 / size_of::<E>();
    let dims = layout.dims();
    // Where a dimension has one index, its stride is never used.
    let contiguous_rows = dims[3] <= 1 || layout.stride()[3] == 1;
    let aligned_steps = (0..3).all(|i| dims[i] <= 1 || layout.stride()[i].is_multiple_of(per_copy));
    let stream = storage.device().cuda_stream();
    let (base, _guard) = storage.as_cuda_slice::<E>()?.device_ptr(&stream);
    let address = base as usize + layout.start_offset() * size_of::<E>();
    let is_aligned = contiguous_rows && aligned_steps && address.is_multiple_of(16);
    Ok(is_aligned.then(|| strides_of(layout)))
}

fn strides_of(layout: &Layout) -> ffi::Strides {
    let stride = |i: usize| match layout.dims()[i] {
        0 | 1 => 0,
        _ => layout.stride()[i] as i64,
    };
    ffi::Strides {
        batch: stride(0),
        seq: stride(1),
        head: stride(2),
    }
}

/// What both passes tell the kernels of a problem; pointers are filled in by the caller.
fn problem<E: Element>(params: &AttnParams, heads_together: usize) -> Result<ffi::AttnProblem> {
    let int = |name: &str, x: usize| match i32::try_from(x) {
        Ok(x) if x < ffi::MAX_WINDOW => Ok(x),
        _ => bail!(
            "flash_attn: {name} must be below {} on CUDA, got {x}",
            ffi::MAX_WINDOW
        ),
    };
    let window = |window: Option<usize>| match window {
        // A wider window ends beyond the other end of any sequence that is admitted.
        Some(keys) => keys.min(ffi::MAX_WINDOW as usize - 1) as i32,
        None => ffi::MAX_WINDOW,
    };
    let no_rows = ffi::Strides {
        batch: 0,
        seq: 0,
        head: 0,
    };
    Ok(ffi::AttnProblem {
        q: std::ptr::null(),
        k: std::ptr::null(),
        v: std::ptr::null(),
        alibi_slopes: std::ptr::null(),
        q_strides: no_rows,
        k_strides: no_rows,
        v_strides: no_rows,
        batch: int("batch", params.batch)?,
        seqlen_q: int("seqlen_q", params.seqlen_q)?,
        seqlen_k: int("seqlen_k", params.seqlen_k)?,
        num_heads: int("num_heads", params.num_heads)?,
        group_size: int("num_heads / num_kv_heads", params.group_size())?,
        head_dim: int("head_dim", params.head_dim)?,
        window_left: window(params.mask.window_left()),
        window_right: window(params.mask.window_right()),
        softmax_scale: params.softmax_scale as f32,
        softcap: params.softcap.unwrap_or(0.) as f32,
        tanh_scale: params
            .softcap
            .map_or(0., |softcap| params.softmax_scale / softcap) as f32,
        heads_together: heads_together as i32,
        element: E::TYPE,
    })
}

/// The first of the alibi slopes, with the read guard that keeps their storage. A contiguous view may begin
/// anywhere in it.
macro_rules! slopes_pointer {
    ($slopes:expr, $stream:expr) => {
        match $slopes {
            None => (std::ptr::null(), None),
            Some((storage, layout)) => {
                let slopes = cuda_storage(storage)?.as_cuda_slice::<f32>()?;
                let (address, guard) = slopes.device_ptr($stream);
                let first = (address as *const f32).wrapping_add(layout.start_offset());
                (first, Some(guard))
            }
        }
    };
}
use slopes_pointer;

pub(crate) fn cuda_storage(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        other => bail!(
            "flash_attn: expected a tensor on a CUDA device, got one on {:?}",
            other.device().location()
        ),
    }
}

/// Makes the status of a launcher an error that names the kernel and the problem.
fn check(status: c_int, kernel: &str, params: &AttnParams) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    bail!(
        "flash_attn: {kernel} failed for batch {}, seqlen_q {}, seqlen_k {}, num_heads {}, num_kv_heads {}, head_dim {}: {}",
        params.batch,
        params.seqlen_q,
        params.seqlen_k,
        params.num_heads,
        params.num_kv_heads,
        params.head_dim,
        error_text(status)
    )
}

/// The driver's text for a `cudaError_t`.
fn error_text(status: c_int) -> String {
    // SAFETY: it returns a static string for any number.
    let text = unsafe { CStr::from_ptr(ffi::cudaGetErrorString(status)) };
    format!("{} (cudaError {status})", text.to_string_lossy())
}

/// The address of what may not be there, else null; the write ends when the guard is dropped.
fn optional_pointer<'s, T>(
    slice: &'s mut Option<CudaSlice<T>>,
    stream: &'s CudaStream,
) -> (*mut T, Option<SyncOnDrop<'s>>) {
    match slice {
        None => (std::ptr::null_mut(), None),
        Some(slice) => {
            let (address, guard) = slice.device_ptr_mut(stream);
            (address as *mut T, Some(guard))
        }
    }
}

/// An uninitialised allocation on the device's stream.
///
/// # Safety
///
/// The caller writes every element before it is read.
unsafe fn alloc<T: DeviceRepr>(device: &CudaDevice, len: usize) -> Result<CudaSlice<T>> {
    // CUDA has no allocation of nothing.
    // SAFETY: the caller's.
    unsafe { device.alloc::<T>(len.max(1)) }
}

/// A contiguous tensor of what a kernel has written.
fn tensor<T: CudaDType>(
    slice: CudaSlice<T>,
    device: &CudaDevice,
    shape: impl Into<Shape>,
) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
