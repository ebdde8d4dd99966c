//! What the tests share: problems, inputs, an independent host implementation, and the error measure.
//!
//! * [`device`]: the devices and dtypes that every test body runs on;
//! * [`problem`]: the numbers that describe one call;
//! * [`tensors`]: seeded inputs, and tensors as host vectors;
//! * [`layout`]: the same values in other storage orders, between NaN;
//! * [`naive`]: forward and gradients in f64, straight from the definition;
//! * [`run`]: the op and the plain formula, with gradients;
//! * [`compare`]: where two results differ, and by how much;
//! * [`verify`]: the error rule, against the plain computation in the same dtype;
//! * [`grid`]: cases that cover every pair of values, of all scores or of plain ones, and a handful;
//! * [`child`]: tests in a process of their own;
//! * [`device::watch`]: an end for tests that wait for the GPU for ever.

pub mod child;
pub mod compare;
pub mod device;
pub mod grid;
pub mod layout;
pub mod naive;
pub mod problem;
pub mod run;
pub mod tensors;
pub mod verify;
