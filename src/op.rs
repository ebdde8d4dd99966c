//! The `CustomOp3` over (q, k, v): chooses a backend and carries the softmax statistics from the
//! forward to the backward.
//!
//! candle hands `bwd` the inputs, the output and its gradient, and nothing else. So each call makes a
//! fresh op value with a [`StatsSlot`] in it: the forward fills the slot, the backward reads it. The
//! slot stays empty when no input is tracked, and the backward computes the statistics again if it finds
//! it empty. An op value that is applied twice could not tell whose statistics it holds, so the second
//! forward empties the slot for good.

use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::params::AttnParams;

/// One attention call.
pub(crate) struct FlashAttn {
    params: AttnParams,
    /// Whether a backward may follow.
    tracked: bool,
    stats: StatsSlot,
}

impl FlashAttn {
    /// `tracked` tells whether a backward may follow, `keep_lse` whether the caller will ask for lse.
    pub(crate) fn new(params: AttnParams, tracked: bool, keep_lse: bool) -> Self {
        Self {
            params,
            tracked,
            stats: StatsSlot {
                state: Arc::new(Mutex::new(if tracked || keep_lse {
                    SlotState::Wanted
                } else {
                    SlotState::Unwanted
                })),
            },
        }
    }

    /// The slot that the forward will fill.
    pub(crate) fn stats(&self) -> StatsSlot {
        self.stats.clone()
    }

    fn stats_shape(&self) -> (usize, usize, usize, usize) {
        let AttnParams {
            batch,
            num_heads,
            seqlen_q,
            ..
        } = self.params;
        (2, batch, num_heads, seqlen_q)
    }

    fn stats_tensor(&self, stats: CpuStorage) -> Result<Tensor> {
        let shape = self.stats_shape();
        match stats {
            CpuStorage::F32(stats) => Tensor::from_vec(stats, shape, &Device::Cpu),
            CpuStorage::F64(stats) => Tensor::from_vec(stats, shape, &Device::Cpu),
            other => bail!(
                "flash_attn: statistics must be F32 or F64, got {:?}",
                other.dtype()
            ),
        }
    }
}

/// The softmax statistics of one call, on their way from the forward to whoever needs them.
#[derive(Clone)]
pub(crate) struct StatsSlot {
    state: Arc<Mutex<SlotState>>,
}

enum SlotState {
    /// Nobody will ask.
    Unwanted,
    /// The forward has not run yet.
    Wanted,
    /// What the forward left. On the CPU `(2, batch, num_heads, seqlen_q)`, see [`cpu::ForwardOutput`]; on
    /// CUDA lse itself, since there the scores' own rounding is coarser.
    Filled(Tensor),
    /// Two forwards ran on one op value.
    Ambiguous,
}

impl StatsSlot {
    fn fill(&self, stats: impl FnOnce() -> Result<Tensor>) -> Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = match *state {
            SlotState::Unwanted => SlotState::Unwanted,
            SlotState::Wanted => SlotState::Filled(stats()?),
            SlotState::Filled(_) | SlotState::Ambiguous => SlotState::Ambiguous,
        };
        Ok(())
    }

    fn get(&self) -> Option<Tensor> {
        match &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            SlotState::Filled(stats) => Some(stats.clone()),
            _ => None,
        }
    }

    /// lse `(batch, num_heads, seqlen_q)`, F32, after the forward has run.
    pub(crate) fn lse(&self) -> Result<Tensor> {
        let Some(stats) = self.get() else {
            bail!("flash_attn: the forward left no softmax statistics");
        };
        if stats.rank() == 3 {
            return Ok(stats);
        }
        // In f64, since a large maximum and a small sum would lose the sum in f32.
        let stats = stats.to_dtype(DType::F64)?;
        let (max, log_sum) = (stats.get(0)?, stats.get(1)?);
        ((max + log_sum)? * std::f64::consts::LN_2)?.to_dtype(DType::F32)
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let cpu::ForwardOutput { out, stats } = cpu::forward(
            &self.params,
            (q, q_layout),
            (k, k_layout),
            (v, v_layout),
            self.tracked,
        )?;
        self.stats.fill(|| self.stats_tensor(stats))?;
        Ok((out, q_layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let cuda::ForwardOutput { out, lse } =
            cuda::forward(&self.params, (q, q_layout), (k, k_layout), (v, v_layout))?;
        self.stats
            .fill(|| Ok(cuda::lse_tensor(&self.params, lse, q)))?;
        Ok((out, q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = match q.device() {
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let lse = match self.stats.get() {
                    Some(lse) => lse,
                    None => cuda::lse(&self.params, q, k, v)?,
                };
                cuda::backward(&self.params, q, k, v, out, dout, &lse)?
            }
            _ => {
                let stats = match self.stats.get() {
                    Some(stats) => stats,
                    None => self.stats_tensor(cpu::stats(&self.params, q, k, v)?)?,
                };
                cpu::backward(&self.params, q, k, v, out, dout, &stats)?
            }
        };
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::AttnOptions;

    /// One op value applied to two problems must give each its own gradients.
    #[test]
    fn a_second_use_of_one_op_value_does_not_mix_the_statistics() -> Result<()> {
        let var = || candle_core::Var::randn(0f64, 1., (1, 5, 2, 4), &Device::Cpu);
        let (q, k, v, other) = (var()?, var()?, var()?, var()?);
        let params = AttnParams::new(&q, &k, &v, &AttnOptions::default())?;
        let expected = q
            .apply_op3(&k, &v, FlashAttn::new(params.clone(), true, false))?
            .backward()?;

        let op = Arc::new(
            Box::new(FlashAttn::new(params, true, false)) as Box<dyn CustomOp3 + Send + Sync>
        );
        let out = q.apply_op3_arc(&k, &v, op.clone())?;
        other.apply_op3_arc(&v, &k, op)?;
        let grads = out.backward()?;
        for input in [&q, &k, &v] {
            let (got, expected) = (grads.get(input), expected.get(input));
            let (Some(got), Some(expected)) = (got, expected) else {
                bail!("an input without gradient");
            };
            assert_eq!(
                got.flatten_all()?.to_vec1::<f64>()?,
                expected.flatten_all()?.to_vec1::<f64>()?
            );
        }
        Ok(())
    }

    /// candle adds up gradients into contiguous tensors, but whoever calls `bwd` may have any layout.
    #[test]
    fn the_gradient_of_the_output_may_have_any_layout() -> Result<()> {
        let normal = |shape: [usize; 4]| Tensor::randn(0f64, 1., &shape[..], &Device::Cpu);
        let (q, k) = (normal([2, 5, 4, 8])?, normal([2, 7, 2, 8])?);
        let params = AttnParams::new(&q, &k, &k, &AttnOptions::default())?;
        let op = FlashAttn::new(params, true, false);
        let shape = q.shape();
        let layout = candle_core::Layout::contiguous(shape);
        let (storage, kv) = (q.storage_and_layout(), k.storage_and_layout());
        let (candle_core::Storage::Cpu(q_storage), candle_core::Storage::Cpu(k_storage)) =
            (&*storage.0, &*kv.0)
        else {
            bail!("tensors on the CPU");
        };
        let (out, shape) = op.cpu_fwd(q_storage, &layout, k_storage, kv.1, k_storage, kv.1)?;
        let CpuStorage::F64(out) = out else {
            bail!("f64 in, f64 out");
        };
        let out = Tensor::from_vec(out, shape, &Device::Cpu)?;

        let one = Tensor::full(0.5f64, (), &Device::Cpu)?;
        let layouts = [
            ("expanded", one.broadcast_as(q.shape())?),
            ("heads first", normal([2, 4, 5, 8])?.transpose(1, 2)?),
            ("strided rows", normal([2, 5, 8, 4])?.transpose(2, 3)?),
            (
                "part of a wider one",
                normal([4, 6, 4, 9])?
                    .narrow(0, 1, 2)?
                    .narrow(1, 1, 5)?
                    .narrow(3, 1, 8)?,
            ),
        ];
        for (name, dout) in layouts {
            assert!(!dout.is_contiguous());
            let got = op.bwd(&q, &k, &k, &out, &dout)?;
            let expected = op.bwd(&q, &k, &k, &out, &dout.contiguous()?)?;
            let values = |grad: Option<Tensor>| match grad {
                Some(grad) => grad.flatten_all()?.to_vec1::<f64>(),
                None => bail!("an input without gradient"),
            };
            assert_eq!(values(got.0)?, values(expected.0)?, "dq, {name}");
            assert_eq!(values(got.1)?, values(expected.1)?, "dk, {name}");
            assert_eq!(values(got.2)?, values(expected.2)?, "dv, {name}");
        }
        Ok(())
    }

    #[test]
    fn statistics_are_kept_only_when_somebody_will_ask() -> Result<()> {
        let q = Tensor::zeros((1, 3, 2, 4), DType::F32, &Device::Cpu)?;
        let params = AttnParams::new(&q, &q, &q, &AttnOptions::default())?;
        for (tracked, keep_lse, kept) in [
            (false, false, false),
            (true, false, true),
            (false, true, true),
        ] {
            let op = FlashAttn::new(params.clone(), tracked, keep_lse);
            let stats = op.stats();
            q.apply_op3(&q, &q, op)?;
            assert_eq!(stats.get().is_some(), kept);
        }
        Ok(())
    }
}
