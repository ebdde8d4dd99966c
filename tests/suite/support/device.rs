//! The devices and dtypes that every test body runs on.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_gqa::is_supported;

// Here, for the tests that have nothing else of this folder.
#[path = "watch.rs"]
pub mod watch;

/// The float types of candle that the op may have kernels for.
pub const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// Every device of this machine that this build has kernels for.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    devices.extend(gpu());
    devices
}

/// The first GPU, with the feature `cuda`. candle gives each host thread a stream of its own there and lets
/// none wait for another: a tensor that goes from one thread to another takes a `synchronize` first.
#[cfg(feature = "cuda")]
pub fn gpu() -> Option<Device> {
    static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
    let open = || Device::new_cuda(0).expect("tests with the feature `cuda` need a GPU");
    watch::begin();
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

/// Fails if an earlier launch did and was swallowed: the device would do nothing any more.
pub fn check_still_works(device: &Device) -> Result<()> {
    device.synchronize()?;
    let two = (Tensor::ones((), DType::F32, device)? + 1.)?;
    ensure!(two.to_scalar::<f32>()? == 2.);
    watch::sign_of_life();
    Ok(())
}

/// Waits for its device when it goes, also where a test panics. Nothing is under way when that ends, and with it the thread
/// and its stream: a driver was seen to be stuck there for ever, if not known to be for this reason
/// (benches/record/2026-11-30-hopper.md).
pub struct WaitAtEnd<'a>(pub &'a Device);

impl Drop for WaitAtEnd<'_> {
    fn drop(&mut self) {
        // What fails here has failed in the test, or is found by the next one.
        let _ = self.0.synchronize();
    }
}

/// Runs a test body.
fn run(test: impl Fn(&Device) -> Result<()>, device: &Device) -> Result<()> {
    let _wait = WaitAtEnd(device);
    test(device)?;
    device.synchronize()?;
    Ok(())
}

/// Runs a test body on each device.
pub fn for_each_device(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    for device in devices() {
        run(&test, &device).with_context(|| format!("on {:?}", device.location()))?;
    }
    Ok(())
}

/// Runs a test body on the CPU, and on the GPU through devices of its own, which share no cuBLAS with other tests:
/// one with a stream for each thread, one with a single stream.
pub fn for_each_stream(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    run(&test, &Device::Cpu).context("on the CPU")?;
    if gpu().is_some() {
        run(&test, &Device::new_cuda(0)?).context("on a stream for each thread")?;
        run(&test, &Device::new_cuda_with_stream(0)?).context("on a single stream")?;
    }
    Ok(())
}

/// Runs a test body on the GPU alone: for sizes that nothing else has room or time for.
pub fn on_the_gpu(test: impl Fn(&Device) -> Result<()>) -> Result<()> {
    match gpu() {
        Some(device) => run(test, &device),
        None => {
            println!("skipped: needs a GPU");
            Ok(())
        }
    }
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

/// Runs a test body in F32 on the CPU, and in each dtype that a GPU supports: for what takes too long to run in
/// every dtype on the CPU.
pub fn for_each_usual_dtype(
    head_dim: usize,
    test: impl Fn(&Device, DType) -> Result<()>,
) -> Result<()> {
    for_each_dtype(head_dim, |device, dtype| {
        if device.is_cpu() && dtype != DType::F32 {
            return Ok(());
        }
        test(device, dtype)
    })
}
