//! AdamW whose state can be saved, with gradient clipping.

use std::collections::{BTreeMap, HashMap};

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPS: f64 = 1e-8;

/// First and second moments of each variable, by its name.
pub struct AdamW {
    moments: BTreeMap<String, (Tensor, Tensor)>,
    weight_decay: f64,
}

impl AdamW {
    pub fn new(vars: &BTreeMap<String, Var>, weight_decay: f64) -> Result<Self> {
        let moments = vars
            .iter()
            .map(|(name, var)| Ok((name.clone(), (var.zeros_like()?, var.zeros_like()?))))
            .collect::<Result<_>>()?;
        Ok(Self {
            moments,
            weight_decay,
        })
    }

    /// Takes one step, the `step`-th counted from 0, with gradients multiplied by `scale`.
    pub fn update(
        &mut self,
        vars: &BTreeMap<String, Var>,
        grads: &GradStore,
        step: usize,
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        let taken = (step + 1) as i32;
        let (correction1, correction2) = (1. - BETA1.powi(taken), 1. - BETA2.powi(taken));
        for (name, var) in vars {
            let (Some(grad), Some((first, second))) = (grads.get(var), self.moments.get_mut(name))
            else {
                candle_core::bail!("{name} has no gradient");
            };
            let grad = (grad * scale)?;
            *first = ((&*first * BETA1)? + (&grad * (1. - BETA1))?)?.detach();
            *second = ((&*second * BETA2)? + (grad.sqr()? * (1. - BETA2))?)?.detach();
            let direction =
                ((&*first / correction1)? / ((&*second / correction2)?.sqrt()? + EPS)?)?;
            // Norms are left alone: pulling a scale towards 0 regularises nothing.
            let decay = if var.rank() > 1 {
                self.weight_decay
            } else {
                0.
            };
            let kept = (var.as_tensor() * (1. - learning_rate * decay))?;
            var.set(&(kept - (direction * learning_rate)?)?.detach())?;
        }
        Ok(())
    }

    /// Everything that [`AdamW::restore`] needs, under names that no weight has.
    pub fn state(&self) -> impl Iterator<Item = (String, Tensor)> {
        self.moments.iter().flat_map(|(name, (first, second))| {
            [
                (format!("first_moment.{name}"), first.clone()),
                (format!("second_moment.{name}"), second.clone()),
            ]
        })
    }

    pub fn restore(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        for (name, (first, second)) in &mut self.moments {
            for (kind, moment) in [("first", first), ("second", second)] {
                match state.get(&format!("{kind}_moment.{name}")) {
                    Some(saved) if saved.dims() == moment.dims() => *moment = saved.clone(),
                    _ => candle_core::bail!("the optimiser's {kind} moment of {name} is missing"),
                }
            }
        }
        Ok(())
    }
}

/// The norm of all gradients taken as one vector.
pub fn gradient_norm(vars: &BTreeMap<String, Var>, grads: &GradStore) -> Result<f64> {
    let mut sum = 0.;
    for (name, var) in vars {
        let Some(grad) = grads.get(var) else {
            candle_core::bail!("{name} has no gradient");
        };
        sum += grad
            .sqr()?
            .sum_all()?
            .to_dtype(DType::F64)?
            .to_scalar::<f64>()?;
    }
    Ok(sum.sqrt())
}
