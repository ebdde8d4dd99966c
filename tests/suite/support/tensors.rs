//! Seeded inputs, and tensors as host vectors.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::StandardNormal;

use super::device::watch;
use super::problem::Problem;

/// What one forward and backward read.
#[derive(Debug, Clone)]
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub dout: Tensor,
}

impl Inputs {
    /// Independent standard normal numbers, rounded to `dtype`.
    pub fn normal(problem: &Problem, dtype: DType, device: &Device, seed: u64) -> Result<Self> {
        Self::scaled(problem, [1.; 3], dtype, device, seed)
    }

    /// Normal q, k and v with the given standard deviations; dout has 1.
    pub fn scaled(
        problem: &Problem,
        [q, k, v]: [f64; 3],
        dtype: DType,
        device: &Device,
        seed: u64,
    ) -> Result<Self> {
        let (q_dims, kv_dims) = (problem.q_dims(), problem.kv_dims());
        Ok(Self {
            q: normal(&q_dims, q, dtype, device, 4 * seed)?,
            k: normal(&kv_dims, k, dtype, device, 4 * seed + 1)?,
            v: normal(&kv_dims, v, dtype, device, 4 * seed + 2)?,
            dout: normal(&q_dims, 1., dtype, device, 4 * seed + 3)?,
        })
    }

    /// The same for every number of q, of k, of v and of dout.
    pub fn constant(
        problem: &Problem,
        [q, k, v, dout]: [f64; 4],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let (q_dims, kv_dims) = (problem.q_dims(), problem.kv_dims());
        Ok(Self {
            q: full(&q_dims, q, dtype, device)?,
            k: full(&kv_dims, k, dtype, device)?,
            v: full(&kv_dims, v, dtype, device)?,
            dout: full(&q_dims, dout, dtype, device)?,
        })
    }

    /// The same on another device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            q: self.q.to_device(device)?,
            k: self.k.to_device(device)?,
            v: self.v.to_device(device)?,
            dout: self.dout.to_device(device)?,
        })
    }

    /// The input of that name.
    pub fn get_mut(&mut self, name: &str) -> &mut Tensor {
        match name {
            "q" => &mut self.q,
            "k" => &mut self.k,
            "v" => &mut self.v,
            "dout" => &mut self.dout,
            _ => panic!("no input {name}"),
        }
    }
}

/// Normal numbers of the given standard deviation, rounded to `dtype`.
pub fn normal(
    dims: &[usize],
    deviation: f64,
    dtype: DType,
    device: &Device,
    seed: u64,
) -> Result<Tensor> {
    let mut rng = StdRng::seed_from_u64(seed);
    let count = dims.iter().product();
    let values: Vec<f64> = (0..count)
        .map(|_| deviation * rng.sample::<f64, _>(StandardNormal))
        .collect();
    from_host(&values, dims, dtype, device)
}

/// A contiguous tensor of one value.
pub fn full(dims: &[usize], value: f64, dtype: DType, device: &Device) -> Result<Tensor> {
    // `full` of candle gives a tensor of strides 0.
    let value = Tensor::full(value, dims, &Device::Cpu)?.to_dtype(dtype)?;
    Ok(value.contiguous()?.to_device(device)?)
}

/// A tensor of host values, rounded to `dtype`.
pub fn from_host(values: &[f64], dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let tensor = Tensor::from_slice(values, dims, &Device::Cpu)?;
    Ok(tensor.to_dtype(dtype)?.to_device(device)?)
}

/// `(1, rows, 1, head_dim)`: rows of a few numbers, the rest of each 0.
pub fn padded_rows<const N: usize>(
    rows: &[[f64; N]],
    head_dim: usize,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let rows = from_host(rows.as_flattened(), &[1, rows.len(), 1, N], dtype, device)?;
    Ok(rows.pad_with_zeros(3, 0, head_dim - N)?)
}

/// The values of a tensor in row-major order.
pub fn host(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let values = tensor.flatten_all()?.to_vec1()?;
    watch::sign_of_life();
    Ok(values)
}

/// `tensor` with the positions in `range` of dimension `dim` set to `value`.
pub fn fill(
    tensor: &Tensor,
    dim: usize,
    range: std::ops::Range<usize>,
    value: f64,
) -> Result<Tensor> {
    let mut dims = tensor.dims().to_vec();
    let end = dims[dim] - range.end;
    dims[dim] = range.len();
    let parts = [
        tensor.narrow(dim, 0, range.start)?,
        full(&dims, value, tensor.dtype(), tensor.device())?,
        tensor.narrow(dim, range.end, end)?,
    ];
    Ok(Tensor::cat(&parts, dim)?)
}

/// `tensor` with one number set to `value`.
pub fn set(tensor: &Tensor, at: [usize; 4], value: f64) -> Result<Tensor> {
    let dims = tensor.dims();
    let mut values = host(tensor)?;
    values[((at[0] * dims[1] + at[1]) * dims[2] + at[2]) * dims[3] + at[3]] = value;
    from_host(&values, dims, tensor.dtype(), tensor.device())
}
