//! The test suite: one body of each test for every device and dtype that the build supports.
//!
//! * [`params`]: every user error; [`mask`]: what a row sees;
//! * [`forward`], [`backward`]: the grid of shapes and options, against f64 on the host;
//! * [`gqa`]: grouped heads; [`op`]: the op in candle's graph; [`strides`]: views and storage orders;
//! * [`cases`], [`cases_backward`], [`cases_large`]: the inputs that have broken other kernels;
//! * [`nan`]: where NaN and infinity go and where they don't;
//! * [`determinism`]: the same bits from any number of threads; [`stress`]: under load, and where the device refuses;
//! * [`simd`]: other instruction sets, [`sanitizer`]: other GPUs, and a grid small enough for a checker;
//! * [`property`]: random shapes, strides and options;
//! * [`training`]: the ops beside the attention.

mod backward;
mod cases;
mod cases_backward;
mod cases_large;
mod determinism;
mod forward;
mod gqa;
mod kernels;
mod mask;
mod nan;
mod op;
mod params;
mod property;
mod sanitizer;
mod simd;
mod stress;
mod strides;
mod support;
mod training;
