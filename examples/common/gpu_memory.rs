//! What a GPU's memory pool, from which candle allocates, has handed out.

use candle_core::{Device, Result};

#[cfg(feature = "cuda")]
pub use cuda::GpuMemory;

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::result::{device, mem_pool};
    use candle_core::cuda_backend::cudarc::driver::sys::{
        CUmemPool_attribute as Attribute, CUmemoryPool,
    };

    use super::{Device, Result};

    /// The default memory pool of a device.
    pub struct GpuMemory {
        pool: CUmemoryPool,
        device: Device,
    }

    impl GpuMemory {
        /// The pool of a CUDA device, which from now on keeps freed memory for the next allocation: as it is
        /// by default, every synchronisation gives all of it back to the driver, and the next step waits for
        /// it to be mapped again. Nothing for other devices.
        pub fn of(device: &Device) -> Result<Option<Self>> {
            let Device::Cuda(cuda) = device else {
                return Ok(None);
            };
            let ordinal = cuda.cuda_stream().context().cu_device();
            // SAFETY: a device that is open.
            let pool = unsafe { device::get_default_mem_pool(ordinal) }.w()?;
            let memory = Self {
                pool,
                device: device.clone(),
            };
            memory.set(Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)?;
            Ok(Some(memory))
        }

        /// All memory of the device.
        pub fn total_bytes(&self) -> Result<u64> {
            let bytes = match &self.device {
                Device::Cuda(cuda) => cuda.cuda_stream().context().total_mem().w()?,
                _ => 0,
            };
            Ok(bytes as u64)
        }

        /// Starts a new peak at the memory in use now.
        pub fn start_peak(&self) -> Result<()> {
            // Freed memory is in use until the stream gets there.
            self.device.synchronize()?;
            self.set(Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
        }

        /// The most memory that was in use since the last [`GpuMemory::start_peak`].
        pub fn peak_bytes(&self) -> Result<u64> {
            let mut bytes = 0u64;
            let value = (&raw mut bytes).cast();
            // SAFETY: the pool of a device that is open; the attribute is a 64-bit number.
            unsafe {
                mem_pool::get_attribute(self.pool, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, value)
            }
            .w()?;
            Ok(bytes)
        }

        /// Gives all freed memory back to the driver.
        pub fn give_back(&self) -> Result<()> {
            self.device.synchronize()?;
            // SAFETY: the pool of a device that is open.
            unsafe { mem_pool::trim_to(self.pool, 0) }.w()
        }

        fn set(&self, attribute: Attribute, value: u64) -> Result<()> {
            let mut value = value;
            // SAFETY: the pool of a device that is open; both attributes set here are 64-bit numbers.
            unsafe { mem_pool::set_attribute(self.pool, attribute, (&raw mut value).cast()) }.w()
        }
    }
}

/// In a build without CUDA there is none.
#[cfg(not(feature = "cuda"))]
pub enum GpuMemory {}

#[cfg(not(feature = "cuda"))]
impl GpuMemory {
    pub fn of(_: &Device) -> Result<Option<Self>> {
        Ok(None)
    }

    pub fn total_bytes(&self) -> Result<u64> {
        match *self {}
    }

    pub fn start_peak(&self) -> Result<()> {
        match *self {}
    }

    pub fn peak_bytes(&self) -> Result<u64> {
        match *self {}
    }

    pub fn give_back(&self) -> Result<()> {
        match *self {}
    }
}
