//! Where the time of a step goes: its phases one after the other, and the parts of the model each alone, on the
//! shapes that they have in a micro-batch.

use std::time::Instant;

use anyhow::Result;
use candle_core::{Device, Tensor, Var};
use candle_flash_gqa::training::{cross_entropy, embedding, rope};

use crate::Args;
use crate::bench::with_largest_batch;
use crate::gpu_memory::GpuMemory;
use crate::model::layers::{Projection, RmsNorm, Rotary, gated};
use crate::shapes::Case;
use crate::step::{Step, random_tokens};
use crate::training::Gradients;

/// The times of one model, attention and context.
pub struct Profile {
    pub batch: usize,
    /// Forward, backward and update of a step of one micro-batch, in milliseconds.
    pub phases: [(&'static str, f64); 3],
    pub parts: Vec<Part>,
}

/// One part of the model.
pub struct Part {
    pub name: &'static str,
    /// How often it is in the model.
    pub count: usize,
    /// Milliseconds of one.
    pub forward: f64,
    pub backward: f64,
}

/// Times the largest micro-batch that fits; nothing if not even one sequence does.
pub fn run(case: Case, args: &Args, device: &Device) -> Result<Option<Profile>> {
    let memory = GpuMemory::of(device)?;
    with_largest_batch(case, args, memory.as_ref(), |batch| {
        time(case, batch, args, device)
    })
}

fn time(case: Case, batch: usize, args: &Args, device: &Device) -> Result<Profile> {
    let Case {
        shape,
        attention,
        seqlen,
    } = case;
    let config = shape.config(seqlen);
    let bench = Bench {
        device,
        repeats: args.steps,
    };
    let mut step = Step::new(&config, attention, args.recompute, device)?;
    let tokens = random_tokens(&config, batch, seqlen, device)?;
    let phases = phases(&mut step, &tokens, &bench)?;
    let dtype = step.parameters.vars()["model.norm.weight"].dtype();
    drop(step);

    let layers = config.num_hidden_layers;
    let [hidden_size, ffn] = [config.hidden_size, config.intermediate_size];
    let head_dim = hidden_size / config.num_attention_heads;
    let var = |dims: &[usize]| -> Result<Var> {
        let normal = Tensor::randn(0f32, 0.02, dims, device)?.to_dtype(dtype)?;
        Ok(Var::from_tensor(&normal)?)
    };
    let heads = |count| var(&[batch, seqlen, count, head_dim]);
    let (q, k, v) = (
        heads(config.num_attention_heads)?,
        heads(config.num_key_value_heads)?,
        heads(config.num_key_value_heads)?,
    );
    let hidden = var(&[batch, seqlen, hidden_size])?;
    let inner = var(&[batch, seqlen, ffn])?;
    let target = tokens.narrow(1, 1, seqlen)?;
    let mut parts = vec![];
    let mut part = |name, count, forward: &dyn Fn() -> candle_core::Result<Tensor>| -> Result<()> {
        parts.push(bench.part(name, count, forward)?);
        Ok(())
    };

    let table = var(&[config.vocab_size, hidden_size])?;
    let input = tokens.narrow(1, 0, seqlen)?;
    part("embedding", 1, &|| embedding(&table, &input))?;
    let norm = RmsNorm::new(var(&[hidden_size])?.as_tensor().clone(), 1e-5);
    part("rms_norm", 2 * layers + 1, &|| norm.forward(&hidden))?;
    let rotary = Rotary::new(&config, dtype, device)?;
    let (cos, sin) = rotary.at(0, seqlen)?;
    part("rope of q", layers, &|| rope(&q, &cos, &sin))?;
    part("rope of k", layers, &|| rope(&k, &cos, &sin))?;
    let mask = attention.mask(seqlen, 0, device)?;
    part("attention", layers, &|| {
        attention.forward(&q, &k, &v, mask.as_ref())
    })?;
    part("residual", 2 * layers, &|| {
        hidden.as_tensor() + hidden.as_tensor()
    })?;

    let kv_size = config.num_key_value_heads * head_dim;
    let projection = |size_out: usize, size_in: usize| -> Result<Projection> {
        let weight = var(&[size_out, size_in])?;
        Ok(Projection::from_weight(weight.as_tensor().clone()))
    };
    let q_proj = projection(hidden_size, hidden_size)?;
    part("q_proj, o_proj", 2 * layers, &|| q_proj.forward(&hidden))?;
    let k_proj = projection(kv_size, hidden_size)?;
    part("k_proj, v_proj", 2 * layers, &|| k_proj.forward(&hidden))?;
    let (gate_proj, up_proj) = (projection(ffn, hidden_size)?, projection(ffn, hidden_size)?);
    part("gate, up and swiglu", layers, &|| {
        gated(&gate_proj, &up_proj, &hidden)
    })?;
    let down_proj = projection(hidden_size, ffn)?;
    part("down_proj", layers, &|| down_proj.forward(&inner))?;
    let lm_head = Projection::from_weight(table.as_tensor().clone());
    part("lm_head", 1, &|| lm_head.forward(&hidden))?;
    drop((q, k, v, inner));
    let logits = var(&[batch, seqlen, config.vocab_size])?;
    part("cross_entropy", 1, &|| cross_entropy(&logits, &target))?;
    Ok(Profile {
        batch,
        phases,
        parts,
    })
}

fn phases(step: &mut Step, tokens: &Tensor, bench: &Bench) -> Result<[(&'static str, f64); 3]> {
    let mut times = [0.; 3];
    for repeat in 0..=bench.repeats {
        let mut gradients = Gradients::default();
        let (forward, loss) = bench.once(|| step.loss(tokens))?;
        let (backward, ()) =
            bench.once(|| Ok(gradients.add(&step.model, loss, step.parameters.vars())?))?;
        let (update, _) = bench.once(|| step.update(&gradients))?;
        // The first is a warm-up.
        if repeat > 0 {
            for (sum, time) in times.iter_mut().zip([forward, backward, update]) {
                *sum += time / bench.repeats as f64;
            }
        }
    }
    Ok([
        ("forward", times[0]),
        ("backward", times[1]),
        ("norm and optimiser", times[2]),
    ])
}

struct Bench<'a> {
    device: &'a Device,
    repeats: usize,
}

impl Bench<'_> {
    /// Milliseconds of a call.
    fn once<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<(f64, T)> {
        self.device.synchronize()?;
        let start = Instant::now();
        let result = call()?;
        self.device.synchronize()?;
        Ok((start.elapsed().as_secs_f64() * 1e3, result))
    }

    /// The mean over repeats that are queued together, so that a short kernel is not hidden by its launch.
    fn part(
        &self,
        name: &'static str,
        count: usize,
        forward: &dyn Fn() -> candle_core::Result<Tensor>,
    ) -> Result<Part> {
        let out = forward()?;
        out.backward()?;
        let (forward_ms, ()) = self.once(|| {
            for _ in 0..self.repeats {
                forward()?;
            }
            Ok(())
        })?;
        let (backward_ms, ()) = self.once(|| {
            for _ in 0..self.repeats {
                out.backward()?;
            }
            Ok(())
        })?;
        let repeats = self.repeats as f64;
        Ok(Part {
            name,
            count,
            forward: forward_ms / repeats,
            backward: backward_ms / repeats,
        })
    }
}
