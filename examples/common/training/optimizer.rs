//! AdamW whose state can be saved, with gradient clipping.

use std::collections::{BTreeMap, HashMap};

use anyhow::Result;
use candle_core::{DType, Tensor, Var};
use candle_flash_gqa::training::{AdamWOptions, AdamWState, adamw_step};

use super::{Gradients, Parameters};

/// First and second moments of each master, by its name, F32.
pub struct AdamW {
    moments: BTreeMap<String, [Var; 2]>,
    weight_decay: f64,
}

impl AdamW {
    pub fn new(parameters: &Parameters, weight_decay: f64) -> candle_core::Result<Self> {
        let moments = parameters
            .masters()
            .iter()
            .map(|(name, master)| {
                let zeros = || Var::zeros(master.shape(), DType::F32, master.device());
                Ok((name.clone(), [zeros()?, zeros()?]))
            })
            .collect::<candle_core::Result<_>>()?;
        Ok(Self {
            moments,
            weight_decay,
        })
    }

    /// Takes one step, the `step`-th counted from 0, with the mean gradients multiplied by `scale`.
    pub fn update(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        step: usize,
        learning_rate: f64,
        scale: f64,
    ) -> Result<()> {
        for (name, [first_moment, second_moment]) in &self.moments {
            let (master, var) = (&parameters.masters()[name], &parameters.vars()[name]);
            let state = AdamWState {
                master,
                first_moment,
                second_moment,
                rounded: (var.dtype() != DType::F32).then_some(var),
            };
            let options = AdamWOptions {
                learning_rate,
                beta2: 0.95,
                // Norms are left alone: pulling a scale towards 0 regularises nothing.
                weight_decay: if master.rank() > 1 {
                    self.weight_decay
                } else {
                    0.
                },
                step: step + 1,
                grad_scale: scale / gradients.count() as f64,
                ..Default::default()
            };
            adamw_step(&state, gradients.sum(name)?, &options)?;
        }
        Ok(())
    }

    /// Everything that [`AdamW::restore`] needs, under names that no weight has. The next step changes it.
    pub fn state(&self) -> impl Iterator<Item = (String, Tensor)> {
        self.moments.iter().flat_map(|(name, [first, second])| {
            [
                (format!("first_moment.{name}"), first.as_detached_tensor()),
                (format!("second_moment.{name}"), second.as_detached_tensor()),
            ]
        })
    }

    pub fn restore(&self, state: &HashMap<String, Tensor>) -> candle_core::Result<()> {
        for (name, moments) in &self.moments {
            for (kind, moment) in ["first", "second"].into_iter().zip(moments) {
                match state.get(&format!("{kind}_moment.{name}")) {
                    Some(saved) if saved.dims() == moment.dims() => moment.set(saved)?,
                    _ => candle_core::bail!("the optimiser's {kind} moment of {name} is missing"),
                }
            }
        }
        Ok(())
    }
}
