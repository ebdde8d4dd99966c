//! RMSNorm and its gradients.

use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Result, Tensor};

use super::ffi::{self, ROWS_TOGETHER, RmsNormParams};
use super::{Input, Operands, cuda_storage, element, rows_and_cols, tensor, uninit};

/// `out`, and rstd of each row.
pub(crate) fn forward(x: Input<'_>, weight: Input<'_>, eps: f32) -> Result<(CudaStorage, Tensor)> {
    let (device, dtype) = (x.0.device(), x.0.dtype());
    let stream = device.cuda_stream();
    let (rows, cols) = rows_and_cols(x.1);
    // SAFETY: the kernel writes all of both.
    let (mut out, mut rstd) = unsafe {
        (
            uninit(device, rows * cols, dtype)?,
            uninit(device, rows, DType::F32)?,
        )
    };
    let mut operands = Operands::new(&stream);
    let params = RmsNormParams {
        x: operands.read(x)?,
        weight: operands.read(weight)?,
        out: operands.write(&mut out)?,
        rstd: operands.write(&mut rstd)?,
        rows: rows as i64,
        cols: cols as i64,
        eps,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes.
    unsafe { operands.launch("flash_rms_norm_fwd", ffi::flash_rms_norm_fwd, params)? };
    Ok((out, tensor(rstd, rows)))
}

pub(crate) fn dx(x: &Tensor, weight: &Tensor, rstd: &Tensor, dout: &Tensor) -> Result<Tensor> {
    let guards = [x, weight, rstd, dout].map(Tensor::storage_and_layout);
    let [x_in, weight, rstd, dout] = &guards;
    let storage = cuda_storage(&x_in.0)?;
    let (device, dtype) = (storage.device(), storage.dtype());
    let stream = device.cuda_stream();
    let (rows, cols) = rows_and_cols(x_in.1);
    // SAFETY: the kernel writes all of it.
    let mut dx = unsafe { uninit(device, rows * cols, dtype)? };
    let mut operands = Operands::new(&stream);
    let params = RmsNormParams {
        x: operands.read((storage, x_in.1))?,
        weight: operands.read_tensor(weight)?,
        dout: operands.read_tensor(dout)?,
        out: operands.write(&mut dx)?,
        rstd: operands.read_tensor::<f32>(rstd)?.cast_mut(),
        rows: rows as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes; this kernel reads rstd.
    unsafe { operands.launch("flash_rms_norm_dx", ffi::flash_rms_norm_dx, params)? };
    Ok(tensor(dx, x.shape()))
}

pub(crate) fn dweight(x: &Tensor, rstd: &Tensor, dout: &Tensor) -> Result<Tensor> {
    let guards = [x, rstd, dout].map(Tensor::storage_and_layout);
    let [x, rstd, dout] = &guards;
    let storage = cuda_storage(&x.0)?;
    let (device, dtype) = (storage.device(), storage.dtype());
    let stream = device.cuda_stream();
    let (rows, cols) = rows_and_cols(x.1);
    // SAFETY: the first kernel writes all of partial, the second all of dweight.
    let (mut partial, mut dweight) = unsafe {
        (
            uninit(device, rows.div_ceil(ROWS_TOGETHER) * cols, DType::F32)?,
            uninit(device, cols, dtype)?,
        )
    };
    let mut operands = Operands::new(&stream);
    let params = RmsNormParams {
        x: operands.read((storage, x.1))?,
        dout: operands.read_tensor(dout)?,
        dweight: operands.write(&mut dweight)?,
        rstd: operands.read_tensor::<f32>(rstd)?.cast_mut(),
        partial: operands.write(&mut partial)?,
        rows: rows as i64,
        cols: cols as i64,
        element: element(dtype)?,
        ..Default::default()
    };
    // SAFETY: contiguous tensors of these sizes, partial with a row for each ROWS_TOGETHER; the kernels read rstd.
    unsafe {
        operands.launch(
            "flash_rms_norm_dweight",
            ffi::flash_rms_norm_dweight,
            params,
        )?
    };
    Ok(tensor(dweight, cols))
}
