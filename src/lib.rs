//! Exact attention for [candle](https://github.com/huggingface/candle), forward **and backward**,
//! with grouped and multi query heads.
//!
//! # Conventions
//!
//! * Tensors are `(batch, seqlen, num_heads, head_dim)`. Any strides and start offsets are taken as
//!   they are.
//! * Query head `h` reads key/value head `h / (num_heads / num_kv_heads)`. K and V are never
//!   repeated; dK and dV are summed over the heads of a group before they are rounded.
//! * The diagonal is anchored at the bottom right: query row `i` is aligned with key
//!   `i + seqlen_k - seqlen_q`.
//! * A row that sees no key has `out = 0`, `lse = -inf` and zero gradients.
//! * `lse` is `(batch, num_heads, seqlen_q)`, f32, the natural logarithm of the row's sum of
//!   exponentials, scale included.
//!
//! # Training
//!
//! [`flash_attn`] is differentiable. The module [`training`] has the ops around it: norms, rotary positions,
//! projections, SwiGLU, embedding, cross entropy, and what comes after the backward.
mod api;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod mask;
mod op;
mod params;
mod reference;
pub mod training;

pub use api::{AttnOptions, flash_attn, flash_attn_with, flash_attn_with_lse, is_supported};
pub use reference::reference;

/// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
