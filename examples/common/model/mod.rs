//! candle-transformers' Llama with the attention of this crate in place of its own.
//!
//! It takes the same `Config` and the same weight names, and computes the same logits. What differs:
//!
//! 1. K and V keep their `num_kv_heads` heads; query heads find theirs inside the attention.
//! 2. Tensors stay `(batch, seqlen, num_heads, head_dim)` between the projections, no transposes.
//! 3. The KV cache is allocated once, and a prompt may be fed to it in chunks of any size.
//! 4. Logits come from any position, and gradients reach every weight that autograd tracks.

mod attention;
mod cache;
pub mod layers;

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};
use candle_flash_gqa::training::{Recompute, embedding, rope};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::Config;

pub use attention::Attention;
pub use cache::KvCache;
use layers::{Projection, RmsNorm, Rotary, gated, widen};

/// A decoder-only transformer whose attention is chosen by [`Attention`].
pub struct Llama {
    embed: Tensor, // (vocab_size, hidden_size)
    blocks: Vec<Arc<Block>>,
    norm: RmsNorm,
    lm_head: Projection,
    rotary: Rotary,
    attention: Attention,
    /// Where there is one, blocks keep no activations for the backward.
    recompute: Option<Recompute>,
}

impl Llama {
    /// Builds a model on weights by the names of [`weight_shapes`], which it shares.
    pub fn new(
        weights: HashMap<String, Tensor>,
        config: &Config,
        attention: Attention,
    ) -> Result<Self> {
        let Some(embed) = weights.get("model.embed_tokens.weight") else {
            candle_core::bail!("weight model.embed_tokens.weight is missing");
        };
        let (dtype, device) = (embed.dtype(), embed.device().clone());
        Self::load(
            VarBuilder::from_tensors(weights, dtype, &device),
            config,
            attention,
        )
    }

    fn load(vb: VarBuilder, config: &Config, attention: Attention) -> Result<Self> {
        let vocab = (config.vocab_size, config.hidden_size);
        let embed = vb.pp("model.embed_tokens").get(vocab, "weight")?;
        let lm_head = if config.tie_word_embeddings {
            Projection::from_weight(embed.clone())
        } else {
            Projection::load(config.vocab_size, config.hidden_size, vb.pp("lm_head"))?
        };
        let blocks = (0..config.num_hidden_layers)
            .map(|layer| Block::load(vb.pp(format!("model.layers.{layer}")), config).map(Arc::new))
            .collect::<Result<_>>()?;
        Ok(Self {
            embed,
            blocks,
            norm: RmsNorm::load(config, vb.pp("model.norm"))?,
            lm_head,
            rotary: Rotary::new(config, vb.dtype(), vb.device())?,
            attention,
            recompute: None,
        })
    }

    /// The same model, whose backward computes the activations of each block again: it keeps their inputs alone.
    pub fn with_recomputation(mut self) -> Self {
        self.recompute = Some(Recompute::default());
        self
    }

    /// Runs all blocks and the last norm.
    ///
    /// # Arguments
    ///
    /// * `tokens`: `(batch, seqlen)`, U32.
    /// * `cache`: the keys and values of the tokens before these; absent means that there are none.
    ///
    /// # Returns
    ///
    /// The hidden states `(batch, seqlen, hidden_size)`.
    pub fn hidden(&self, tokens: &Tensor, mut cache: Option<&mut KvCache>) -> Result<Tensor> {
        let seqlen = tokens.dim(1)?;
        let position = cache.as_ref().map_or(0, |cache| cache.len());
        let (cos, sin) = self.rotary.at(position, seqlen)?;
        let context = Arc::new(Context {
            cos,
            sin,
            mask: self.attention.mask(seqlen, position, tokens.device())?,
            attention: self.attention,
        });
        let mut hidden = embedding(&self.embed, tokens)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            let cache = cache.as_deref_mut().map(|cache| (cache, layer));
            hidden = match (&self.recompute, cache) {
                (Some(recompute), None) => {
                    let (block, context) = (block.clone(), context.clone());
                    recompute.run(&hidden, move |hidden| block.forward(hidden, &context, None))?
                }
                (_, cache) => block.forward(&hidden, &context, cache)?,
            };
        }
        if let Some(cache) = cache {
            cache.advance(seqlen);
        }
        self.norm.forward(&hidden)
    }

    /// Logits of a row.
    pub fn vocab_size(&self) -> usize {
        self.embed.dims()[0]
    }

    /// Multiplies hidden states with the output embedding, `(.., hidden_size)` to `(.., vocab_size)`.
    pub fn output(&self, hidden: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(hidden)
    }

    /// Runs backward from a loss of this model.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        match &self.recompute {
            Some(recompute) => recompute.backward(loss),
            None => loss.backward(),
        }
    }

    /// [`Llama::output`], at least F32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        widen(&self.output(hidden)?)
    }
}

/// Name and shape of every weight of a model, the names of the Hugging Face checkpoints.
pub fn weight_shapes(config: &Config) -> Vec<(String, Vec<usize>)> {
    let hidden = config.hidden_size;
    let kv = hidden / config.num_attention_heads * config.num_key_value_heads;
    let ffn = config.intermediate_size;
    let vocab = vec![config.vocab_size, hidden];

    let mut shapes = vec![("model.embed_tokens.weight".to_string(), vocab.clone())];
    for layer in 0..config.num_hidden_layers {
        let of_layer = [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![ffn, hidden]),
            ("mlp.up_proj", vec![ffn, hidden]),
            ("mlp.down_proj", vec![hidden, ffn]),
        ];
        shapes.extend(
            of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)),
        );
    }
    shapes.push(("model.norm.weight".to_string(), vec![hidden]));
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".to_string(), vocab));
    }
    shapes
}

/// What all blocks of one forward pass share.
struct Context {
    cos: Tensor, // (seqlen, head_dim / 2)
    sin: Tensor,
    mask: Option<Tensor>,
    attention: Attention,
}

/// One transformer block: attention and SwiGLU, each with a norm before and a residual around it.
struct Block {
    input_norm: RmsNorm,
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    mlp_norm: RmsNorm,
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
    head_dim: usize,
}

impl Block {
    fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        let hidden = config.hidden_size;
        let head_dim = hidden / config.num_attention_heads;
        let kv = head_dim * config.num_key_value_heads;
        let ffn = config.intermediate_size;
        let (attn, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        Ok(Self {
            input_norm: RmsNorm::load(config, vb.pp("input_layernorm"))?,
            q_proj: Projection::load(hidden, hidden, attn.pp("q_proj"))?,
            k_proj: Projection::load(kv, hidden, attn.pp("k_proj"))?,
            v_proj: Projection::load(kv, hidden, attn.pp("v_proj"))?,
            o_proj: Projection::load(hidden, hidden, attn.pp("o_proj"))?,
            mlp_norm: RmsNorm::load(config, vb.pp("post_attention_layernorm"))?,
            gate_proj: Projection::load(ffn, hidden, mlp.pp("gate_proj"))?,
            up_proj: Projection::load(ffn, hidden, mlp.pp("up_proj"))?,
            down_proj: Projection::load(hidden, ffn, mlp.pp("down_proj"))?,
            head_dim,
        })
    }

    fn forward(
        &self,
        hidden: &Tensor, // (batch, seqlen, hidden_size)
        context: &Context,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Result<Tensor> {
        let normed = self.input_norm.forward(hidden)?;
        let hidden = (hidden + self.attend(&normed, context, cache)?)?;
        let normed = self.mlp_norm.forward(&hidden)?;
        let inner = gated(&self.gate_proj, &self.up_proj, &normed)?;
        hidden + self.down_proj.forward(&inner)?
    }

    /// Self-attention of the new tokens over the cached ones and themselves.
    fn attend(
        &self,
        normed: &Tensor,
        context: &Context,
        cache: Option<(&mut KvCache, usize)>,
    ) -> Result<Tensor> {
        let q = self.q_proj.forward_to_heads(normed, self.head_dim)?;
        let k = self.k_proj.forward_to_heads(normed, self.head_dim)?;
        let v = self.v_proj.forward_to_heads(normed, self.head_dim)?;

        let q = rope(&q, &context.cos, &context.sin)?;
        let k = rope(&k, &context.cos, &context.sin)?;
        let (k, v) = match cache {
            Some((cache, layer)) => cache.append(layer, &k, &v)?,
            None => (k, v),
        };
        let out = context
            .attention
            .forward(&q, &k, &v, context.mask.as_ref())?;
        self.o_proj.forward_from_heads(&out)
    }
}
