//! Trained tensors, in the type that the model computes in and in F32.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result};
use candle_core::{DType, Tensor, Var};

/// Trained tensors by name: for each a variable, which the model computes with, and a master in F32, which
/// the optimiser updates.
///
/// In BF16 a weight has 8 bits and an update is often below half of the last one, so it has to add up
/// somewhere else. The variables are in BF16 rather than the masters cast in each forward, because candle
/// would hold a cast node for every weight, and pass its gradient on through zeros and one more addition.
/// So gradients arrive in BF16; what sums them over micro-batches is in F32.
///
/// In F32 the master is the variable itself.
pub struct Parameters {
    vars: BTreeMap<String, Var>,
    masters: BTreeMap<String, Var>,
}

impl Parameters {
    /// Makes variables of `dtype` from copies of `weights`.
    pub fn new(
        weights: impl IntoIterator<Item = (String, Tensor)>,
        dtype: DType,
    ) -> candle_core::Result<Self> {
        let (mut vars, mut masters) = (BTreeMap::new(), BTreeMap::new());
        for (name, weight) in weights {
            let master = Var::from_tensor(&weight.to_dtype(DType::F32)?)?;
            let var = match dtype {
                DType::F32 => master.clone(),
                dtype => Var::from_tensor(&master.as_detached_tensor().to_dtype(dtype)?)?,
            };
            vars.insert(name.clone(), var);
            masters.insert(name, master);
        }
        Ok(Self { vars, masters })
    }

    /// What the model computes with.
    pub fn vars(&self) -> &BTreeMap<String, Var> {
        &self.vars
    }

    /// What the optimiser updates, F32.
    pub fn masters(&self) -> &BTreeMap<String, Var> {
        &self.masters
    }

    /// Gives a master a new value and rounds it into its variable.
    pub fn set(&self, name: &str, value: &Tensor) -> Result<()> {
        let master = self.masters.get(name);
        let (master, var) = master.zip(self.vars.get(name)).context(name.to_string())?;
        master.set(value)?;
        if var.dtype() != DType::F32 {
            var.set(&value.to_dtype(var.dtype())?)?;
        }
        Ok(())
    }

    /// Gives every master the value that it has in a saved state.
    pub fn restore(&self, state: &HashMap<String, Tensor>) -> Result<()> {
        for name in self.masters.keys() {
            let saved = state
                .get(name)
                .with_context(|| format!("{name} is missing; it is the state of another model"))?;
            self.set(name, saved)?;
        }
        Ok(())
    }
}
