//! AdamW whose state can be saved, with gradient clipping.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::{Gradients, Parameters};

const BETA1: f64 = 0.9;
const BETA2: f64 = 0.95;
const EPS: f64 = 1e-8;

/// First and second moments of each master, by its name, F32.
pub struct AdamW {
    moments: BTreeMap<String, (Tensor, Tensor)>,
    weight_decay: f64,
}

impl AdamW {
    pub fn new(parameters: &Parameters, weight_decay: f64) -> candle_core::Result<Self> {
        let moments = parameters
            .masters()
            .iter()
            .map(|(name, master)| {
                let moments = (master.zeros_like()?, master.zeros_like()?);
                Ok((name.clone(), moments))
            })
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            moments,
            weight_decay,
        })
    }

    /// Takes one step, the `step`-th counted from 0, with the mean gradients multiplied by `scale`.
    pub fn update(
        &mut self,
        parameters: &Parameters,
        gradients: &Gradients,
        step: usize,
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        let taken = (step + 1) as i32;
        let (correction1, correction2) = (1. - BETA1.powi(taken), 1. - BETA2.powi(taken));
        let scale = scale / gradients.count() as f64;
        for (name, (first, second)) in &mut self.moments {
            let master = parameters.masters()[name].as_detached_tensor();
            let grad = (gradients.sum(name)?.to_dtype(DType::F32)? * scale)?;
            *first = ((&*first * BETA1)? + (&grad * (1. - BETA1))?)?;
            *second = ((&*second * BETA2)? + (grad.sqr()? * (1. - BETA2))?)?;
            let direction =
                ((&*first / correction1)? / ((&*second / correction2)?.sqrt()? + EPS)?)?;
            // Norms are left alone: pulling a scale towards 0 regularises nothing.
            let decay = if master.rank() > 1 {
                self.weight_decay
            } else {
                0.
            };
            let kept = (master * (1. - learning_rate * decay))?;
            parameters.set(name, &(kept - (direction * learning_rate)?)?)?;
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

    pub fn restore(&mut self, state: &HashMap<String, Tensor>) -> candle_core::Result<()> {
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
