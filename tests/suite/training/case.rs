//! An op with its operands, and the error rule: `err(ours) <= factor * err(plain formula in the same dtype) + atol`,
//! where `err` is the largest distance from the plain formula in f64.

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};

use super::ops::Op;
use crate::support::compare::{close, max_distance};
use crate::support::device::{FLOATS, for_each_device};
use crate::support::tensors::{host, normal};
use crate::support::verify::unit_roundoff;

/// An op and what it is applied to.
#[derive(Clone)]
pub struct Case {
    pub op: Op,
    /// Operands that receive a gradient.
    pub operands: Vec<Tensor>,
    /// Operands that do not.
    pub constants: Vec<Tensor>,
}

/// What a forward and a backward give.
pub struct Passes {
    pub out: Tensor,
    /// Of each operand.
    pub grads: Vec<Tensor>,
}

impl Passes {
    pub fn named(&self) -> impl Iterator<Item = (String, &Tensor)> {
        let grads = self.grads.iter().enumerate();
        let grads = grads.map(|(i, grad)| (format!("gradient {i}"), grad));
        std::iter::once(("out".to_string(), &self.out)).chain(grads)
    }
}

/// Runs a test body on each device, in each dtype that the ops have kernels for.
pub fn for_each_dtype(test: impl Fn(&Device, DType) -> Result<()>) -> Result<()> {
    for_each_device(|device| {
        for dtype in FLOATS {
            if device.is_cpu() || dtype != DType::F64 {
                test(device, dtype).with_context(|| format!("in {dtype:?}"))?;
            }
        }
        Ok(())
    })
}

impl Case {
    /// The op forward, and backward from `sum(out * dout)`.
    pub fn passes(&self) -> Result<Passes> {
        self.differentiate(self.op.fused)
    }

    fn differentiate(
        &self,
        formula: fn(&[Tensor], &[Tensor]) -> candle_core::Result<Tensor>,
    ) -> Result<Passes> {
        let vars = variables(&self.operands)?;
        let operands: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let out = formula(&operands, &self.constants)?;
        let dout = dout(&out)?;
        let grads = (&out * dout)?.sum_all()?.backward()?;
        let grads = gradients(&grads, &vars)?;
        Ok(Passes { out, grads })
    }

    /// The same numbers in f64 on the CPU.
    fn in_f64(&self) -> Result<Self> {
        let wide = |tensor: &Tensor| -> candle_core::Result<Tensor> {
            let tensor = tensor.to_device(&Device::Cpu)?;
            match tensor.dtype().is_float() {
                true => tensor.to_dtype(DType::F64),
                false => Ok(tensor),
            }
        };
        let all = |tensors: &[Tensor]| tensors.iter().map(wide).collect::<candle_core::Result<_>>();
        Ok(Self {
            op: self.op,
            operands: all(&self.operands)?,
            constants: all(&self.constants)?,
        })
    }

    /// Holds the op's results, however they were computed, to the error rule.
    pub fn check(&self, ours: &Passes) -> Result<()> {
        let truth = self.in_f64()?.differentiate(self.op.plain)?;
        let plain = self.differentiate(self.op.plain)?;
        let all = ours.named().zip(plain.named()).zip(truth.named());
        for (i, (((name, ours), (_, plain)), (_, truth))) in all.enumerate() {
            let name = format!("{name} of {} {:?}", self.op.name, self.shapes());
            ensure!(
                ours.dims() == plain.dims() && ours.dtype() == plain.dtype(),
                "{name}: {:?} {:?}, expected {:?} {:?}",
                ours.dtype(),
                ours.dims(),
                plain.dtype(),
                plain.dims()
            );
            let truth = host(truth)?;
            let largest = truth
                .iter()
                .fold(0., |largest: f64, x| largest.max(x.abs()));
            let factor = if i == 0 { 2. } else { 3. };
            let error = max_distance(&host(plain)?, &truth);
            ensure!(error.is_finite(), "{name}: the plain formula is not finite");
            // In f64 the plain formula is the truth.
            let atol = match ours.dtype() {
                DType::F64 => 1e-13,
                dtype => 4. * unit_roundoff(dtype),
            } * largest;
            close(&name, ours, &truth, factor * error + atol)?;
        }
        Ok(())
    }

    fn shapes(&self) -> Vec<&[usize]> {
        self.operands.iter().map(|tensor| tensor.dims()).collect()
    }
}

/// A variable of each tensor.
pub fn variables(tensors: &[Tensor]) -> Result<Vec<Var>> {
    Ok(tensors
        .iter()
        .map(Var::from_tensor)
        .collect::<candle_core::Result<_>>()?)
}

/// The gradient of each variable.
pub fn gradients(grads: &GradStore, vars: &[Var]) -> Result<Vec<Tensor>> {
    let grad = |var: &Var| {
        Ok(grads
            .get(var)
            .context("an operand without gradient")?
            .clone())
    };
    vars.iter().map(grad).collect()
}

/// The gradient of an output, the same on every run.
pub fn dout(out: &Tensor) -> Result<Tensor> {
    let dout = normal(out.dims(), 1., DType::F64, &Device::Cpu, 99)?;
    Ok(dout.to_dtype(out.dtype())?.to_device(out.device())?)
}
