//! The gradients of one step, over all its micro-batches.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use candle_core::{DType, Result, Tensor, Var};
use candle_flash_gqa::training::{add_grad, grad_norm};

use crate::model::Llama;

/// Sums over micro-batches of the gradients of each variable, by name.
///
/// A single micro-batch's gradients stay in the type that they came in; from the second on the sums are F32.
#[derive(Default)]
pub struct Gradients {
    sums: BTreeMap<String, Tensor>,
    losses: Vec<Tensor>,
}

impl Gradients {
    /// Runs backward from a model's loss of one micro-batch. Takes the loss, so that its graph, and with it every
    /// activation, is freed before the sums are made.
    pub fn add(&mut self, model: &Llama, loss: Tensor, vars: &BTreeMap<String, Var>) -> Result<()> {
        let mut grads = model.backward(&loss)?;
        self.losses.push(loss.detach());
        drop(loss);
        for (name, var) in vars {
            let Some(grad) = grads.remove(var) else {
                candle_core::bail!("{name} has no gradient");
            };
            let grad = grad.detach();
            match self.sums.entry(name.clone()) {
                Entry::Vacant(entry) => {
                    entry.insert(grad);
                }
                Entry::Occupied(mut entry) => {
                    let sum = entry.get_mut();
                    *sum = sum.to_dtype(DType::F32)?;
                    add_grad(sum, &grad)?;
                }
            }
        }
        Ok(())
    }

    /// The sum for a variable; the mean over micro-batches is this divided by [`Gradients::count`].
    pub fn sum(&self, name: &str) -> Result<&Tensor> {
        match self.sums.get(name) {
            Some(sum) => Ok(sum),
            None => candle_core::bail!("{name} has no gradient"),
        }
    }

    /// Micro-batches added.
    pub fn count(&self) -> usize {
        self.losses.len()
    }

    /// The mean loss, and the norm of all mean gradients taken as one vector. The step's only
    /// synchronisation.
    pub fn loss_and_norm(&self) -> Result<(f32, f64)> {
        let loss = Tensor::stack(&self.losses, 0)?.mean_all()?;
        let sums: Vec<&Tensor> = self.sums.values().collect();
        let both = Tensor::stack(&[loss, grad_norm(&sums)?], 0)?.to_vec1::<f32>()?;
        Ok((both[0], f64::from(both[1]) / self.count() as f64))
    }
}
