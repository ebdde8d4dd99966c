//! The ops of `training`.
//!
//! * [`case`]: an op with operands, and the error rule; [`ops`]: the ops and the plain formulas;
//! * [`formula`]: values and gradients against the plain formula in f64, and finite differences;
//! * [`layouts`]: views, offsets and gradients of any layout;
//! * [`values`]: large and small numbers, infinities, long sums, indices out of range;
//! * [`determinism`]: the same bits; [`errors`]: what is refused;
//! * [`recompute`]: activations that are not kept;
//! * [`update`]: sums of gradients, their norm, AdamW.

mod case;
mod determinism;
mod errors;
mod formula;
mod layouts;
mod ops;
mod recompute;
mod update;
mod values;
