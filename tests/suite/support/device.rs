//! The devices and dtypes that every test body runs on.

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use candle_flash_gqa::is_supported;

/// The float types of candle that the op may have kernels for.
pub const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// Every device of this machine that this build has kernels for.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    devices.extend(gpu());
    devices
}

/// The first GPU, with the feature `cuda`; all tests share its stream.
#[cfg(feature = "cuda")]
pub fn gpu() -> Option<Device> {
    static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
    let open = || Device::new_cuda(0).expect("tests with the feature `cuda` need a GPU");
    Some(GPU.get_or_init(open).clone())
}

#[cfg(not(feature = "cuda"))]
pub fn gpu() -> Option<Device> {
    None
}

/// The dtypes that have a kernel for `head_dim` on `device`.
pub fn dtypes(device: &Device, head_dim: usize) -> Vec<DType> {
    let mut dtypes = FLOATS.to_vec();
    dtypes.retain(|&dtype| is_supported(device, dtype, head_dim));
    dtypes
}

/// Runs a test body on each device.
pub fn for_each_device(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    for device in devices() {
        test(&device).with_context(|| format!("on {:?}", device.location()))?;
    }
    Ok(())
}

/// Runs a test body on each device that has kernels for `dtype` and `head_dim`: for tests whose numbers are
/// those of one type.
pub fn for_each_device_with(
    dtype: DType,
    head_dim: usize,
    test: impl Fn(&Device) -> Result<()>,
) -> Result<()> {
    for_each_device(|device| {
        if is_supported(device, dtype, head_dim) {
            test(device)?;
        }
        Ok(())
    })
}

/// Runs a test body on each device, in each dtype that it supports at `head_dim`.
pub fn for_each_dtype(head_dim: usize, test: impl Fn(&Device, DType) -> Result<()>) -> Result<()> {
    for_each_device(|device| {
        for dtype in dtypes(device, head_dim) {
            test(device, dtype).with_context(|| format!("in {dtype:?}"))?;
        }
        Ok(())
    })
}
