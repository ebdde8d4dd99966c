//! What all ops ask of their operands.

use candle_core::{DType, Device, Result, Tensor, bail};

/// An operand and its name.
pub(super) type Named<'a> = (&'a str, &'a Tensor);

/// Refuses operands of different dtypes or on different devices.
pub(super) fn alike(op: &str, (first_name, first): Named<'_>, others: &[Named<'_>]) -> Result<()> {
    for &(name, other) in others {
        if other.dtype() != first.dtype() {
            bail!(
                "{op}: {first_name} and {name} must have the same dtype, got {:?} and {:?}",
                first.dtype(),
                other.dtype()
            );
        }
        same_device(op, (first_name, first), (name, other))?;
    }
    Ok(())
}

/// Refuses a dtype that the device has no kernels for.
pub(super) fn has_kernel(op: &str, operand: &Tensor) -> Result<()> {
    let (dtype, device) = (operand.dtype(), operand.device());
    let dtypes: &[DType] = match device {
        Device::Cpu => &[DType::F16, DType::BF16, DType::F32, DType::F64],
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => &crate::cuda::training::DTYPES,
        _ => &[],
    };
    if !dtypes.contains(&dtype) {
        bail!(
            "{op}: no kernel for dtype {dtype:?} on {:?}; available there: {dtypes:?}",
            device.location()
        );
    }
    Ok(())
}

/// Refuses indices that are not U32 or not where they are needed.
pub(super) fn indices(op: &str, (name, indices): Named<'_>, by: Named<'_>) -> Result<()> {
    if indices.dtype() != DType::U32 {
        bail!("{op}: {name} must be U32, got {:?}", indices.dtype());
    }
    same_device(op, by, (name, indices))
}

/// Refuses a dtype other than those given.
pub(super) fn dtype(op: &str, (name, operand): Named<'_>, dtypes: &[DType]) -> Result<()> {
    if !dtypes.contains(&operand.dtype()) {
        bail!(
            "{op}: {name} must be one of {dtypes:?}, got {:?}",
            operand.dtype()
        );
    }
    Ok(())
}

/// Refuses operands of different shapes.
pub(super) fn same_shape(op: &str, (a_name, a): Named<'_>, (b_name, b): Named<'_>) -> Result<()> {
    if a.dims() != b.dims() {
        bail!(
            "{op}: {a_name} and {b_name} must have the same shape, got {:?} and {:?}",
            a.dims(),
            b.dims()
        );
    }
    Ok(())
}

/// Refuses operands on different devices.
pub(super) fn same_device(op: &str, (a_name, a): Named<'_>, (b_name, b): Named<'_>) -> Result<()> {
    if !a.device().same_device(b.device()) {
        bail!(
            "{op}: {a_name} and {b_name} must be on the same device, got {:?} and {:?}",
            a.device().location(),
            b.device().location()
        );
    }
    Ok(())
}
